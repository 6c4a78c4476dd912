"""What the decoder of image files, stb_image, does not check: it makes up what a truncated JPEG or GIF lacks, and
inflates all data of a PNG, whatever its header states."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

STEP_BYTES = 64 << 10
MAX_JPEG_SEGMENTS = 4096
_END_OF_IMAGE = 0xD9
_GIF_IMAGE, _GIF_EXTENSION, _GIF_TRAILER = 0x2C, 0x21, 0x3B
# The start of a segment; after 0xFF, data of a scan have 0 or the number of a restart.
_MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])", re.DOTALL)


def has_end(data: bytes) -> bool:
    """Whether nothing is missing at the end of a JPEG or GIF file; also True for a file of another kind."""
    if data.startswith(b"\xff\xd8"):
        return _jpeg_has_end(data)
    try:
        return not data.startswith(b"GIF8") or _gif_has_end(data)
    except IndexError:
        return False


def _jpeg_has_end(data: bytes) -> bool:
    """Steps over each segment, so that the end of a thumbnail within one does not count."""
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        marker = _MARKER.search(data, at)
        if marker is None:
            return False
        if marker[1][0] == _END_OF_IMAGE:
            return True
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return False


def _gif_has_end(data: bytes) -> bool:
    """Steps over each block; bytes between two blocks are skipped, as other decoders do. Raises IndexError."""
    at = 13 + _table_bytes(data[10])
    while (kind := data[at]) != _GIF_TRAILER:
        at += 1
        if kind == _GIF_IMAGE:
            at += 10 + _table_bytes(data[at + 8])
        elif kind == _GIF_EXTENSION:
            at += 1
        else:
            continue
        while size := data[at]:
            at += 1 + size
        at += 1
    return True


def _table_bytes(flags: int) -> int:
    """The size of a colour table, 0 without one."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


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
