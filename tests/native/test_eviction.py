"""Who goes when room is needed: short stories with a known victim, told at a single layer or over all."""

from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel, Open, make_model

from moegguf.errors import MoeggufError
from moegguf.native.store import Store

WHOLE_LAYER = [[0, 1], [2, 3], [4, 5], [6, 7]] * 4  # a prompt of 16 tokens that touches every expert


@pytest.fixture
def layer(tmp_path: Path) -> FakeModel:
    """One layer of 8 experts, top-2."""
    return make_model(tmp_path, n_layer=1)


def there(store: Store, il: int = 0) -> set[int]:
    return set(np.flatnonzero(store.residency()[il] == 2).tolist())


def scores(**by_expert: float) -> list[list[float]]:
    return [[by_expert.get(f"e{expert}", 0.0) for expert in range(8)]]


def test_scores_that_are_not_numbers_count_as_zero(layer: FakeModel, open_store: Open) -> None:
    store, context = open_store(layer, 4)
    store.set_scores(scores(e0=float("nan"), e1=float("inf"), e2=1, e3=-float("inf")))
    for chosen in ([3, 2], [1, 0], [4, 5]):
        layer.acquire(store, context, 0, chosen)
    assert there(store) == {0, 2, 4, 5}


def test_in_a_pool_smaller_than_a_token_every_layer_keeps_some(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 6, simulate=True)
    for il in [0, 1, 2, 3] * 2:
        context.acquire(il, [0, 1])
    assert store.counters()["hits_ready"] == 4


def test_in_a_sweep_the_layer_that_was_just_computed_goes_first(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 16, simulate=True, fill=False, stream=False)
    for il in range(4):
        context.acquire(il, WHOLE_LAYER)
    assert [len(there(store, il)) for il in range(4)] == [8, 0, 0, 8]


def test_a_gate_drops_the_prefetches_of_its_layer_that_were_not_needed(layer: FakeModel, open_store: Open) -> None:
    """On the modelled link, where nothing moves before the gate."""
    store, context = open_store(layer, 8, simulate=True, fill=False)
    store.resize(7)
    context.acquire(0, [0, 1])
    store.prefetch([0] * 3, [2, 3, 4])
    context.acquire(0, [3, 5])
    store.drain()
    assert there(store) == {0, 1, 3, 5}
    assert store.counters()["prefetch_dropped"] == 3


def test_a_stale_prefetch_that_was_begun_gives_its_slot_back(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=1e9)
    store.prefetch([1], [4])
    store.advance(10)
    context.acquire(0, [0, 1])  # goes before the rest of it
    assert store.residency()[1, 4] == 1
    context.acquire(1, [5])
    assert store.residency()[1, 4] == 0
    counters = store.counters()
    assert counters["prefetch_started"] == counters["prefetch_wasted"] == 1
    assert counters["prefetch_dropped"] == 0


def test_a_prompts_pass_fetches_the_next_layer_ahead(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 16)
    fake.acquire(store, context, 0, WHOLE_LAYER)
    store.drain(5)
    assert there(store, 1) == set(range(8))
    fake.acquire(store, context, 1, WHOLE_LAYER)
    counters = store.counters()
    assert counters["prefetch_useful"] == 8
    assert counters["misses"] == 8


def test_a_pass_that_needs_more_experts_than_slots_ends_with_a_typed_error_and_the_next_one_works(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 5)
    with pytest.raises(MoeggufError, match="8 experts of layer 0 at once"):
        context.acquire(0, WHOLE_LAYER)
    failure = context.take_failure()
    assert failure.il == 0
    fake.token(store, context, [3, 4])


def test_a_prompt_waits_on_the_modelled_link_for_a_slot_that_is_being_filled(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=1e9, sweep=False)
    context.acquire(0, [0, 1])
    store.prefetch([2], [5])
    store.advance(1)
    context.acquire(1, WHOLE_LAYER)
    counters = store.counters()
    assert counters["misses"] == 10
    assert counters["stall_ns"] >= 10 * fake.expert_bytes
