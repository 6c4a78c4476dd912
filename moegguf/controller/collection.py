"""The expert activation matrix collection of MoE-Infinity (section 4.5, appendix B.1).

An entry is a request-level EAM: counts of tokens per (layer, expert) of one request's answer, as only passes that
decode are matched (`moegguf/native/predictors/counts.cpp`). The collection is saved as `Weights`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.controller.history import Counts
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.predictor import integers

CAPACITY = 1000
ENTRIES = "decode"  # array of the entries in a file; older files also have entries of prompts


class Eamc:
    """A collection of up to `capacity` rEAMs, each (n_layer, n_expert) counts."""

    def __init__(self, n_layer: int, n_expert: int, capacity: int = CAPACITY) -> None:
        self._table = n_layer, n_expert
        self.capacity = max(1, capacity)
        self._entries: list[Counts] = []

    @property
    def n_entries(self) -> int:
        """The number of entries."""
        return len(self._entries)

    @property
    def state(self) -> Counts:
        """(n_entries, n_layer, n_expert): a copy of the entries. `from_state` restores the collection."""
        return np.array(self._entries, np.float32).reshape(-1, *self._table)

    @classmethod
    def from_state(cls, state: Counts, capacity: int = CAPACITY) -> Eamc:
        """A collection of these entries (n, n_layer, n_expert); of the last `capacity` ones if there are more."""
        _, n_layer, n_expert = state.shape
        eamc = cls(n_layer, n_expert, capacity)
        for ream in state[-eamc.capacity :]:
            eamc.add(ream)
        return eamc

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Eamc:
        """Returns the collection that an earlier `weights()` described. Raises ValueError where the
        arrays do not fit."""
        return cls.from_state(weights.array(ENTRIES, len(weights.arrays[ENTRIES]), *shape.table))

    def weights(self) -> Weights:
        """A copy of the entries, to be saved."""
        return Weights({ENTRIES: _narrowed(self.state)})

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The entries as `predictors/counts.cpp` matches them: in two orders, so that matching a layer costs one
        contiguous addition per expert used, and a matched entry is contiguous."""
        entries = self.state if self._entries else np.zeros((1, *self._table), np.float32)
        return {
            "entries": entries,
            "columns": np.ascontiguousarray(entries.transpose(1, 2, 0)),
            "row_norm2": np.einsum("nle,nle->ln", entries, entries, order="C"),
            "tokens": entries.sum(axis=(1, 2)),
            "n_entries": integers(self.n_entries),
        }

    def add(self, ream: Counts) -> bool:
        """Stores a rEAM; in a full collection it replaces the entry most similar to it, for diversity (appendix B.1).

        Returns False for what could never be matched: no counts, NaN, infinite or negative ones, another shape.
        """
        if ream.shape != self._table:
            return False
        counts = ream.astype(np.float32)
        norm2 = np.einsum("le,le->", counts, counts)
        if not (np.isfinite(norm2) and norm2 > 0 and counts.min() >= 0):
            return False
        if self.n_entries < self.capacity:
            self._entries.append(counts)
        else:
            self._entries[self.most_similar(counts)] = counts
        return True

    def most_similar(self, ream: Counts) -> int:
        """Index of the entry with the largest cosine to this EAM (n_layer, n_expert), all rows compared; -1 if none."""
        if self.n_entries == 0:
            return -1
        # einsum: a BLAS would start threads that compete with those that compute
        entries = self.state
        dot = np.einsum("nle,le->n", entries, ream.astype(np.float32))
        return int(np.argmax(dot * dot / np.einsum("nle,nle->n", entries, entries)))


def _narrowed(counts: Counts) -> npt.NDArray[np.generic]:
    """Returns the counts in the smallest type that holds them exactly."""
    for kind in (np.uint8, np.uint16):
        if counts.max(initial=0) <= np.iinfo(kind).max and np.array_equal(counts, np.trunc(counts)):
            return counts.astype(kind)
    return counts
