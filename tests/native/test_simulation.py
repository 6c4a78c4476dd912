"""Tests the modelled link: its counters equal the counters of a store with files, and
its times equal hand-computed times.

A link of GB_S moves 1 byte per ns, so a number of bytes is also a number of ns.
"""

import numpy as np
import pytest
from fake_model import FakeModel, Open
from test_staging import N_TOKENS, routed
from test_tiers import FIGURES, check_tiers, figures

from moegguf.native.store import DeviceSlots, Tier

GB_S = 1e9
MODELLED = {
    "simulate": True,
    "link_bytes_per_s": GB_S,
    "copy_bytes_per_s": 4 * GB_S,
    "copy_latency_s": 1e-5,
}


@pytest.mark.parametrize(
    ("n_slots", "n_ram", "staging", "policies"),
    [
        ((8,), 12, 0, ("lru", "lru")), ((12,), 8, 0, ("lru", "lfu-decay")), ((2,), 1, 0, ("next-use", "slru")),
        ((3,), 32, 0, ("lru", "lru")), ((32,), 8, 0, ("lfu-decay", "slru")), ((4, 9), 8, 0, ("lru", "slru")),
        ((2, 2), 1, 0, ("next-use", "slru")), ((16, 3), 12, 0, ("lru", "slru")), ((2,), 1, 1, ("lru", "lru")),
        ((4,), 8, 2, ("lru", "lru")), ((13,), 5, 1, ("lru", "lru")), ((9,), 32, 2, ("lru", "lru")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("of_first", [True, False])
def test_simulated_counters_equal_the_counters_of_a_store_with_files(
    fake: FakeModel, open_store: Open, n_slots: tuple[int, ...], n_ram: int, staging: int, policies: tuple[str, str],
    of_first: bool,
) -> None:  # fmt: skip
    """Compares a store that reads files with a store on the modelled link, on one or
    two devices.

    Slots in RAM below the first device, and staging tensors, are optional.
    """
    found = []
    for options in ({}, MODELLED):
        layers = [range(4)] if len(n_slots) == 1 else [range(2), range(2, 4)]
        devices = [
            DeviceSlots(
                None,
                n,
                tuple(of),
                through_ram=of_first or d > 0,
                staging=staging if of_first else 0,
            )
            for d, (n, of) in enumerate(zip(n_slots, layers, strict=True))
        ]
        has_ram = any(device.through_ram for device in devices)
        store, context = open_store(
            fake, devices, n_ram_slots=n_ram if has_ram else 0, fill=False, **options
        )
        for tier, policy in zip(store.tiers, policies, strict=False):
            store.set_policy(policy, tier)
        rng = np.random.default_rng(2)
        for n in range(80):
            n_tokens = int(rng.choice(N_TOKENS)) if devices[0].staging and n % 3 else 1
            context.announce(n, 0, list(range(n_tokens)))
            for il in range(4):
                context.acquire(il, routed(rng, n_tokens))
        store.drain(10)
        if Tier.RAM in store.tiers:
            check_tiers(store)
        # The number of prefetched bytes depends on time if prompts are staged.
        names = FIGURES[:5] if staging else FIGURES
        of_tiers = [{name: of[name] for name in names} for of in figures(store)]
        found.append(
            (
                of_tiers,
                [store.residency(tier).tolist() for tier in store.tiers],
                store.counters()["reads"],
            )
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("latency_ns", [0, 1000])
def test_stall_is_bytes_missed_over_bandwidth_plus_a_latency_per_matrix(
    fake: FakeModel, open_store: Open, latency_ns: int
) -> None:
    store, context = open_store(
        fake, 8, simulate=True, link_bytes_per_s=GB_S, link_latency_s=latency_ns / 1e9
    )
    context.acquire(0, [0, 1])
    context.acquire(1, [[0, 1], [1, 2]])
    context.acquire(0, [0, 1])
    counters = store.counters()
    assert counters["bytes_missed"] == 5 * fake.expert_bytes
    assert (
        counters["stall_ns"]
        == counters["sim_clock_ns"]
        == counters["bytes_missed"] + 5 * 3 * latency_ns
    )
    assert counters["hits_ready"] == 2


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_prefetch_reduces_the_stall_by_its_head_start(
    fake: FakeModel, open_store: Open, share: float
) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S)
    context.acquire(0, [0, 1])
    stall_ns, had_ns = store.counters()["stall_ns"], int(share * 2 * fake.expert_bytes)
    store.prefetch([1, 1], [4, 5])
    store.advance(had_ns)
    context.acquire(1, [4, 5])
    counters = store.counters()
    assert counters["stall_ns"] - stall_ns == 2 * fake.expert_bytes - had_ns
    come = 2 * (share == 1)
    assert counters["hits_ready"] == counters["prefetch_useful"] == come
    assert counters["hits_late"] == counters["prefetch_late"] == 1 - come // 2


def test_prefetches_are_served_in_order(fake: FakeModel, open_store: Open) -> None:
    store, _ = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S)
    store.prefetch([1, 1], [4, 5])
    store.advance(fake.expert_bytes // 2)  # expert 4 has a slot
    store.prefetch([2], [6])
    store.advance(fake.expert_bytes * 2)
    assert [tuple(key) for key in np.argwhere(store.residency() == 2)] == [
        (1, 4),
        (1, 5),
    ]
    store.drain()
    assert [tuple(key) for key in np.argwhere(store.residency() == 2)] == [
        (1, 4),
        (1, 5),
        (2, 6),
    ]
    counters = store.counters()
    assert (
        counters["prefetch_requested"],
        counters["prefetch_started"],
        counters["prefetch_dropped"],
    ) == (3, 3, 0)


@pytest.mark.parametrize("first", [True, False], ids=["demand first", "in order"])
def test_miss_overtakes_queued_prefetches_if_demand_first_is_set(
    fake: FakeModel, open_store: Open, first: bool
) -> None:
    store, context = open_store(
        fake, 8, simulate=True, link_bytes_per_s=GB_S, demand_first=first
    )
    store.prefetch([2, 2], [6, 7])
    context.acquire(1, [4])
    assert store.counters()["stall_ns"] == (1 if first else 3) * fake.expert_bytes
    store.drain()


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_miss_waits_for_one_matrix_of_a_chunked_prefetch_or_for_all(
    fake: FakeModel, open_store: Open, chunked: bool
) -> None:
    store, context = open_store(
        fake, 8, simulate=True, link_bytes_per_s=GB_S, chunked=chunked
    )
    store.prefetch([2], [7])
    store.advance(500)
    context.acquire(1, [4])
    first = fake.layout.layers[2].matrices[0].expert_bytes
    in_flight = first if chunked else fake.expert_bytes
    assert store.counters()["stall_ns"] == in_flight - 500 + fake.expert_bytes
    store.drain()
    assert store.residency()[2, 7] == 2


def test_simulation_needs_no_file_and_no_pool_and_free_transfers_take_no_time(
    fake: FakeModel, open_store: Open
) -> None:
    for path in fake.paths:
        path.unlink()
    store, context = open_store(fake, 4, simulate=True)
    for il in range(4):
        context.acquire(il, [0, 1])
    assert store.info()["pool_bytes"] == 0
    assert store.counters()["stall_ns"] == store.counters()["sim_clock_ns"] == 0
    store.advance(123)
    assert store.counters()["sim_clock_ns"] == 123
