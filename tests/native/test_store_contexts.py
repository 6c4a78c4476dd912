"""Tests cancelling and closing a store, and calls from a forked child."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_model import FakeModel, Open
from waiting import status_of, until

from moegguf.errors import ClosedError, ForkError, GenerationCancelled
from moegguf.native import abi
from moegguf.testing.library import arm_fault

CHILD_TIMEOUT_S = 10


def test_cancel_during_a_slow_read_ends_the_event_soon_and_the_next_works(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 4)
    arm_fault("slow_read", 1, sticky=True)
    with ThreadPoolExecutor(1) as pool:
        event = pool.submit(context.acquire, 0, [0, 1])
        until(lambda: store.counters()["chunks_reading"])
        start = time.monotonic()
        store.cancel()
        with pytest.raises(GenerationCancelled):
            event.result(5)
        assert time.monotonic() - start < 1
    arm_fault("slow_read", 0)
    with pytest.raises(GenerationCancelled):
        context.acquire(1, [0, 1])
    store.cancel(False)
    failure = context.take_failure()
    assert failure.status == abi.CANCELLED
    assert context.take_failure() is None
    fake.token(store, context, [0, 1])


def test_cancel_ends_an_event_that_waits_for_a_slot(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 2)
    arm_fault("slow_read", 1, sticky=True)
    store.prefetch([0], [0])
    until(lambda: store.counters()["chunks_reading"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(context.acquire, 1, [2, 3])
        until(lambda: store.counters()["routing_events"])
        assert not waiting.done()
        store.cancel()
        with pytest.raises(GenerationCancelled):
            waiting.result(1)
    arm_fault("slow_read", 0)
    store.cancel(False)
    assert context.take_failure() is not None
    assert (store.residency()[1] == 0).all(), "the slot that it had taken is free"
    fake.acquire(store, context, 1, [2, 3])


def in_child(body: Callable[[], bool]) -> None:
    """Runs `body` in a forked child process.

    Fails unless `body` returns a true value within CHILD_TIMEOUT_S seconds.
    """
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


def test_forked_child_gets_errors_and_never_hangs(
    fake: FakeModel, open_store: Open
) -> None:
    """Forks 25 times while readers and a second thread use the store, so a fork may
    happen while its lock is held."""
    store, context = open_store(fake, 6)
    over = threading.Event()

    def busy() -> None:
        rng = np.random.default_rng(3)
        while not over.is_set():
            store.prefetch(rng.integers(0, 4, 8), rng.integers(0, 8, 8))
            store.counters()

    def child() -> bool:
        calls = (
            lambda: context.acquire(0, [0, 1]), store.counters, store.info, store.drain, store.listen,
            lambda: store.resize(3), lambda: store.prefetch([0], [0]), lambda: store.cancel(),
        )  # fmt: skip
        alone = all(refused(call) for call in calls)
        context.take_failure()
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


def test_closed_store_raises_closed_error(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 4)
    store.close()
    store.close()
    for call in (
        lambda: context.acquire(0, [0, 1]),
        store.counters,
        store.drain,
        lambda: store.resize(2),
    ):
        with pytest.raises(ClosedError):
            call()


def test_store_closes_while_reads_and_prefetches_are_running(
    fake: FakeModel, open_store: Open
) -> None:
    for _ in range(30):
        store, context = open_store(fake, 20)
        context.acquire(0, [0, 1])
        store.prefetch([il for il in range(4) for _ in range(8)], list(range(8)) * 4)
        store.close()
