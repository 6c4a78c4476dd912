"""DuoServe-MoE's two statistics (section 4.1), each as a predictor: popularity of experts, affinity between layers."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.counting import choices, single_choice
from moegguf.controller.shape import MoeShape
from moegguf.controller.trace import Trace
from moegguf.controller.weights_file import Weights
from moegguf.native.events import Float32s, Gate


def count_popularity(trace: Trace) -> Float32s:
    """Equation 2: P (n_moe_layer, n_expert), rows adding up to 1, even for layers never seen."""
    counts = np.stack([choices(trace, row).sum(axis=0) for row in range(len(trace.shape.layers))])
    return _shares(counts, np.full_like(counts, 1 / trace.shape.n_expert))


def count_affinity(trace: Trace, popularity: Float32s) -> Float32s:
    """Equation 3: A (n_moe_layer - 1, n_expert, n_expert): how layer l + 1 chooses, given who was chosen in layer l.

    Rows add up to 1; that of an expert never chosen is the popularity of the next layer.
    """
    hot = [choices(trace, row) for row in range(len(trace.shape.layers))]
    together = [here.T @ after for here, after in pairwise(hot)]
    n_expert = trace.shape.n_expert
    counts = np.stack(together) if together else np.zeros((0, n_expert, n_expert), np.float32)
    return _shares(counts, np.broadcast_to(popularity[1:, None, :], counts.shape))


def _shares(counts: Float32s, otherwise: Float32s) -> Float32s:
    totals = counts.sum(axis=-1, keepdims=True)
    return np.where(totals > 0, counts / np.maximum(totals, 1), otherwise).astype(np.float32)


class Popularity(Predictor):
    """Says of every layer, at any time, how often each expert was chosen there."""

    name: ClassVar[str] = "popularity"

    def __init__(self, shape: MoeShape, popularity: Float32s) -> None:
        super().__init__(shape, reach=len(shape.layers))
        self.popularity = popularity
        self._likelihoods = np.minimum(popularity * shape.n_expert_used, 1.0).astype(np.float32)

    @classmethod
    def learn(cls, trace: Trace) -> Popularity:
        """Counts the trace's choices, all passes alike."""
        return cls(trace.shape, count_popularity(trace))

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Popularity:
        """The predictor that `weights` were taken from; ValueError when they do not fit."""
        return cls(shape, weights.array("popularity", len(shape.layers), shape.n_expert))

    def weights(self) -> Weights:
        """What it learned, to be saved."""
        return Weights({"popularity": self.popularity})

    def predict(self, il: int, distance: int) -> Float32s | None:
        row = self.shape.row_of.get(il)
        return None if row is None else self._likelihoods[row]


class Affinity(Predictor):
    """Says of the next layer what usually follows the experts just chosen: the mean of their rows of A."""

    name: ClassVar[str] = "affinity"

    def __init__(self, shape: MoeShape, affinity: Float32s) -> None:
        super().__init__(shape, reach=1)
        self.affinity = affinity
        self._next: int | None = None
        self._likelihoods = np.zeros(shape.n_expert, np.float32)

    @classmethod
    def learn(cls, trace: Trace) -> Affinity:
        """Counts the trace's pairs of choices in consecutive layers, all passes alike."""
        return cls(trace.shape, count_affinity(trace, count_popularity(trace)))

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Affinity:
        """The predictor that `weights` were taken from; ValueError when they do not fit."""
        return cls(shape, weights.array("affinity", len(shape.layers) - 1, shape.n_expert, shape.n_expert))

    def weights(self) -> Weights:
        """What it learned, to be saved."""
        return Weights({"affinity": self.affinity})

    def observe(self, gate: Gate) -> None:
        ids = single_choice(self.shape, gate)
        self._next = None if ids is None else self.shape.layer_after(gate.il, 1)
        if ids is not None and self._next is not None:
            # A's rows add up to 1, but n_expert_used experts follow
            rows = self.affinity[self.shape.row_of[gate.il], ids]
            np.multiply(rows.mean(axis=0), self.shape.n_expert_used, out=self._likelihoods)
            np.minimum(self._likelihoods, 1.0, out=self._likelihoods)

    def predict(self, il: int, distance: int) -> Float32s | None:
        return self._likelihoods if distance == 1 and il == self._next else None
