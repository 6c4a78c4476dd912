"""How often tokens use each expert, as exponentially fading averages of several half-lives at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moegguf.controller.history import History
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s


class Rates:
    """table (n_half_life, n_layer, n_expert): the share of a layer's tokens that used an expert, the last ones most.

    What happened at gates that `update` was not called for (a prompt's) is made up for at the layer's next gate, as if
    it had been spread evenly over its tokens.
    """

    def __init__(self, shape: MoeShape, half_lives_tokens: Sequence[float]) -> None:
        self.table: Float32s = np.zeros((len(half_lives_tokens), *shape.table), np.float32)
        self._kept: Float32s = np.exp2(-1 / np.array(half_lives_tokens, np.float32))[:, np.newaxis]
        self._seen: Float32s = np.zeros(shape.table, np.float32)  # of this request
        self._n_used = shape.n_expert_used

    def update(self, history: History) -> None:
        """Adds what the last gate's layer was routed to since its last update."""
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
