"""Eviction policies: those that the store carries out natively, and those that compute a score table in Python."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.native.events import Float32s
from moegguf.native.store import NativePolicy

LRU = NativePolicy("lru")
"""Least recently used: the store's default."""


@runtime_checkable
class Policy(Protocol):
    """A policy in Python. One method; the store applies floors and pins, and breaks ties by least recent use."""

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """Scores (n_layer, n_expert), the lowest is evicted first; None keeps the last ones.

        Called after each routing event. NaN and infinities count as 0.
        """


AnyPolicy = Policy | NativePolicy
