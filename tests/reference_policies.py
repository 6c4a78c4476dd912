"""Computes the rates of the native next-use policy in numpy. Tests compare them with
the choices of the store."""

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Int32s

LEAST = 1e-4  # the smallest rate; a rate is the probability that a token uses an expert


def logits(p: Float32s) -> Float32s:
    """Returns approximate logits of probabilities, which are first clipped to [0.001,
    0.999].

    The logarithm is linear between powers of two.
    """
    p = np.clip(p, 1e-3, 1 - np.float32(1e-3)).astype(np.float32)
    return (p.view(np.int32) - (1 - p).view(np.int32)).astype(np.float32) * np.float32(
        np.log(2) / (1 << 23)
    )


class LearnedRates:
    """Computes `table` (n_layer, n_expert): the probability that a token uses an
    expert.

    The probability mixes averages over several half-lives and the uses after similar
    earlier tokens. The weights of this mix are learned, as in
    `moegguf/native/policies/expected_use.cpp`.
    """

    WINDOW, AFTER, SHARPNESS = 1536, (0.4, 0.25, 0.15, 0.1, 0.05, 0.05), 16
    HALF_LIVES_TOKENS = (1, 4, 16, 64, 256, 4000)

    def __init__(self, shape: MoeShape) -> None:
        n = len(self.HALF_LIVES_TOKENS)
        self.weights: Float32s = np.full((shape.n_layer, n + 1), 0.6 / n, np.float32)
        self.weights[:, -1] = 0.4
        self.table: Float32s = np.full(shape.table, LEAST, np.float32)
        self._gradients: Float32s = np.full((shape.n_layer, n + 1), 1e-3, np.float32)
        self._kept = np.exp2(-1 / np.array(self.HALF_LIVES_TOKENS, np.float32))[
            :, np.newaxis
        ]
        self._averages: Float32s = np.zeros(
            (shape.n_layer, n, shape.n_expert), np.float32
        )
        self._inputs: Float32s = np.zeros(
            (shape.n_layer, n + 1, shape.n_expert), np.float32
        )
        # The experts of each layer's tokens, oldest token first.
        self._history: list[list[Int32s]] = [[] for _ in range(shape.n_layer)]
        # The number of experts of a layer that each earlier token shares with the
        # newest token. The most recent of the earlier tokens comes first.
        self._alike = np.zeros((shape.n_layer, self.WINDOW), np.int64)
        self._n_used = shape.n_expert_used * len(shape.layers)

    def count(self, il: int, ids: Int32s) -> None:
        """Counts the experts that the router chose, and updates the layer's rates. ids:
        (n_tokens, n_expert_used)."""
        n_tokens, n_used = ids.shape
        history, averages, inputs = (
            self._history[il],
            self._averages[il],
            self._inputs[il],
        )
        n_expert = averages.shape[1]
        used = (
            np.bincount(ids.ravel(), minlength=n_expert).astype(np.float32) / n_tokens
        )
        if history:
            gradient = inputs @ (used - self.table[il]) / n_used
            self._gradients[il] += gradient**2
            self.weights[il] += 0.03 * gradient / np.sqrt(self._gradients[il])
        averages[:] = used + self._kept**n_tokens * (averages - used)
        prior = 0.5 * (1 - self._kept)
        inputs[:-1] = logits((averages + prior * n_used / n_expert) / (1 + prior))
        history.extend(ids)
        earlier = history[-2 : -self.WINDOW - 2 : -1]
        if earlier:
            self._alike[il, : len(earlier)] = [
                len(np.intersect1d(token, ids[-1])) for token in earlier
            ]
            inputs[-1] = logits(self._recalled(il, len(earlier)))
        self.table[il] = np.maximum(1 / (1 + np.exp(-self.weights[il] @ inputs)), LEAST)

    def _recalled(self, il: int, n_earlier: int) -> Float32s:
        """Returns (n_expert,): the use of each expert by the tokens that followed
        tokens routed like the newest token.
        """
        alike = self._alike.sum(0)[:n_earlier]
        weights = np.exp(self.SHARPNESS * (alike - alike.max()) / self._n_used)
        # `expected` holds the weight of each earlier token, by age. `found` holds the
        # weighted uses of each expert.
        expected, found = np.zeros(n_earlier + 1), np.zeros(self.table.shape[1])
        for age, weight in enumerate(weights, 1):
            for later, share in enumerate(self.AFTER[:age], 1):
                expected[age - later] += weight * share
        for age in np.flatnonzero(expected > 1e-3):
            found[self._history[il][-1 - age]] += expected[age]
        return (found / weights.sum()).astype(np.float32)
