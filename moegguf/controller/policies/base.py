"""Eviction policies: those that the store carries out natively, and those that compute a score table in Python."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.native.events import Float32s, NativePolicy

LRU = NativePolicy("lru")
"""Least recently used: what the store does where nothing else was chosen."""


@runtime_checkable
class Policy(Protocol):
    """A policy in Python. One method; the store does the rest: floors, pins, ties broken by least recent use."""

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """Scores (n_layer, n_expert), the lowest is evicted first; None leaves the last ones in force.

        Called after each routing event. NaN and infinities count as 0.
        """


AnyPolicy = Policy | NativePolicy
