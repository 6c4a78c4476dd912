"""Slots on a device whose memory is not host memory: the same store, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_model import Q4_K, Q6_K, FakeModel, Types, check_counters, make_model
from random_events import random_events
from rpc_device import in_child, register


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
