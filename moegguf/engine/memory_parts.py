"""Accesses the parts of a llama.cpp context's memory (`native/memory_parts.h`): cells
of full attention, cells of a sliding window, and a recurrent state.

This module knows nothing about tokens and files, and does not decide when a state is
kept.
"""

from __future__ import annotations

import ctypes as c
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moegguf.native import library

if TYPE_CHECKING:
    from moegguf.engine.upstream import UpstreamLlama

CELLS, WINDOW, RECURRENT = 1, 2, 4
# Stands for the whole memory; the value of `MemoryParts.all` if the memory cannot be
# divided into parts.
WHOLE = 0
_MEMORY, _CONTEXT, _BYTES = c.c_void_p, c.c_void_p, c.c_void_p
_PARTS, _SEQUENCE, _POSITION = c.c_uint32, c.c_int32, c.c_int32
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "memory_parts": (_PARTS, (_MEMORY,)),
    "parts_seq_rm": (c.c_bool, (_MEMORY, _PARTS, _SEQUENCE, _POSITION, _POSITION)),
    "parts_seq_cp": (
        None,
        (_CONTEXT, _PARTS, _SEQUENCE, _SEQUENCE, _POSITION, _POSITION),
    ),
    "parts_share_stream": (None, (_MEMORY, _SEQUENCE, _SEQUENCE)),
    "parts_seq_pos_min": (_POSITION, (_MEMORY, _PARTS, _SEQUENCE)),
    "parts_seq_pos_max": (_POSITION, (_MEMORY, _PARTS, _SEQUENCE)),
    "parts_state_bytes": (c.c_size_t, (_CONTEXT, _PARTS, _SEQUENCE)),
    "parts_state_write": (c.c_bool, (_CONTEXT, _PARTS, _SEQUENCE, _BYTES, c.c_size_t)),
    "parts_state_read": (c.c_bool, (_CONTEXT, _PARTS, _SEQUENCE, _BYTES, c.c_size_t)),
}


class MemoryParts:
    """Removes, copies, saves and restores parts of the memory of `llm`'s context. The
    argument `parts` combines the bits CELLS, WINDOW and RECURRENT; WHOLE stands for the
    whole memory. The methods raise ClosedError after the model was closed, and must not
    be called for a context without memory. In a llama.cpp without moegguf's patches,
    only `remove`, `first` and `end` work, for the whole memory."""

    def __init__(self, llm: UpstreamLlama) -> None:
        self._bindings = library.llama_cpp()
        self._library: Any = self._bindings.llama_cpp._lib
        self._llm = llm
        # Bits of the parts that the memory has, or WHOLE.
        self.all: int = WHOLE
        self._is_patched = hasattr(self._library, "moegguf_memory_parts")
        if not self._is_patched:
            return
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._library, f"moegguf_{name}")
            function.restype = result
            function.argtypes = arguments
        if self._memory is not None:
            self.all = self._library.moegguf_memory_parts(self._memory)

    @property
    def _memory(self) -> int | None:
        """The address of the memory; None for a context that only computes
        embeddings."""
        return self._llm._ctx.memory

    def remove(self, parts: int, sequence: int, begin: int = -1, end: int = -1) -> bool:
        """Removes the positions from `begin` up to but not including `end` from these
        parts of a sequence. -1: no limit on this side. Returns False if one of the
        parts cannot remove them."""
        if not self._is_patched:
            return bool(
                self._bindings.llama_memory_seq_rm(self._memory, sequence, begin, end)
            )
        return bool(
            self._library.moegguf_parts_seq_rm(
                self._memory, parts, sequence, begin, end
            )
        )

    def copy(
        self, parts: int, source: int, target: int, begin: int = -1, end: int = -1
    ) -> None:
        """Copies the positions from `begin` up to but not including `end` in these
        parts, from the sequence `source` to the sequence `target`. -1: no limit on this
        side. Between sequences with their own cells, there must be no limit. The other
        cells of `target` are then removed."""
        self._library.moegguf_parts_seq_cp(
            self._llm.ctx, parts, source, target, begin, end
        )

    def share_stream(self, sequence: int, other: int) -> None:
        """Makes an empty sequence, which is never evaluated, use the same set of cells
        as `other`. Parts of cells can then be copied between the two sequences."""
        self._library.moegguf_parts_share_stream(self._memory, sequence, other)

    def first(self, parts: int, sequence: int) -> int:
        """Returns the sequence's first position in these parts: the largest of the
        parts' first positions; -1 if all are empty."""
        if not self._is_patched:
            return int(self._bindings.llama_memory_seq_pos_min(self._memory, sequence))
        return int(
            self._library.moegguf_parts_seq_pos_min(self._memory, parts, sequence)
        )

    def end(self, parts: int, sequence: int) -> int:
        """Returns the position after the sequence's last one in these parts: the
        smallest over the parts; 0 if a part is empty."""
        if not self._is_patched:
            last = self._bindings.llama_memory_seq_pos_max(self._memory, sequence)
            return int(last) + 1
        return (
            int(self._library.moegguf_parts_seq_pos_max(self._memory, parts, sequence))
            + 1
        )

    def state_bytes(self, parts: int, sequence: int) -> int:
        """Returns the size in bytes of a sequence's state with only these parts; 0 if
        llama.cpp cannot write the state."""
        return int(
            self._library.moegguf_parts_state_bytes(self._llm.ctx, parts, sequence)
        )

    def state(
        self, parts: int, sequence: int, n_bytes: int
    ) -> npt.NDArray[np.uint8] | None:
        """Returns a sequence's state with only these parts. Returns None if llama.cpp
        cannot write the state, or if its size is not `n_bytes`."""
        data = np.empty(n_bytes, np.uint8)
        write = self._library.moegguf_parts_state_write
        if write(self._llm.ctx, parts, sequence, data.ctypes.data, n_bytes):
            return data
        return None

    def set_state(self, parts: int, sequence: int, address: int, n_bytes: int) -> bool:
        """Replaces these parts of a sequence with a state of `n_bytes` bytes. `address`
        is an address in memory, or was returned by KVBlocks.add. Returns False if
        llama.cpp cannot read the state."""
        read = self._library.moegguf_parts_state_read
        return bool(read(self._llm.ctx, parts, sequence, address, n_bytes))
