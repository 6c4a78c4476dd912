"""The query of an EAM collection: which of many stored requests resemble the rows of a pass seen so far.

The kernel is in `predictors/eamc.cpp`. It reads the collection's arrays in place, and writes sums of its own.
"""

from __future__ import annotations

import copy
import ctypes as c

import numpy as np
import numpy.typing as npt

from moegguf.native.events import Float32s
from moegguf.native.library import load

TINY = np.float32(1e-30)  # a squared norm that makes 0/norm a similarity of 0
MOST = 64  # entries that one match can return


class Query:
    """Similarities of one pass to entries: dot products with the rows seen, and the norms of these.

    columns (n_layer, n_expert, capacity): the entries' counts; row_norm2 (n_layer, capacity): squared norms of their
    rows; tokens (capacity,). The kernel reads these arrays where they are: they must not move. Addresses are kept:
    asking numpy for one takes as long as half a match.
    """

    def __init__(self, columns: Float32s, row_norm2: Float32s, tokens: Float32s) -> None:
        self.columns, self.row_norm2, self.tokens = columns, row_norm2, tokens
        _, self._n_expert, self._capacity = columns.shape
        self.dot: Float32s = np.zeros(self._capacity, np.float32)
        self.norm2: Float32s = np.full(self._capacity, TINY, np.float32)
        self._row: Float32s = np.zeros(self._n_expert, np.float32)
        self._scores: Float32s = np.zeros(self._capacity, np.float32)
        self._indices: npt.NDArray[np.intp] = np.zeros(MOST, np.intp)
        self._n_found = c.c_int32()
        self._library = load()
        self._sums_at = self.dot.ctypes.data, self.norm2.ctypes.data
        self._found_at = self._scores.ctypes.data, self._indices.ctypes.data, c.addressof(self._n_found)
        self._columns_at, self._row_norm2_at = columns.ctypes.data, row_norm2.ctypes.data
        self._row_at, self._tokens_at = self._row.ctypes.data, tokens.ctypes.data

    def __deepcopy__(self, memo: dict[int, object]) -> Query:
        other = Query(*(copy.deepcopy(array, memo) for array in (self.columns, self.row_norm2, self.tokens)))
        other.resume(self)
        return other

    def resume(self, other: Query) -> None:
        """Goes on with what another one, of no larger capacity, has seen."""
        n = len(other.dot)
        self.dot[:n], self.norm2[:n] = other.dot, other.norm2

    def clear(self) -> None:
        """Nothing was seen."""
        self.dot.fill(0)
        self.norm2.fill(TINY)

    def add_row(self, il: int, row: Float32s, n_entries: int) -> bool:
        """Adds a layer of the pass, (n_expert,) counts; False for an empty one."""
        if not row.any():
            return False
        self._row[:] = row
        columns_at = self._columns_at + 4 * il * self._n_expert * self._capacity
        row_norm2_at = self._row_norm2_at + 4 * il * self._capacity
        rows = columns_at, self._capacity, self._row_at, self._n_expert, row_norm2_at
        self._library.moegguf_eamc_add_row(*rows, n_entries, *self._sums_at)
        return True

    def match(self, n: int, n_entries: int) -> npt.NDArray[np.intp]:
        """Indices of the at most `n` nearest entries, the nearest first.

        Entries that agree in nothing are not among them. Of entries equally near, those with more tokens come first.
        """
        n = min(n, MOST)
        self._library.moegguf_eamc_match(*self._sums_at, self._tokens_at, n_entries, n, *self._found_at)
        return self._indices[: self._n_found.value].copy()
