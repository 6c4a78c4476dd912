"""Slots on a device whose memory is not host memory: the same store, the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_model import Q4_K, Q6_K, FakeModel, Types, check_counters, make_model
from rpc_device import in_child, register

from moegguf.native.store import Store, StoreOptions


def events_on_rpc(rpc: Path, port: int, fake: FakeModel, n_slots: int) -> dict[str, int]:
    """Random events and prefetches with checked bytes; the counters afterwards."""
    store = Store(fake.layout, n_slots, StoreOptions(device=register(rpc, port)))
    lane = store.open_lane()
    try:
        assert store.info()["n_repacked"] == 0
        rng = np.random.default_rng(0)
        for n in range(120):
            fake.acquire(store, lane, n % 4, rng.permutation(8)[:2])
            store.prefetch([(n + 1) % 4] * 2, rng.permutation(8)[:2])
        if n_slots == 32:
            store.resize(9)
            for n in range(40):
                fake.acquire(store, lane, n % 4, rng.permutation(8)[:2])
        store.drain(10)
        return store.counters()
    finally:
        lane.close()
        store.close()


@pytest.mark.parametrize("n_slots", [5, 32], ids=["shared", "resident, then shrunk"])
def test_slots_on_an_rpc_device_hold_the_files_bytes(tmp_path: Path, n_slots: int) -> None:
    types: tuple[Types, ...] = ({"gate": Q4_K, "up": Q4_K, "down": Q6_K}, {"gate_up": Q6_K, "down": Q4_K})
    fake = make_model(tmp_path, n_embd=256, n_ff=256, types=types)
    counters = in_child(events_on_rpc, fake, n_slots)
    check_counters(counters, n_slots)
    assert counters["evictions"] > 0
    assert counters["prefetch_started"] > 0 or n_slots == 32
