"""Skip prediction (Mixtral-offloading; ProMoE section 4.2): a layer's router input into the router of a later layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from moegguf.controller.predictors.base import InputPredictor
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Routers
from moegguf.native.events import Float32s
from moegguf.native.matvec import QuantizedMatrix
from moegguf.native.predictor import Array, NativePredictor, integers


class Skip(InputPredictor):
    """Predicts at any distance; accuracy falls with it, as inputs of distant layers differ more."""

    name: ClassVar[str] = "skip"

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, reach=len(shape.layers) - 1)
        self.routers = routers

    def predict(self, il: int, distance: int) -> Float32s | None:
        """As `Predictor.predict`: the probabilities of the router of layer `il`."""
        return self._through_router(il, distance) if distance > 0 else None

    def fork(self) -> Skip:
        """As `Predictor.fork`."""
        return type(self)(self.shape, self.routers)

    def native(self) -> NativePredictor | None:
        """As `Predictor.native`: the routers in signed bytes, with a scale per expert."""
        arrays: dict[str, Array] = {
            "n_embd": integers(self.shape.n_embd), "gating": integers(self.routers.gating),
            "n_group": integers(self.routers.n_group), "n_group_used": integers(self.routers.n_group_used),
        }  # fmt: skip
        for il, router in self.routers.routers.items():
            matrix = QuantizedMatrix(router.matrix)
            arrays |= {f"{il}.weights": matrix.bytes, f"{il}.scale": matrix.scale}
            biases = {"logit_bias": router.logit_bias, "choice_bias": router.choice_bias}
            arrays |= {f"{il}.{name}": bias for name, bias in biases.items() if bias is not None}
        return NativePredictor(self.name, arrays)

    def release(self) -> None:
        """As `Predictor.release`: the routers in float32."""
        self.routers = replace(self.routers, routers={})

    def _through_router(self, il: int, distance: int) -> Float32s | None:
        vector = self._input_for(il, distance)
        if vector is None or il not in self.routers.routers:
            return None
        return self.routers.probabilities(il, vector)
