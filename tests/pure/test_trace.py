"""Tests a trace in memory: events in live order, selections, shuffling, and passes with
tokens of several requests.

Belady's bound is computed by hand, and compared with every choice of victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import hand_made
from traces import SMALL, batched, random_trace, same

from moegguf.controller import history as history_module
from moegguf.controller.history import History
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError, TraceError
from moegguf.native.events import Announcement, Part, Phase, RoutingEvent
from moegguf.trace.belady import Lookups, belady
from moegguf.trace.format import check, read, write
from moegguf.trace.trace import Trace, TraceHeader
from predictors.study.arrange import separated, shuffled

TINY = MoeShape(
    n_layer=4, n_expert=4, n_expert_used=2, layers=(1, 3), n_embd=2, n_vocab=100
)
# A token uses two experts of layer 1 and one of layer 3. The first three tokens are a
# prompt in two passes, and layer 3 is computed only for the last of them.
LAYER_1 = [[0, 1], [1, 2], [2, 3], [3, 0], [1, 0], [2, 1]]
LAYER_3 = [[-1, -1], [-1, -1], [3, -1], [0, -1], [1, -1], [2, -1]]


def tiny(**changes: Any) -> Trace:
    """Returns a trace of two requests. The prompt of request 5 is announced once and
    computed in two passes."""
    trace = Trace(
        shape=TINY,
        header=TraceHeader("tiny", "ab", {5: "code", 6: "prose"}, {"threads": 2}),
        pass_sequence=np.array([5, 5, 6, 5, 6], np.int32),
        pass_phase=np.array([0, 0, 0, 1, 1], np.uint8),
        pass_first_token=np.array([0, 2, 0, 0, -1], np.int32),
        pass_ns=np.array([10, 20, 30, 40, 50], np.int64),
        pass_start=np.array([0, 2, 3, 4, 5, 6], np.int64),
        tokens=np.array([7, 8, 9, 20, 11, -1], np.int32),
        expert_ids=np.array([LAYER_1, LAYER_3], np.int16),
    )
    return replace(trace, **changes)


def routing_events(trace: Trace) -> list[RoutingEvent]:
    return [event for event in trace.events() if isinstance(event, RoutingEvent)]


def test_events_have_the_order_of_a_live_run() -> None:
    check(tiny())
    events: list[Any] = []
    for event in tiny().events():
        if isinstance(event, Announcement):
            events.append((event.sequence, event.phase, event.tokens.tolist()))
        else:
            events.append(
                (event.pass_, event.il, event.first_token, event.expert_ids.tolist())
            )
    assert events == [
        (5, 0, [7, 8, 9]), (0, 1, 0, [[0, 1], [1, 2]]), (1, 1, 2, [[2, 3]]), (1, 3, 2, [[3]]), (6, 0, [20]),
        (2, 1, 0, [[3, 0]]), (2, 3, 0, [[0]]), (5, 1, [11]), (3, 1, 0, [[1, 0]]), (3, 3, 0, [[1]]),
        (4, 1, -1, [[2, 1]]), (4, 3, -1, [[2]]),
    ]  # fmt: skip
    assert [event.time_ns for event in routing_events(tiny())] == [
        10,
        20,
        20,
        30,
        30,
        40,
        40,
        50,
        50,
    ]
    assert {type(event.phase) for event in routing_events(tiny())} == {Phase}
    assert all(
        event.expert_ids.dtype == np.int32 and event.weights is None
        for event in routing_events(tiny())
    )
    trace = tiny(pass_first_token=np.array([1, 3, 0, 7, -1], np.int32))
    (announced,) = (
        event for event in trace.events() if isinstance(event, Announcement)
    )
    assert (announced.sequence, announced.phase, announced.tokens.tolist()) == (
        6,
        0,
        [20],
    )
    assert [event.first_token for event in routing_events(trace)] == [
        -1,
        -1,
        -1,
        0,
        0,
        -1,
        -1,
        -1,
        -1,
    ]


def test_events_of_the_last_layer_and_of_a_failed_pass_have_computed_rows_only() -> (
    None
):
    ids = np.array([LAYER_1, LAYER_3], np.int16)
    ids[1, 1] = [2, -1]
    events = {
        (event.pass_, event.il): event.expert_ids.tolist()
        for event in routing_events(tiny(expert_ids=ids))
    }
    assert events[0, 1] == [[0, 1], [1, 2]] and events[0, 3] == [[2]]
    trace = random_trace(n_sequences=1, n_prefill=2, n_decode=2, seed=0)
    trace.expert_ids[2:, 2] = -1
    check(trace)
    assert [event.il for event in routing_events(trace) if event.pass_ == 1] == [1, 2]


def test_events_carry_weights_and_inputs_of_their_tokens() -> None:
    weights = np.arange(24).reshape(2, 6, 2).astype(np.float16)
    inputs = np.arange(1, 25).reshape(2, 6, 2).astype(np.float16)
    inputs[:, 4] = 0
    events = {
        (event.pass_, event.il): event
        for event in routing_events(tiny(weights=weights, inputs=inputs))
    }
    first, last, without_inputs = events[0, 1], events[1, 3], events[3, 1]
    assert first.weights is not None and first.weights.tolist() == [[0, 1], [2, 3]]
    assert last.weights is not None and last.weights.tolist() == [[16]]
    assert first.inputs is not None and first.inputs.tolist() == [[1, 2], [3, 4]]
    assert (
        last.inputs is not None
        and last.inputs.tolist() == [[17, 18]]
        and last.inputs.dtype == np.float32
    )
    assert without_inputs.inputs is None, "not recorded for this pass"


def test_select_and_decode_cut_a_trace_by_request_and_phase() -> None:
    five = tiny().select([5])
    assert tiny().sequences() == [5, 6] and five.sequences() == [5]
    assert five.tokens.tolist() == [7, 8, 9, 11] and five.pass_start.tolist() == [
        0,
        2,
        3,
        4,
    ]
    assert five.expert_ids[0].tolist() == [[0, 1], [1, 2], [2, 3], [1, 0]]
    assert five.pass_ns.tolist() == [10, 20, 40] and five.header.labels == {5: "code"}
    decode = tiny().decode()
    assert (decode.n_pass, decode.n_tokens) == (2, 2) and decode.tokens.tolist() == [
        11,
        -1,
    ]
    nothing = tiny().select([])
    assert (nothing.n_pass, nothing.n_tokens) == (0, 0) and list(nothing.events()) == []
    for part in (five, decode, nothing):
        check(part)


def test_shuffled_keeps_the_experts_of_each_request_in_another_order() -> None:
    trace = random_trace(n_decode=60, seed=3, with_inputs=True)
    control = shuffled(trace, 1)
    check(control)
    assert same(control, shuffled(trace, 1)) and not same(control, shuffled(trace, 2))
    prefill = np.repeat(trace.pass_phase == Phase.PREFILL, np.diff(trace.pass_start))
    assert np.array_equal(control.expert_ids[:, prefill], trace.expert_ids[:, prefill])
    assert (
        np.array_equal(control.tokens, trace.tokens) and control.inputs is trace.inputs
    )
    for sequence in trace.sequences():
        mine = trace.sequence_of == sequence
        assert not np.array_equal(
            control.expert_ids[:, mine], trace.expert_ids[:, mine]
        )
        for row in range(len(SMALL.layers)):
            before, after = (
                sorted(
                    zip(
                        map(tuple, of.expert_ids[row, mine]),
                        map(tuple, of.weights[row, mine]),
                        strict=True,
                    )
                )
                for of in (trace, control)
            )
            assert before == after
    # Only the order of the experts differs. The shuffled trace keeps some reuse, but
    # less than the recorded trace has.
    assert reuse(trace) > 1.15 * reuse(control)


def reuse(trace: Trace) -> float:
    """Returns the mean share of a decoded token's experts that the previous token also
    used, in the first MoE layer."""
    ids = trace.decode().expert_ids[0]
    return float(
        np.mean([np.isin(now, before).mean() for before, now in pairwise(ids)])
    )


def trace_of(passes: Sequence[Sequence[Sequence[int]]]) -> Trace:
    """Returns a trace of one request with one token per pass. passes[p][row] lists the
    token's experts in a layer."""
    n_row, k = len(passes[0]), len(passes[0][0])
    path = [[list(layer) for layer in token] for token in passes]
    return hand_made(MoeShape(n_row, 4, k, tuple(range(n_row))), [path])


