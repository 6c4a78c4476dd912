"""Two tiers: slots that layers compute with, and below them slots in RAM that they are filled from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel, Open, make_model

from moegguf.errors import AllocationError, OptionError
from moegguf.native import library
from moegguf.native.store import Store, StoreOptions, Tier

EVENT = tuple[int, list[int]]


def skewed(n_events: int, seed: int = 0, n_layer: int = 4, n_expert: int = 8, n_used: int = 2) -> list[EVENT]:
    """Routing events layer after layer, with some experts chosen far more often than others."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, n_expert + 1)
    share = weights / weights.sum()
    return [
        (n % n_layer, ((rng.choice(n_expert, n_used, False, share) + n % n_layer) % n_expert).tolist())
        for n in range(n_events)
    ]


def check_tiers(store: Store) -> None:
    """What holds of two tiers whenever nothing is on its way."""
    upper, lower = store.tier(), store.tier(Tier.RAM)
    counters = store.counters()
    assert lower["lookups"] == lower["hits_ready"] + lower["hits_late"] + lower["misses"]
    assert lower["lookups"] <= upper["misses"]
    assert lower["slots_pinned"] == 0
    for tier in (upper, lower):
        assert tier["slots_used"] <= tier["n_slots_usable"]
    assert upper["misses"] == counters["misses"]
    assert lower["stall_ns"] <= counters["stall_ns"]
    assert (store.residency(Tier.RAM) != 1).all()


class TwoLrus:
    """An oracle: what two tiers hold when both evict the least recently used, and no layer keeps a floor."""

    def __init__(self, n_upper: int, n_ram: int) -> None:
        self.sizes = (n_upper, n_ram)
        self.upper: dict[tuple[int, int], None] = {}  # oldest first
        self.lower: dict[tuple[int, int], None] = {}
        self.figures = dict.fromkeys(("hits", "misses", "lower_hits", "lower_misses", "from_file"), 0)

    def event(self, il: int, experts: Sequence[int]) -> None:
        keys = [(il, e) for e in dict.fromkeys(experts)]
        here, missed = [k for k in keys if k in self.upper], [k for k in keys if k not in self.upper]
        for key in (*here, *missed):
            if key not in self.upper and len(self.upper) == self.sizes[0]:
                self.evict_above(next(k for k in self.upper if k not in keys))
            self.upper.pop(key, None)
            self.upper[key] = None
        self.figures["hits"] += len(here)
        self.figures["misses"] += len(missed)
        below = [k for k in missed if k in self.lower]
        absent = [k for k in missed if k not in self.lower]
        for key in below:
            self.touch(key)
        for key in absent:
            self.figures["lower_misses"] += 1
            victim = next((k for k in self.lower if k not in missed), None)
            if len(self.lower) == self.sizes[1] and victim is None:
                self.figures["from_file"] += 1
                continue
            if len(self.lower) == self.sizes[1]:
                assert victim is not None
                del self.lower[victim]
            self.lower[key] = None
        self.figures["lower_hits"] += len(below)

    def evict_above(self, key: tuple[int, int]) -> None:
        del self.upper[key]
        if key in self.lower:
            self.touch(key)

    def touch(self, key: tuple[int, int]) -> None:
        del self.lower[key]
        self.lower[key] = None


def held(store: Store, tier: Tier) -> set[tuple[int, int]]:
    return {(int(il), int(e)) for il, e in np.argwhere(store.residency(tier) == 2)}


@pytest.mark.parametrize(("n_upper", "n_ram"), [(8, 8), (9, 16), (12, 20), (16, 8), (10, 32)])
def test_two_tiers_count_what_two_lrus_count(fake: FakeModel, open_store: Open, n_upper: int, n_ram: int) -> None:
    oracle = TwoLrus(n_upper, n_ram)
    store, context = open_store(fake, n_upper, n_ram_slots=n_ram, fill=False)
    for il, experts in skewed(400):
        oracle.event(il, experts)
        fake.acquire(store, context, il, experts)
    store.drain(10)
    upper, lower = store.tier(), store.tier(Tier.RAM)
    assert (upper["hits_ready"], upper["misses"]) == (oracle.figures["hits"], oracle.figures["misses"])
    assert (lower["hits_ready"], lower["misses"]) == (oracle.figures["lower_hits"], oracle.figures["lower_misses"])
    assert held(store, Tier.COMPUTE) == set(oracle.upper)
    assert held(store, Tier.RAM) == set(oracle.lower)
    check_tiers(store)


