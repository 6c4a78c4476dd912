"""The rates of the native next-use policy in numpy, which the store's choices are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Int32s

LEAST = 1e-4  # a token uses no expert less often than this


class LearnedRates:
    """table (n_layer, n_expert): the probability that a token uses an expert, by averages and recall mixed by weights
    that are learned, as `moegguf/native/policies/use_rates.h` has it."""

    WINDOW, AFTER = 64, (0.4, 0.28, 0.19, 0.13)

    def __init__(self, shape: MoeShape, half_lives_tokens: Sequence[float] = (1, 4, 16, 64, 256, 4000)) -> None:
        n = len(half_lives_tokens)
        self.weights: Float32s = np.full(n + 1, 1 / (n + 1), np.float32)
        self.table: Float32s = np.full(shape.table, LEAST, np.float32)
        self._kept = np.exp2(-1 / np.array(half_lives_tokens, np.float32))[:, np.newaxis]
        self._predicted: Float32s = np.zeros((shape.n_layer, n + 1, shape.n_expert), np.float32)
        self._history = np.zeros((shape.n_layer, self.WINDOW, shape.n_expert), np.int64)  # by age of the token
        self._alike = np.zeros((shape.n_layer, self.WINDOW), np.int64)

    def count(self, il: int, ids: Int32s) -> None:
        """What the router chose, (n_tokens, n_expert_used)."""
        n_tokens, n_used = ids.shape
        history, predicted = self._history[il], self._predicted[il]
        used = np.bincount(ids.ravel(), minlength=history.shape[1]).astype(np.float32) / n_tokens
        p = np.clip(self.weights @ predicted, 0.01, 0.99)
        step = np.clip(0.1 * (predicted @ ((used - p) / (p * (1 - p)))) / n_used, -1, 1)
        self.weights = np.maximum(self.weights * np.exp(step), 1e-3).astype(np.float32)
        predicted[:-1] = used + self._kept**n_tokens * (predicted[:-1] - used)
        for token in ids:
            history[1:] = history[:-1].copy()
            history[0] = 0
            self._alike[il] = history[:, token].sum(1)
            history[0, token] = 1
        alike = self._alike.sum(0)
        weights = np.exp((alike - alike.max()) / n_used)
        by_age = np.zeros(self.WINDOW)
        for age in range(1, self.WINDOW):
            for i, share in enumerate(self.AFTER[:age]):
                by_age[age - 1 - i] += weights[age] * share
        predicted[-1] = by_age @ history / weights[1:].sum()
        self.table[il] = np.maximum(self.weights @ predicted, LEAST)
