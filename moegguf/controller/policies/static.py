"""A fixed choice of experts: those that were popular in another trace."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s


class Static:
    """score = popularity (len(shape.layers), n_expert), as `trace.fit.count_popularity` counts it."""

    name: ClassVar[str] = "static"

    def __init__(self, shape: MoeShape, popularity: Float32s) -> None:
        self._scores: Float32s = np.zeros(shape.table, np.float32)
        self._scores[list(shape.layers)] = popularity

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        return self._scores
