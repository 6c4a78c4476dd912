"""Several sequences in a pass: each is predicted as it is alone; the forecast is that any of them uses an expert."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from oracles import counted
from traces import SMALL, batched

from moegguf.controller.predictors import base as sequences
from moegguf.controller.predictors.base import NoPrediction, PerSequence, Predictor, per_sequence
from moegguf.controller.predictors.counts import Popularity
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent
from moegguf.trace.trace import Trace
from predictors.study.arrange import separated

BATCH = batched()
TRACE = separated(BATCH)


class Everything(Predictor):
    """Half a probability for the experts of the last token of the pass; the rest depends on all that it was shown."""

    name: ClassVar[str] = "everything"

    def __init__(self) -> None:
        super().__init__(SMALL, 99)
        self._seen = 0.0
        self._last: Float32s | None = None

    def announce(self, announcement: Announcement) -> None:
        self._seen += 0.37 * float(announcement.tokens.sum() + announcement.phase)

    def observe(self, event: RoutingEvent) -> None:
        assert event.inputs is not None
        self._seen += 0.37 * float(event.expert_ids.sum() + event.first_token + event.inputs.sum() + event.phase)
        self._last = np.zeros(SMALL.n_expert, np.float32)
        self._last[event.expert_ids[-1]] = 0.5

    def predict(self, il: int, distance: int) -> Float32s | None:
        return None if self._last is None else self._last + np.float32(self._seen % 1 / 2)

    def fork(self) -> Everything:
        return Everything()


Forecasts = dict[tuple[int, int], Float32s | None]  # by pass and row


def forecasts(predictor: Predictor, trace: Trace) -> Forecasts:
    """What is predicted after each event, and before the first."""
    found: Forecasts = {}
    pass_ = -1
    for event in trace.events():
        if isinstance(event, Announcement):
            pass_ += 1
            predictor.announce(event)
            found[pass_, -1] = predictor.predict(SMALL.layers[0], 1)
            continue
        predictor.observe(event)
        found[pass_, SMALL.row_of[event.il]] = predictor.predict(SMALL.layers[0], 1)
    return found


def test_the_forecast_is_the_union_of_what_each_is_predicted_alone() -> None:
    found = forecasts(PerSequence(Everything()), BATCH)
    alone = {sequence: forecasts(Everything(), TRACE.select([sequence])) for sequence in TRACE.sequences()}
    n_before = dict.fromkeys(alone, 0)  # passes of each sequence
    for pass_, tokens in enumerate(np.split(BATCH.sequence_of, BATCH.pass_start[1:-1])):
        present = np.unique(tokens).tolist()
        for row in range(-1, len(SMALL.layers)):
            rows = [one for s in present if (one := alone[s][n_before[s], row]) is not None]
            union = 1 - np.prod([1 - one for one in rows], axis=0) if rows else np.nan
            np.testing.assert_allclose(np.asarray(found[pass_, row], np.float32), union, atol=1e-5)
        for sequence in present:
            n_before[sequence] += 1


def test_one_request_after_another_is_predicted_as_without_it() -> None:
    wrapped, plain = forecasts(PerSequence(Everything()), TRACE), forecasts(Everything(), TRACE)
    assert wrapped.keys() == plain.keys()
    for key, row in plain.items():
        np.testing.assert_array_equal(wrapped[key], row)  # type: ignore[arg-type]


def test_what_takes_batches_as_they_are_is_left_alone() -> None:
    for predictor in (EamcPredictor(SMALL), NoPrediction(SMALL)):
        assert per_sequence(predictor) is predictor


def test_a_pass_of_too_many_sequences_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MOST_SEQUENCES", 3)
    found = forecasts(PerSequence(counted(Popularity, TRACE)), BATCH)
    assert all(found[1, row] is None for row in range(-1, len(SMALL.layers)))


class Told(Predictor):
    """Keeps the first tokens of the events that all of it were shown, and predicts what is no probability."""

    name: ClassVar[str] = "told"

    def __init__(self, first_tokens: dict[int, list[int]]) -> None:
        super().__init__(SMALL, 99)
        self._first_tokens = first_tokens

    def observe(self, event: RoutingEvent) -> None:
        self._first_tokens.setdefault(event.sequence, []).append(event.first_token)

    def predict(self, il: int, distance: int) -> Float32s | None:
        return np.array([-1, 0.5, 3], np.float32)

    def fork(self) -> Told:
        return Told(self._first_tokens)


def of_two(pass_: int, first_token: int, *of_tokens: int) -> RoutingEvent:
    ids, phases = np.zeros((len(of_tokens), 1), np.int32), np.zeros(len(of_tokens), np.int32)
    il, sequences = SMALL.layers[0], np.array(of_tokens, np.int32)
    return RoutingEvent(pass_, 0, of_tokens[0], Phase.PREFILL, first_token, il, ids, None, None, sequences, phases)


def test_each_is_told_its_own_first_token_and_what_is_predicted_is_a_probability() -> None:
    """Five tokens of two sequences, announced together, in two passes."""
    first_tokens = dict[int, list[int]]()
    predictor = PerSequence(Told(first_tokens))
    tokens = np.arange(5, dtype=np.int32)
    of_tokens, phases = np.array([7, 7, 8, 7, 8], np.int32), np.zeros(5, np.int32)
    predictor.announce(Announcement(7, Phase.PREFILL, tokens, of_tokens, phases, np.ones(5, np.int32)))
    predictor.observe(of_two(0, 0, 7, 7, 8))
    predictor.observe(of_two(1, 3, 7, 8))
    assert first_tokens == {7: [0, 2], 8: [0, 1]}
    np.testing.assert_array_equal(predictor.predict(SMALL.layers[1], 1), [0, 0.75, 1])  # type: ignore[arg-type]
