"""Tests that each chosen expert's slot holds the file's bytes after a routing event,
even during concurrent calls."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import (
    F16,
    F32,
    PLAIN,
    Q4_K,
    Q6_K,
    Q8_0,
    FakeModel,
    Open,
    Types,
    check_counters,
    make_model,
)

from moegguf.native.store import Store
from moegguf.testing.library import arm_fault

N_LAYER, N_EXPERT, N_USED = 4, 8, 2
ALL = N_LAYER * N_EXPERT
SIZES = {
    "k": 2,
    "k+1": 3,
    "2k": 4,
    "E-1": 7,
    "E": 8,
    "more": 19,
    "all but one": ALL - 1,
    "all": ALL,
}
SWITCHES: list[dict[str, Any]] = [
    {"readers": 4},
    {
        "readers": 1,
        "chunked": False,
        "preempt": False,
        "sweep": False,
        "overlap": False,
        "direct": False,
    },
    {"readers": 2, "chunked": False, "direct": False},
    {"readers": 4, "preempt": False},
    {"readers": 2, "sweep": False, "overlap": False, "fill": False},
]
# Each pool size runs with two of the five SWITCHES, and each switch setting runs with
# at least three sizes. test_store_model.py covers other pairs.
RUNS = [
    (n, SWITCHES[(i + more) % 5])
    for i, n in enumerate(SIZES.values())
    for more in (1, 4)
]
MIXED: tuple[Types, ...] = (
    {"gate": Q4_K, "up": Q4_K, "down": Q6_K},
    {"gate": Q4_K, "up": Q6_K, "down": Q4_K},
    {"down": Q8_0, "gate_up": Q4_K},
    {"up": F16, "down": F32},
)


def meddle(store: Store, seed: int, over: threading.Event) -> None:
    """Sets random scores, changes the policy and prefetches random experts, until
    `over` is set.

    Some of these experts do not exist.
    """
    rng = np.random.default_rng(seed)
    while not over.wait(0.0005):
        store.set_scores(rng.random(store.shape) if rng.random() < 0.8 else None)
        if rng.random() < 0.2:
            store.set_policy(str(rng.choice(("lru", "slru", "lfu-decay", "next-use"))))
        wanted = rng.integers(-1, [[N_LAYER + 1], [N_EXPERT + 1]], (2, 6))
        store.prefetch(wanted[0], wanted[1])
        store.residency()


def routing(rng: np.random.Generator, most: int) -> npt.NDArray[np.int32]:
    """Returns the expert ids of one token or of several tokens, with at most `most`
    distinct experts."""
    some = rng.permutation(N_EXPERT)[: min(most, N_EXPERT)]
    n_tokens = int(rng.choice([1, 1, 1, 3, 24]))
    return np.array([rng.permutation(some)[:N_USED] for _ in range(n_tokens)], np.int32)


@pytest.mark.parametrize(("n_slots", "switches"), RUNS, ids=str)
def test_slots_hold_the_files_bytes_under_random_routing_prefetches_and_scores(
    fake: FakeModel, open_store: Open, n_slots: int, switches: dict[str, Any]
) -> None:
    store, context = open_store(fake, n_slots, **switches)
    rng, over = np.random.default_rng(n_slots), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        meddler = pool.submit(meddle, store, n_slots, over)
        try:
            for n in range(160):
                il = n % N_LAYER
                fake.acquire(store, context, il, routing(rng, n_slots))
                store.prefetch([(il + 1) % N_LAYER] * 3, rng.permutation(N_EXPERT)[:3])
        finally:
            over.set()
    meddler.result()
    store.drain(10)
    counters = store.counters()
    check_counters(counters, n_slots)
    assert counters["routing_events"] == 160
    assert counters["passes"] == 40
    assert counters["read_errors"] == 0
    if n_slots < ALL:
        assert counters["evictions"] > 0
        assert counters["misses"] > 0
    if N_USED < n_slots < ALL:
        assert counters["prefetch_started"] > 0


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("n_slots", [5, 32], ids=["shared", "resident"])
def test_slots_shared_by_layers_of_mixed_types_hold_the_files_bytes(
    tmp_path: Path, open_store: Open, n_slots: int, direct: bool
) -> None:
    fake = make_model(tmp_path, n_embd=256, n_ff=256, types=MIXED)
    store, context = open_store(fake, n_slots, direct=direct)
    for _ in range(3):
        for first in range(0, N_EXPERT, 2):
            fake.token(store, context, [first, first + 1])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("gap", [0, 32, 4096, 4096 - 32])
def test_reads_work_at_any_offset_and_at_the_end_of_a_file(
    tmp_path: Path, open_store: Open, gap: int, direct: bool
) -> None:
    fake = make_model(
        tmp_path, n_layer=2, types=(PLAIN, {"up": F32, "down": Q8_0}), gap=gap
    )
    last = fake.layout.matrices[-1]
    assert last.offset + last.n_expert * last.expert_bytes == len(fake.contents[0])
    store, context = open_store(fake, 2, direct=direct)
    for expert in range(N_EXPERT):
        fake.token(store, context, [expert, (expert + 3) % N_EXPERT])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_experts_larger_than_a_read_buffer_are_read_in_pieces(
    tmp_path: Path, open_store: Open, direct: bool
) -> None:
    fake = make_model(
        tmp_path,
        n_layer=1,
        n_expert=3,
        n_used=1,
        n_embd=1024,
        n_ff=1056,
        types=({"up": F32, "down": F32},),
    )
    store, context = open_store(fake, 2, direct=direct)
    n_matrices = len(fake.layout.matrices)
    # There is one more read than matrices, so some matrix is read in pieces.
    arm_fault("read", n_matrices + 1)
    fake.acquire(store, context, 0, [0])
    assert store.counters()["read_retries"] == 1
    for expert in (0, 1, 2, 0):
        fake.acquire(store, context, 0, [expert])
