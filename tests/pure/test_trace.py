"""A trace in memory: events in live order, selections by request, shuffling."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from traces import SMALL, random_trace, same

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.trace.format import check
from moegguf.trace.trace import Trace, TraceHeader
from predictors.study.arrange import shuffled

TINY = MoeShape(n_layer=4, n_expert=4, n_expert_used=2, layers=(1, 3), n_embd=2, n_vocab=100)
# Layer 1 uses two experts; layer 3 one, and in the first pass for its last token only.
LAYER_1 = [[0, 1], [1, 2], [2, 3], [3, 0], [1, 0], [2, 1]]
LAYER_3 = [[-1, -1], [-1, -1], [3, -1], [0, -1], [1, -1], [2, -1]]


def tiny(**changes: Any) -> Trace:
    """Request 5: three tokens announced together, in passes of two and one; then request 6, in between one of 5."""
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


def test_events_come_in_live_order() -> None:
    check(tiny())
    events: list[Any] = []
    for event in tiny().events():
        if isinstance(event, Announcement):
            events.append((event.sequence, event.phase, event.tokens.tolist()))
        else:
            events.append((event.pass_, event.il, event.first_token, event.expert_ids.tolist()))
    assert events == [
        (5, 0, [7, 8, 9]), (0, 1, 0, [[0, 1], [1, 2]]), (1, 1, 2, [[2, 3]]), (1, 3, 2, [[3]]), (6, 0, [20]),
        (2, 1, 0, [[3, 0]]), (2, 3, 0, [[0]]), (5, 1, [11]), (3, 1, 0, [[1, 0]]), (3, 3, 0, [[1]]),
        (4, 1, -1, [[2, 1]]), (4, 3, -1, [[2]]),
    ]  # fmt: skip
    assert [event.time_ns for event in routing_events(tiny())] == [10, 20, 20, 30, 30, 40, 40, 50, 50]
    assert {type(event.phase) for event in routing_events(tiny())} == {Phase}
    assert all(event.expert_ids.dtype == np.int32 and event.weights is None for event in routing_events(tiny()))


def test_the_last_layer_has_the_last_tokens_only() -> None:
    ids = np.array([LAYER_1, LAYER_3], np.int16)
    ids[1, 1] = [2, -1]
    events = {(event.pass_, event.il): event.expert_ids.tolist() for event in routing_events(tiny(expert_ids=ids))}
    assert events[0, 1] == [[0, 1], [1, 2]] and events[0, 3] == [[2]]


def test_a_pass_whose_announcement_is_not_in_the_trace_is_unannounced() -> None:
    trace = tiny(pass_first_token=np.array([1, 3, 0, 7, -1], np.int32))
    (announced,) = (event for event in trace.events() if isinstance(event, Announcement))
    assert (announced.sequence, announced.phase, announced.tokens.tolist()) == (6, 0, [20])
    assert [event.first_token for event in routing_events(trace)] == [-1, -1, -1, 0, 0, -1, -1, -1, -1]


def test_weights_and_inputs_go_with_their_tokens() -> None:
    weights = np.arange(24).reshape(2, 6, 2).astype(np.float16)
    inputs = np.arange(1, 25).reshape(2, 6, 2).astype(np.float16)
    inputs[:, 4] = 0
    events = {(event.pass_, event.il): event for event in routing_events(tiny(weights=weights, inputs=inputs))}
    first, last, without_inputs = events[0, 1], events[1, 3], events[3, 1]
    assert first.weights is not None and first.weights.tolist() == [[0, 1], [2, 3]]
    assert last.weights is not None and last.weights.tolist() == [[16]]
    assert first.inputs is not None and first.inputs.tolist() == [[1, 2], [3, 4]]
    assert last.inputs is not None and last.inputs.tolist() == [[17, 18]] and last.inputs.dtype == np.float32
    assert without_inputs.inputs is None, "not recorded for this pass"


def test_select_and_decode() -> None:
    five = tiny().select([5])
    assert tiny().sequences() == [5, 6] and five.sequences() == [5]
    assert five.tokens.tolist() == [7, 8, 9, 11] and five.pass_start.tolist() == [0, 2, 3, 4]
    assert five.expert_ids[0].tolist() == [[0, 1], [1, 2], [2, 3], [1, 0]]
    assert five.pass_ns.tolist() == [10, 20, 40] and five.header.labels == {5: "code"}
    decode = tiny().decode()
    assert (decode.n_pass, decode.n_tokens) == (2, 2) and decode.tokens.tolist() == [11, -1]
    nothing = tiny().select([])
    assert (nothing.n_pass, nothing.n_tokens) == (0, 0) and list(nothing.events()) == []
    for part in (five, decode, nothing):
        check(part)


def test_shuffling_keeps_each_request_s_own_experts_and_loses_order() -> None:
    trace = random_trace(n_decode=60, seed=3, with_inputs=True)
    control = shuffled(trace, 1)
    check(control)
    assert same(control, shuffled(trace, 1)) and not same(control, shuffled(trace, 2))
    prefill = np.repeat(trace.pass_phase == Phase.PREFILL, np.diff(trace.pass_start))
    assert np.array_equal(control.expert_ids[:, prefill], trace.expert_ids[:, prefill])
    assert np.array_equal(control.tokens, trace.tokens) and control.inputs is trace.inputs
    for sequence in trace.sequences():
        mine = trace.sequence_of == sequence
        assert not np.array_equal(control.expert_ids[:, mine], trace.expert_ids[:, mine])
        for row in range(len(SMALL.layers)):
            before, after = (
                sorted(zip(map(tuple, of.expert_ids[row, mine]), map(tuple, of.weights[row, mine]), strict=True))
                for of in (trace, control)
            )
            assert before == after
    assert reuse(trace) > 1.15 * reuse(control)  # what the request as a whole reuses stays


def reuse(trace: Trace) -> float:
    """The share of experts that the token before used as well."""
    ids = trace.decode().expert_ids[0]
    return float(np.mean([np.isin(now, before).mean() for before, now in pairwise(ids)]))


def test_a_failed_pass_has_events_of_the_layers_computed() -> None:
    trace = random_trace(n_sequences=1, n_prefill=2, n_decode=2, seed=0)
    trace.expert_ids[2:, 2] = -1
    check(trace)
    assert [event.il for event in routing_events(trace) if event.pass_ == 1] == [1, 2]
