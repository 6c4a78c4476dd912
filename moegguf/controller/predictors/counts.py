"""Predictors by counting: popularity and affinity, the last token's experts, the experts of a token id."""

from __future__ import annotations

import copy
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moegguf.controller.predictors.base import Predictor, single_choice
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent
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


class Affinity(Predictor):
    """DuoServe-MoE's affinity (section 4.1): of the next layer, the mean of the rows of the experts just chosen."""

    name: ClassVar[str] = "affinity"

    def __init__(self, shape: MoeShape, affinity: Float32s) -> None:
        super().__init__(shape, reach=1)
        self.affinity = affinity
        self._next: int | None = None
        self._probabilities = np.zeros(shape.n_expert, np.float32)

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Affinity:
        """From a file's arrays; ValueError when they do not fit the shape."""
        return cls(shape, weights.array("affinity", len(shape.layers) - 1, shape.n_expert, shape.n_expert))

    def observe(self, event: RoutingEvent) -> None:
        """Computes the prediction for the next layer; an event of several tokens clears it."""
        ids = single_choice(self.shape, event)
        self._next = None if ids is None else self.shape.layer_after(event.il, 1)
        if ids is not None and self._next is not None:
            # A's rows sum to 1, but a token uses n_expert_used experts
            rows = self.affinity[self.shape.row_of[event.il], ids]
            np.multiply(rows.mean(axis=0), self.shape.n_expert_used, out=self._probabilities)
            np.minimum(self._probabilities, 1.0, out=self._probabilities)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None but at distance 1."""
        return self._probabilities if distance == 1 and il == self._next else None

    def fork(self) -> Affinity:
        """Shares the matrix."""
        return Affinity(self.shape, self.affinity)

    def native(self) -> NativePredictor:
        """The matrix."""
        return NativePredictor(self.name, {"affinity": np.ascontiguousarray(self.affinity, np.float32)})


class PreviousToken(Predictor):
    """Temporal locality (ExpertFlow, section 5.2: TLP): probability 1 for the experts that a layer's last token used.

    Predicts every layer observed at least once, across requests too.
    """

    name: ClassVar[str] = "previous-token"

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self._used: Float32s = np.zeros(shape.table, np.float32)
        self._seen: npt.NDArray[np.bool_] = np.zeros(shape.n_layer, np.bool_)

    def observe(self, event: RoutingEvent) -> None:
        """Stores the last token's experts; an event without tokens or of an unknown layer changes nothing."""
        if event.il not in self.shape.row_of or len(event.expert_ids) == 0:
            return
        last = event.expert_ids[-1]
        used = self._used[event.il]
        used[:] = 0
        used[last[(last >= 0) & (last < self.shape.n_expert)]] = 1
        self._seen[event.il] = True

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance."""
        return self._used[il] if il in self.shape.row_of and self._seen[il] else None

    def fork(self) -> PreviousToken:
        """Shares nothing."""
        return PreviousToken(self.shape)

    def native(self) -> NativePredictor:
        """Needs no arrays."""
        return NativePredictor(self.name)


class TokenTable(Predictor):
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
        self._token = -1

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

    def announce(self, announcement: Announcement) -> None:
        """Takes the token of a decode pass."""
        single = announcement.phase == Phase.DECODE and len(announcement.tokens) == 1
        token = int(announcement.tokens[0]) if single else -1
        self._token = token if 0 <= token < len(self._entry_of) else -1

    def observe(self, event: RoutingEvent) -> None:
        """Discards the token in a pass that is not its own."""
        if event.first_token != 0 or event.phase != Phase.DECODE:
            self._token = -1

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The same at any distance; None without a token."""
        row = self.shape.row_of.get(il)
        if row is None or self._token < 0:
            return None
        n_used = self.shape.n_expert_used
        average = self._average(row)
        entry = int(self._entry_of[self._token])
        if entry < 0:
            return np.minimum(average, 1.0)
        counts = self._counts[entry, row].astype(np.float32)
        return np.minimum((counts + average) / (float(counts.sum()) / n_used + 1.0), 1.0)

    def fork(self) -> TokenTable:
        """Shares the counts."""
        other = copy.copy(self)
        other._token = -1
        return other

    def native(self) -> NativePredictor:
        """The counts, and what an average token uses."""
        average = self._average(slice(None))
        return NativePredictor(self.name, {"entry_of": self._entry_of, "counts": self._counts, "average": average})

    def _average(self, rows: int | slice) -> Float32s:
        """(..., n_expert): how often an average token uses an expert, of one layer or several."""
        popularity = self._popularity[rows]
        sums = np.maximum(popularity.sum(axis=-1, keepdims=True), 1.0)
        return np.asarray(popularity * (self.shape.n_expert_used / sums), np.float32)
