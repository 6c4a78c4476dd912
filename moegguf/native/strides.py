"""What slots take in memory, as the native store lays them out. Needs the library, but no store and no files."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from dataclasses import dataclass

from moegguf.gguf.experts import ExpertLayout, Kind
from moegguf.native import library
from moegguf.native.store import matrices_of


@dataclass(frozen=True)
class SlotSizes:
    """stride_bytes: {matrix kind: bytes from one slot to the next in its arena}.

    slot_bytes: one expert over all arenas. pool_bytes: all arenas with n_slots slots; guard_bytes of them are the
    guards behind the last slots.
    """

    stride_bytes: Mapping[Kind, int]
    slot_bytes: int
    pool_bytes: int
    guard_bytes: int


def slot_sizes(layout: ExpertLayout, n_slots: int = 0) -> SlotSizes:
    """The sizes that a store of this layout with n_slots slots has.

    Raises OptionError for matrices of a kind or type that does not exist.
    """
    sizes, matrices = library.Sizes(), matrices_of(layout)
    library.check(library.load().moegguf_slot_sizes(matrices, len(matrices), n_slots, c.byref(sizes)))
    strides = {kind: sizes.stride_bytes[library.KIND[kind]] for kind in layout.kinds}
    return SlotSizes(strides, sizes.slot_bytes, sizes.pool_bytes, sizes.guard_bytes)
