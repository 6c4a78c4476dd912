"""Several devices: each has slots for its own layers, and all are filled from the same slots in RAM."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fake_model import FakeModel, Open, check_counters
from test_tiers import skewed

from moegguf.errors import OptionError
from moegguf.native.store import DeviceSlots, Store, StoreOptions
from moegguf.quantities import Link

LAYERS = ((0, 1), (2, 3))  # of four, on each of two devices
FIGURES = (
    "lookups", "hits_ready", "hits_late", "misses", "evictions", "bytes_missed", "bytes_prefetched", "slots_used",
)  # fmt: skip


def two(n_slots: Sequence[int]) -> list[DeviceSlots]:
    return [DeviceSlots(None, n, of, through_ram=True) for n, of in zip(n_slots, LAYERS, strict=True)]


def figures(store: Store) -> list[dict[str, int]]:
    """Counts of each device, of all of them, and of the tier below."""
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
    store, context = open_store(fake, two(n_slots), fill=False)
    store.set_policy(policy)
    for il, experts in skewed(300):
        fake.acquire(store, context, il, experts)
    check_sums(store)
    for index, of_device in enumerate(LAYERS):
        layers = tuple(layer for layer in fake.layout.layers if layer.il in of_device)
        alone = FakeModel(replace(fake.layout, layers=layers), fake.contents)
        other, other_context = open_store(alone, n_slots[index], fill=False)
        other.set_policy(policy)
        for il, experts in skewed(300):
            if il in of_device:
                other_context.acquire(il, experts)
        assert {name: store.device(index)[name] for name in FIGURES} == {name: other.tier()[name] for name in FIGURES}
        assert store.device(index)["n_slots"] == n_slots[index]


def test_each_device_of_a_simulation_has_a_link_of_its_own(fake: FakeModel, open_store: Open) -> None:
    n_bytes = fake.layout.layers[0].expert_bytes
    links = (Link(1e9), Link(4e9))
    devices = [replace(of, link=link) for of, link in zip(two((2, 2)), links, strict=True)]
    store, context = open_store(fake, devices, n_ram_slots=32, fill=False, simulate=True)
    for experts in ([0, 1], [2, 3]):
        for il in (0, 2):
            context.acquire(il, experts)
    for il, link in zip((0, 2), links, strict=True):
        before_ns = store.counters()["sim_clock_ns"]
        context.acquire(il, [0, 1])
        took_ns = store.counters()["sim_clock_ns"] - before_ns
        assert took_ns == pytest.approx(2 * n_bytes / link.bytes_per_s * 1e9, abs=6)


def test_slots_of_all_devices_are_shared_out_and_those_of_one_are_its_own(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, two((12, 6)), n_ram_slots=8)
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
        fake.acquire(store, context, il, experts)
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
    store, context = open_store(fake, devices, n_ram_slots=8)
    for n_slots in (13, 17, 14, 20):
        store.resize(n_slots)
        context.acquire(0, [[0, 1], [2, 3], [4, 5], [6, 7]])
        context.acquire(2, [[0, 1], [1, 2]])
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
