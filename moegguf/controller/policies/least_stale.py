"""Least-Stale (SpecMD, arXiv 2602.03921): layers that this pass has left behind are given up before those ahead."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

AHEAD = 1.0


class LeastStale:
    """Stale experts go first, the least recently used of them first; then the others, by recency too.

    Layers are computed in a fixed order, so an expert of a layer that this pass has computed cannot be used before the
    next pass, and one of a layer ahead can: evicting the latter is the paper's collision miss. We had the paper's
    abstract only; that "stale" means "its layer is behind us in this pass" is our reading of it. The layer computed
    next counts as behind: its chosen experts are pinned when victims are chosen, the others wait for the next pass.
    """

    name: ClassVar[str] = "least-stale"

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        row = self.shape.row_of.get(history.il)
        if row is None:
            return None
        following = (row + 1) % len(self.shape.layers)
        self._scores[: self.shape.layers[following] + 1] = 0
        self._scores[self.shape.layers[following] + 1 :] = AHEAD
        return self._scores
