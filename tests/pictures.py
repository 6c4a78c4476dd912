"""Creates small image files.

PNGs and the beginning of a JPEG are created without a library. Complete JPEGs and GIFs
are created with Pillow.
"""

import base64
import io
import random
import struct
import zlib
from typing import Any


def png(width: int = 64, height: int = 64, seed: int = 0) -> bytes:
    """A PNG of random pixels."""
    pixels = random.Random(seed)
    rows = b"".join(b"\0" + pixels.randbytes(3 * width) for _ in range(height))
    return png_of(width, height, zlib.compress(rows))


def png_of(
    width: int,
    height: int,
    data: bytes,
    *,
    bits: int = 8,
    alpha: bool = False,
    interlaced: bool = False,
) -> bytes:
    """A colour PNG with the compressed `data`, which are not checked and may be
    invalid."""
    header = struct.pack(
        ">IIBBBBB", width, height, bits, 6 if alpha else 2, 0, 0, interlaced
    )
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", data)
        + _chunk(b"IEND", b"")
    )


def interlaced_png(width: int, height: int) -> bytes:
    """A black, transparent PNG with 8 bits per channel, interlaced in the seven passes
    of Adam7."""
    passes = (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    )
    n_bytes = sum(
        (1 + 4 * -(-(width - x) // dx)) * -(-(height - y) // dy)
        for x, y, dx, dy in passes
    )
    return png_of(
        width, height, zlib.compress(bytes(n_bytes), 1), alpha=True, interlaced=True
    )


def deep_png(width: int, height: int) -> bytes:
    """A black, transparent PNG with 16 bits per channel."""
    rows = zlib.compress(bytes((1 + 8 * width) * height), 1)
    return png_of(width, height, rows, bits=16, alpha=True)


def png_bomb(width: int, height: int) -> bytes:
    """A PNG whose header states the given width and height, with the data of only one
    pixel. Its checksum is not updated."""
    small = png(1, 1)
    return small[:16] + struct.pack(">II", width, height) + small[24:]


def jpeg_header(width: int, height: int) -> bytes:
    """The beginning of a JPEG of this size: a comment, a fill byte and the header of a
    progressive frame."""
    return (
        b"\xff\xd8\xff\xfe\0\x06abcd\xff\xff\xc2\0\x11\x08"
        + struct.pack(">HH", height, width)
        + b"\x03"
        + b"\0" * 9
    )


def jpeg(**options: Any) -> bytes:
    """A JPEG of 32 x 32 random pixels. `options` are options of Pillow's `save`."""
    return _saved([_random_image(0)], "JPEG", **options)


def gif(n_frames: int = 1) -> bytes:
    """A GIF of 32 x 32 random pixels, animated when it has more than one frame."""
    first, *others = map(_random_image, range(n_frames))
    return _saved(
        [first, *others],
        "GIF",
        **({"save_all": True, "append_images": others} if others else {}),
    )


def with_thumbnail(data: bytes) -> bytes:
    """Returns a JPEG with data that cameras add: an Exif segment with a second JPEG,
    and zeros after the end."""
    within = b"Exif\0\0" + jpeg(quality=10)
    return (
        data[:2]
        + b"\xff\xe1"
        + struct.pack(">H", 2 + len(within))
        + within
        + data[2:]
        + bytes(100)
    )


def _random_image(seed: int) -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (32, 32), random.Random(seed).randbytes(3 * 32 * 32))


def _saved(images: list[Any], kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    images[0].save(file, kind, **options)
    return file.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
    )


def base64_of(data: bytes) -> str:
    """Returns the bytes of an image as base64 text."""
    return base64.b64encode(data).decode()


def image(data: bytes) -> dict[str, str]:
    """Returns the part of a message that holds an image."""
    return {"type": "image", "data": base64_of(data)}


def message(*parts: str | bytes, role: str = "user") -> dict[str, Any]:
    """Returns a message whose parts are texts (str) and images (bytes)."""
    return {
        "role": role,
        "content": [
            image(part) if isinstance(part, bytes) else {"type": "text", "text": part}
            for part in parts
        ],
    }
