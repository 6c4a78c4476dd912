"""Tests stores with two tiers, and stores with several devices.

A layer uses slots on its device. The slots of all devices are filled from the same
slots in RAM, if there are any.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel, Open, check_counters, make_model

from moegguf.engine.session import divide_among_devices
from moegguf.errors import AllocationError, OptionError
from moegguf.native.store import DeviceSlots, Store, StoreOptions, Tier
from moegguf.quantities import Link
from moegguf.testing.library import arm_fault

EVENT = tuple[int, list[int]]


def skewed(n_events: int) -> list[EVENT]:
    """Returns random routing events of one token each, as (layer, expert ids), layer by
    layer: 2 of 8 experts in each of 4 layers.

    Some experts are chosen far more often than others.
    """
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, 9)
    share = weights / weights.sum()
    events = []
    for n in range(n_events):
        il = n % 4
        ids = (rng.choice(8, 2, False, share) + il) % 8
        events.append((il, ids.tolist()))
    return events


def check_tiers(store: Store) -> None:
    """Asserts that the counters of the upper tier and of the tier in RAM are
    consistent. The store must be drained."""
    upper, lower = store.tier(), store.tier(Tier.RAM)
    counters = store.counters()
    assert (
        lower["lookups"] == lower["hits_ready"] + lower["hits_late"] + lower["misses"]
    )
    assert lower["lookups"] <= upper["misses"]
    assert lower["slots_pinned"] == 0
    for tier in (upper, lower):
        assert tier["slots_used"] <= tier["n_slots_usable"]
    assert upper["misses"] == counters["misses"]
    assert lower["stall_ns"] <= counters["stall_ns"]
    assert (store.residency(Tier.RAM) != 1).all()


def held(store: Store, tier: Tier) -> set[tuple[int, int]]:
    return {(int(il), int(e)) for il, e in np.argwhere(store.residency(tier) == 2)}


def test_expert_evicted_from_the_device_counts_as_used_in_ram(
    tmp_path: Path, open_store: Open
) -> None:
    one = make_model(tmp_path, n_layer=1, n_used=1)
    store, context = open_store(one, 2, n_ram_slots=3, fill=False)
    # expert 3 evicts expert 0 from the device, and expert 1 from RAM.
    for expert in (0, 1, 0, 2, 3):
        one.acquire(store, context, 0, [[expert]])
    store.drain(10)
    assert held(store, Tier.RAM) == {(0, 0), (0, 2), (0, 3)}


def test_ram_evicts_experts_that_stay_on_the_device_first(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 8, n_ram_slots=8)
    # Experts 0 and 1 of layers 0 to 2 stay on the device; the second expert of layer 3
    # changes.
    for n in range(60):
        il = n % 4
        fake.acquire(store, context, il, [0, 1] if il < 3 else [0, 1 + n // 4 % 7])
    store.drain(10)
    above, below = held(store, Tier.COMPUTE), held(store, Tier.RAM)
    assert {(il, e) for il in range(3) for e in (0, 1)} <= above
    assert not {(il, e) for il in range(3) for e in (0, 1)} & below
    assert {(3, e) for e in range(1, 8)} <= below


def test_simulated_clock_overlaps_file_reads_and_copies(
    fake: FakeModel, open_store: Open
) -> None:
    n_bytes = fake.layout.layers[0].expert_bytes
    store, context = open_store(
        fake,
        8,
        n_ram_slots=32,
        fill=False,
        simulate=True,
        link_bytes_per_s=1e9,
        copy_bytes_per_s=4e9,
    )
    # Both experts are read from the file; while a matrix is read, the previous one is
    # copied.
    context.acquire(0, [0, 1])
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
def test_warm_fills_free_slots_in_the_given_order_and_evicts_nothing(
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
    # 6 slots are full, so nothing is evicted or read; 32 slots have room for the
    # expert.
    store.warm([0], [0])
    store.drain(10)
    assert (store.residency()[0, 0] == 2) == (n_upper == 32)


def test_store_without_ram_slots_rejects_ram_calls_and_notes_unpinned_memory(
    fake: FakeModel, open_store: Open
) -> None:
    store, _ = open_store(fake, 8)
    assert store.tiers == (Tier.COMPUTE,)
    for call in (
        store.tier,
        store.residency,
        lambda tier: store.resize(4, tier),
        lambda tier: store.set_policy("lru", tier),
    ):
        with pytest.raises(OptionError, match="no such slots"):
            call(Tier.RAM)
    with pytest.raises(OptionError, match="not -1"):
        Store(fake.layout, 8, StoreOptions(), n_ram_slots=-1)
    store, _ = open_store(fake, 8, n_ram_slots=8)
    lower = store.tier(Tier.RAM)
    assert not lower["pinned_memory"]
    assert lower["device"] == "CPU"
    assert "CPU offers no pinned memory" in lower["note"]
    assert store.tier()["note"] == ""


@pytest.mark.parametrize("nth", [1, 4])
def test_failed_allocation_of_either_tier_raises_allocation_error(
    fake: FakeModel, nth: int
) -> None:
    arm_fault("alloc", nth)
    with pytest.raises(AllocationError, match="refused"):
        Store(fake.layout, 8, StoreOptions(repack=False), n_ram_slots=8)


def test_reassigned_slot_gets_no_copies_of_its_former_expert(
    tmp_path: Path, open_store: Open
) -> None:
    fake = make_model(tmp_path, n_layer=1)
    link = {"link_bytes_per_s": 1e9, "copy_bytes_per_s": 1e9}
    store, context = open_store(
        fake, 3, n_ram_slots=8, simulate=True, fill=False, preempt=False, **link
    )
    for ids in ([4, 5], [2, 3], [0, 1]):
        context.acquire(0, ids)
    store.prefetch([0], [4])
    store.advance(1)  # the first matrix of the prefetched expert is being copied
    # Copies for this event precede the prefetch's other matrices.
    context.acquire(0, [0, 5])
    context.acquire(0, [0, 7])  # expert 7 gets the slot of the prefetched expert
    store.drain()
    assert 0 < store.tier()["bytes_prefetched"] < fake.expert_bytes / 2


LAYERS = ((0, 1), (2, 3))  # the model's four layers, two on each of two devices
FIGURES = (
    "lookups", "hits_ready", "hits_late", "misses", "evictions", "bytes_missed", "bytes_prefetched", "slots_used",
)  # fmt: skip


def two(n_slots: Sequence[int]) -> list[DeviceSlots]:
    return [
        DeviceSlots(None, n, of, through_ram=True)
        for n, of in zip(n_slots, LAYERS, strict=True)
    ]


def figures(store: Store) -> list[dict[str, int]]:
    """Returns the counters FIGURES of each device, of all devices together, and of the
    tier in RAM if there is one."""
    found = [store.device(index) for index in range(len(store.devices))] + [
        store.tier(tier) for tier in store.tiers
    ]
    return [{name: of[name] for name in FIGURES} for of in found]


def check_sums(store: Store) -> None:
    """Asserts that the counters of all devices together are the sums of the counters of
    each device."""
    *devices, whole = figures(store)[: len(store.devices) + 1]
    assert whole == {name: sum(of[name] for of in devices) for name in FIGURES}
    counters = store.counters()
    for name in (
        "lookups",
        "hits_ready",
        "hits_late",
        "misses",
        "evictions",
        "slots_used",
    ):
        assert counters[name] == whole[name]
    check_counters(counters, sum(device.n_slots for device in store.devices))


def test_simulated_devices_have_links_of_their_own(
    fake: FakeModel, open_store: Open
) -> None:
    n_bytes = fake.layout.layers[0].expert_bytes
    links = (Link(1e9), Link(4e9))
    devices = [
        replace(of, link=link) for of, link in zip(two((2, 2)), links, strict=True)
    ]
    store, context = open_store(
        fake, devices, n_ram_slots=32, fill=False, simulate=True
    )
    for experts in ([0, 1], [2, 3]):
        for il in (0, 2):
            context.acquire(il, experts)
    for il, link in zip((0, 2), links, strict=True):
        before_ns = store.counters()["sim_clock_ns"]
        context.acquire(il, [0, 1])
        took_ns = store.counters()["sim_clock_ns"] - before_ns
        assert took_ns == pytest.approx(2 * n_bytes / link.bytes_per_s * 1e9, abs=6)


def resize_all(store: Store, n_slots: int) -> None:
    for (tier, device), n in divide_among_devices(store, n_slots).items():
        store.resize(n, tier, device)


def test_a_budget_is_divided_among_devices_and_a_resize_changes_one_device(
    fake: FakeModel, open_store: Open
) -> None:
    devices = [replace(of, pass_slots=2) for of in two((12, 6))]
    store, context = open_store(fake, devices, n_ram_slots=8)
    sizes: list[tuple[Callable[[], None], tuple[int, int]]] = [
        (lambda: None, (12, 6)),
        (lambda: resize_all(store, 4), (2, 2)),
        (lambda: resize_all(store, 11), (7, 4)),
        (lambda: store.resize(5, device=1), (7, 5)),
        (lambda: resize_all(store, 18), (12, 6)),
    ]
    for n, (il, experts) in enumerate(skewed(200)):
        resize, expected = sizes[n // 40]
        if n % 40 == 0:
            resize()
        fake.acquire(store, context, il, experts)
        assert (
            tuple(store.device(index)["n_slots_usable"] for index in (0, 1)) == expected
        )
        assert all(
            store.device(index)["slots_used"] <= expected[index] for index in (0, 1)
        )
    with pytest.raises(OptionError, match="only one pool of slots"):
        store.resize(11)
    for n_slots, device in ((1, 0), (13, 0), (1, 1), (7, 1)):
        with pytest.raises(OptionError, match="slots, not"):
            store.resize(n_slots, device=device)
    for call in (store.device, lambda index: store.resize(4, device=index)):
        for index in (2, -1):
            with pytest.raises(OptionError, match="no such slots"):
                call(index)
    store.drain(10)
    check_sums(store)


def test_resize_keeps_pass_slots_in_the_pool_of_each_device(
    fake: FakeModel, open_store: Open
) -> None:
    devices = [
        replace(of, pass_slots=n) for of, n in zip(two((14, 6)), (8, 5), strict=True)
    ]
    store, context = open_store(fake, devices, n_ram_slots=8)
    for n_slots in (13, 17, 14, 20):
        resize_all(store, n_slots)
        context.acquire(0, [[0, 1], [2, 3], [4, 5], [6, 7]])
        context.acquire(2, [[0, 1], [1, 2]])
        usable = tuple(store.device(index)["n_slots_usable"] for index in (0, 1))
        assert sum(usable) == n_slots
        assert usable[0] >= 8 and usable[1] >= 5
    for n_slots, device in ((7, 0), (4, 1)):
        with pytest.raises(OptionError, match="slots, not"):
            store.resize(n_slots, device=device)


def test_store_rejects_layers_without_a_device_and_devices_without_layers(
    fake: FakeModel,
) -> None:
    first, second = two((4, 4))
    for devices in (
        [first],
        [first, second, replace(first, layers=())],
        [first, replace(second, n_slots=0)],
        [],
    ):
        with pytest.raises(OptionError):
            Store(fake.layout, devices, StoreOptions(repack=False))
