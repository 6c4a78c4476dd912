"""Predictors of known accuracy and hand-made traces for tests, and ProMoE's measure of
accuracy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.predictors import LEARNED
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Gating, Router, Routers
from moegguf.learning.counts import COUNTED
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent
from moegguf.trace.trace import Trace, TraceHeader


def hand_made(
    shape: MoeShape, routing: list[list[list[list[int]]]], *, prefill: int = 0
) -> Trace:
    """Returns a trace in which a token uses the experts routing[sequence][token][row].

    The first `prefill` tokens of a sequence form one pass. Every other token is a
    decode pass.
    """
    lengths, phases, sequences, tokens = [], [], [], []
    for sequence, path in enumerate(routing):
        parts = ([(Phase.PREFILL, path[:prefill])] if prefill else []) + [
            (Phase.DECODE, [t]) for t in path[prefill:]
        ]
        for phase, part in parts:
            lengths.append(len(part))
            phases.append(phase)
            sequences.append(sequence)
            tokens.extend(part)
    n_pass = len(lengths)
    return Trace(
        shape=shape,
        header=TraceHeader(
            "hand-made", labels={i: f"kind{i % 2}" for i in range(len(routing))}
        ),
        pass_sequence=np.array(sequences, np.int32),
        pass_phase=np.array(phases, np.uint8),
        pass_first_token=np.zeros(n_pass, np.int32),
        pass_ns=np.arange(n_pass, dtype=np.int64),
        pass_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.arange(len(tokens), dtype=np.int32),
        expert_ids=np.array(tokens, np.int16).transpose(1, 0, 2),
    )


class Oracle(Predictor):
    """Predicts the experts of each pass's first token from the trace, but replaces the
    last `n_wrong` of them with wrong ones.

    Predicts nothing beyond `reach`, and nothing for the first layer if `first_layer` is
    False.
    """

    name: ClassVar[str] = "oracle"

    def __init__(
        self,
        trace: Trace,
        n_wrong: int = 0,
        *,
        reach: int = 99,
        first_layer: bool = True,
    ) -> None:
        super().__init__(trace.shape, reach)
        self.trace, self.n_wrong, self.first_layer = trace, n_wrong, first_layer
        self.next_pass = -1

    def announce(self, announcement: Announcement) -> None:
        self.next_pass += 1

    def observe(self, event: RoutingEvent) -> None:
        assert event.pass_ == self.next_pass

    def truth(self, il: int) -> list[int]:
        token = self.trace.pass_start[self.next_pass]
        return self.trace.expert_ids[self.shape.row_of[il], token].tolist()

    def predict(self, il: int, distance: int) -> Float32s | None:
        if distance > self.reach or (
            il == self.shape.layers[0] and not self.first_layer
        ):
            return None
        probabilities = np.zeros(self.shape.n_expert, np.float32)
        right = self.truth(il)
        wrong = [e for e in range(self.shape.n_expert) if e not in right][
            : self.n_wrong
        ]
        for rank, e in enumerate(right[: len(right) - self.n_wrong] + wrong):
            probabilities[e] = 1 - rank / 10
        return probabilities


class Unpredictive(Predictor):
    """Always returns `answer`."""

    name: ClassVar[str] = "unpredictive"

    def __init__(self, shape: MoeShape, answer: Float32s | None) -> None:
        super().__init__(shape, 99)
        self.answer = answer

    def predict(self, il: int, distance: int) -> Float32s | None:
        return self.answer


def routers_of(shape: MoeShape, matrices: Float32s) -> Routers:
    """Returns softmax routers with these matrices (len(shape.layers), n_expert,
    n_embd)."""
    rows = zip(shape.layers, matrices, strict=True)
    return Routers(
        Gating.SOFTMAX, {il: Router(shape.n_expert_used, matrix) for il, matrix in rows}
    )


def counted(name: str, trace: Trace) -> Predictor:
    """Returns the predictor of this name, with arrays that `moegguf.learning` has
    computed from the trace."""
    return LEARNED[name](trace.shape, COUNTED[name](trace))


def accuracy(predictor: Predictor, trace: Trace, distance: int) -> float:
    """Returns the share of the experts used in decode passes that were predicted
    `distance` MoE layers earlier.

    Counts only layers with a prediction. Returns 0 if there are no predictions.
    """
    right = total = 0
    predicted: dict[int, set[int]] = {}
    for event in trace.decode().events():
        if isinstance(event, Announcement):
            predictor.announce(event)
            predicted = {}
            continue
        predictor.observe(event)
        _predict(predictor, event, distance, predicted)
        if event.il in predicted:
            right += len(predicted[event.il] & set(event.expert_ids[0].tolist()))
            total += event.expert_ids.shape[1]
    return right / max(1, total)


def _predict(
    predictor: Predictor,
    event: RoutingEvent,
    distance: int,
    predicted: dict[int, set[int]],
) -> None:
    il = next(
        iter(predictor.shape.layers[predictor.shape.row_of[event.il] + distance :]),
        None,
    )
    probabilities = None if il is None else predictor.predict(il, distance)
    if il is not None and probabilities is not None:
        assert probabilities.shape == (predictor.shape.n_expert,)
        assert probabilities.min() >= 0 and probabilities.max() <= 1
        predicted[il] = set(
            np.argsort(-probabilities, kind="stable")[
                : event.expert_ids.shape[1]
            ].tolist()
        )
