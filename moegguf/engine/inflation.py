"""How large the data of a PNG file become. Its decoder, stb_image, inflates all of them, whatever its header states."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

STEP_BYTES = 64 << 10


def inflates_within(data: bytes, most_bytes: int) -> bool:
    """Whether a PNG's data become at most `most_bytes`; also True for a file of another kind. False where they cannot
    be inflated."""
    inflater, n_bytes = zlib.decompressobj(), 0
    try:
        for part in _compressed(data):
            while part and n_bytes <= most_bytes:
                n_bytes += len(inflater.decompress(part, STEP_BYTES))
                part = inflater.unconsumed_tail
    except zlib.error:
        return False
    return n_bytes <= most_bytes


def _compressed(data: bytes) -> Iterator[bytes]:
    """The compressed data of all IDAT chunks, in small parts."""
    at = 8 if data.startswith(b"\x89PNG") else len(data)
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            for begin in range(at + 8, min(at + 8 + size, len(data)), STEP_BYTES):
                yield data[begin : min(begin + STEP_BYTES, at + 8 + size)]
        at += size + 12
