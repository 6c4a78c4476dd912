"""Victims by lot: the control that every policy has to beat."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s


class Random:
    """Every gate draws new scores; the same seed draws the same."""

    name: ClassVar[str] = "random"

    def __init__(self, shape: MoeShape, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        return self._rng.random(dtype=np.float32, out=self._scores)
