"""Native eviction policies in numpy, as score tables: the reference for the native ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

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
    shares. `distance_weight` is w: 1 by the derivation, more where long waits are overestimated. `trust` scales the
    probabilities. The defaults are good on the demo model's routing, on random weights' and on published reuse.
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
