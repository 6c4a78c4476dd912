"""What an eviction policy is: a table of scores, renewed at gates."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.native.events import Float32s, NativePolicy


@runtime_checkable
class Policy(Protocol):
    """Decides what stays. One method; the store does the rest: floors, pins, ties broken by least recent use."""

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """Scores (n_layer, n_expert), the lowest is evicted first; None leaves the last ones in force.

        Called after each gate. NaN and infinities count as 0.
        """


@runtime_checkable
class CarriedByStore(Protocol):
    """A policy that needs nothing but the gates where nobody predicts: the store then carries it out by itself."""

    @property
    def native_policy(self) -> NativePolicy:
        """The policy's name in the store and its parameters there."""