def test_lookups_are_distinct_experts_in_order_of_first_choice() -> None:
    trace = random_trace(n_sequences=1, n_prefill=5, n_decode=2)
    lookups = Lookups.of(trace)
    n_expert = trace.shape.n_expert
    for row in range(len(trace.shape.layers)):
        ids = trace.expert_ids[row, :5].ravel()
        expected = list(dict.fromkeys(ids[ids >= 0].tolist()))
        assert (
            lookups.keys[lookups.start[row] : lookups.start[row + 1]] - row * n_expert
        ).tolist() == expected
    assert lookups.decode.tolist() == [False] * 5 + [True] * 10
    trace = random_trace(n_sequences=3, n_prefill=6, n_decode=5)
    counted = belady(Lookups.of(trace), 20)
    assert counted.decode_lookups == 3 * 5 * 5 * 2
    with pytest.raises(OptionError, match="needs 2 experts"):
        belady(Lookups.of(trace_of([[[0, 1]], [[2, 3]]])), 1)


def optimum(trace: Trace, n_slots: int) -> int:
    """Returns the maximum number of hits with n_slots slots, found by trying every
    choice of victims."""
    lookups = Lookups.of(trace)
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for start, end in zip(lookups.start[:-1], lookups.start[1:], strict=True):
        event = frozenset(lookups.keys[start:end].tolist())
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            others = sorted(resident - event)
            for kept in combinations(others, min(len(others), n_slots - len(event))):
                state = event | frozenset(kept)
                after[state] = max(after.get(state, 0), hits + len(event & resident))
        best = after
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.sets(st.integers(0, 3), min_size=2, max_size=2)] * 2),
        min_size=1,
        max_size=10,
    ),
    st.integers(2, 6),
)
def test_belady_equals_the_best_choice_of_victims(
    passes: list[tuple[set[int], set[int]]], n_slots: int
) -> None:
    trace = trace_of([[sorted(layer) for layer in one] for one in passes])
    bound = belady(Lookups.of(trace), n_slots)
    assert bound.hits == optimum(trace, n_slots)
    assert bound.hits <= bound.lookups


