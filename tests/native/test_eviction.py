"""Who goes when room is needed: short stories with a known victim, told at a single layer or over all."""

from __future__ import annotations

import time
from collections import OrderedDict
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


@pytest.fixture
def deep(tmp_path: Path) -> FakeModel:
    """6 layers of 8 experts, top-2: a token cycle of 12 slots."""
    return make_model(tmp_path, n_layer=6)


def there(store: Store, il: int = 0) -> set[int]:
    return set(np.flatnonzero(store.residency()[il] == 2).tolist())


def scores(**by_expert: float) -> list[list[float]]:
    return [[by_expert.get(f"e{expert}", 0.0) for expert in range(8)]]


def test_the_least_recently_used_expert_goes_first(layer: FakeModel, open_store: Open) -> None:
    store, lane = open_store(layer, 4)
    for chosen in ([0, 1], [2, 3], [0, 4]):
        layer.acquire(store, lane, 0, chosen)
    assert there(store) == {0, 2, 3, 4}
    layer.acquire(store, lane, 0, [2, 5])
    assert there(store) == {0, 2, 4, 5}
    assert store.counters()["evictions"] == 2


def test_the_lowest_score_goes_first_however_recent(layer: FakeModel, open_store: Open) -> None:
    store, lane = open_store(layer, 4)
    store.set_scores(scores(e0=3, e1=2, e2=5, e3=1))
    for chosen in ([0, 1], [2, 3], [0, 4]):
        layer.acquire(store, lane, 0, chosen)
    assert there(store) == {0, 1, 2, 4}
    layer.acquire(store, lane, 0, [2, 5])  # 4 has score 0
    assert there(store) == {0, 1, 2, 5}


def test_without_scores_recency_decides_again(layer: FakeModel, open_store: Open) -> None:
    store, lane = open_store(layer, 4)
    store.set_scores(scores(e0=9, e1=9))
    layer.acquire(store, lane, 0, [0, 1])
    layer.acquire(store, lane, 0, [2, 3])
    store.set_scores(None)
    layer.acquire(store, lane, 0, [4, 5])
    assert there(store) == {2, 3, 4, 5}


def test_scores_that_are_not_numbers_count_as_zero(layer: FakeModel, open_store: Open) -> None:
    store, lane = open_store(layer, 4)
    store.set_scores(scores(e0=float("nan"), e1=float("inf"), e2=1, e3=-float("inf")))
    for chosen in ([3, 2], [1, 0], [4, 5]):
        layer.acquire(store, lane, 0, chosen)
    assert there(store) == {0, 2, 4, 5}


def test_a_pinned_expert_stays_whatever_its_score(layer: FakeModel, open_store: Open) -> None:
    store, lane = open_store(layer, 3)
    layer.acquire(store, lane, 0, [2, 3])
    layer.acquire(store, lane, 0, [0, 1])
    kept = there(store) - {0, 1}
    slots = lane.acquire(0, [0, 1])
    store.set_scores(scores(e0=-9, e1=-9, e2=5, e3=5, e4=9))
    store.prefetch([0], [4])
    store.drain(5)
    assert there(store) == {0, 1, 4}
    assert kept & {2, 3}
    layer.check(store, 0, [0, 1], slots)


def test_when_all_slots_are_pinned_a_prefetch_is_dropped_at_once(layer: FakeModel, open_store: Open) -> None:
    store, lane = open_store(layer, 2)
    layer.acquire(store, lane, 0, [0, 1])
    store.prefetch([0, 0], [2, 3])
    store.drain(1)
    assert there(store) == {0, 1}
    assert store.counters()["prefetch_dropped"] == 2


def test_a_prefetch_never_displaces_what_is_worth_as_much(layer: FakeModel, open_store: Open) -> None:
    store, lane = open_store(layer, 4)
    store.set_scores(scores(e0=2, e1=2, e4=2, e5=3))
    layer.acquire(store, lane, 0, [2, 3])
    layer.acquire(store, lane, 0, [0, 1])
    store.prefetch([0, 0], [4, 5])  # 2 and 3 are worth nothing
    store.drain(1)
    assert there(store) == {0, 1, 4, 5}
    layer.acquire(store, lane, 0, [4, 5])
    store.set_scores(scores(e0=2, e1=2, e6=2, e7=1))
    store.prefetch([0, 0], [6, 7])
    start = time.monotonic()
    store.drain(20)
    assert time.monotonic() - start < 10  # although nothing was read
    assert there(store) == {0, 1, 4, 5}


def test_a_gate_drops_the_prefetches_of_its_layer_that_were_not_needed(layer: FakeModel, open_store: Open) -> None:
    """On the modelled link, where nothing moves before the gate."""
    store, lane = open_store(layer, 8, simulate=True, fill=False)
    store.resize(7)
    lane.acquire(0, [0, 1])
    store.prefetch([0] * 3, [2, 3, 4])
    lane.acquire(0, [3, 5])
    store.drain()
    assert there(store) == {0, 1, 3, 5}
    assert store.counters()["prefetch_dropped"] == 3


