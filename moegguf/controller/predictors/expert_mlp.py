"""DuoServe-MoE's ExpertMLP (section 4.2): the next layer's experts from all choices of this pass so far.

Open points of the paper, and the choices made here. One network serves all layers: its input is padded to one length,
and the length of the unpadded part, with the layer's popularity, identifies the target layer. Experts count from 1 and
are divided by n_expert, so that 0 is padding only. a_{l-1,l} are the rows of the
affinity matrix of the experts just chosen (section 5: "the inter-layer affinity vector from the previous layer's expert
selection"), flattened; the whole matrix would be the same for every token. The six hidden layers from 2048 to 64 and
the output are the seven layers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s
from moegguf.native.predictor import Array, NativePredictor, QuantizedMatrix, integers

HIDDEN_SIZES = (2048, 1024, 512, 256, 128, 64)


def state_size(shape: MoeShape) -> int:
    """Length of a state: h, p and a."""
    k = shape.n_expert_used
    return (len(shape.layers) - 1) * k + shape.n_expert + k * shape.n_expert


class ExpertMlp(StorePredictor):
    """Predicts one layer ahead, once every layer before it was observed in this pass of one token."""

    name: ClassVar[str] = "expert-mlp"

    def __init__(
        self, shape: MoeShape, popularity: Float32s, affinity: Float32s, layers: list[QuantizedMatrix]
    ) -> None:
        super().__init__(shape, reach=1)
        self._popularity, self._affinity, self._network = popularity, affinity, layers

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> ExpertMlp:
        """From `popularity`, `affinity`, `layers.<i>.{weight,bias}` (BatchNorm folded in) and the fact `hidden`.

        ValueError when they do not fit.
        """
        hidden = weights.facts["hidden"]
        if len(hidden) != len(HIDDEN_SIZES) or not all(isinstance(size, int) and size > 0 for size in hidden):
            raise ValueError(f"hidden must be {len(HIDDEN_SIZES)} sizes, but is {hidden!r:.80}")
        sizes = [state_size(shape), *hidden, shape.n_expert]
        layers = [
            QuantizedMatrix(weights.array(f"layers.{i}.weight", n_out, n_in), weights.array(f"layers.{i}.bias", n_out))
            for i, (n_in, n_out) in enumerate(pairwise(sizes))
        ]
        n_layer, n_expert = len(shape.layers), shape.n_expert
        popularity = weights.array("popularity", n_layer, n_expert)
        return cls(shape, popularity, weights.array("affinity", n_layer - 1, n_expert, n_expert), layers)

    def native(self) -> NativePredictor:
        """The network as it is, in signed bytes, and both statistics."""
        sizes = [state_size(self.shape), *(layer.shape[0] for layer in self._network)]
        arrays: dict[str, Array] = {"n_expert_used": integers(self.shape.n_expert_used), "sizes": integers(*sizes)}
        for i, layer in enumerate(self._network):
            arrays |= layer.arrays(f"layers.{i}")
        return NativePredictor(self.name, arrays | {"popularity": self._popularity, "affinity": self._affinity})
