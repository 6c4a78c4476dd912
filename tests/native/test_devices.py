"""Several devices, each with slots for its own layers that are filled from the same slots in RAM; remote ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import Q4_K, Q6_K, FakeModel, Open, Types, check_counters, make_model, random_events
from own_process import in_own_process
from rpc_device import in_child, in_child_of_two, register

from moegguf.errors import OptionError
from moegguf.native.link_device import Pinned, add_link_device
from moegguf.native.store import DeviceSlots, Store, StoreOptions, Tier
from moegguf.quantities import Link

LAYERS = ((0, 1), (2, 3))  # of four, on each of two devices
FIGURES = (
    "lookups",
    "hits_ready",
    "hits_late",
    "misses",
    "evictions",
    "bytes_missed",
    "bytes_prefetched",
    "slots_used",
)
Event = tuple[int, list[int]]


def skewed(n_events: int, seed: int = 0) -> list[Event]:
    """Routing events layer after layer, with some experts chosen far more often than others."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, 9)
    return [(n % 4, rng.choice(8, 2, False, weights / weights.sum()).tolist()) for n in range(n_events)]


def two(n_slots: Sequence[int], names: Sequence[str | None] = (None, None), lower: bool = True) -> list[DeviceSlots]:
    return [DeviceSlots(name, n, of, lower) for name, n, of in zip(names, n_slots, LAYERS, strict=True)]


def figures(store: Store) -> list[dict[str, int]]:
    """Of each device, of all of them, and of the tier below."""
    found = [store.device(index) for index in range(len(store.devices))] + [store.tier(tier) for tier in store.tiers]
    return [{name: of[name] for name in FIGURES} for of in found]


def check_sums(store: Store) -> None:
    """What is counted of all devices is what each of them counts."""
    *devices, whole = figures(store)[: len(store.devices) + 1]
    assert whole == {name: sum(of[name] for of in devices) for name in FIGURES}
    counters = store.counters()
    for name in ("lookups", "hits_ready", "hits_late", "misses", "evictions", "slots_used"):
        assert counters[name] == whole[name]
    check_counters(counters, sum(device.n_slots for device in store.devices))


@pytest.mark.parametrize("n_slots", [(2, 2), (3, 9), (16, 5), (16, 16)])
@pytest.mark.parametrize("policy", ["lru", "lfu-decay", "slru"])
def test_a_device_counts_what_a_store_of_its_layers_alone_counts(
    fake: FakeModel, open_store: Open, n_slots: tuple[int, int], policy: str
) -> None:
    store, lane = open_store(fake, two(n_slots), fill=False)
    store.set_policy(policy)
    for il, experts in skewed(300):
        fake.acquire(store, lane, il, experts)
    check_sums(store)
    for index, of_device in enumerate(LAYERS):
        layers = tuple(layer for layer in fake.layout.layers if layer.il in of_device)
        alone = FakeModel(replace(fake.layout, layers=layers), fake.contents)
        other, other_lane = open_store(alone, n_slots[index], fill=False)
        other.set_policy(policy)
        for il, experts in skewed(300):
            if il in of_device:
                other_lane.acquire(il, experts)
        assert {name: store.device(index)[name] for name in FIGURES} == {name: other.tier()[name] for name in FIGURES}
        assert store.device(index)["n_slots"] == n_slots[index]


@pytest.mark.parametrize("lower_of", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("n_slots", "n_lower"), [((4, 9), 8), ((2, 2), 1), ((16, 3), 12)])
def test_a_simulation_of_several_devices_counts_what_the_engine_counts(
    fake: FakeModel, open_store: Open, n_slots: tuple[int, int], n_lower: int, lower_of: tuple[bool, bool]
) -> None:
    found = []
    for options in ({}, {"simulate": True, "link_bytes_per_s": 1e9}):
        devices = [replace(of, lower=below) for of, below in zip(two(n_slots), lower_of, strict=True)]
        devices[0] = replace(devices[0], link=Link(1e9, 5e-6))
        store, lane = open_store(fake, devices, n_lower_slots=n_lower, fill=False, **options)
        store.set_policy("slru", Tier.LOWER)
        for il, experts in skewed(300, seed=2):
            lane.acquire(il, experts)
        store.drain(10)
        check_sums(store)
        found.append((figures(store), store.counters()["reads"], store.counters()["bytes_missed"]))
    assert found[0] == found[1]


def test_each_device_of_a_simulation_has_a_link_of_its_own(fake: FakeModel, open_store: Open) -> None:
    n_bytes = fake.layout.layers[0].expert_bytes
    links = (Link(1e9), Link(4e9))
    devices = [replace(of, link=link) for of, link in zip(two((2, 2)), links, strict=True)]
    store, lane = open_store(fake, devices, n_lower_slots=32, fill=False, simulate=True)
    for experts in ([0, 1], [2, 3]):
        for il in (0, 2):
            lane.acquire(il, experts)
    for il, link in zip((0, 2), links, strict=True):
        before_ns = store.counters()["sim_clock_ns"]
        lane.acquire(il, [0, 1])
        took_ns = store.counters()["sim_clock_ns"] - before_ns
        assert took_ns == pytest.approx(2 * n_bytes / link.bytes_per_s * 1e9, abs=6)