def test_event_parts_split_tokens_by_request_and_phase() -> None:
    event = RoutingEvent(
        0, 0, 7, Phase.PREFILL, 0, 1, np.zeros((4, 2), np.int32),
        sequences=np.array([7, 8, 7, 7], np.int32), phases=np.array([0, 1, 0, 1], np.int32),
    )  # fmt: skip
    parts = [(part.sequence, part.phase, list(part.rows)) for part in event.parts()]  # type: ignore[arg-type]
    assert parts == [
        (7, Phase.PREFILL, [0, 2]),
        (8, Phase.DECODE, [1]),
        (7, Phase.DECODE, [3]),
    ]
    alone = event._replace(sequences=None, phases=None)
    assert alone.parts() == [Part(7, Phase.PREFILL, slice(0, 4))]


def test_history_sums_eams_of_a_pass_and_the_collection_learns_each_request() -> None:
    trace, history = batched(), History(SMALL)
    for event in trace.events():
        if isinstance(event, Announcement):
            continue
        history.update(event)
        present = {part.sequence for part in event.parts()}
        sums = sum(history.requests[s].counts for s in sorted(present))
        np.testing.assert_array_equal(history.prefill, sums[0])
        np.testing.assert_array_equal(history.decode, sums[1])
        counted = np.bincount(event.expert_ids.ravel(), minlength=SMALL.n_expert)
        np.testing.assert_array_equal(history.iteration[event.il], counted)
    predictor, history = EamcPredictor(SMALL), History(SMALL)
    for event in batched().events():
        if isinstance(event, RoutingEvent):
            history.update(event)
            predictor.learn(history)
    eamc = predictor.learned(history)
    assert eamc.n_entries == 4
    rows = eamc.state.sum(axis=2)
    assert (rows[:, list(SMALL.layers)] == 6 * SMALL.n_expert_used).all()


