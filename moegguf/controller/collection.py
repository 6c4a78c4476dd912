"""The expert activation matrix collection of MoE-Infinity (section 4.5, appendix B.1).

An entry is a request-level EAM: counts of tokens per (layer, expert) of one request, prefill and decode apart. The
store matches passes with them (`moegguf/native/predictors/counts.cpp`); they are saved as `Weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.controller.history import Counts
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Float32s
from moegguf.native.predictor import integers

CAPACITY = 1000
_INITIAL_CAPACITY = 16
_PHASES = ("prefill", "decode")


class Eamc:
    """Up to `capacity` rEAMs, each (n_layer, n_expert) counts.

    Entries are stored in two layouts, so that matching a layer costs one contiguous addition per expert used, and a
    matched entry is contiguous. Memory grows with the entries: 8 bytes per cell.
    """

    def __init__(self, n_layer: int, n_expert: int, capacity: int = CAPACITY) -> None:
        self.n_layer = n_layer
        self.n_expert = n_expert
        self.capacity = max(1, capacity)
        self.n_entries = 0
        self._entries = np.zeros((0, n_layer, n_expert), np.float32)
        self._columns = np.zeros((n_layer, n_expert, 0), np.float32)
        self._row_norm2 = np.zeros((n_layer, 0), np.float32)
        self._tokens = np.zeros(0, np.float32)

    @property
    def state(self) -> Counts:
        """(n_entries, n_layer, n_expert): the entries, a view. `from_state` restores the collection."""
        return self._entries[: self.n_entries]

    @classmethod
    def from_state(cls, state: Counts, capacity: int = CAPACITY) -> Eamc:
        """A collection of these entries (n, n_layer, n_expert); of the last `capacity` ones if there are more."""
        _, n_layer, n_expert = state.shape
        eamc = cls(n_layer, n_expert, capacity)
        for ream in state[-eamc.capacity :]:
            eamc.add(ream)
        return eamc

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The entries as `predictors/counts.cpp` matches them, in place: nothing is added meanwhile."""
        if len(self._tokens) == 0:
            self._grow(min(self.capacity, _INITIAL_CAPACITY))
        return {
            "entries": self._entries, "columns": self._columns, "row_norm2": self._row_norm2, "tokens": self._tokens,
            "n_entries": integers(self.n_entries),
        }  # fmt: skip

    def add(self, ream: Counts) -> bool:
        """Stores a rEAM; in a full collection it replaces the entry most similar to it, for diversity (appendix B.1).

        Returns False for what could never be matched: no counts, NaN, infinite or negative ones, another shape.
        """
        if ream.shape != (self.n_layer, self.n_expert):
            return False
        counts = ream.astype(np.float32)
        row_norm2 = np.einsum("le,le->l", counts, counts)
        if not (np.isfinite(row_norm2.sum()) and row_norm2.any() and counts.min() >= 0):
            return False
        self._store(self._index_for(counts), counts, row_norm2)
        return True

    def most_similar(self, ream: Counts) -> int:
        """Index of the entry with the largest cosine to this EAM (n_layer, n_expert), all rows compared; -1 if none."""
        if self.n_entries == 0:
            return -1
        n = self.n_entries
        # einsum: a BLAS would start threads that compete with those that compute
        dot = np.einsum("nf,f->n", self._entries[:n].reshape(n, -1), ream.ravel().astype(np.float32))
        return int(np.argmax(dot * dot / self._row_norm2[:, :n].sum(axis=0)))

    def _index_for(self, counts: Counts) -> int:
        if self.n_entries == self.capacity:
            return self.most_similar(counts)
        if self.n_entries == len(self._tokens):
            self._grow(min(self.capacity, max(_INITIAL_CAPACITY, 2 * self.n_entries)))
        self.n_entries += 1
        return self.n_entries - 1

    def _store(self, index: int, counts: Counts, row_norm2: Float32s) -> None:
        self._entries[index] = counts
        self._columns[:, :, index] = counts
        self._row_norm2[:, index] = row_norm2
        self._tokens[index] = counts.sum()

    def _grow(self, capacity: int) -> None:
        entries = np.zeros((capacity, self.n_layer, self.n_expert), np.float32)
        entries[: self.n_entries] = self._entries[: self.n_entries]
        self._entries = entries
        self._columns = _widened(self._columns, capacity)
        self._row_norm2 = _widened(self._row_norm2, capacity)
        self._tokens = _widened(self._tokens, capacity)


class EamcPair:
    """The two collections of a model: prefill and decode of requests (section 4.3). Not thread-safe."""

    def __init__(self, prefill: Eamc, decode: Eamc) -> None:
        self.prefill = prefill
        self.decode = decode

    @classmethod
    def empty(cls, n_layer: int, n_expert: int, capacity: int = CAPACITY) -> EamcPair:
        """Two collections of up to `capacity` entries each."""
        return cls(Eamc(n_layer, n_expert, capacity), Eamc(n_layer, n_expert, capacity))

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights, capacity: int = CAPACITY) -> EamcPair:
        """From an earlier `weights()`, of each the last `capacity` entries; ValueError when they do not fit."""
        if sorted(weights.arrays) != sorted(_PHASES):
            raise ValueError(f"it holds {sorted(weights.arrays)}, not {sorted(_PHASES)}")
        states = (weights.array(phase, len(weights.arrays[phase]), *shape.table) for phase in _PHASES)
        return cls(*(Eamc.from_state(state, capacity) for state in states))

    def states(self) -> dict[str, Counts]:
        """{phase: a copy of its entries}, which another thread can save."""
        return {phase: getattr(self, phase).state.copy() for phase in _PHASES}

    @staticmethod
    def packed(states: Mapping[str, Counts]) -> Weights:
        """An earlier `states()`, to be saved."""
        return Weights({phase: _narrowed(state) for phase, state in states.items()})

    def weights(self) -> Weights:
        """Both collections, to be saved."""
        return self.packed(self.states())

    def add(self, prefill: Counts, decode: Counts) -> None:
        """Stores the rEAMs of a request that has ended; a phase without tokens adds nothing."""
        self.prefill.add(prefill)
        self.decode.add(decode)


def _narrowed(counts: Counts) -> npt.NDArray[np.generic]:
    """The same numbers in the smallest type that holds them exactly."""
    for kind in (np.uint8, np.uint16):
        if counts.max(initial=0) <= np.iinfo(kind).max and np.array_equal(counts, np.trunc(counts)):
            return counts.astype(kind)
    return counts


def _widened(array: Float32s, capacity: int) -> Float32s:
    """The array with its last axis padded with zeros to `capacity`."""
    wide = np.zeros((*array.shape[:-1], capacity), np.float32)
    wide[..., : array.shape[-1]] = array
    return wide
