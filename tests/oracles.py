"""Predictors for tests whose rightness is known: they have read the trace they are judged on."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent
from moegguf.trace.trace import Trace, TraceHeader


def hand_made(shape: MoeShape, routing: list[list[list[list[int]]]], *, prefill: int = 0) -> Trace:
    """A trace from lists [sequence][token][row][experts]; the first `prefill` tokens of each sequence are one pass."""
    lengths, phases, sequences, tokens = [], [], [], []
    for sequence, path in enumerate(routing):
        parts = ([(Phase.PREFILL, path[:prefill])] if prefill else []) + [(Phase.DECODE, [t]) for t in path[prefill:]]
        for phase, part in parts:
            lengths.append(len(part))
            phases.append(phase)
            sequences.append(sequence)
            tokens.extend(part)
    n_pass = len(lengths)
    return Trace(
        shape=shape,
        header=TraceHeader("hand-made", labels={i: f"kind{i % 2}" for i in range(len(routing))}),
        pass_sequence=np.array(sequences, np.int32),
        pass_phase=np.array(phases, np.uint8),
        pass_first_token=np.zeros(n_pass, np.int32),
        pass_ns=np.arange(n_pass, dtype=np.int64),
        pass_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.arange(len(tokens), dtype=np.int32),
        expert_ids=np.array(tokens, np.int16).transpose(1, 0, 2),
    )


class Oracle(Predictor):
    """Knows the truth of every one-token pass; names `n_wrong` of its experts wrongly, and the wrong ones last."""

    name: ClassVar[str] = "oracle"

    def __init__(self, trace: Trace, n_wrong: int = 0, *, reach: int = 99, first_layer: bool = True) -> None:
        super().__init__(trace.shape, reach)
        self.trace, self.n_wrong, self.first_layer = trace, n_wrong, first_layer
        self.next_pass = -1

    def announce(self, announcement: Announcement) -> None:
        self.next_pass += 1

    def observe(self, gate: RoutingEvent) -> None:
        assert gate.pass_ == self.next_pass

    def truth(self, il: int) -> list[int]:
        token = self.trace.pass_start[self.next_pass]
        return self.trace.expert_ids[self.shape.row_of[il], token].tolist()

    def predict(self, il: int, distance: int) -> Float32s | None:
        if distance > self.reach or (il == self.shape.layers[0] and not self.first_layer):
            return None
        probabilities = np.zeros(self.shape.n_expert, np.float32)
        right = self.truth(il)
        wrong = [e for e in range(self.shape.n_expert) if e not in right][: self.n_wrong]
        for rank, e in enumerate(right[: len(right) - self.n_wrong] + wrong):
            probabilities[e] = 1 - rank / 10
        return probabilities


class Silent(Predictor):
    """Answers with nothing, in every way there is."""

    name: ClassVar[str] = "silent"

    def __init__(self, shape: MoeShape, answer: Float32s | None) -> None:
        super().__init__(shape, 99)
        self.answer = answer

    def predict(self, il: int, distance: int) -> Float32s | None:
        return self.answer


class FreshGate(Predictor):
    """The router itself, on the input it has just seen: distance 0 only."""

    name: ClassVar[str] = "fresh gate"
    needs_inputs: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, routers: Float32s) -> None:
        super().__init__(shape, 0)
        self.routers = routers
        self.logits: Float32s | None = None
        self.il = -1

    def observe(self, gate: RoutingEvent) -> None:
        assert gate.inputs is not None
        self.il = gate.il
        self.logits = self.routers[self.shape.row_of[gate.il]] @ gate.inputs[-1]

    def predict(self, il: int, distance: int) -> Float32s | None:
        if distance != 0 or il != self.il or self.logits is None:
            return None
        return 1 / (1 + np.exp(-self.logits))
