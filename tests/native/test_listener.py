"""Tests the callbacks of a store's listener, and the sequence and phase that events
carry for each token.

Two tests simulate passes with tokens of several sequences.
"""

import ctypes as c
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from fake_model import FakeModel, Open
from traces import SMALL, random_trace
from waiting import until

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies import LRU, Lfu, make_policy
from moegguf.controller.predictors.base import NoPrediction
from moegguf.errors import CallbackError, OptionError
from moegguf.native import abi, library
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import ListenOptions, native_policies
from moegguf.trace.simulate import Simulation
from predictors.study.arrange import grouped, used_experts
from predictors.study.synthesize import shape_of, synthesize

CAPACITY = 4096  # number of events that the ring of native/events.h holds


def test_routing_callbacks_come_in_order_on_a_thread_of_their_own(
    fake: FakeModel, open_store: Open
) -> None:
    """The callback reads the residency, sets scores and requests prefetches."""
    store, context = open_store(fake, 8)
    seen: list[tuple[int, int, list[int]]] = []
    threads: set[int] = set()

    def on_routing(event: RoutingEvent) -> None:
        seen.append((event.pass_, event.il, event.expert_ids.ravel().tolist()))
        threads.add(threading.get_ident())
        store.set_scores(store.residency().astype(np.float32))
        store.prefetch([(event.il + 1) % 4] * 2, [0, 1])

    store.listen(on_routing=on_routing)
    rng = np.random.default_rng(0)
    sent = []
    for n in range(200):
        ids = np.array([rng.permutation(8)[:2] for _ in range(1 if n % 8 else 3)])
        context.acquire(n % 4, ids)
        sent.append((n // 4 + 1, n % 4, ids.ravel().tolist()))
    store.listen()  # removes the listener, and returns after its last callback
    store.raise_callback_error()
    assert seen == sent
    assert store.counters()["prefetch_requested"] == 2 * len(sent)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert store.counters()["events_dropped"] == 0


def test_callback_error_stops_the_listener_and_is_raised_later(
    fake: FakeModel, open_store: Open
) -> None:
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


@pytest.mark.parametrize("everything", [False, True])
def test_slow_listener_drops_and_counts_events_unless_everything_is_set(
    fake: FakeModel, open_store: Open, everything: bool
) -> None:
    store, context = open_store(fake, 8, simulate=True)
    n_seen = n_sent = 0

    def on_routing(event: RoutingEvent) -> None:
        nonlocal n_seen
        if n_seen == 0:
            until(lambda: n_sent >= (CAPACITY if everything else 5999))
        n_seen += 1

    store.listen(on_routing=on_routing, options=ListenOptions(everything=everything))
    for n in range(6000):
        n_sent = n
        context.acquire(n % 4, [n % 8, (n + 1) % 8])
    dropped = store.counters()["events_dropped"]
    store.listen()
    assert n_seen > 0 and (n_seen == 6000) == (dropped == 0) == everything


def test_new_listener_gets_no_earlier_events(fake: FakeModel, open_store: Open) -> None:
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
            store.listen(
                on_routing=lambda event, passes=passes: passes.append(event.pass_)
            )
            until(lambda passes=passes: passes)
            store.listen()
            stale += [n for n in passes if n < before]
    finally:
        over.set()
        thread.join()
    assert stale == []


def test_announcements_precede_their_events_which_carry_the_first_token(
    fake: FakeModel, open_store: Open
) -> None:
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


def test_removing_the_listener_releases_a_waiting_event(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 8, simulate=True)
    heard, go_on = threading.Event(), threading.Event()

    def on_routing(event: RoutingEvent) -> None:
        heard.set()
        go_on.wait(30)

    store.listen(
        on_routing=on_routing, options=ListenOptions(everything=True, lockstep=True)
    )

    def events() -> None:
        for n in range(100):
            context.acquire(n % 4, [n % 8, (n + 1) % 8])

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(events)
        assert heard.wait(30)
        assert not sent.done()
        go_on.set()
        store.listen()
        sent.result(10)


def test_lazy_listener_gets_every_event_in_order(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 8, simulate=True)
    seen: list[int] = []
    store.listen(
        on_routing=lambda event: seen.append(event.il),
        options=ListenOptions(everything=True, lazy=True),
    )
    for n in range(3000):
        context.acquire(n % 4, [n % 8, (n + 1) % 8])
    until(lambda: len(seen) == 3000)
    context.acquire(0, [0, 1])
    until(lambda: len(seen) == 3001)
    context.acquire(1, [0, 1])
    store.listen()
    assert seen == [*(n % 4 for n in range(3000)), 0, 1]
    assert store.counters()["events_dropped"] == 0


def test_close_delivers_queued_events_to_callbacks_that_use_the_store(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 9, simulate=True)
    handle, done = store.handle, 0

    def on_routing(event: RoutingEvent) -> None:
        nonlocal done
        # Calls the C function, because a method of `store` raises ClosedError once
        # close() has begun.
        library.load().moegguf_store_set_scores(handle, None, 0)
        done += 1

    store.listen(on_routing=on_routing)
    for n in range(400):
        context.acquire(n % 4, [[n % 8, (n + 1) % 8]])
    store.close()
    assert done == 400


def test_events_carry_the_sequence_and_phase_of_each_token(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 16)
    seen: list[Announcement | RoutingEvent] = []
    store.listen(on_routing=seen.append, on_tokens=seen.append)
    context.announce(
        [4, 4, 5, 6, 6], [0, 0, 1, 0, 0], [10, 11, 12, 13, 14], outputs=[0, 1, 1, 0, 1]
    )
    context.acquire(0, np.zeros((3, 2)))  # the first ubatch
    # The last layer is computed only for the first ubatch's two output tokens.
    context.acquire(3, np.zeros((2, 2)))
    context.acquire(0, np.zeros((2, 2)))
    context.acquire(3, np.zeros((1, 2)))
    context.acquire(0, np.zeros((1, 2)))  # never announced
    store.listen()
    announced, *events = seen
    assert isinstance(announced, Announcement)
    assert (announced.sequence, announced.phase) == (4, Phase.DECODE)
    found = np.stack([announced.sequences, announced.phases, announced.outputs])  # type: ignore[list-item]
    assert found.tolist() == [[4, 4, 5, 6, 6], [0, 0, 1, 0, 0], [0, 1, 1, 0, 1]]
    sequences = [
        None if event.sequences is None else event.sequences.tolist()
        for event in events
    ]
    phases = [
        None if event.phases is None else event.phases.tolist() for event in events
    ]
    assert sequences == [[4, 4, 5], [4, 5], [6, 6], [6], None]
    assert phases == [[0, 0, 1], [0, 1], [0, 0], [0], None]
    assert {event.phase for event in events[:4]} == {Phase.DECODE}, (
        "a controller acts for the one that decodes"
    )
    assert [
        event.first_token for event in events if isinstance(event, RoutingEvent)
    ] == [0, 0, 3, 3, -1]


def test_events_of_one_sequence_have_no_sequence_arrays(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 16)
    seen: list[Announcement | RoutingEvent] = []
    store.listen(on_routing=seen.append, on_tokens=seen.append)
    context.announce([4, 4], [1, 1], [10, 11], outputs=[0, 1])
    context.acquire(0, np.zeros((2, 2)))
    context.announce(5, Phase.PREFILL, ())
    store.listen()
    assert [(event.sequence, event.phase) for event in seen] == [(4, 1), (4, 1), (5, 0)]
    assert all(event.sequences is None for event in seen)


def test_announce_rejects_mismatched_lengths_and_unknown_phases(
    fake: FakeModel, open_store: Open
) -> None:
    _, context = open_store(fake, 16)
    with pytest.raises(OptionError, match="2 tokens must have 2 sequences"):
        context.announce([1, 2, 3], Phase.DECODE, [10, 11])
    with pytest.raises(OptionError, match="a phase"):
        context.announce([1, 2], [0, 2], [10, 11])
    with pytest.raises(OptionError, match="a phase"):
        context.announce(1, 7, [10, 11])  # type: ignore[arg-type]
    event = abi.TokensEvent(1, 0, 0, None, (c.c_int32 * 1)(), None, None)
    with pytest.raises(OptionError):
        library.load().moegguf_context_announce(context.handle, event)


POLICIES = {
    "lru": lambda: LRU,
    "lfu": Lfu,
    "sparsity": lambda: make_policy("sparsity", SMALL, Artifacts(None)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_simulation_counts_prompt_tokens_of_mixed_passes_apart_from_decoding(
    name: str,
) -> None:
    trace = random_trace(n_sequences=3, n_prefill=4, n_decode=6)
    first, second, third = (
        np.flatnonzero(trace.sequence_of == sequence) for sequence in range(3)
    )
    mixed = [np.array([first[4 + i], second[i], third[i]]) for i in range(4)]
    alone = [
        np.array([first[8], second[4], third[4]]),
        np.array([first[9]]),
        *(third[at : at + 1] for at in (5, 6)),
    ]
    trace = grouped(trace, [first[:4], *mixed, *alone])
    found = Simulation(trace, POLICIES[name](), NoPrediction(SMALL), 40).run()
    assert (
        found.decode.tokens
        == np.count_nonzero(trace.phase_of == Phase.DECODE)
        == 4 + 3 + 1 + 2
    )
    assert found.whole.tokens == trace.n_tokens == 4 + 12 + 6
    assert found.decode.lookups > found.whole.lookups / 2, (
        "what mixed passes needed counts as decoding"
    )
    of_passes = np.logical_or.reduceat(
        used_experts(trace, np.arange(trace.n_tokens)), trace.pass_start[:-1], axis=0
    )
    assert found.whole.lookups == of_passes.sum(), (
        "an expert that several sequences use is looked up once in a pass"
    )


def test_next_use_misses_less_than_lru_with_eight_interleaved_sequences() -> None:
    """Each pass has one token of each of eight sequences, and the pool has 89 slots for
    240 experts."""
    shape = shape_of("qwen3-30b", 4, 60, 4)
    trace = synthesize("qwen3-30b", shape, 128, 0, 8)
    # The simulation announces a pass only if its tokens are known, so every token gets
    # the id 0.
    trace = replace(trace, tokens=np.zeros(trace.n_tokens, np.int32))
    trace = grouped(trace, [np.arange(8) * 128 + at for at in range(128)])
    misses = {
        name: Simulation(trace, native_policies()[name], NoPrediction(shape), 89)
        .run()
        .counters["misses"]
        for name in ("lru", "next-use")
    }
    assert misses["next-use"] < 0.7 * misses["lru"]