def decoded(sequences: list[int], pass_: int, experts: list[int]) -> RoutingEvent:
    ids = np.array(experts, np.int32)[:, np.newaxis]
    phases = np.full(len(sequences), Phase.DECODE, np.int32)
    return RoutingEvent(
        pass_,
        0,
        sequences[0],
        Phase.DECODE,
        0,
        1,
        ids,
        sequences=np.array(sequences, np.int32),
        phases=phases,
    )


def test_history_ends_a_request_after_passes_without_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history_module, "ABSENT_PASSES", 3)
    history = History(SMALL)
    history.update(decoded([0, 1], 0, [3, 4]))
    for pass_ in range(1, 4):
        history.update(decoded([1, 2], pass_, [4, 5]))
        assert not history.finished
    history.update(decoded([1, 2], 4, [4, 5]))
    assert [(ream.sum(), ream[1, 3]) for ream in history.finished] == [(1, 1)]
    assert sorted(history.requests) == [1, 2]


def test_history_keeps_counts_of_waiting_requests_and_limits_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = History(SMALL)
    for pass_ in range(10):
        history.update(decoded([0, 1] if pass_ % 2 else [2, 3], pass_, [pass_ % 2, 5]))
        assert not history.finished
    assert [history.requests[s].counts[Phase.DECODE].sum() for s in range(4)] == [
        5,
        5,
        5,
        5,
    ]
    monkeypatch.setattr(history_module, "MOST_REQUESTS", 4)
    for pass_ in range(10, 30):
        history.update(decoded([2 * pass_, 2 * pass_ + 1], pass_, [0, 1]))
        assert len(history.requests) <= 4


def test_select_and_decode_keep_batches_and_read_rejects_wrong_phases(
    tmp_path: Path,
) -> None:
    trace = batched()
    part = trace.select([1, 3])
    assert part.sequences() == [1, 3]
    assert part.n_pass == 1 + 6
    assert (np.diff(part.pass_start)[-6:] == 2).all()
    announced = [event for event in part.events() if isinstance(event, Announcement)]
    assert [len(event.tokens) for event in announced] == [6, *[2] * 6]
    decode = trace.decode()
    assert (decode.phase_of == Phase.DECODE).all() and decode.n_tokens == 4 * 6
    assert (decode.pass_phase == Phase.DECODE).all()
    trace = batched()
    wrong = replace(trace, token_phase=np.full_like(trace.token_phase, 2))
    write(tmp_path / "t.npz", wrong)
    with pytest.raises(TraceError, match="token_phase must be at most 1"):
        read(tmp_path / "t.npz")


def test_separated_gives_each_request_its_own_passes() -> None:
    alone = separated(batched())
    assert alone.token_sequence is None
    assert alone.n_pass == 4 + 4 * 6 + 1
    for event in alone.events():
        assert event.sequences is None
        if isinstance(event, RoutingEvent):
            assert event.first_token == 0
    original = random_trace(n_sequences=5, n_prefill=3, n_decode=6, with_inputs=True)
    one = alone.select([2]), original.select([2])
    np.testing.assert_array_equal(one[0].expert_ids, one[1].expert_ids)
    np.testing.assert_array_equal(one[0].tokens, one[1].tokens)
