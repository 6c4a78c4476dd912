"""Skip prediction (Mixtral-offloading; ProMoE section 4.2): a layer's router input into the router of a later layer."""

from __future__ import annotations

from typing import ClassVar

from moegguf.controller.predictors.from_input import FromInput
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Routers
from moegguf.native.events import Float32s


class Skip(FromInput):
    """Answers at any distance, worse with each layer: inputs of neighbouring layers are alike, far ones less."""

    name: ClassVar[str] = "skip"

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, reach=len(shape.layers) - 1)
        self.routers = routers

    def predict(self, il: int, distance: int) -> Float32s | None:
        return self._through_router(il, distance) if distance > 0 else None

    def _through_router(self, il: int, distance: int) -> Float32s | None:
        vector = self._input_for(il, distance)
        if vector is None or il not in self.routers.routers:
            return None
        return self.routers.probabilities(il, vector)


class FreshGate(Skip):
    """A control, not a prediction: the router with its own input, at distance 0. It must score 100 %."""

    name: ClassVar[str] = "fresh-gate"

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, routers)
        self.reach = 0

    def predict(self, il: int, distance: int) -> Float32s | None:
        return self._through_router(il, distance) if distance == 0 else None
