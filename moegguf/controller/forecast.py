"""The predictor's probabilities for the rest of this pass, within a window that moves with each routing event."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s


class Forecast:
    """The sliding window of ProMoE (section 4.2): at layer i, layers up to i+window can be predicted.

    again: all of them are predicted at every layer, and a later prediction replaces an earlier one, whose distance was
    longer. Otherwise each is predicted once, when it comes into the window: layer i+window at layer i, and at the
    first layer all up to the window (footnote 1). That is the paper's; it asks the predictor less, and farther ahead.
    """

    def __init__(self, shape: MoeShape, window: int, again: bool = True) -> None:
        self._shape = shape
        self._window = window
        self._again = again
        self._table: Float32s = np.zeros(shape.table, np.float32)
        self._known: list[int] = []

    def clear(self) -> None:
        """Discards all predictions."""
        self._table[:] = 0
        self._known.clear()

    def begin_pass(self, predictor: Predictor) -> None:
        """Predicts the first `window` layers, before any routing event of the pass. Raises as `advance` does."""
        self.clear()
        self._predict(predictor, row=-1)

    def advance(self, predictor: Predictor, il: int) -> None:
        """Layer `il` was routed: predicts the `window` layers after it. Raises ValueError for a wrong shape or NaN."""
        self._table[il] = 0
        self._known = [known for known in self._known if known > il]
        self._predict(predictor, self._shape.row_of[il])

    def take(self, probabilities: Float32s, known: npt.NDArray[np.bool_]) -> None:
        """Takes the store's probabilities (n_layer, n_expert) of `known` layers in place of the predicted ones."""
        self._known = np.flatnonzero(known).tolist()
        self._table[:] = probabilities * known[:, np.newaxis]

    def _predict(self, predictor: Predictor, row: int) -> None:
        layers = self._shape.layers[row + 1 : row + 1 + min(self._window, predictor.reach)]
        for distance, il in enumerate(layers, start=1):
            if il in self._known and not self._again:
                continue
            probabilities = predictor.predict(il, distance)
            if probabilities is None:
                continue
            self._set_row(il, probabilities)
            if il not in self._known:
                self._known.append(il)

    def _set_row(self, il: int, probabilities: Float32s) -> None:
        """Copies (n_expert,) numbers, clipped to [0, 1]."""
        shape = np.shape(probabilities)
        if shape != (self._shape.n_expert,):
            raise ValueError(f"probabilities have the shape {shape}, not {(self._shape.n_expert,)}")
        row = self._table[il]
        np.maximum(probabilities, 0, out=row)
        np.minimum(row, 1, out=row)
        if np.isnan(row.sum()):
            raise ValueError(f"probabilities of layer {il} are NaN")

    def probabilities(self) -> Float32s:
        """(n_layer, n_expert) in [0, 1]; rows without a prediction are 0. Valid until the next routing event."""
        return self._table

    def known(self) -> list[int]:
        """Layers with a prediction, nearest first."""
        return sorted(self._known)
