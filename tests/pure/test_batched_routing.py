"""Passes with tokens of several requests: told apart in events, EAMs and traces, and none of it lost in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from traces import SMALL, batched, random_trace

from moegguf.controller import history as history_module
from moegguf.controller.history import History
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.engine.live_controller import CHECKPOINT_REQUESTS, LiveController
from moegguf.errors import TraceError
from moegguf.native.events import Announcement, Part, Phase, RoutingEvent
from moegguf.trace.format import read, write
from predictors.study.arrange import separated


def test_the_tokens_of_an_event_come_apart_by_request_and_phase() -> None:
    event = RoutingEvent(
        0, 0, 7, Phase.PREFILL, 0, 1, np.zeros((4, 2), np.int32),
        sequences=np.array([7, 8, 7, 7], np.int32), phases=np.array([0, 1, 0, 1], np.int32),
    )  # fmt: skip
    parts = [(part.sequence, part.phase, list(part.rows)) for part in event.parts()]  # type: ignore[arg-type]
    assert parts == [(7, Phase.PREFILL, [0, 2]), (8, Phase.DECODE, [1]), (7, Phase.DECODE, [3])]
    alone = event._replace(sequences=None, phases=None)
    assert alone.parts() == [Part(7, Phase.PREFILL, slice(0, 4))]


def test_every_request_of_a_batch_has_the_reams_it_has_alone() -> None:
    trace, together, alone = batched(), History(SMALL), {s: History(SMALL) for s in range(5)}
    for event in trace.events():
        if isinstance(event, RoutingEvent):
            together.update(event)
    for event in separated(trace).events():
        if isinstance(event, RoutingEvent):
            alone[event.sequence].update(event)
    assert sorted(together.requests) == [0, 1, 2, 3, 4]
    for sequence, request in together.requests.items():
        np.testing.assert_array_equal(request.prefill, alone[sequence].prefill)
        np.testing.assert_array_equal(request.decode, alone[sequence].decode)


def test_the_eams_of_a_pass_are_those_of_its_requests_together() -> None:
    trace, history = batched(), History(SMALL)
    for event in trace.events():
        if isinstance(event, Announcement):
            continue
        history.update(event)
        present = {part.sequence for part in event.parts()}
        sums = [sum(getattr(history.requests[s], phase) for s in sorted(present)) for phase in ("prefill", "decode")]
        np.testing.assert_array_equal(history.prefill, sums[0])
        np.testing.assert_array_equal(history.decode, sums[1])
        counted = np.bincount(event.expert_ids.ravel(), minlength=SMALL.n_expert)
        np.testing.assert_array_equal(history.iteration[event.il], counted)


def decoded(sequences: list[int], pass_: int, experts: list[int]) -> RoutingEvent:
    ids = np.array(experts, np.int32)[:, np.newaxis]
    phases = np.full(len(sequences), Phase.DECODE, np.int32)
    return RoutingEvent(
        pass_, 0, sequences[0], Phase.DECODE, 0, 1, ids, sequences=np.array(sequences, np.int32), phases=phases
    )


def test_a_request_of_a_batch_ends_when_it_takes_no_part_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "ABSENT_PASSES", 3)
    history = History(SMALL)
    history.update(decoded([0, 1], 0, [3, 4]))
    for pass_ in range(1, 4):
        history.update(decoded([1, 2], pass_, [4, 5]))
        assert not history.finished
    history.update(decoded([1, 2], 4, [4, 5]))
    assert [(p.sum(), d.sum(), d[1, 3]) for p, d in history.finished] == [(0, 1, 1)]
    assert sorted(history.requests) == [1, 2]


def test_a_group_that_waits_goes_on_with_its_own_ream() -> None:
    history = History(SMALL)
    for pass_ in range(10):
        history.update(decoded([0, 1] if pass_ % 2 else [2, 3], pass_, [pass_ % 2, 5]))
        assert not history.finished
    assert [history.requests[s].decode.sum() for s in range(4)] == [5, 5, 5, 5]


def test_memory_is_bounded_however_many_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_REQUESTS", 4)
    history = History(SMALL)
    for pass_ in range(20):
        history.update(decoded([2 * pass_, 2 * pass_ + 1], pass_, [0, 1]))
        assert len(history.requests) <= 4


def test_the_collection_learns_every_request_of_a_batch() -> None:
    predictor, history = EamcPredictor(SMALL), History(SMALL)
    for event in batched().events():
        if isinstance(event, RoutingEvent):
            history.update(event)
            predictor.learn(history)
    eamcs = predictor.learned(history)
    assert eamcs.decode.n_entries == 4
    assert eamcs.prefill.n_entries == 5
    rows = eamcs.decode.state.sum(axis=2)
    assert (rows[:, list(SMALL.layers)] == 6 * SMALL.n_expert_used).all()


def test_requests_that_end_together_each_count_until_the_collection_is_saved() -> None:
    saved, history, live = [], SimpleNamespace(finished=[None] * 3), object.__new__(LiveController)
    parts = {"history": history, "predictor": EamcPredictor(SMALL), "policy": None, "shape": SMALL}
    live.controller = SimpleNamespace(observe=lambda event: None, **parts)
    live.artifacts = SimpleNamespace(layout=None, save_collection=lambda *given: saved.append(given))
    live._n_ended, live._writer = CHECKPOINT_REQUESTS - 2, None
    live.observe(decoded([1, 2, 3], 0, [0, 1, 2]))
    live._writer.join()
    assert len(saved) == 1


def test_the_phases_of_tokens_are_checked(tmp_path: Path) -> None:
    trace = batched()
    wrong = replace(trace, token_phase=np.full_like(trace.token_phase, 2))
    write(tmp_path / "t.npz", wrong)
    with pytest.raises(TraceError, match="token_phase must be at most 1"):
        read(tmp_path / "t.npz")


def test_cutting_keeps_the_batches_of_what_is_left() -> None:
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


def test_separated_requests_have_their_own_passes_and_events() -> None:
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
