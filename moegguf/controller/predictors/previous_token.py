"""Temporal locality (ExpertFlow, section 5.2: TLP): the experts that the last token used at a layer."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, RoutingEvent
from moegguf.native.predictor import NativePredictor

NAME = "previous-token"


class PreviousToken(Predictor):
    """Probability 1 for the experts that the last token used at a layer, 0 for the others. No training.

    Of a pass of many tokens, the last one counts. Predicts every layer observed at least once, across requests too.
    """

    name: ClassVar[str] = NAME

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self._used: Float32s = np.zeros(shape.table, np.float32)
        self._seen: npt.NDArray[np.bool_] = np.zeros(shape.n_layer, np.bool_)

    def observe(self, event: RoutingEvent) -> None:
        """Stores the last token's experts; an event without tokens or of an unknown layer changes nothing."""
        if event.il not in self.shape.row_of or len(event.expert_ids) == 0:
            return
        last = event.expert_ids[-1]
        used = self._used[event.il]
        used[:] = 0
        used[last[(last >= 0) & (last < self.shape.n_expert)]] = 1
        self._seen[event.il] = True

    def predict(self, il: int, distance: int) -> Float32s | None:
        """As `Predictor.predict`, at any distance."""
        return self._used[il] if il in self.shape.row_of and self._seen[il] else None

    def fork(self) -> PreviousToken:
        """As `Predictor.fork`."""
        return PreviousToken(self.shape)

    def native(self) -> NativePredictor:
        """As `Predictor.native`."""
        return NativePredictor(NAME)
