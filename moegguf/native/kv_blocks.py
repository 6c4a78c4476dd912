"""States of sequences, read from files into a KV cache, each checked by its digest: `kv_blocks.cpp` for Python."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass
from pathlib import Path

from moegguf.native import abi
from moegguf.native.library import load


@dataclass(frozen=True)
class StateFile:
    """A state of `n_bytes` bytes from `begin` on in a file, its first bytes `head`, and the XXH3 digest (128 bits) of
    `prefix` and all of it, which was not compared yet."""

    path: Path
    begin: int
    n_bytes: int
    head: bytes
    prefix: bytes
    digest: bytes


class KVBlocks:
    """States that are added, one after the other, and then read together. `seed`: of their digests."""

    def __init__(self, seed: int) -> None:
        self._library = load()
        self._handle = self._library.moegguf_kv_blocks_open(seed)

    def __enter__(self) -> KVBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.moegguf_kv_blocks_close(self._handle)

    def add(self, file: StateFile) -> int:
        """The address for llama_state_seq_set_data, to be called next on this thread."""
        digest = (c.c_uint8 * len(file.digest)).from_buffer_copy(file.digest)
        prefix = c.cast(c.c_char_p(file.prefix), c.c_void_p)
        block = abi.KvBlock(str(file.path).encode(), file.begin, file.n_bytes, prefix, len(file.prefix), digest)
        state = c.c_void_p()
        self._library.moegguf_kv_blocks_add(self._handle, c.byref(block), c.byref(state))
        return state.value or 0

    def fill(self) -> int:
        """Reads what was added; the number of the first ones that have their digest."""
        n_right = c.c_int32()
        self._library.moegguf_kv_blocks_fill(self._handle, c.byref(n_right))
        return n_right.value
