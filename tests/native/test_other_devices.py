"""Tests slots on devices whose memory is not the host's: one or two simulated links or
RPC servers.

Some cases also have slots in RAM and staging tensors.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import Q4_K, Q6_K, FakeModel, Types, check_counters, make_model
from own_process import in_own_process
from rpc_device import in_child, reserved_port
from test_staging import N_TOKENS, check_staged, routed
from test_tiers import check_tiers

from moegguf.native.store import DeviceSlots, Store, StoreOptions, Tier
from moegguf.quantities import Link
from moegguf.testing.library import ABI
from moegguf.testing.link_device import add_link_device

# Numbers of slots per device, slots in RAM (0: no such tier), and staging tensors.
Size = tuple[int, int, int]
# Counters of each device, and counters of the tier in RAM (empty without this tier).
Figures = tuple[list[dict[str, Any]], dict[str, Any]]
FAST = Link(1e9, 1e-5)
MIXED: tuple[Types, ...] = (
    {"gate": Q4_K, "up": Q4_K, "down": Q6_K},
    {"gate_up": Q6_K, "down": Q4_K},
)


@pytest.fixture
def mixed(tmp_path: Path) -> FakeModel:
    """Returns a model of 4 layers with 8 experts each, top-2. Its matrices have the
    types Q4_K and Q6_K."""
    return make_model(tmp_path, n_embd=256, n_ff=256, types=MIXED)


def passes_on(fake: FakeModel, size: Size, names: Sequence[str]) -> Figures:
    """Runs 40 random passes with prefetches on the devices `names`. Checks bytes, and
    returns the counters.

    A store without slots in RAM is resized to fewer slots after 30 passes.
    """
    n_slots, n_ram, staging = size
    devices = [
        DeviceSlots(name, n_slots, range(d, 4, len(names)), n_ram > 0, staging)
        for d, name in enumerate(names)
    ]
    store = Store(fake.layout, devices, StoreOptions(), n_ram)
    context, rng = store.context, np.random.default_rng(0)
    try:
        for n in range(40):
            if n == 30 and not n_ram:
                for index in range(len(names)):
                    store.resize(max(2, n_slots // 3), device=index)
            n_tokens = int(rng.choice(N_TOKENS)) if staging and n % 2 else 1
            context.announce(n, 0, range(n_tokens))
            for il in range(4):
                ids = routed(rng, n_tokens)
                slots = context.acquire(il, ids)
                fake.check(store, il, ids, slots) if n_tokens == 1 else check_staged(
                    fake, store, il, ids, slots
                )
                store.prefetch([(il + 1) % 4] * 2, rng.permutation(8)[:2])
        context.take_failure()
        store.drain(10)
        check_counters(store.counters(), n_slots * len(names))
        if n_ram:
            check_tiers(store)
        if staging:
            assert (
                store.staging()["lookups"] > 0 and store.staging()["device"] == names[0]
            )
        found = [store.device(d) for d in range(len(names))]
        assert all(
            of["evictions"] > 0 and (of["hits_ready"] > 0 or n_slots < 5)
            for of in found
        )
        assert [of["device"] for of in found] == list(names)
        return found, store.tier(Tier.RAM) if n_ram else {}
    finally:
        store.close()


def on_rpc(fake: FakeModel) -> tuple[list[Figures], Figures]:
    """Returns the counters of passes on RPC0 alone, for each of six sizes, and of
    passes on RPC0 and RPC1 together."""
    names = ["RPC0", "RPC1"]
    sizes = ((5, 0, 0), (32, 0, 0), (2, 1, 0), (13, 13, 0), (4, 8, 1), (9, 32, 2))
    return [passes_on(fake, size, names[:1]) for size in sizes], passes_on(
        fake, (5, 7, 0), names
    )


def test_rpc_slots_hold_the_files_bytes(mixed: FakeModel) -> None:
    of_one, (devices, ram) = in_child(on_rpc, mixed, n_servers=2)
    with_ram = [below for _, below in of_one if below]
    assert len(with_ram) == 4
    assert all(
        of["device"] == "RPC0" and "RPC0 offers no pinned memory" in of["note"]
        for of in with_ram
    )
    assert [of["device"] for of in devices] == ["RPC0", "RPC1"]
    assert "RPC0, RPC1 offers no pinned memory" in ram["note"]


def behind_a_link(fake: FakeModel, strict_seed: int) -> None:
    name = add_link_device(FAST, strict_seed=strict_seed)
    for size in ((5, 0, 0), (32, 0, 0), (4, 8, 1), (13, 13, 2)):
        passes_on(fake, size, [name])


@pytest.mark.parametrize("strict_seed", [0, 1])
def test_store_on_a_device_behind_a_link_holds_the_files_bytes(
    mixed: FakeModel, strict_seed: int
) -> None:
    in_own_process(behind_a_link, mixed, strict_seed)


def behind_two_links(fake: FakeModel, pinned: int) -> tuple[str, dict[str, Any]]:
    """Returns the note of a RAM tier below two devices, and the counters of a RAM tier
    below only the second device."""
    names = [add_link_device(Link(2e9)), add_link_device(Link(5e8), pinned=pinned)]
    _, ram = passes_on(fake, (5, 7, 0), names)
    store = Store(fake.layout, 6, StoreOptions(device=names[1]), 7)
    alone = store.tier(Tier.RAM)
    store.close()
    return ram["note"], alone


@pytest.mark.parametrize(
    ("pinned", "why"),
    [
        (ABI.PINNED_NOT, "was refused pinned memory"),
        (ABI.PINNED_FIRST, "offers no pinned memory"),
    ],
)
def test_ram_slots_pinned_for_the_first_device_are_pageable_for_others(
    mixed: FakeModel, pinned: int, why: str
) -> None:
    note, alone = in_own_process(behind_two_links, mixed, pinned)
    assert note == "slots in RAM are pinned for LINK0, and pageable for LINK1"
    assert (alone["pinned_memory"], alone["device"]) == (0, "LINK1")
    assert alone["note"].startswith(f"LINK1 {why}")


def test_a_reserved_port_is_kept_from_other_programs_until_the_server_listens() -> None:
    """The RPC server sets SO_REUSEADDR, so the server can listen on the port. A program
    without it cannot."""
    with reserved_port() as port, socket.socket() as other, socket.socket() as served:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        served.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        served.bind(("127.0.0.1", port))
        served.listen()
        with socket.create_connection(("127.0.0.1", port)), reserved_port() as another:
            assert another != port
