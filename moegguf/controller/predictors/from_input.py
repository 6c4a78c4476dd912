"""What predictors that look at the router's input share: a copy of the last one."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, RoutingEvent


class FromInput(Predictor):
    """Keeps the router's input of the gate observed last: one token's, finite; else there is nothing to say.

    Passes of several tokens are left out: a prompt uses most experts anyway, and costs a vector each.
    """

    needs_inputs: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, reach: int) -> None:
        super().__init__(shape, reach)
        self._input = np.zeros(shape.n_embd, np.float32)
        self._source: int | None = None  # the layer it entered

    def announce(self, announcement: Announcement) -> None:
        self._source = None

    def observe(self, event: RoutingEvent) -> None:
        self._source = None
        inputs = event.inputs
        if inputs is None or inputs.shape != (1, self.shape.n_embd) or event.il not in self.shape.row_of:
            return
        np.copyto(self._input, inputs[0])
        if np.isfinite(np.dot(self._input, self._input)):
            self._source = event.il

    def _input_for(self, il: int, distance: int) -> Float32s | None:
        """The kept input if it is `distance` MoE layers before `il`."""
        if self._source is None or self.shape.layer_after(self._source, distance) != il:
            return None
        return self._input
