"""Belady's rule with an estimate in place of the future: out goes the expert expected to be used again last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from moegguf.controller.history import History
from moegguf.controller.policies.base import Outlook
from moegguf.controller.policies.rates import Rates
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

LEAST = 1e-4  # a token uses no expert less often than this


class NextUse:
    """score = -(expected passes until the next use), counted from the next gate.

    d, the gates until an expert's layer comes up, is 1 for the layer after the next gate's and L for that gate's own:
    its chosen experts are pinned by then, and the others wait for the next pass. With p the chance that a token
    passing the layer uses the expert, passes are independent: E = d / L + (1 / p - 1). Where the predictor speaks of
    the layer, its likelihood q decides about this pass: E = (1 - q) x (1 / p) + d / L, and d of the next gate's layer
    is 0.

    p is a mixture of fading averages of past use; `weights` are their shares, `half_lives_tokens` how fast they fade.
    `phase_weight` scales d / L. `trust` is how much of q to believe.
    """

    name: ClassVar[str] = "next-use"

    def __init__(
        self,
        shape: MoeShape,
        half_lives_tokens: Sequence[float] = (4.0, 24.0, 200.0),
        weights: Sequence[float] = (0.3, 0.4, 0.3),
        phase_weight: float = 1.0,
        trust: float = 1.0,
    ) -> None:
        self.shape = shape
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

    def scores(self, history: History, outlook: Outlook) -> Float32s | None:
        """(n_layer, n_expert), all negative; valid until the next call."""
        il = history.il
        row = self.shape.row_of.get(il)
        if row is None:
            return None
        self._rates.update(history)
        chance = self._weights @ self._rates.table[:, il]
        np.divide(1, np.maximum(chance, LEAST, out=chance), out=self._wait[il])
        np.negative(self._wait, out=self._scores)
        known = [layer for layer in outlook.known() if layer > il] if self._trust > 0 else []
        if known:
            self._scores[known] *= 1 - self._trust * outlook.likelihoods()[known]
        self._scores -= self._ahead[row]
        if known and known[0] == self.shape.layer_after(il, 1):
            self._scores[known[0]] += self._ahead[row, known[0]]
        return self._scores