def test_an_expert_that_stays_above_is_the_first_to_go_below(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, n_ram_slots=8)
    for n in range(60):  # experts 0 and 1 of each layer stay above; others of layer 3 come and go
        il = n % 4
        fake.acquire(store, context, il, [0, 1] if il < 3 else [0, 1 + n // 4 % 7])
    store.drain(10)
    above, below = held(store, Tier.COMPUTE), held(store, Tier.RAM)
    assert {(il, e) for il in range(3) for e in (0, 1)} <= above
    assert not {(il, e) for il in range(3) for e in (0, 1)} & below
    assert {(3, e) for e in range(1, 8)} <= below


def test_the_modelled_clock_has_two_links_that_move_at_the_same_time(fake: FakeModel, open_store: Open) -> None:
    n_bytes = fake.layout.layers[0].expert_bytes
    store, context = open_store(
        fake, 8, n_ram_slots=32, fill=False, simulate=True, link_bytes_per_s=1e9, copy_bytes_per_s=4e9
    )
    context.acquire(0, [0, 1])  # from the file; a matrix is copied while the next is read
    from_file_ns = store.counters()["sim_clock_ns"]
    assert 2 * n_bytes < from_file_ns < 2 * n_bytes * 1.25
    for il in range(1, 4):
        context.acquire(il, [0, 1])
        context.acquire(il, [2, 3])
    assert store.residency()[0, 0] == 0
    before_ns = store.counters()["sim_clock_ns"]
    context.acquire(0, [0, 1])
    assert abs(store.counters()["sim_clock_ns"] - before_ns - 2 * n_bytes / 4) <= 6


@pytest.mark.parametrize(("n_upper", "n_ram"), [(6, 0), (6, 4), (32, 4)])
def test_a_warm_start_fills_free_slots_in_the_order_given(
    fake: FakeModel, open_store: Open, n_upper: int, n_ram: int
) -> None:
    store, context = open_store(fake, n_upper, n_ram_slots=n_ram, fill=False)
    order = [(il, e) for e in (3, 5, 1, 7) for il in range(4)]
    store.warm([il for il, _ in [(99, 0), *order]], [e for _, e in [(0, 0), *order]])
    store.drain(10)
    assert held(store, Tier.COMPUTE) == set(order[:n_upper])
    if n_ram:
        assert held(store, Tier.RAM) == set(order[n_upper : n_upper + n_ram])
    assert store.counters()["evictions"] == store.counters()["prefetch_started"] == 0
    assert store.counters()["bytes_missed"] == 0
    fake.acquire(store, context, 0, [3, 5])
    assert store.counters()["misses"] == 0
    store.warm([0], [0])  # no slot is free: nothing goes for it
    store.drain(10)
    assert (store.residency()[0, 0] == 2) == (n_upper == 32)


def test_without_a_tier_below_none_is_named(fake: FakeModel, open_store: Open) -> None:
    store, _ = open_store(fake, 8)
    assert store.tiers == (Tier.COMPUTE,)
    for call in (
        store.tier,
        store.residency,
        lambda tier: store.resize(4, tier),
        lambda tier: store.set_policy("lru", tier),
    ):
        with pytest.raises(OptionError, match="no slots in RAM below those of a device"):
            call(Tier.RAM)
    with pytest.raises(OptionError, match="not -1"):
        Store(fake.layout, 8, StoreOptions(), n_ram_slots=-1)


@pytest.mark.parametrize("nth", [1, 4])
def test_memory_that_is_refused_to_either_tier_is_an_allocation_error(fake: FakeModel, nth: int) -> None:
    library.arm_fault("alloc", nth)
    with pytest.raises(AllocationError, match="refused"):
        Store(fake.layout, 8, StoreOptions(repack=False), n_ram_slots=8)


def test_memory_that_is_not_pinned_says_why(fake: FakeModel, open_store: Open) -> None:
    store, _ = open_store(fake, 8, n_ram_slots=8)
    lower = store.tier(Tier.RAM)
    assert not lower["pinned_memory"]
    assert lower["device"] == "CPU"
    assert "CPU offers no pinned memory" in lower["note"]
    assert store.tier()["note"] == ""


def test_what_was_to_be_copied_to_a_slot_is_not_once_that_has_another_expert(tmp_path: Path, open_store: Open) -> None:
    fake = make_model(tmp_path, n_layer=1)
    link = {"link_bytes_per_s": 1e9, "copy_bytes_per_s": 1e9}
    store, context = open_store(fake, 3, n_ram_slots=8, simulate=True, fill=False, preempt=False, **link)
    for ids in ([4, 5], [2, 3], [0, 1]):
        context.acquire(0, ids)
    store.prefetch([0], [4])
    store.advance(1)  # the first of its matrices is on its way
    context.acquire(0, [0, 5])  # goes before the others
    context.acquire(0, [0, 7])  # takes its slot
    store.drain()
    assert 0 < store.tier()["bytes_prefetched"] < fake.expert_bytes / 2
