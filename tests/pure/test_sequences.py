"""Several sequences in a pass: each is predicted as it is alone; the forecast is that any of them uses an expert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from oracles import counted, routers_of
from reference_predictors import Affinity, EamcPredictor, PreviousToken, Skip, TokenTable
from traces import SMALL, hidden_routers, random_trace

from moegguf.controller.predictors import base as sequences
from moegguf.controller.predictors.base import NoPrediction, PerSequence, Predictor, per_sequence
from moegguf.controller.predictors.counts import Popularity
from moegguf.native.events import Announcement, Float32s
from moegguf.trace.trace import Trace
from predictors.study.arrange import grouped

TRACE = random_trace(n_sequences=4, n_prefill=3, n_decode=8, with_inputs=True)


def batched(trace: Trace) -> Trace:
    """All prompts in one pass, then a token of every request in each."""
    of = [np.flatnonzero(trace.sequence_of == sequence) for sequence in trace.sequences()]
    steps = [np.array([tokens[step] for tokens in of]) for step in range(3, len(of[0]))]
    return grouped(trace, [np.concatenate([tokens[:3] for tokens in of]), *steps])


MAKE: dict[str, Callable[[], Predictor]] = {
    "previous-token": lambda: PreviousToken(SMALL),
    "token-id": lambda: counted(TokenTable, TRACE),
    "popularity": lambda: counted(Popularity, TRACE),
    "affinity": lambda: counted(Affinity, TRACE),
    "skip": lambda: Skip(SMALL, routers_of(SMALL, hidden_routers(SMALL, 0))),
}

Forecasts = dict[tuple[int, int], list[Float32s | None]]  # by pass and row


def forecasts(predictor: Predictor, trace: Trace) -> Forecasts:
    """What is predicted for the layer after each event, and before the first."""
    found: Forecasts = {}
    pass_ = -1
    for event in trace.events():
        if isinstance(event, Announcement):
            pass_ += 1
            predictor.announce(event)
            found[pass_, -1] = [_copy(predictor.predict(SMALL.layers[0], 1))]
            continue
        predictor.observe(event)
        row = SMALL.row_of[event.il]
        if row + 1 < len(SMALL.layers):
            found[pass_, row] = [_copy(predictor.predict(SMALL.layers[row + 1], 1))]
    return found


def _copy(row: Float32s | None) -> Float32s | None:
    return None if row is None else np.minimum(row, 1).copy()


@pytest.mark.parametrize("name", MAKE)
def test_the_forecast_is_the_union_of_what_each_is_predicted_alone(name: str) -> None:
    batch = batched(TRACE)
    found = forecasts(PerSequence(MAKE[name]()), batch)
    alone = [forecasts(MAKE[name](), TRACE.select([sequence])) for sequence in TRACE.sequences()]
    for step in range(8):
        for row in range(-1, len(SMALL.layers) - 1):
            rows = [r for one in alone for r in one[1 + step, row] if r is not None]
            (union,) = found[1 + step, row]
            if not rows:
                assert union is None
                continue
            np.testing.assert_allclose(union, 1 - np.prod([1 - r for r in rows], axis=0), atol=1e-6)


@pytest.mark.parametrize("name", MAKE)
def test_one_request_after_another_is_predicted_as_without_it(name: str) -> None:
    wrapped, plain = forecasts(PerSequence(MAKE[name]()), TRACE), forecasts(MAKE[name](), TRACE)
    assert wrapped.keys() == plain.keys()
    for key, (row,) in plain.items():
        np.testing.assert_array_equal(wrapped[key][0], row)


def test_what_takes_batches_as_they_are_is_left_alone() -> None:
    for predictor in (EamcPredictor(SMALL), NoPrediction(SMALL)):
        assert per_sequence(predictor) is predictor
    wrapped = per_sequence(PreviousToken(SMALL))
    assert wrapped.name == "previous-token" and wrapped.native() is not None


def test_a_pass_of_too_many_sequences_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MOST_SEQUENCES", 3)
    predictor = PerSequence(counted(Popularity, TRACE))
    found = forecasts(predictor, batched(TRACE))
    assert all(found[1, row] == [None] for row in range(-1, len(SMALL.layers) - 1))


def test_statistics_are_shared_not_copied() -> None:
    table, affinity = counted(TokenTable, TRACE), counted(Affinity, TRACE)
    assert table.fork()._counts is table._counts
    fork = affinity.fork()
    assert isinstance(fork, Affinity) and fork.affinity is affinity.affinity
