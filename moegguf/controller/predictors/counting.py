"""Chosen experts as arrays: what predictors that count choices have in common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s, Int32s, RoutingEvent


def multi_hot(expert_ids: npt.NDArray[np.integer], n_expert: int) -> Float32s:
    """(n_tokens, n_expert) for ids (n_tokens, n_expert_used); negative ids are nobody."""
    hot = np.zeros((len(expert_ids), n_expert + 1), np.float32)
    np.put_along_axis(hot, np.where(expert_ids < 0, n_expert, expert_ids).astype(np.intp), 1, axis=1)
    return hot[:, :n_expert]


def single_choice(shape: MoeShape, event: RoutingEvent) -> Int32s | None:
    """The experts (n_expert_used,) one token's gate chose; None for several tokens, or a gate of no such model."""
    if event.il not in shape.row_of or event.expert_ids.shape[0] != 1:
        return None
    ids = event.expert_ids[0]
    known = ids.size and ids.min() >= 0 and ids.max() < shape.n_expert
    return ids if known else None
