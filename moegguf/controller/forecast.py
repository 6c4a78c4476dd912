"""What the predictor says about the rest of this pass, renewed at each gate within its window."""

from __future__ import annotations

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s


class Forecast:
    """The sliding window of ProMoE (section 4): at layer i, layers i+1 to i+window are predicted anew.

    A later prediction of a layer replaces an earlier one, because it was made from closer by.
    """

    def __init__(self, shape: MoeShape, window: int) -> None:
        self._shape = shape
        self._window = window
        self._table: Float32s = np.zeros(shape.table, np.float32)
        self._known: list[int] = []
        self.il = -1

    def clear(self) -> None:
        """Nothing is said about any layer."""
        self._table[:] = 0
        self._known.clear()
        self.il = -1

    def begin_pass(self, predictor: Predictor) -> None:
        """Nothing was routed yet in this pass; only predictors from tokens can speak. Raises what `advance` raises."""
        self.clear()
        self._predict(predictor, row=-1)

    def advance(self, predictor: Predictor, il: int) -> None:
        """Layer `il` was routed: look `window` layers further. Raises ValueError when the predictor talks nonsense."""
        self.il = il
        self._table[il] = 0
        self._known = [known for known in self._known if known > il]
        self._predict(predictor, self._shape.row_of[il])

    def _predict(self, predictor: Predictor, row: int) -> None:
        layers = self._shape.layers[row + 1 : row + 1 + min(self._window, predictor.reach)]
        for distance, il in enumerate(layers, start=1):
            probabilities = predictor.predict(il, distance)
            if probabilities is None:
                continue
            self._put(il, probabilities)
            if il not in self._known:
                self._known.append(il)

    def _put(self, il: int, probabilities: Float32s) -> None:
        """Takes one number per expert over, cut off at 0 and 1."""
        shape = np.shape(probabilities)
        if shape != (self._shape.n_expert,):
            raise ValueError(f"probabilities have the shape {shape}, not {(self._shape.n_expert,)}")
        row = self._table[il]
        np.maximum(probabilities, 0, out=row)
        np.minimum(row, 1, out=row)
        if np.isnan(row.sum()):
            raise ValueError(f"probabilities of layer {il} are not numbers")

    def probabilities(self) -> Float32s:
        """(n_layer, n_expert) in [0, 1]; rows of layers nothing is said about are 0. Valid until the next gate."""
        return self._table

    def known(self) -> list[int]:
        """Layers something is said about, nearest first."""
        return sorted(self._known)
