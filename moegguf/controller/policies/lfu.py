"""Least frequently used, since the model was loaded and within a request; `lfu-decay` is native."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s


class Lfu:
    """score = routing events that used the expert since the model was loaded (MoE-Infinity's published code)."""

    name: ClassVar[str] = "lfu"

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert), renewed at every routing event."""
        return history.uses


class LfuRequest:
    """score = tokens of this request that used the expert, prompt included."""

    name: ClassVar[str] = "lfu-request"

    def __init__(self, shape: MoeShape) -> None:
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert), renewed at every routing event."""
        return np.add(history.prefill, history.decode, out=self._scores)
