"""The modelled link: the same counters as the file-backed store, and times that can be worked out by hand.

The link moves 1 byte per ns, so bytes are nanoseconds.
"""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import FakeModel, Open

from moegguf.errors import OptionError

GB_S = 1e9


def test_the_stall_is_bytes_missed_over_bandwidth(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S)
    context.acquire(0, [0, 1])
    assert store.counters()["stall_ns"] == 2 * fake.expert_bytes
    context.acquire(1, [[0, 1], [1, 2]])
    context.acquire(0, [0, 1])
    counters = store.counters()
    assert counters["stall_ns"] == counters["sim_clock_ns"] == counters["bytes_missed"] == 5 * fake.expert_bytes
    assert counters["hits_ready"] == 2


def test_every_transfer_of_a_matrix_costs_the_latency(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S, link_latency_s=1e-6)
    context.acquire(0, [0, 1])
    assert store.counters()["stall_ns"] == 2 * fake.expert_bytes + 6 * 1000


def test_a_prefetch_during_compute_costs_no_stall(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S)
    context.acquire(0, [0, 1])
    stall = store.counters()["stall_ns"]
    store.prefetch([1, 1], [4, 5])
    store.advance(2 * fake.expert_bytes)
    context.acquire(1, [4, 5])
    counters = store.counters()
    assert counters["stall_ns"] == stall
    assert counters["hits_ready"] == counters["prefetch_useful"] == 2


def test_a_late_prefetch_saves_the_time_it_had(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S)
    store.prefetch([1], [4])
    store.advance(1000)
    context.acquire(1, [4])
    counters = store.counters()
    assert counters["stall_ns"] == fake.expert_bytes - 1000
    assert counters["hits_late"] == counters["prefetch_useful"] == 1


def test_prefetches_are_queued_behind_those_before_or_replace_them(fake: FakeModel, open_store: Open) -> None:
    store, _ = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S)
    store.prefetch([1, 1], [4, 5])
    store.advance(fake.expert_bytes // 2)  # 4 has a slot
    store.prefetch([2], [6], replace=True)
    store.drain()
    assert [tuple(key) for key in np.argwhere(store.residency() == 2)] == [(1, 4), (2, 6)]
    counters = store.counters()
    assert (counters["prefetch_requested"], counters["prefetch_started"], counters["prefetch_dropped"]) == (3, 2, 1)
    store.prefetch([3], [0])
    store.prefetch([], [], replace=True)
    store.drain()
    assert not store.residency()[3, 0]


@pytest.mark.parametrize("first", [True, False], ids=["demand first", "in order"])
def test_a_miss_passes_the_prefetches_asked_for_or_waits_for_them(
    fake: FakeModel, open_store: Open, first: bool
) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S, demand_first=first)
    store.prefetch([2, 2], [6, 7])
    context.acquire(1, [4])
    assert store.counters()["stall_ns"] == (1 if first else 3) * fake.expert_bytes
    store.drain()


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_a_miss_waits_for_one_matrix_of_a_prefetch_or_for_all_of_it(
    fake: FakeModel, open_store: Open, chunked: bool
) -> None:
    store, context = open_store(fake, 8, simulate=True, link_bytes_per_s=GB_S, chunked=chunked)
    store.prefetch([2], [7])
    store.advance(500)
    context.acquire(1, [4])
    first = fake.layout.layers[2].matrices[0].expert_bytes
    in_flight = first if chunked else fake.expert_bytes
    assert store.counters()["stall_ns"] == in_flight - 500 + fake.expert_bytes
    store.drain()
    assert store.residency()[2, 7] == 2


def test_free_transfers_take_no_time(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 4, simulate=True)
    for il in range(4):
        context.acquire(il, [0, 1])
    assert store.counters()["stall_ns"] == store.counters()["sim_clock_ns"] == 0
    store.advance(123)
    assert store.counters()["sim_clock_ns"] == 123


def test_a_simulation_touches_no_file_and_no_pool(fake: FakeModel, open_store: Open) -> None:
    for path in fake.paths:
        path.unlink()
    store, context = open_store(fake, 4, simulate=True)
    context.acquire(0, [0, 1])
    assert store.info()["pool_bytes"] == store.info()["read_buffer_bytes"] == 0
    with pytest.raises(OptionError):
        store.probe(0.01)
    with pytest.raises(OptionError):
        store.read_slot(0, 0)
