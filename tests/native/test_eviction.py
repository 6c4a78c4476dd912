"""Tests which experts a short sequence of events evicts or keeps, in one layer or in
several.

A few tests in this file evict nothing, because every expert has a slot, or count how
often each expert is used and loaded.
"""

import time
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel, Open, check_counters, make_model

from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.predictor import NativeForecast, NativePredictor
from moegguf.native.store import Store
from moegguf.testing.library import arm_fault

# A prompt of 16 tokens that uses every expert.
WHOLE_LAYER = [[0, 1], [2, 3], [4, 5], [6, 7]] * 4


@pytest.fixture
def layer(tmp_path: Path) -> FakeModel:
    """A model of one layer with 8 experts, top-2."""
    return make_model(tmp_path, n_layer=1)


def there(store: Store, il: int = 0) -> set[int]:
    return set(np.flatnonzero(store.residency()[il] == 2).tolist())


def test_eviction_treats_nan_and_infinite_scores_as_zero(
    layer: FakeModel, open_store: Open
) -> None:
    store, context = open_store(layer, 4)
    store.set_scores([[np.nan, np.inf, 1, -np.inf, 0, 0, 0, 0]])
    for chosen in ([3, 2], [1, 0], [4, 5]):
        layer.acquire(store, context, 0, chosen)
    assert there(store) == {0, 2, 4, 5}


def test_prefetch_evicts_only_an_expert_with_a_lower_score(
    layer: FakeModel, open_store: Open
) -> None:
    store, context = open_store(layer, 4, fill=False)
    store.set_scores([[1, 1, 1, 1, 1, 2, 0, 0]])
    for chosen in ([0, 1], [2, 3]):
        layer.acquire(store, context, 0, chosen)
    store.prefetch([0], [4])
    store.drain()
    assert there(store) == {0, 1, 2, 3}
    store.prefetch([0], [5])
    store.drain()
    assert 5 in there(store) and len(there(store)) == 4


def test_sweep_evicts_the_layer_that_was_just_computed_first(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 16, simulate=True, fill=False, stream=False)
    for il in range(4):
        context.acquire(il, WHOLE_LAYER)
    assert [len(there(store, il)) for il in range(4)] == [8, 0, 0, 8]


def test_routing_drops_unneeded_prefetches_of_its_layer(
    layer: FakeModel, open_store: Open
) -> None:
    """Uses a simulated link that has not yet transferred anything when the last routing
    event begins."""
    store, context = open_store(layer, 8, simulate=True, fill=False)
    store.resize(7)
    context.acquire(0, [0, 1])
    store.prefetch([0] * 3, [2, 3, 4])
    context.acquire(0, [3, 5])
    store.drain()
    assert there(store) == {0, 1, 3, 5}
    assert store.counters()["prefetch_dropped"] == 3


def test_started_prefetch_that_is_not_needed_frees_its_slot(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=1e9)
    store.prefetch([1], [4])
    store.advance(10)
    context.acquire(0, [0, 1])  # reads for this event precede the rest of the prefetch
    assert store.residency()[1, 4] == 1
    context.acquire(1, [5])
    assert store.residency()[1, 4] == 0
    counters = store.counters()
    assert counters["prefetch_started"] == counters["prefetch_wasted"] == 1
    assert counters["prefetch_dropped"] == 0


def test_prompt_pass_prefetches_the_whole_next_layer(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 16)
    fake.acquire(store, context, 0, WHOLE_LAYER)
    store.drain(5)
    assert there(store, 1) == set(range(8))
    fake.acquire(store, context, 1, WHOLE_LAYER)
    counters = store.counters()
    assert counters["prefetch_useful"] == 8
    assert counters["misses"] == 8


def test_prompt_in_simulation_waits_for_a_slot_that_is_being_filled(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(
        fake, 8, simulate=True, link_bytes_per_s=1e9, sweep=False
    )
    context.acquire(0, [0, 1])
    store.prefetch([2], [5])
    store.advance(1)
    context.acquire(1, WHOLE_LAYER)
    counters = store.counters()
    assert counters["misses"] == 10
    assert counters["stall_ns"] >= 10 * fake.expert_bytes


def test_resize_returns_after_reads_into_the_pool_have_ended(
    layer: FakeModel, open_store: Open
) -> None:
    store, _ = open_store(layer, 8, fill=False)
    arm_fault("slow_read", 1)
    store.prefetch([0], [4])
    while not store.counters()["chunks_reading"]:
        time.sleep(0.001)
    store.resize(2)
    assert store.counters()["chunks_reading"] == 0


def test_fill_reads_every_expert_once_and_later_events_read_nothing(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 1_000_000)
    assert store.info()["n_slots"] == 32, "more slots than experts are not allocated"
    store.drain(10)
    assert (store.residency() == 2).all()
    filled = store.counters()
    assert filled["bytes_prefetched"] == fake.layout.expert_bytes
    assert filled["prefetch_started"] == 0
    for first in range(0, 8, 2):
        fake.token(store, context, [first, first + 1])
    counters = store.counters()
    assert counters["reads"] == filled["reads"]
    assert counters["hits_ready"] == counters["lookups"] == 32
    check_counters(counters, 32)


def test_awaits_tokens_is_true_only_while_a_listener_or_predictor_uses_tokens(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 32, fill=False)
    assert context.awaits_tokens(1, Phase.DECODE), "experts are still to be read"
    for first in range(0, 8, 2):
        fake.token(store, context, [first, first + 1])
    store.set_predictor(NativePredictor("previous-token"), NativeForecast())
    assert not context.awaits_tokens(1, Phase.DECODE), (
        "of experts that are all there nothing is predicted"
    )
    seen: list[Announcement | RoutingEvent] = []
    context.announce(7, Phase.PREFILL, [10, 11])
    assert not context.awaits_tokens(8, Phase.DECODE)
    store.listen(on_routing=seen.append, on_tokens=seen.append)
    assert context.awaits_tokens(8, Phase.DECODE)
    context.acquire(0, [1, 4])  # this pass was not announced
    store.listen()
    (event,) = seen
    assert isinstance(event, RoutingEvent)
    assert (event.sequence, event.phase, event.first_token) == (8, Phase.DECODE, -1), (
        "those before are forgotten"
    )
    assert not context.awaits_tokens(8, Phase.DECODE)
    store.resize(20)
    assert context.awaits_tokens(8, Phase.DECODE), (
        "from the next routing event on slots have to be filled"
    )


def test_activity_counts_lookups_and_loads_of_each_expert(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 8)
    for experts in ([0, 1], [0, 2], [0, 1]):
        fake.token(store, context, experts)
    uses, loads = store.activity()
    counters = store.counters()
    assert uses.shape == loads.shape == store.shape
    assert uses[0].tolist() == [3, 2, 1, 0, 0, 0, 0, 0]
    assert uses.sum() == counters["lookups"]
    assert loads.sum() == counters["misses"] and loads[0, 1] == 2, (
        "it was evicted, and came back"
    )
