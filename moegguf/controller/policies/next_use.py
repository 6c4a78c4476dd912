"""Belady's rule with an estimate in place of the future: out goes the expert expected to be used again last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies.rates import Rates
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, NativePolicy

LEAST = 1e-4  # a token uses no expert less often than this


class NextUse:
    """score = -(expected passes until the next use), counted from the next gate.

    d, the gates until an expert's layer comes up, is 1 for the layer after the next gate's and L for that gate's own:
    its chosen experts are pinned by then, and the others wait for the next pass. With p the chance that a token
    passing the layer uses the expert, and passes taken as independent, E = w x d / L + 1 / p - 1. Where the predictor
    speaks of a layer still to come, its probability q decides about this pass: E = w x d / L + (1 - q) / p, with d = 0
    for the next gate's layer.

    p is a mixture of fading averages of past use: `half_lives_tokens` say how fast they fade, `weights` what part each
    has. `phase_weight` is w: 1 by the derivation, more where long waits are overestimated. `trust` is how much of a
    probability to believe. The defaults are the best found on the demo model's routing, on other texts than reported.

    Without a predictor the store computes the same by itself (moegguf/native/policies/next_use.cpp).
    """

    name: ClassVar[str] = "next-use"

    def __init__(
        self,
        shape: MoeShape,
        half_lives_tokens: Sequence[float] = (40.0, 2000.0),
        weights: Sequence[float] = (0.85, 0.15),
        phase_weight: float = 2.0,
        trust: float = 1.0,
    ) -> None:
        self.shape = shape
        self.native_policy = NativePolicy(
            self.name,
            {"half_lives_tokens": tuple(half_lives_tokens), "weights": tuple(weights), "phase_weight": phase_weight},
        )
        self._rates = Rates(shape, half_lives_tokens)
        self._weights: Float32s = np.array(weights, np.float32)
        self._trust = trust
        self._wait: Float32s = np.full(shape.table, 1 / LEAST, np.float32)  # 1 / p, passes between uses
        self._scores: Float32s = np.zeros(shape.table, np.float32)
        self._ahead = self._distances(phase_weight)

    def _distances(self, phase_weight: float) -> Float32s:
        """(n_row, n_layer, 1): d / L of every layer after a gate of each row, scaled."""
        n_row = len(self.shape.layers)
        rows = np.arange(n_row)
        ahead = (rows[np.newaxis, :] - rows[:, np.newaxis] - 2) % n_row + 1
        table = np.zeros((n_row, self.shape.n_layer, 1), np.float32)
        table[:, list(self.shape.layers), 0] = phase_weight * ahead / n_row
        return table

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """(n_layer, n_expert), all negative; valid until the next call."""
        il = history.il
        row = self.shape.row_of.get(il)
        if row is None:
            return None
        self._rates.update(history)
        chance = self._weights @ self._rates.table[:, il]
        np.divide(1, np.maximum(chance, LEAST, out=chance), out=self._wait[il])
        np.subtract(1, self._wait, out=self._scores)
        self._scores -= self._ahead[row]
        if self._trust > 0:
            self._believe(il, row, forecast)
        return self._scores

    def _believe(self, il: int, row: int, forecast: Forecast) -> None:
        known = [layer for layer in forecast.known() if layer > il]
        if not known:
            return
        wait = self._wait[known] * (1 - self._trust * forecast.probabilities()[known])
        ahead = self._ahead[row, known]
        if known[0] == self.shape.layer_after(il, 1):
            ahead[0] = 0
        self._scores[known] = -wait - ahead
