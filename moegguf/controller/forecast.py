"""Keeps the predicted probabilities for the next layers of a pass. The window of
predicted layers moves on with each routing event."""

from __future__ import annotations

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Bools, Float32s


class Forecast:
    """The sliding window of ProMoE (section 4.2): at MoE layer i, the next `window` MoE
    layers can be predicted, or fewer if the predictor's reach is shorter.

    With `again`, every layer in the window is predicted at each routing event. A new
    prediction, which was made at a nearer layer, replaces the old one. Without `again`,
    as in the paper, layers that have a prediction are skipped. The first time, all
    layers of the window are predicted, and later, at layer i, only layer i + window
    (footnote 1). The predictor is then called less often, but predicts farther ahead.
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
        """Discards all predictions. Then predicts the first layers, up to the window's
        length, before any routing event of the pass. Raises the same errors as
        `advance`."""
        self.clear()
        self._predict(predictor, row=-1)

    def advance(self, predictor: Predictor, il: int) -> None:
        """Discards the predictions for layer `il`, which was just routed, and for
        earlier layers. Then predicts the layers of the window after `il`. Raises
        ValueError if the predictor returns a wrong shape or NaN. Errors that the
        predictor raises are not caught."""
        self._table[il] = 0
        self._known = [known for known in self._known if known > il]
        self._predict(predictor, self._shape.row_of[il])

    def take(self, probabilities: Float32s, known: Bools) -> None:
        """Replaces all predictions with the `probabilities` (n_layer, n_expert) that
        the store has computed. `known` (n_layer,) is True for the layers that the store
        predicted."""
        self._known = np.flatnonzero(known).tolist()
        self._table[:] = probabilities * known[:, np.newaxis]

    def _predict(self, predictor: Predictor, row: int) -> None:
        layers = self._shape.layers[
            row + 1 : row + 1 + min(self._window, predictor.reach)
        ]
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
        """Copies the probabilities (n_expert,) of layer `il` into the table, clipped to
        [0, 1]. Raises ValueError for a wrong shape or NaN."""
        shape = np.shape(probabilities)
        if shape != (self._shape.n_expert,):
            raise ValueError(
                f"probabilities of a layer must have the shape {(self._shape.n_expert,)}, but have {shape}; correct"
                " the predictor"
            )
        row = self._table[il]
        np.maximum(probabilities, 0, out=row)
        np.minimum(row, 1, out=row)
        if np.isnan(row.sum()):
            raise ValueError(
                f"probabilities of layer {il} must be numbers, but some are NaN; correct the predictor"
            )

    def probabilities(self) -> Float32s:
        """Returns the table (n_layer, n_expert) of probabilities in [0, 1]. Only the
        rows of the layers in `known()` are predictions. The table is valid until the
        next announcement or routing event."""
        return self._table

    def known(self) -> list[int]:
        """Returns the numbers of the layers that have a prediction, in ascending
        order."""
        return sorted(self._known)
