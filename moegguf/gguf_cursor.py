"""A forward reader over an open GGUF file: bounds-checked, one chunk in memory, complaints with their offset.

Used by gguf_file.py only. Knows lengths and limits, not what the values mean.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass, field
from typing import NoReturn

from moegguf.errors import ExpertIOError, ModelFormatError

MAX_STRINGS = 1 << 22  # in one array
MAX_ALL_STRINGS = 1 << 23  # in all arrays of a file
KEPT_TOTAL_BYTES = 12 << 20  # all that is kept of the key-values of a file
CHUNK_BYTES = 1 << 20
MAX_ITEM_BYTES = CHUNK_BYTES - 8  # one string in an array, such as one token
FETCH_AGAIN = "the file is damaged or incomplete, fetch it again"

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass
class Cursor:
    """Reads forward through an open file of `size` bytes, one chunk in memory at a time."""

    fd: int
    size: int
    label: str
    pos: int = 0
    base: int = 0
    buf: bytes = b""
    n_strings: int = 0
    kept_bytes: int = 0
    what: str = "header"
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def fail(self, rule: str, at: int | None = None) -> NoReturn:
        offset = self.pos if at is None else at
        raise ModelFormatError(f"{self.label}: {self.what}, at offset {offset}: {rule}.")

    def need(self, n: int) -> int:
        """Makes the next `n` (at most a chunk) bytes present in `buf`; returns their index there."""
        if self.pos + n > self.size:
            self.fail(f"needs {n} bytes but the file ends at {self.size}; {FETCH_AGAIN}")
        at = self.pos - self.base
        if at < 0 or at + n > len(self.buf):
            self.buf = self._read(self.pos, max(n, CHUNK_BYTES))
            self.base, at = self.pos, 0
            if len(self.buf) < n:
                self.fail(f"the file got shorter while it was read; {FETCH_AGAIN}")
        return at

    def _read(self, offset: int, n: int) -> bytes:
        parts: list[bytes] = []
        try:
            while n > 0 and (part := os.pread(self.fd, n, offset)):
                parts.append(part)
                n, offset = n - len(part), offset + len(part)
        except OSError as error:
            raise ExpertIOError(
                f"{self.label}: reading at offset {offset} failed ({error.strerror})."
            ) from error
        return b"".join(parts)

    def u32(self) -> int:
        value = self.peek_u32()
        self.pos += 4
        return value

    def peek_u32(self) -> int:
        at = self.need(4)
        value: int = U32.unpack_from(self.buf, at)[0]
        return value

    def u64(self) -> int:
        at = self.need(8)
        value: int = U64.unpack_from(self.buf, at)[0]
        self.pos += 8
        return value

    def skip(self, n: int) -> None:
        if self.pos + n > self.size:
            self.fail(f"needs {n} bytes but the file ends at {self.size}; {FETCH_AGAIN}")
        self.pos += n

    def string(self, cap: int, what: str) -> bytes:
        """A length-prefixed string of at most `cap` (itself at most a chunk) bytes."""
        n = self.u64()
        if n > cap:
            self.fail(f"{what} is {n} bytes long, but at most {cap} are allowed", self.pos - 8)
        at = self.need(n)
        self.pos += n
        return self.buf[at : at + n]

    def keep(self, n: int) -> None:
        self.kept_bytes += n
        if self.kept_bytes > KEPT_TOTAL_BYTES:
            self.fail(
                f"the key-values hold more than {KEPT_TOTAL_BYTES} bytes of text and numbers; {FETCH_AGAIN}"
            )

    def strings(self, count: int, hashed: bool) -> None:
        """Walks `count` strings of an array; keeps only a hash of each when `hashed`."""
        self.n_strings += count
        if count > MAX_STRINGS or self.n_strings > MAX_ALL_STRINGS:
            self.fail(f"an array of {count} strings is too long, at most {MAX_STRINGS} are allowed")
        if count * 8 > self.size - self.pos:
            self.fail(f"{count} strings do not fit before the end of the file at {self.size}; {FETCH_AGAIN}")
        step = self._step_hashed if hashed else self._step
        while count:
            at = self.need(8)
            after, left = step(at, count)
            self.pos = self.base + after
            if left == count:  # the next string does not end in this chunk
                n = self.u64()
                if n > MAX_ITEM_BYTES:
                    self.fail(
                        f"a string in it is {n} bytes long, at most {MAX_ITEM_BYTES} are allowed",
                        self.pos - 8,
                    )
                self.pos -= 8
                self.need(8 + n)
            count = left

    def _step(self, pos: int, count: int) -> tuple[int, int]:
        """Steps over up to `count` strings that end in the chunk; returns (index after, strings left)."""
        buf, end, unpack = self.buf, len(self.buf), U64.unpack_from
        last = end - 8
        while count and pos <= last:
            after = pos + 8 + unpack(buf, pos)[0]
            if after > end:
                break
            pos = after
            count -= 1
        return pos, count

    def _step_hashed(self, pos: int, count: int) -> tuple[int, int]:
        """As _step, and notes a hash of every string that is not empty."""
        buf, end, unpack, add = self.buf, len(self.buf), U64.unpack_from, self.tokens.append
        last = end - 8
        while count and pos <= last:
            start = pos + 8
            after = start + unpack(buf, pos)[0]
            if after > end:
                break
            text = buf[start:after]
            if b"\0" in text:  # llama.cpp reads a token up to its first zero byte
                text = text[: text.index(b"\0")]
            if text:
                add(hash(text))
            pos = after
            count -= 1
        return pos, count
