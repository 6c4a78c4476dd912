"""Baseline eviction policies in Python: LFU, static, random and Least-Stale (`lru` and `lfu-decay` are native)."""

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
        """(n_layer, n_expert), updated at every routing event."""
        return history.uses


class LfuRequest:
    """score = tokens of this request that used the expert, prompt included."""

    name: ClassVar[str] = "lfu-request"

    def __init__(self, shape: MoeShape) -> None:
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert), updated at every routing event."""
        return np.add(history.prefill, history.decode, out=self._scores)


class Static:
    """score = popularity (len(shape.layers), n_expert) in another trace."""

    name: ClassVar[str] = "static"

    def __init__(self, shape: MoeShape, popularity: Float32s) -> None:
        self._scores: Float32s = np.zeros(shape.table, np.float32)
        self._scores[list(shape.layers)] = popularity

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert), constant."""
        return self._scores


class Random:
    """Random victims, the control that every policy has to beat. Deterministic by seed."""

    name: ClassVar[str] = "random"

    def __init__(self, shape: MoeShape, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert) in [0, 1)."""
        return self._rng.random(dtype=np.float32, out=self._scores)


class LeastStale:
    """Least-Stale (SpecMD, arXiv 2602.03921): evicts experts of computed layers before those of layers ahead.

    Layers are computed in a fixed order, so an expert of a layer that this pass has computed cannot be used before the
    next pass, and one of a layer ahead can: evicting the latter is the paper's collision miss. Only the paper's
    abstract was available; that "stale" means "its layer was computed in this pass" is an interpretation. The layer
    computed next counts as stale: its chosen experts are pinned when victims are chosen, the others are not needed in
    this pass. Recency decides among equals.
    """

    name: ClassVar[str] = "least-stale"

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self._scores: Float32s = np.zeros(shape.table, np.float32)

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert): 0 for stale experts, 1 for the others. None for a layer that has no experts."""
        row = self.shape.row_of.get(history.il)
        if row is None:
            return None
        following = (row + 1) % len(self.shape.layers)
        self._scores[: self.shape.layers[following] + 1] = 0
        self._scores[self.shape.layers[following] + 1 :] = 1
        return self._scores
