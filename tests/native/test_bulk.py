"""Tests bulk replay, and library calls that need no store: sizes of slots and names of
policies."""

import ctypes as c
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import Q4_K, Q6_K, FakeModel, Open, make_model

from moegguf.errors import GenerationCancelled, MoeggufError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import GGML_TYPES
from moegguf.native import abi, library
from moegguf.native.events import RoutingEvent
from moegguf.native.slot_sizes import slot_sizes
from moegguf.native.store import native_policies

Events = list[tuple[int, npt.NDArray[np.int32]]]


def events(n_passes: int, seed: int = 0) -> Events:
    """Returns (il, ids) of passes of one to three tokens over 4 layers with 8 experts,
    top-2."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 4, n_passes)
    return [
        (il, np.stack([rng.permutation(8)[:2] for _ in range(n)]).astype(np.int32))
        for n in lengths
        for il in range(4)
    ]


def columns(some: Events) -> list[npt.NDArray[np.int32]]:
    """Returns the arguments of `replay`: il, n_tokens and n_used of each event, and all
    expert ids in one array."""
    il, n_tokens = [il for il, _ in some], [len(ids) for _, ids in some]
    flat = np.concatenate([ids.ravel() for _, ids in some])
    return [
        np.array(column, np.int32) for column in (il, n_tokens, [2] * len(some), flat)
    ]


def figures(counters: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in counters.items() if name != "hook_ns"}


def test_replay_counters_equal_the_counters_of_single_events(
    fake: FakeModel, open_store: Open
) -> None:
    options: dict[str, Any] = {
        "simulate": True,
        "link_bytes_per_s": 1e9,
        "link_latency_s": 1e-6,
    }
    stores = [open_store(fake, 11, **options) for _ in range(2)]
    some = events(60)
    for il, ids in some:
        stores[0][1].acquire(il, ids)
        stores[0][0].advance(500 * len(ids))
    il, n_tokens, n_used, flat = columns(some)
    half = len(some) // 2
    cut = int((n_tokens[:half] * n_used[:half]).sum())
    for part, ids in ((slice(None, half), flat[:cut]), (slice(half, None), flat[cut:])):
        times = 500 * n_tokens[part].astype(np.uint64)
        stores[1][1].replay(il[part], n_tokens[part], n_used[part], ids, times)
    assert figures(stores[0][0].counters()) == figures(stores[1][0].counters())
    assert np.array_equal(stores[0][0].residency(), stores[1][0].residency())
    assert stores[0][0].counters()["evictions"] > 0


def test_replay_sends_its_events_to_the_listener(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 9, simulate=True)
    got: list[RoutingEvent] = []
    store.listen(on_routing=got.append)
    some = events(10)
    context.replay(*columns(some))
    store.listen()
    assert [event.il for event in got] == [il for il, _ in some]
    assert all(
        np.array_equal(event.expert_ids, ids)
        for event, (_, ids) in zip(got, some, strict=True)
    )


def test_replay_stops_at_the_first_failing_event(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 9, simulate=True)
    some = events(3)
    some[5] = (some[5][0], np.full_like(some[5][1], 8))
    with pytest.raises(MoeggufError, match="expert 8 of 8"):
        context.replay(*columns(some))
    assert store.counters()["routing_events"] == 6
    assert context.take_failure() is not None
    store.cancel()
    with pytest.raises(GenerationCancelled):
        context.replay(*columns(events(3)))
    store.cancel(False)
    context.take_failure()
    context.replay(*columns(events(3)))


def test_replay_rejects_inconsistent_arrays(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 9)
    il, n_tokens, n_used, flat = columns(events(3))
    for broken in (
        (il[:-1], n_tokens, n_used, flat), (il, n_tokens, n_used, flat[:-1]), (il, 0 * n_tokens, n_used, flat),
        (il, n_tokens, n_used + 7, flat), (il, -n_tokens, n_used, flat), (il, n_tokens, n_used, flat, il[:-1]),
    ):  # fmt: skip
        with pytest.raises(OptionError):
            context.replay(*broken)
    with pytest.raises(OptionError, match="only a simulation"):
        context.replay(il, n_tokens, n_used, flat, np.ones(il.size, np.uint64))
    replay, n_done = library.load().moegguf_context_replay, c.c_int64()
    for routing in (None, abi.Routing(n_events=1), abi.Routing(n_events=-1)):
        with pytest.raises(OptionError):
            replay(context.handle, routing and c.byref(routing), c.byref(n_done))
    for broken in (
        (None, c.byref(abi.Routing()), c.byref(n_done)),
        (context.handle, c.byref(abi.Routing()), None),
    ):
        with pytest.raises(OptionError):
            replay(*broken)
    none = np.zeros(0, np.int32)
    context.replay(none, none, none, none)
    assert store.counters()["routing_events"] == 0


def expected_stride(layout: ExpertLayout, kind: str) -> int:
    """Returns the size in bytes of the largest expert matrix of a kind, rounded up to a
    multiple of 64 and of every block size.

    A block size is the number of bytes in a block of one of the kind's types.
    """
    matrices = [m for m in layout.matrices if m.kind == kind]
    unit = math.lcm(64, *(GGML_TYPES[m.ggml_type][2] for m in matrices))
    return -(-max(m.expert_bytes for m in matrices) // unit) * unit


@pytest.mark.parametrize(
    "types",
    [None, ({"gate": Q4_K, "up": Q4_K, "down": Q6_K}, {"gate_up": Q6_K, "down": Q4_K})],
)
def test_slot_sizes_equal_the_sizes_of_an_open_store(
    tmp_path: Path, open_store: Open, types: Any
) -> None:
    fake = make_model(
        tmp_path, n_embd=256, n_ff=256, **({"types": types} if types else {})
    )
    store, _ = open_store(fake, 5)
    sizes = slot_sizes(fake.layout, 5)
    assert sizes.stride_bytes == {
        kind: expected_stride(fake.layout, kind) for kind in fake.layout.kinds
    }
    assert (
        sizes.slot_bytes
        == sum(sizes.stride_bytes.values())
        == store.info()["slot_bytes"]
    )
    guard_bytes = slot_sizes(fake.layout).pool_bytes
    assert (
        sizes.pool_bytes
        == 5 * sizes.slot_bytes + guard_bytes
        == store.info()["pool_bytes"]
        and guard_bytes > 0
    )


def test_slot_sizes_reject_impossible_matrices() -> None:
    call, pad, sizes = (
        library.load().moegguf_slot_sizes,
        library.load().moegguf_pad,
        c.byref(abi.Sizes()),
    )
    refused: list[tuple[Any, ...]] = [
        (call, None, 1, 1, 0, sizes), (call, None, -1, 1, 0, sizes), (call, None, 0, -1, 0, sizes),
        (call, None, 0, 1, 0, None),
    ]  # fmt: skip
    for kind, type_ in ((-1, 0), (4, 0), (0, -1), (0, 999), (0, 4)):
        matrices = (abi.Matrix * 1)(
            abi.Matrix(b"m", 0, kind, type_, 8, 4, 4, 0, 0, 0, 64)
        )
        refused += [(call, matrices, 1, 1, 0, sizes)] + (
            [] if kind else [(pad, b"CPU", matrices, 1)]
        )
    for function, *arguments in refused:
        with pytest.raises(OptionError):
            function(*arguments)
    call(None, 0, 1, 0, sizes)


def test_native_policies_lists_names_that_a_store_accepts(
    fake: FakeModel, open_store: Open
) -> None:
    takes_forecast = {
        name: policy.takes_forecast for name, policy in native_policies().items()
    }
    assert (
        takes_forecast.items()
        >= {"lru": False, "lfu-decay": False, "next-use": True}.items()
    )
    assert library.load().moegguf_policy_name(-1, None) is None
    store, context = open_store(fake, 9)
    for name in native_policies():
        store.set_policy(name)
        context.replay(*columns(events(10)))
    store.set_policy()
