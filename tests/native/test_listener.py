"""Callbacks: on the event thread, in order, never in the way of a gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from fake_model import FakeModel, Open

from moegguf.errors import CallbackError
from moegguf.native.library import GateEvent, ResidencyEvent


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def test_gate_events_come_in_order_with_the_experts_chosen_on_a_thread_of_their_own(
    fake: FakeModel, open_store: Open
) -> None:
    store, lane = open_store(fake, 8)
    seen: list[tuple[int, int, list[int]]] = []
    threads: set[int] = set()

    def on_gate(event: GateEvent) -> None:
        n = event.n_tokens * event.n_expert_used
        seen.append((event.pass_, event.il, [event.expert_ids[i] for i in range(n)]))
        threads.add(threading.get_ident())

    store.listen(on_gate=on_gate)
    rng = np.random.default_rng(0)
    sent = []
    for n in range(200):
        ids = np.array([rng.permutation(8)[:2] for _ in range(1 if n % 8 else 3)])
        lane.gate(n % 4, ids)
        sent.append((n // 4 + 1, n % 4, ids.ravel().tolist()))
    store.listen()  # returns after the last callback
    assert seen == sent
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert store.counters()["events_dropped"] == 0


def test_residency_events_add_up_to_the_residency_map(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 9)
    held: dict[int, tuple[int, int]] = {}

    def on_residency(event: ResidencyEvent) -> None:
        if event.resident:
            held[event.slot] = (event.il, event.expert)
        else:
            held.pop(event.slot, None)

    store.listen(on_residency=on_residency)
    rng = np.random.default_rng(0)
    for n in range(200):
        lane.gate(n % 4, rng.permutation(8)[:2])
        store.prefetch([(n + 1) % 4] * 2, rng.permutation(8)[:2])
    store.drain(10)
    store.listen()
    assert sorted(held.values()) == [tuple(at) for at in np.argwhere(store.residency() == 2).tolist()]
    assert store.counters()["evictions"] > 0


def test_an_exception_in_a_callback_ends_the_listening_and_is_raised_when_asked_for(
    fake: FakeModel, open_store: Open
) -> None:
    store, lane = open_store(fake, 8)
    calls = []

    def on_gate(event: GateEvent) -> None:
        calls.append(event.il)
        raise KeyError("mine")

    store.listen(on_gate=on_gate)
    fake.token(store, lane, [0, 1])
    until(lambda: bool(calls))
    with pytest.raises(CallbackError, match="mine") as caught:
        store.raise_callback_error()
    assert isinstance(caught.value.__cause__, KeyError)
    store.raise_callback_error()
    fake.token(store, lane, [2, 3])
    assert calls == [0]


def test_events_that_a_slow_listener_has_no_room_for_are_dropped_and_counted(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 8, simulate=True)
    go_on, n_seen = threading.Event(), 0

    def on_gate(event: GateEvent) -> None:
        nonlocal n_seen
        go_on.wait(30)
        n_seen += 1

    store.listen(on_gate=on_gate)
    for n in range(6000):
        lane.gate(n % 4, [n % 8, (n + 1) % 8])
    dropped = store.counters()["events_dropped"]
    go_on.set()
    store.listen()
    assert dropped > 0
    assert n_seen > 0


def test_a_listener_hears_nothing_from_before_it_came(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 8)
    over = threading.Event()

    def gates() -> None:
        n = 0
        while not over.is_set():
            lane.gate(n % 4, [n % 8, (n + 1) % 8])
            n += 1

    thread = threading.Thread(target=gates)
    thread.start()
    stale: list[int] = []
    try:
        for _ in range(60):
            before = store.counters()["passes"]
            passes: list[int] = []
            store.listen(on_gate=lambda event, passes=passes: passes.append(event.pass_))
            time.sleep(0.002)
            store.listen()
            stale += [n for n in passes if n < before]
    finally:
        over.set()
        thread.join()
    assert stale == []


def test_callbacks_may_ask_the_store_and_write_scores(fake: FakeModel, open_store: Open) -> None:
    store, lane = open_store(fake, 8)

    def on_gate(event: GateEvent) -> None:
        table = store.residency().astype(np.float32)
        table[event.il] += 1
        store.set_scores(table)
        store.prefetch([(event.il + 1) % 4] * 2, [0, 1])

    store.listen(on_gate=on_gate)
    rng = np.random.default_rng(0)
    for n in range(200):
        fake.gate(store, lane, n % 4, rng.permutation(8)[:2])
    store.listen()
    store.raise_callback_error()
    assert store.counters()["prefetch_started"] > 0
