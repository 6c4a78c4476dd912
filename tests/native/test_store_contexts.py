"""Several contexts, several stores, cancelling, and children made by fork."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_model import FakeModel, Open, check_counters
from waiting import status_of, until

from moegguf.errors import ClosedError, ForkError, GenerationCancelled
from moegguf.native import abi, library
from moegguf.native.store import Store, StoreContext

CHILD_TIMEOUT_S = 10


def decode(fake: FakeModel, store: Store, context: StoreContext, seed: int, n_events: int, most: int = 2) -> None:
    """Random events with checked bytes; lets go of everything at the end, as an engine does after each pass."""
    rng = np.random.default_rng(seed)
    for n in range(n_events):
        n_tokens = max(1, most // 2)
        some = rng.permutation(8)[:most]
        fake.acquire(store, context, n % 4, [rng.permutation(some)[:2] for _ in range(n_tokens)])
    assert context.take_failure() is None


@pytest.mark.parametrize("n_slots", [4, 5, 9, 32])
def test_two_contexts_at_once_get_their_bytes(fake: FakeModel, open_store: Open, n_slots: int) -> None:
    store, context = open_store(fake, n_slots)
    other = store.open_context()
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(decode, fake, store, each, seed, 300) for seed, each in enumerate((context, other))]:
            job.result(60)
    other.close()
    store.drain(10)
    check_counters(store.counters(), n_slots)
    assert store.counters()["routing_events"] == 600
    assert store.counters()["slots_pinned"] == 0


def test_contexts_that_need_every_slot_take_turns(fake: FakeModel, open_store: Open) -> None:
    """Prompts that need all 8 slots beside tokens that need 2: nobody holds some while waiting for the rest."""
    store, context = open_store(fake, 8)
    others = [store.open_context() for _ in range(2)]
    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(decode, fake, store, each, seed, 200, most)
            for seed, (each, most) in enumerate([(context, 2), (others[0], 8), (others[1], 6)])
        ]
        for job in jobs:
            job.result(60)
    assert time.monotonic() - start < 30
    for other in others:
        other.close()


def test_a_context_that_waits_for_slots_can_be_cancelled(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 3)
    other = store.open_context()
    context.acquire(0, [0, 1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.acquire, 1, [2, 3])
        until(lambda: store.counters()["routing_events"] == 2)
        assert not waiting.done()
        store.cancel()
        with pytest.raises(GenerationCancelled):
            waiting.result(1)
    store.cancel(False)
    assert other.take_failure() is not None
    assert (store.residency()[1] == 0).all(), "the slot that it had taken is free"
    assert context.take_failure() is None
    fake.acquire(store, other, 1, [2, 3])
    other.close()


def test_cancelling_during_a_slow_read_ends_the_event_within_a_second_and_the_next_one_works(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 4)
    library.arm_fault("slow_read", 1, sticky=True)
    with ThreadPoolExecutor(1) as pool:
        event = pool.submit(context.acquire, 0, [0, 1])
        until(lambda: store.counters()["chunks_reading"])
        start = time.monotonic()
        store.cancel()
        with pytest.raises(GenerationCancelled):
            event.result(5)
        assert time.monotonic() - start < 1
    library.arm_fault("slow_read", 0)
    with pytest.raises(GenerationCancelled):
        context.acquire(1, [0, 1])
    store.cancel(False)
    failure = context.take_failure()
    assert failure is not None
    assert failure.status == abi.CANCELLED
    assert context.take_failure() is None
    fake.token(store, context, [0, 1])


def in_child(body: Callable[[], bool]) -> None:
    """Runs body in a forked child; fails unless it returns True there within the time."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if body() else 1)
        except BaseException:
            os._exit(2)
    assert status_of(pid, CHILD_TIMEOUT_S) == 0


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ForkError:
        return True
    return False


def test_a_forked_child_is_refused_and_never_hangs(fake: FakeModel, open_store: Open) -> None:
    """Forked again and again while readers and another thread hold the store's lock now and then."""
    store, context = open_store(fake, 6)
    over = threading.Event()

    def busy() -> None:
        rng = np.random.default_rng(3)
        while not over.is_set():
            store.prefetch(rng.integers(0, 4, 8), rng.integers(0, 8, 8))
            store.counters()

    def child() -> bool:
        calls = (
            lambda: context.acquire(0, [0, 1]), store.counters, store.info, store.drain, store.open_context,
            store.listen, lambda: store.resize(3), lambda: store.prefetch([0], [0]), lambda: store.cancel(),
        )  # fmt: skip
        alone = all(refused(call) for call in calls)
        context.take_failure()
        context.close()
        store.close()
        return alone

    meddler = threading.Thread(target=busy)
    meddler.start()
    try:
        for n in range(25):
            context.acquire(n % 4, [n % 8, (n + 1) % 8])
            in_child(child)
    finally:
        over.set()
        meddler.join()
    fake.token(store, context, [0, 1])


def test_what_is_closed_says_so(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 4)
    context.close()
    context.close()
    with pytest.raises(ClosedError):
        context.acquire(0, [0, 1])
    store.close()
    store.close()
    for call in (store.counters, store.open_context, store.drain, lambda: store.resize(2)):
        with pytest.raises(ClosedError):
            call()


def test_a_store_may_close_with_reads_and_prefetches_under_way(fake: FakeModel, open_store: Open) -> None:
    for _ in range(30):
        store, context = open_store(fake, 20)
        context.acquire(0, [0, 1])
        store.prefetch([il for il in range(4) for _ in range(8)], list(range(8)) * 4)
        context.close()
        store.close()
