"""Predictors by counting: popularity and affinity, the last token's experts, the experts of a token id. All but
popularity are computed by the store."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import Predictor, StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s, Int32s
from moegguf.native.predictor import NativePredictor

MAX_COUNT = np.iinfo(np.uint16).max


class Popularity(Predictor):
    """DuoServe-MoE's popularity (section 4.1): for every layer, at any distance, how often each expert was chosen."""

    name: ClassVar[str] = "popularity"

    def __init__(self, shape: MoeShape, popularity: Float32s) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self._probabilities = np.minimum(popularity * shape.n_expert_used, 1.0).astype(np.float32)

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Popularity:
        """From a file's arrays; ValueError when they do not fit the shape."""
        return cls(shape, weights.array("popularity", len(shape.layers), shape.n_expert))

    def fork(self) -> Popularity:
        """Itself: it keeps nothing of a sequence."""
        return self

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance."""
        row = self.shape.row_of.get(il)
        return None if row is None else self._probabilities[row]


class Affinity(StorePredictor):
    """DuoServe-MoE's affinity (section 4.1): of the next layer, the mean of the rows of the experts just chosen."""

    name: ClassVar[str] = "affinity"

    def __init__(self, shape: MoeShape, affinity: Float32s) -> None:
        super().__init__(shape, reach=1)
        self.affinity = affinity

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Affinity:
        """From a file's arrays; ValueError when they do not fit the shape."""
        return cls(shape, weights.array("affinity", len(shape.layers) - 1, shape.n_expert, shape.n_expert))

    def native(self) -> NativePredictor:
        """The matrix."""
        return NativePredictor(self.name, {"affinity": np.ascontiguousarray(self.affinity, np.float32)})


class PreviousToken(StorePredictor):
    """Temporal locality (ExpertFlow, section 5.2: TLP): probability 1 for the experts that a layer's last token used.

    Predicts every layer observed at least once, across requests too.
    """

    name: ClassVar[str] = "previous-token"

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=len(shape.layers))

    def native(self) -> NativePredictor:
        """Needs no arrays."""
        return NativePredictor(self.name)


class TokenTable(StorePredictor):
    """ProMoE's token-based prediction (section 4.2): experts that a token id used most often, all layers at once.

    counts (n_entry, n_moe_layer, n_expert): of the choices made for each token id seen.

    A probability is the share of the token's occurrences that used the expert, with one occurrence of an average token
    added: the paper does not define unseen tokens; here they get the layer's popularity.
    """

    name: ClassVar[str] = "token-id"
    needs_tokens: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, tokens: Int32s, counts: npt.NDArray[np.uint16]) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self._entry_of: Int32s = np.full(max(1, shape.n_vocab), -1, np.int32)
        self._entry_of[tokens] = np.arange(len(tokens))
        self._counts = counts
        self._popularity = counts.sum(axis=0)

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> TokenTable:
        """From a file's arrays; ValueError when they do not fit the shape."""
        tokens = weights.arrays["tokens"]
        below = tokens.min(initial=0) >= 0 and tokens.max(initial=-1) < shape.n_vocab
        if tokens.ndim != 1 or tokens.dtype != np.int32 or not below or len(np.unique(tokens)) != len(tokens):
            raise ValueError("'tokens' must be different token ids of the model")
        counts = weights.array("counts", len(tokens), len(shape.layers), shape.n_expert)
        if counts.min(initial=0) < 0 or counts.max(initial=0) > MAX_COUNT:
            raise ValueError(f"'counts' must be from 0 to {MAX_COUNT}")
        return cls(shape, tokens, counts.astype(np.uint16))

    def native(self) -> NativePredictor:
        """The counts, and (n_moe_layer, n_expert) how often an average token uses each expert."""
        sums = np.maximum(self._popularity.sum(axis=-1, keepdims=True), 1.0)
        average = np.asarray(self._popularity * (self.shape.n_expert_used / sums), np.float32)
        return NativePredictor(self.name, {"entry_of": self._entry_of, "counts": self._counts, "average": average})