def test_slots_of_all_devices_are_shared_out_and_those_of_one_are_its_own(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, two((12, 6)), n_lower_slots=8)
    sizes: list[tuple[Callable[[], None], tuple[int, int]]] = [
        (lambda: None, (12, 6)),
        (lambda: store.resize(4), (2, 2)),
        (lambda: store.resize(11), (7, 4)),
        (lambda: store.resize(5, device=1), (7, 5)),
        (lambda: store.resize(18), (12, 6)),
    ]
    for n, (il, experts) in enumerate(skewed(200)):
        resize, expected = sizes[n // 40]
        if n % 40 == 0:
            resize()
        fake.acquire(store, lane, il, experts)
        assert tuple(store.device(index)["n_slots_usable"] for index in (0, 1)) == expected
        assert all(store.device(index)["slots_used"] <= expected[index] for index in (0, 1))
    for n_slots, device in ((3, None), (19, None), (1, 0), (7, 1)):
        with pytest.raises(OptionError, match="slots, not"):
            store.resize(n_slots, device=device)
    for call in (store.device, lambda index: store.resize(4, device=index)):
        with pytest.raises(OptionError, match=r"no device 2; it has 0 \(CPU\), 1 \(CPU\)"):
            call(2)
    store.drain(10)
    check_sums(store)


def test_no_pool_gets_fewer_slots_than_a_pass_needs_there(fake: FakeModel, open_store: Open) -> None:
    devices = [replace(of, pass_slots=n) for of, n in zip(two((14, 6)), (8, 5), strict=True)]
    store, lane = open_store(fake, devices, n_lower_slots=8)
    for n_slots in (13, 17, 14, 20):
        store.resize(n_slots)
        lane.acquire(0, [[0, 1], [2, 3], [4, 5], [6, 7]])
        lane.acquire(2, [[0, 1], [1, 2]])
        usable = tuple(store.device(index)["n_slots_usable"] for index in (0, 1))
        assert sum(usable) == n_slots
        assert usable[0] >= 8 and usable[1] >= 5
    for call in (lambda: store.resize(12), lambda: store.resize(7, device=0), lambda: store.resize(4, device=1)):
        with pytest.raises(OptionError, match="slots, not"):
            call()


def test_a_layer_on_no_device_and_a_device_without_layers_are_refused(fake: FakeModel) -> None:
    first, second = two((4, 4))
    for devices in ([first], [first, second, replace(first, layers=())], [first, replace(second, n_slots=0)], []):
        with pytest.raises(OptionError):
            Store(fake.layout, devices, StoreOptions(repack=False))


def walk_on(fake: FakeModel, names: Sequence[str | None]) -> tuple[list[dict[str, Any]], str]:
    """Random events with checked bytes on the devices of these names; the figures of each, and the note of RAM."""
    store = Store(fake.layout, two((6, 3), names), StoreOptions(repack=False), 7)
    lane = store.open_lane()
    try:
        for il, experts in skewed(160):
            fake.acquire(store, lane, il, experts)
        lane.acquire(0, [0, 1])
        store.drain(10)
        check_sums(store)
        return [store.device(index) for index in (0, 1)], store.tier(Tier.LOWER)["note"]
    finally:
        lane.close()
        store.close()


def behind_two_links(fake: FakeModel) -> tuple[list[dict[str, Any]], str]:
    return walk_on(fake, [add_link_device(Link(2e9)), add_link_device(Link(5e8), pinned=False)])


def pinned_for_one(fake: FakeModel) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Two devices of which the first pins memory for itself alone, and what a store says with the second alone."""
    names = [add_link_device(Link(2e9)), add_link_device(Link(2e9), pinned=Pinned.OF_FIRST)]
    devices, note = walk_on(fake, names)
    store = Store(fake.layout, 6, StoreOptions(device=names[1]), 7)
    alone = store.tier(Tier.LOWER)
    store.close()
    return devices, note, alone


def on_two_servers(rpc: Path, ports: tuple[int, int], fake: FakeModel) -> tuple[list[dict[str, Any]], str]:
    return walk_on(fake, [register(rpc, port) for port in ports])


def test_two_links_of_different_speed(fake: FakeModel) -> None:
    devices, note = in_own_process(behind_two_links, fake)
    assert all(of["evictions"] > 0 and of["hits_ready"] > 0 for of in devices)
    assert devices[0]["device"] != devices[1]["device"]
    assert f"pageable for {devices[1]['device']}" in note


def test_memory_that_is_pinned_for_the_first_device_is_not_for_others(fake: FakeModel) -> None:
    devices, note, alone = in_own_process(pinned_for_one, fake)
    assert all(of["evictions"] > 0 and of["hits_ready"] > 0 for of in devices)
    assert note == "slots in RAM are pinned for LINK0, and pageable for LINK1"
    assert (alone["pinned_memory"], alone["device"]) == (0, "LINK1")
    assert alone["note"].startswith("LINK1 offers no pinned memory")


def test_two_rpc_servers(tmp_path: Path) -> None:
    devices, note = in_child_of_two(on_two_servers, make_model(tmp_path))
    assert [of["device"] for of in devices] == ["RPC0", "RPC1"]
    assert all(of["evictions"] > 0 and of["hits_ready"] > 0 for of in devices)
    assert "RPC0, RPC1 offers no pinned memory" in note


def events_on_rpc(rpc: Path, port: int, fake: FakeModel, n_slots: int) -> dict[str, int]:
    """Random events and prefetches with checked bytes; the counters afterwards."""
    return random_events(fake, n_slots, register(rpc, port))


@pytest.mark.parametrize("n_slots", [5, 32], ids=["shared", "resident, then shrunk"])
def test_slots_on_an_rpc_device_hold_the_files_bytes(tmp_path: Path, n_slots: int) -> None:
    types: tuple[Types, ...] = ({"gate": Q4_K, "up": Q4_K, "down": Q6_K}, {"gate_up": Q6_K, "down": Q4_K})
    fake = make_model(tmp_path, n_embd=256, n_ff=256, types=types)
    counters = in_child(events_on_rpc, fake, n_slots)
    check_counters(counters, n_slots)
    assert counters["evictions"] > 0
    assert counters["prefetch_started"] > 0 or n_slots == 32