def test_a_stale_prefetch_that_was_begun_gives_its_slot_back(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 8, simulate=True, link_bytes_per_s=1e9)
    store.prefetch([1], [4])
    store.advance(10)
    lane.acquire(0, [0, 1])  # goes before the rest of it
    assert store.residency()[1, 4] == 1
    lane.acquire(1, [5])
    assert store.residency()[1, 4] == 0
    counters = store.counters()
    assert counters["prefetch_started"] == counters["prefetch_wasted"] == 1
    assert counters["prefetch_dropped"] == 0


def lru_hits(routing: list[int], n_slots: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in routing:
        hits += expert in held
        held[expert] = None
        held.move_to_end(expert)
        if len(held) > n_slots:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("n_slots", [4, 8, 11])
def test_below_a_token_cycle_every_layer_keeps_some_where_a_global_lru_hits_nothing(
    deep: FakeModel, open_store: Open, n_slots: int
) -> None:
    assert lru_hits([il * 8 + e for _ in range(10) for il in range(6) for e in (1, 6)], n_slots) == 0
    store, lane = open_store(deep, n_slots)
    for _ in range(10):
        deep.token(store, lane, [1, 6])
    counters = store.counters()
    kept = (n_slots - 2) // 6 * 6 + (n_slots - 2) % 6  # all but what one layer needs at once
    assert counters["hits_ready"] >= 9 * (kept // 2)
    assert counters["evictions"] > 0


def test_a_pool_that_shrinks_below_a_token_cycle_keeps_some_of_every_layer(deep: FakeModel, open_store: Open) -> None:
    store, lane = open_store(deep, 48)
    deep.token(store, lane, [1, 6])
    store.resize(8)
    for _ in range(3):
        deep.token(store, lane, [1, 6])
    before = store.counters()
    for _ in range(10):
        deep.token(store, lane, [1, 6])
    assert store.counters()["hits_ready"] > before["hits_ready"]


def test_a_prompts_pass_fetches_the_next_layer_ahead(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 16)
    fake.acquire(store, lane, 0, WHOLE_LAYER)
    store.drain(5)
    assert there(store, 1) == set(range(8))
    fake.acquire(store, lane, 1, WHOLE_LAYER)
    counters = store.counters()
    assert counters["prefetch_useful"] == 8
    assert counters["misses"] == 8


def test_without_sweeps_a_prompt_misses_every_layer(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 16, sweep=False)
    for il in range(4):
        fake.acquire(store, lane, il, WHOLE_LAYER)
    assert store.counters()["misses"] == 32
    assert store.counters()["prefetch_started"] == 0


def test_a_sweep_evicts_the_layer_that_was_just_computed(fake: FakeModel, open_store: Open) -> None:
    """Its turn comes last, while layer 3, older, is needed sooner."""
    store, lane = open_store(fake, 24, sweep=False)
    for il in (3, 0, 1):
        fake.acquire(store, lane, il, WHOLE_LAYER)
    fake.acquire(store, lane, 2, WHOLE_LAYER)
    assert there(store, 3) == set(range(8))
    assert there(store, 1) == set()


def test_a_pass_that_needs_more_experts_than_slots_ends_with_a_typed_error_and_the_next_one_works(
    fake: FakeModel, open_store: Open
) -> None:
    store, lane = open_store(fake, 5)
    with pytest.raises(MoeggufError, match="8 experts of layer 0 at once"):
        lane.acquire(0, WHOLE_LAYER)
    failure = lane.take_failure()
    assert failure is not None
    assert failure.il == 0
    fake.token(store, lane, [3, 4])


def test_a_prompt_may_need_slots_that_prefetches_are_still_filling(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 8)
    rng, n, deadline = np.random.default_rng(0), 0, time.monotonic() + 60
    # More often where other processes leave readers no time to begin between two layers.
    while n < 60 or (store.counters()["prefetch_started"] == 0 and time.monotonic() < deadline):
        n += 1
        fake.acquire(store, lane, 0, rng.permutation(8)[:2])
        store.prefetch([2] * 8, range(8))
        fake.acquire(store, lane, 1, WHOLE_LAYER)
    assert store.counters()["prefetch_started"] > 0


def test_a_prompt_waits_on_the_modelled_link_for_a_slot_that_is_being_filled(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 8, simulate=True, link_bytes_per_s=1e9, sweep=False)
    lane.acquire(0, [0, 1])
    store.prefetch([2], [5])
    store.advance(1)
    lane.acquire(1, WHOLE_LAYER)
    counters = store.counters()
    assert counters["misses"] == 10
    assert counters["stall_ns"] >= 10 * fake.expert_bytes
