"""Images in a conversation: what a file may be, and where it stands in a message and in the rendered prompt.

A message's content is text, or a list of parts in order, where images stand among texts:
{"type": "text", "text": "..."} and {"type": "image", "data": "<the file as base64>"}. Files are untrusted: format and
dimensions are read from the header before anything is decoded. Does not know models or tokens.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.engine.projector import JPEG_FRAMES, Image, jpeg_frame
from moegguf.errors import OptionError
from moegguf.generate.request import Message
from moegguf.gguf.projector import DECODED_BYTES

MAX_IMAGE_BYTES = 20 << 20
MAX_ASPECT_RATIO = 64  # projectors that keep the proportions would enlarge the long side of a line without limit
MAX_IMAGES = 64  # images in one request
# Bytes per pixel that stb_image takes while it decodes a file, measured: for 8 bits, interlaced (in addition), 16 bits
# or progressive, and a GIF.
PLAIN_BYTES, INTERLACED_BYTES, WIDE_BYTES, GIF_BYTES = 8, 8, 16, 12

Part = Mapping[str, Any]


def with_images(text: str, images: Iterable[str | bytes]) -> str | list[dict[str, str]]:
    """A message's content: `images` (files, or their base64) before `text`. Raises as `image_part`."""
    parts = [image_part(base64.b64encode(image).decode() if isinstance(image, bytes) else image) for image in images]
    return [*parts, {"type": "text", "text": text}] if parts else text


def image_part(text: str) -> dict[str, str]:
    """The part for an image that came as base64. Raises OptionError when it is not an image that can be used."""
    read_image(decode_base64(text))
    return {"type": "image", "data": text}


def decode_base64(text: str) -> bytes:
    """The bytes of an image. Raises OptionError for text that is not base64, or too much of it."""
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 1024:
        raise _too_large(len(text) * 3 // 4)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (ValueError, binascii.Error):
        raise OptionError(f"an image is sent as base64, but {text[:24]!r}... is not; encode the file.") from None


def read_image(data: bytes) -> Image:
    """A file that can be decoded, with the dimensions that its header states.

    Raises OptionError for another format, a damaged header, and dimensions beyond the limits.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(len(data))
    found = _dimensions(data)
    if found is None:
        raise OptionError("an image is a PNG, JPEG or GIF file, but this one is not, or is damaged; convert it.")
    width, height, pixel_bytes = found
    if not 0 < width * height <= DECODED_BYTES // pixel_bytes:
        raise OptionError(
            f"an image of this kind has 1 to {DECODED_BYTES // pixel_bytes} pixels, but this one is {width} x {height};"
            " send a smaller one."
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise OptionError(
            f"an image is at most {MAX_ASPECT_RATIO} times as long as wide, but this one is {width} x {height}; cut it."
        )
    return Image(data, width, height)


def _too_large(n_bytes: int) -> OptionError:
    return OptionError(
        f"an image file has at most {MAX_IMAGE_BYTES >> 20} MiB, but this one {n_bytes / (1 << 20):.1f}; shrink it."
    )


def _dimensions(data: bytes) -> tuple[int, int, int] | None:
    """Width and height as the decoder (stb_image) will read them, and the bytes that it takes per pixel; None when the
    header is of no format that it may decode."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
            width, height, depth, interlaced = struct.unpack_from(">IIB3xB", data, 16)
            pixel_bytes = WIDE_BYTES if depth == 16 else PLAIN_BYTES
            return width, height, pixel_bytes + (INTERLACED_BYTES if interlaced else 0)
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return *struct.unpack_from("<HH", data, 6), GIF_BYTES
        if data.startswith(b"\xff\xd8") and (frame := jpeg_frame(data)) >= 0:
            height, width = struct.unpack_from(">HH", data, frame + 4)
            return width, height, WIDE_BYTES if data[frame] == JPEG_FRAMES[-1] else PLAIN_BYTES
    except struct.error:  # it ends early
        pass
    return None


def text_of(content: Any) -> str:
    """The text of a message's content, without its images."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")


def images_of(message: Message) -> list[str]:
    """The images of a message, in base64."""
    return [str(part.get("data", "")) for part in _parts(message) if _is_image(part)]


def has_images(messages: Sequence[Message]) -> bool:
    """Returns whether a message has an image among its parts."""
    return any(_is_image(part) for message in messages for part in _parts(message))


@dataclass(frozen=True)
class Marked:
    """Messages with texts only: `marker`, which no one can guess, stands for each of `images`, in order."""

    messages: Sequence[Message]
    images: tuple[Image, ...]
    marker: str

    def pieces(self, text: str) -> list[str] | None:
        """The rendered `text` before, between and after the images; None when not every image is in it once."""
        found = text.split(self.marker)
        return found if len(found) == len(self.images) + 1 else None


def mark_images(messages: Sequence[Message]) -> Marked:
    """Puts a marker in place of each image. Raises OptionError for images that cannot be used, or too many."""
    marker = f"<image-{secrets.token_hex(8)}>"
    parts = [part for message in messages for part in _parts(message) if _is_image(part)]
    if len(parts) > MAX_IMAGES:
        raise OptionError(f"a request has at most {MAX_IMAGES} images, but this one {len(parts)}; leave some out.")
    images = tuple(read_image(decode_base64(str(part.get("data", "")))) for part in parts)
    return Marked([_with_text(message, marker) for message in messages], images, marker)


def _with_text(message: Message, marker: str) -> Message:
    """The message with its parts as one text: a line break between two texts, none around an image."""
    parts = _parts(message)
    if not parts:
        return message
    text = ""
    for before, part in zip((None, *parts), parts, strict=False):
        if not _is_image(part) and before is not None and not _is_image(before):
            text += "\n"
        text += marker if _is_image(part) else str(part.get("text", ""))
    return {**message, "content": text}


def _parts(message: Message) -> Sequence[Part]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Part) -> bool:
    return part.get("type") == "image"
