"""A control for what is measured: the router itself, whose figures show whether events and model fit together."""

from __future__ import annotations

from typing import ClassVar

from moegguf.controller.predictors.router_inputs import Skip
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Routers
from moegguf.native.events import Float32s


class FreshGate(Skip):
    """A control, not a prediction: a router with its own input, at distance 0. Its accuracy must be 100 %."""

    name: ClassVar[str] = "fresh-gate"

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, routers)
        self.reach = 0

    def native(self) -> None:
        """None: it is a control, and predicts nothing."""

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None but at distance 0."""
        return self._through_router(il, distance) if distance == 0 else None
