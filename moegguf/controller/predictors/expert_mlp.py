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

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import Predictor, single_choice
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s, RoutingEvent
from moegguf.native.matvec import QuantizedMatrix
from moegguf.native.predictor import Array, NativePredictor, integers

HIDDEN_SIZES = (2048, 1024, 512, 256, 128, 64)


def state_size(shape: MoeShape) -> int:
    """Length of a state: h, p and a."""
    k = shape.n_expert_used
    return (len(shape.layers) - 1) * k + shape.n_expert + k * shape.n_expert


def states(
    popularity: Float32s, affinity: Float32s, expert_ids: npt.NDArray[np.integer], row: int, out: Float32s
) -> Float32s:
    """s_l = [h_l, p_l, a_{l-1,l}] (equation 5) for MoE layer number `row`, at least 1: (n_tokens, state_size).

    expert_ids (at least `row`, n_tokens, n_expert_used): the choices before it, in the router's order. `out` is
    filled and returned.
    """
    n_layer, n_expert = popularity.shape
    n_tokens, k = expert_ids.shape[1:]
    h, p, a = np.split(out, [(n_layer - 1) * k, (n_layer - 1) * k + n_expert], axis=1)
    h[:, row * k :] = 0
    h[:, : row * k] = expert_ids[:row].transpose(1, 0, 2).reshape(n_tokens, -1)
    h[:, : row * k] += 1
    h /= n_expert
    p[:] = popularity[row]
    a[:] = affinity[row - 1, expert_ids[row - 1]].reshape(n_tokens, -1)
    return out


class ExpertMlp(Predictor):
    """Predicts one layer ahead, once every layer before it was observed in this pass of one token."""

    name: ClassVar[str] = "expert-mlp"

    def __init__(
        self, shape: MoeShape, popularity: Float32s, affinity: Float32s, layers: list[QuantizedMatrix]
    ) -> None:
        super().__init__(shape, reach=1)
        self._popularity, self._affinity, self._network = popularity, affinity, layers
        self._ids = np.zeros((len(shape.layers), 1, shape.n_expert_used), np.int32)
        self._state = np.zeros((1, state_size(shape)), np.float32)
        self._outputs = [np.zeros(layer.shape[0], np.float32) for layer in layers]
        self._pass = -1
        self._rows_seen = 0

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
            QuantizedMatrix(
                weights.array(f"layers.{i}.weight", n_out, n_in),
                weights.array(f"layers.{i}.bias", n_out),
                relu=i < len(hidden),
            )
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

    def fork(self) -> ExpertMlp:
        """Shares the network and both statistics."""
        return ExpertMlp(self.shape, self._popularity, self._affinity, self._network)

    def observe(self, event: RoutingEvent) -> None:
        """Appends the layer's choice to the history of the pass."""
        if event.pass_ != self._pass:
            self._pass, self._rows_seen = event.pass_, 0
        ids = single_choice(self.shape, event)
        # After a missed layer, or one that uses fewer experts, there is no prediction until the next pass.
        if ids is None or len(ids) != self.shape.n_expert_used or self.shape.row_of[event.il] != self._rows_seen:
            self._rows_seen = -1
            return
        self._ids[self._rows_seen, 0] = ids
        self._rows_seen += 1

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None but at distance 1."""
        row = self.shape.row_of.get(il)
        if distance != 1 or row is None or row < 1 or row != self._rows_seen:
            return None
        x = states(self._popularity, self._affinity, self._ids, row, self._state)[0]
        for layer, out in zip(self._network, self._outputs, strict=True):
            x = layer.apply(x, out)
        return 0.5 + 0.5 * np.tanh(0.5 * x)  # sigmoid
