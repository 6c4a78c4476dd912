"""Parts of the memory of a llama.cpp context (`native/memory_parts.h`): cells of full attention, cells of a sliding
window, and a recurrent state.

Does not know tokens, files, or when a state is kept.
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
WHOLE = 0  # the whole memory, if it has no parts that can be treated separately
_MEMORY, _CONTEXT, _BYTES = c.c_void_p, c.c_void_p, c.c_void_p
_PARTS, _SEQUENCE, _POSITION = c.c_uint32, c.c_int32, c.c_int32
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "memory_parts": (_PARTS, (_MEMORY,)),
    "parts_seq_rm": (c.c_bool, (_MEMORY, _PARTS, _SEQUENCE, _POSITION, _POSITION)),
    "parts_seq_cp": (None, (_MEMORY, _PARTS, _SEQUENCE, _SEQUENCE, _POSITION, _POSITION)),
    "parts_seq_pos_min": (_POSITION, (_MEMORY, _PARTS, _SEQUENCE)),
    "parts_seq_pos_max": (_POSITION, (_MEMORY, _PARTS, _SEQUENCE)),
    "parts_state_bytes": (c.c_size_t, (_CONTEXT, _PARTS, _SEQUENCE)),
    "parts_state_write": (c.c_bool, (_CONTEXT, _PARTS, _SEQUENCE, _BYTES, c.c_size_t)),
    "parts_state_read": (c.c_bool, (_CONTEXT, _PARTS, _SEQUENCE, _BYTES, c.c_size_t)),
}


class MemoryParts:
    """Removes, copies, saves and restores parts of the memory of `llm`'s context. The argument `parts` is a set of the
    bits CELLS, WINDOW and RECURRENT, or WHOLE."""

    def __init__(self, llm: UpstreamLlama) -> None:
        loaded: Any = library.llama_cpp().llama_cpp._lib
        self._context, self._memory = llm.ctx, llm._ctx.memory
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"moegguf_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self.all: int = self._functions["memory_parts"](self._memory)  # bits of the parts that the memory has, or WHOLE

    def remove(self, parts: int, sequence: int, begin: int = -1, end: int = -1) -> bool:
        """Removes a sequence's positions from `begin` to `end`, which is excluded. -1: no limit on this side. Returns
        False if that is impossible."""
        return bool(self._functions["parts_seq_rm"](self._memory, parts, sequence, begin, end))

    def copy(self, parts: int, source: int, target: int, begin: int = -1, end: int = -1) -> None:
        """Copies the positions from `begin` to `end`, which is excluded, of `source` to `target`. -1: no limit on this
        side."""
        self._functions["parts_seq_cp"](self._memory, parts, source, target, begin, end)

    def first(self, parts: int, sequence: int) -> int:
        """Returns the first position of a sequence; -1 if the sequence is empty."""
        return int(self._functions["parts_seq_pos_min"](self._memory, parts, sequence))

    def end(self, parts: int, sequence: int) -> int:
        """Returns the position after the last one of a sequence; 0 if the sequence is empty."""
        return int(self._functions["parts_seq_pos_max"](self._memory, parts, sequence)) + 1

    def state_bytes(self, parts: int, sequence: int) -> int:
        """Returns the size of a sequence's state in bytes; 0 if llama.cpp cannot write the state."""
        return int(self._functions["parts_state_bytes"](self._context, parts, sequence))

    def state(self, parts: int, sequence: int, n_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Returns the state of a sequence, whose size is `n_bytes`; None if llama.cpp cannot write it."""
        data, write = np.empty(n_bytes, np.uint8), self._functions["parts_state_write"]
        return data if write(self._context, parts, sequence, data.ctypes.data, n_bytes) else None

    def set_state(self, parts: int, sequence: int, address: int, n_bytes: int) -> bool:
        """Replaces these parts of a sequence by the state at `address`, which may also come from KVBlocks.add. Returns
        False if llama.cpp cannot read the state."""
        read = self._functions["parts_state_read"]
        return bool(read(self._context, parts, sequence, address, n_bytes))
