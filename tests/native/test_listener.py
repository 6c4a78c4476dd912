"""Callbacks: on the event thread, in order, never in the way of a event."""

import threading

import numpy as np
import pytest
from fake_model import FakeModel, Open
from waiting import until

from moegguf.errors import CallbackError
from moegguf.native import library
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import ListenOptions

CAPACITY = 4096  # events of the ring, native/events.h


def test_events_come_in_order_with_the_experts_chosen_on_their_own_thread(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8)
    seen: list[tuple[int, int, list[int]]] = []
    threads: set[int] = set()

    def on_routing(event: RoutingEvent) -> None:
        seen.append((event.pass_, event.il, event.expert_ids.ravel().tolist()))
        threads.add(threading.get_ident())

    store.listen(on_routing=on_routing)
    rng = np.random.default_rng(0)
    sent = []
    for n in range(200):
        ids = np.array([rng.permutation(8)[:2] for _ in range(1 if n % 8 else 3)])
        context.acquire(n % 4, ids)
        sent.append((n // 4 + 1, n % 4, ids.ravel().tolist()))
    store.listen()  # returns after the last callback
    assert seen == sent
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert store.counters()["events_dropped"] == 0


def test_an_exception_in_a_callback_ends_the_listening_and_is_raised_later(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8)
    calls = []

    def on_routing(event: RoutingEvent) -> None:
        calls.append(event.il)
        raise KeyError("mine")

    store.listen(on_routing=on_routing)
    fake.token(store, context, [0, 1])
    until(lambda: bool(calls))
    with pytest.raises(CallbackError, match="mine") as caught:
        store.raise_callback_error()
    assert isinstance(caught.value.__cause__, KeyError)
    store.raise_callback_error()
    fake.token(store, context, [2, 3])
    assert calls == [0]


def test_events_that_a_slow_listener_has_no_room_for_are_dropped_and_counted(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True)
    go_on, n_seen = threading.Event(), 0

    def on_routing(event: RoutingEvent) -> None:
        nonlocal n_seen
        go_on.wait(30)
        n_seen += 1

    store.listen(on_routing=on_routing)
    for n in range(6000):
        context.acquire(n % 4, [n % 8, (n + 1) % 8])
    dropped = store.counters()["events_dropped"]
    go_on.set()
    store.listen()
    assert dropped > 0
    assert n_seen > 0


def test_a_listener_hears_nothing_from_before_it_came(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8)
    over = threading.Event()

    def events() -> None:
        n = 0
        while not over.is_set():
            context.acquire(n % 4, [n % 8, (n + 1) % 8])
            n += 1

    thread = threading.Thread(target=events)
    thread.start()
    stale: list[int] = []
    try:
        for _ in range(60):
            before = store.counters()["passes"]
            passes: list[int] = []
            store.listen(on_routing=lambda event, passes=passes: passes.append(event.pass_))
            until(lambda passes=passes: passes)
            store.listen()
            stale += [n for n in passes if n < before]
    finally:
        over.set()
        thread.join()
    assert stale == []


def test_callbacks_may_ask_the_store_and_write_scores(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8)
    heard: list[int] = []

    def on_routing(event: RoutingEvent) -> None:
        table = store.residency().astype(np.float32)
        table[event.il] += 1
        store.set_scores(table)
        store.prefetch([(event.il + 1) % 4] * 2, [0, 1])
        heard.append(event.pass_)

    store.listen(on_routing=on_routing)
    rng = np.random.default_rng(0)
    for n in range(200):
        fake.acquire(store, context, n % 4, rng.permutation(8)[:2])
        until(lambda n=n: len(heard) > n)
    until(lambda: store.counters()["prefetch_started"] > 0)
    store.listen()
    store.raise_callback_error()
    assert store.counters()["prefetch_started"] > 0


def test_announced_tokens_come_before_events_and_a_pass_knows_its_place(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8)
    heard: list[tuple[object, ...]] = []

    def on_tokens(event: Announcement) -> None:
        heard.append((event.sequence, event.phase, event.tokens.tolist()))

    def on_routing(event: RoutingEvent) -> None:
        heard.append((event.sequence, event.phase, event.il, event.first_token))

    store.listen(on_routing=on_routing, on_tokens=on_tokens)
    context.acquire(0, [[0, 1]])
    context.announce(7, Phase.PREFILL, [10, 11, 12])
    for il in (0, 1):
        context.acquire(il, [[0, 1], [2, 3]])
    context.acquire(0, [[0, 1]])
    context.announce(7, Phase.DECODE, [13])
    context.acquire(0, [[4, 5]])
    context.acquire(0, [[4, 5]])
    store.listen()
    assert heard == [
        (-1, Phase.PREFILL, 0, -1),
        (7, Phase.PREFILL, [10, 11, 12]),
        (7, Phase.PREFILL, 0, 0),
        (7, Phase.PREFILL, 1, 0),
        (7, Phase.PREFILL, 0, 2),
        (7, Phase.DECODE, [13]),
        (7, Phase.DECODE, 0, 0),
        (7, Phase.DECODE, 0, -1),
    ]


def test_with_a_listener_of_everything_the_event_waits_and_none_is_missed(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True)
    n_seen = n_sent = 0

    def on_routing(event: RoutingEvent) -> None:
        nonlocal n_seen
        if n_seen == 0:
            until(lambda: n_sent >= CAPACITY)
        n_seen += 1

    store.listen(on_routing=on_routing, options=ListenOptions(everything=True))
    for n in range(6000):
        n_sent = n
        context.acquire(n % 4, [n % 8, (n + 1) % 8])
    store.listen()
    assert n_seen == 6000
    assert store.counters()["events_dropped"] == 0


def test_a_event_that_waits_for_room_ends_when_the_listener_goes(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True)
    heard, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def on_routing(event: RoutingEvent) -> None:
        heard.set()
        go_on.wait(30)

    store.listen(on_routing=on_routing, options=ListenOptions(everything=True, lockstep=True))

    def events() -> None:
        for n in range(100):
            context.acquire(n % 4, [n % 8, (n + 1) % 8])
        done.set()

    thread = threading.Thread(target=events)
    thread.start()
    assert heard.wait(30)
    assert not done.is_set()
    go_on.set()
    store.listen()
    thread.join(10)
    assert done.is_set()


def test_a_lazy_listener_hears_everything_a_little_later(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, simulate=True)
    seen: list[int] = []
    store.listen(on_routing=lambda event: seen.append(event.il), options=ListenOptions(everything=True, lazy=True))
    for n in range(3000):
        context.acquire(n % 4, [n % 8, (n + 1) % 8])
    until(lambda: len(seen) == 3000)
    context.acquire(0, [0, 1])
    until(lambda: len(seen) == 3001)
    context.acquire(1, [0, 1])
    store.listen()
    assert seen == [*(n % 4 for n in range(3000)), 0, 1]
    assert store.counters()["events_dropped"] == 0


def test_closing_the_store_delivers_what_is_queued_to_callbacks_that_use_it(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 9, simulate=True)
    handle, done = store.handle, 0

    def on_routing(event: RoutingEvent) -> None:
        nonlocal done
        library.load().moegguf_store_set_scores(handle, None, 0)  # as a C program may: past the closed object
        done += 1

    store.listen(on_routing=on_routing)
    for n in range(400):
        context.acquire(n % 4, [[n % 8, (n + 1) % 8]])
    store.close()
    assert done == 400
