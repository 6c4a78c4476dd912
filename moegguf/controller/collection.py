"""MoE-Infinity's collection of expert activation matrices (EAMs, section 4.5 and
appendix B.1).

An entry is the EAM of one request (rEAM): for each (layer, expert), the number of
tokens that used the expert. Only tokens of the answer are counted, because only decode
passes are compared with entries (`moegguf/native/predictors/counts.cpp`).
`moegguf/controller/artifacts.py` saves the collection in a file.
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
# Name of the array of entries in a file; files written by older versions also have an
# array with entries of prompts
ENTRIES = "decode"


class Eamc:
    """A collection of at most `capacity` rEAMs, each (n_layer, n_expert). An rEAM is
    the expert activation matrix of one request: counts of tokens."""

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
        """A copy of the entries, (n_entries, n_layer, n_expert). `from_state` creates a
        collection from it."""
        return np.array(self._entries, np.float32).reshape(-1, *self._table)

    @classmethod
    def from_state(cls, state: Counts, capacity: int = CAPACITY) -> Eamc:
        """Creates a collection from the entries `state` (n, n_layer, n_expert). Keeps
        only the last `capacity` entries if there are more, and leaves out entries that
        `add` rejects."""
        _, n_layer, n_expert = state.shape
        eamc = cls(n_layer, n_expert, capacity)
        for ream in state[-eamc.capacity :]:
            eamc.add(ream)
        return eamc

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> Eamc:
        """Returns the collection whose entries `weights()` returned earlier. Raises
        ValueError if the array of entries does not have the model's shape or holds
        numbers that are not finite, and KeyError if there is no such array."""
        return cls.from_state(
            weights.array(ENTRIES, len(weights.arrays[ENTRIES]), *shape.table)
        )

    def weights(self) -> Weights:
        """Returns a copy of the entries, in the form in which they are saved."""
        return Weights({ENTRIES: _narrowed(self.state)})

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays that `predictors/counts.cpp` reads, with the entries in
        two orders. In `entries`, each entry is contiguous. In `columns`, the counts of
        one expert in all entries are contiguous, because a layer is compared with all
        entries at once."""
        entries = (
            self.state if self._entries else np.zeros((1, *self._table), np.float32)
        )
        return {
            "entries": entries,
            "columns": np.ascontiguousarray(entries.transpose(1, 2, 0)),
            "row_norm2": np.einsum("nle,nle->ln", entries, entries, order="C"),
            "tokens": entries.sum(axis=(1, 2)),
            "n_entries": integers(self.n_entries),
        }

    def add(self, ream: Counts) -> bool:
        """Adds the rEAM of a request. If the collection is full, the new rEAM replaces
        the entry most similar to it, which keeps the entries diverse (appendix B.1).

        Returns True if the rEAM was added. Returns False, and adds nothing, for an rEAM
        that has the wrong shape, only zeros, or NaN, infinite or negative counts.
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
        """Returns the index of the entry with the largest cosine similarity to `ream`
        (n_layer, n_expert), over all layers together. Returns -1 if there are no
        entries."""
        if self.n_entries == 0:
            return -1
        # einsum, because a BLAS would start threads that compete with the model's
        # threads
        entries = self.state
        dot = np.einsum("nle,le->n", entries, ream.astype(np.float32))
        return int(np.argmax(dot * dot / np.einsum("nle,nle->n", entries, entries)))


def _narrowed(counts: Counts) -> npt.NDArray[np.generic]:
    """Returns the counts in the smallest type that holds them exactly: uint8, uint16 or
    float32."""
    for kind in (np.uint8, np.uint16):
        if counts.max(initial=0) <= np.iinfo(kind).max and np.array_equal(
            counts, np.trunc(counts)
        ):
            return counts.astype(kind)
    return counts
