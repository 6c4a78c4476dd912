"""DuoServe-MoE's two statistics (section 4.1), each as a predictor: popularity of experts, affinity between layers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.predictors.base import Predictor, single_choice
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s, RoutingEvent
from moegguf.native.predictor import NativePredictor


class Popularity(Predictor):
    """Predicts for every layer, at any distance, how often each expert was chosen there."""

    name: ClassVar[str] = "popularity"

    def __init__(self, shape: MoeShape, popularity: Float32s) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self._probabilities = np.minimum(popularity * shape.n_expert_used, 1.0).astype(np.float32)

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Popularity:
        """From a file's arrays; ValueError when they do not fit the shape."""
        return cls(shape, weights.array("popularity", len(shape.layers), shape.n_expert))

    def fork(self) -> Popularity:
        """As `Predictor.fork`."""
        return self

    def predict(self, il: int, distance: int) -> Float32s | None:
        """As `Predictor.predict`; does not depend on `distance`."""
        row = self.shape.row_of.get(il)
        return None if row is None else self._probabilities[row]


class Affinity(Predictor):
    """Predicts the next layer from the experts just chosen: the mean of their rows of the affinity matrix A."""

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
        """As `Predictor.predict`, at distance 1 only."""
        return self._probabilities if distance == 1 and il == self._next else None

    def fork(self) -> Affinity:
        """As `Predictor.fork`."""
        return Affinity(self.shape, self.affinity)

    def native(self) -> NativePredictor:
        """As `Predictor.native`."""
        return NativePredictor(self.name, {"affinity": np.ascontiguousarray(self.affinity, np.float32)})
