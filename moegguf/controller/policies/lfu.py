"""Least frequently used, in three readings: ever, within this request, and with older uses counting less."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies.rates import Rates
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s


class Lfu:
    """score = gates that used the expert since the model was loaded (MoE-Infinity's published code, per pass)."""

    name: ClassVar[str] = "lfu"

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        return history.uses


class LfuRequest:
    """score = tokens of this request that used the expert, prompt included."""

    name: ClassVar[str] = "lfu-request"

    def __init__(self, shape: MoeShape) -> None:
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        return np.add(history.prefill, history.decode, out=self._scores)


class LfuDecay:
    """LRFU (Lee et al. 2001): score = uses, each worth half as much after every `half_life_tokens`.

    1 is close to LRU, infinity is LFU.
    """

    name: ClassVar[str] = "lfu-decay"

    def __init__(self, shape: MoeShape, half_life_tokens: float = 64.0) -> None:
        self._rates = Rates(shape, (half_life_tokens,))

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        self._rates.update(history)
        return self._rates.table[0]
