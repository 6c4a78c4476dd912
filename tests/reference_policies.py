"""Native eviction policies in numpy, as score tables: the reference for the native ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Int32s

LEAST = 1e-4  # a token uses no expert less often than this


class Rates:
    """table (n_half_life, n_layer, n_expert): the share of a layer's tokens that used an expert, the last ones most.

    Events without `update` (a prompt's) are added at the layer's next event, as if spread evenly over its tokens.
    """

    def __init__(self, shape: MoeShape, half_lives_tokens: Sequence[float]) -> None:
        self.table: Float32s = np.zeros((len(half_lives_tokens), *shape.table), np.float32)
        self._kept: Float32s = np.exp2(-1 / np.array(half_lives_tokens, np.float32))[:, np.newaxis]
        self._seen: Float32s = np.zeros(shape.table, np.float32)  # of this request
        self._n_used = shape.n_expert_used

    def update(self, history: History) -> None:
        """Adds the routing of the last event's layer since its last update."""
        il = history.il
        if il < 0:
            return
        if history.new_request:
            self._seen[:] = 0
        total = history.prefill[il] + history.decode[il]
        fresh = total - self._seen[il]
        self._seen[il] = total
        n_tokens = float(fresh.sum()) / self._n_used
        if n_tokens <= 0:
            return
        kept = self._kept if n_tokens == 1 else self._kept**n_tokens
        rows = self.table[:, il]
        rows *= kept
        rows += (1 - kept) * (fresh if n_tokens == 1 else fresh / n_tokens)


class LfuDecay:
    """LRFU (Lee et al. 2001): score = uses, each worth half as much after every `half_life_tokens`.

    1 is close to LRU, infinity is LFU.
    """

    name: ClassVar[str] = "lfu-decay"

    def __init__(self, shape: MoeShape, half_life_tokens: float = 64.0) -> None:
        self._rates = Rates(shape, (half_life_tokens,))

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        self._rates.update(history)
        return self._rates.table[0]


class NextUse:
    """score = -(expected passes until the next use), counted from the next event.

    d, the events until an expert's layer is routed, is 1 for the layer after the next event's and L for that event's
    own: its chosen experts are pinned by then, and the others wait for the next pass. With p the probability that a
    token uses the expert, and passes taken as independent, E = w x d / L + 1 / p - 1. Where there is a forecast of a
    layer to come, its probability q decides about this pass: E = w x d / L + (1 - q) / p, with d = 0 for the next
    event's layer.

    p is a mixture of decaying averages of past use: `half_lives_tokens` are their half-lives, `weights` their
    shares (`LearnedRates` where none are given). `distance_weight` is w: 1 by the derivation, more where long waits are
    overestimated. `trust` scales the probabilities.
    """

    name: ClassVar[str] = "next-use"

    def __init__(
        self,
        shape: MoeShape,
        half_lives_tokens: Sequence[float] = (12.0, 60.0, 2000.0),
        weights: Sequence[float] = (0.5, 0.35, 0.15),
        distance_weight: float = 4.0,
        trust: float = 1.0,
    ) -> None:
        self.shape = shape
        self._rates = Rates(shape, half_lives_tokens)
        self._weights: Float32s = np.array(weights, np.float32)
        self._trust = trust
        self._wait: Float32s = np.full(shape.table, 1 / LEAST, np.float32)  # 1 / p, passes between uses
        self._scores: Float32s = np.zeros(shape.table, np.float32)
        self._ahead = self._distances(distance_weight)

    def _distances(self, distance_weight: float) -> Float32s:
        """(n_row, n_layer, 1): d / L of every layer after an event of each row, scaled."""
        n_row = len(self.shape.layers)
        rows = np.arange(n_row)
        ahead = (rows[np.newaxis, :] - rows[:, np.newaxis] - 2) % n_row + 1
        table = np.zeros((n_row, self.shape.n_layer, 1), np.float32)
        table[:, list(self.shape.layers), 0] = distance_weight * ahead / n_row
        return table

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert), all negative; valid until the next call."""
        il = history.il
        row = self.shape.row_of.get(il)
        if row is None:
            return None
        self._rates.update(history)
        used = self._weights @ self._rates.table[:, il]
        np.divide(1, np.maximum(used, LEAST, out=used), out=self._wait[il])
        np.subtract(1, self._wait, out=self._scores)
        self._scores -= self._ahead[row]
        if self._trust > 0:
            self._apply_forecast(il, row, forecast)
        return self._scores

    def _apply_forecast(self, il: int, row: int, forecast: Forecast) -> None:
        known = [layer for layer in forecast.known() if layer > il]
        if not known:
            return
        wait = self._wait[known] * (1 - self._trust * forecast.probabilities()[known])
        ahead = self._ahead[row, known]
        if known[0] == self.shape.layer_after(il, 1):
            ahead[0] = 0
        self._scores[known] = -wait - ahead


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
