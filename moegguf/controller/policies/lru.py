"""Least recently used: what the store does by itself."""

from __future__ import annotations

from typing import ClassVar

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.native.events import Float32s


class Lru:
    """Leaves the store its own order. The simplest policy, and the one that others are compared with."""

    name: ClassVar[str] = "lru"

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        return None
