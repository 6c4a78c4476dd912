"""Controls for what is measured: a predictor that no other could beat, and the router itself, whose figures show
whether events and model fit together. Neither predicts.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Routers
from moegguf.native.events import Announcement, Float32s, RoutingEvent
from moegguf.trace.trace import Trace

ORACLE = "oracle"


class Oracle(Predictor):
    """Reads the trace that it is replayed on. Predicts the whole pass in progress as it was recorded, with certainty.

    It follows the tokens, not the numbers of passes, which a replay may split.
    """

    name: ClassVar[str] = ORACLE

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.shape, reach=len(trace.shape.layers))
        self._expert_ids = trace.expert_ids
        self._first = 0  # token of the pass in progress
        self._n_tokens = 0  # of that pass, as far as it has been routed
        self._pass = -1

    def announce(self, announcement: Announcement) -> None:
        """The next pass begins."""
        self._end_pass()

    def observe(self, event: RoutingEvent) -> None:
        """Counts the tokens of the pass."""
        if event.pass_ != self._pass:
            self._end_pass()
            self._pass = event.pass_
        self._n_tokens = max(self._n_tokens, len(event.expert_ids))

    def _end_pass(self) -> None:
        self._first += self._n_tokens
        self._n_tokens = 0

    def predict(self, il: int, distance: int) -> Float32s | None:
        """1 for the experts of the pass's first token, at any distance; None after the end."""
        row = self.shape.row_of.get(il)
        if row is None or self._first >= self._expert_ids.shape[1]:
            return None
        ids = self._expert_ids[row, self._first]
        probabilities = np.zeros(self.shape.n_expert, np.float32)
        probabilities[ids[ids >= 0]] = 1
        return probabilities


class FreshGate(Predictor):
    """A control, not a prediction: a router with its own input, at distance 0. Its accuracy must be 100 %."""

    name: ClassVar[str] = "fresh-gate"

    needs_inputs: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, reach=0)
        self._routers = routers.routers
        self._probabilities = routers.probabilities
        self._input: tuple[int, Float32s] | None = None

    def announce(self, announcement: Announcement) -> None:
        """The next pass begins."""
        self._input = None

    def observe(self, event: RoutingEvent) -> None:
        """Keeps the input of one token."""
        self._input = None
        if event.inputs is not None and event.inputs.shape == (1, self.shape.n_embd):
            self._input = event.il, event.inputs[0].copy()

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None but at distance 0."""
        if distance != 0 or self._input is None or self._input[0] != il or il not in self._routers:
            return None
        return self._probabilities(il, self._input[1])
