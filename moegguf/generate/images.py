"""Images in a conversation: reads and checks image files, and finds their places in
messages and in the rendered prompt.

The content of a message is a string, or a list of text and image parts: {"type":
"text", "text": "..."} and {"type": "image", "data": "<the file as base64>"}. Files are
untrusted: format and dimensions are read from the header before an image is decoded.
This module handles neither models nor tokens.
"""

from __future__ import annotations

import base64
import binascii
import itertools
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
# Longer side / shorter side; some projectors would enlarge a very narrow image without
# limit.
MAX_ASPECT_RATIO = 64
MAX_IMAGES = 64  # maximum number of images in a request
# Bytes of memory per pixel that stb_image needs to decode a file (measured).
# PLAIN_BYTES: 8-bit PNG, baseline JPEG. INTERLACED_BYTES: added for an interlaced PNG.
# WIDE_BYTES: 16-bit PNG, progressive JPEG.
PLAIN_BYTES, INTERLACED_BYTES, WIDE_BYTES, GIF_BYTES = 8, 8, 16, 12

Part = Mapping[str, Any]


def with_images(text: str, images: Iterable[str | bytes]) -> str | list[dict[str, str]]:
    """Returns the content of a message with `images` before `text`, or `text` itself if
    there are no images. Each image is the content of a file, as bytes or as base64.
    Raises OptionError as `image_part` does."""
    parts = [
        image_part(
            base64.b64encode(image).decode() if isinstance(image, bytes) else image
        )
        for image in images
    ]
    return [*parts, {"type": "text", "text": text}] if parts else text


def image_part(text: str) -> dict[str, str]:
    """Returns the content part for an image in base64. Raises OptionError as
    `decode_base64` and `read_image` do."""
    read_image(decode_base64(text))
    return {"type": "image", "data": text}


def decode_base64(text: str) -> bytes:
    """Returns the bytes of an image file that was sent as base64. Whitespace in `text`
    is ignored. Raises OptionError for text that is not base64 or is too long."""
    most = MAX_IMAGE_BYTES * 4 // 3 + 1024
    if len(text) > most:
        raise OptionError(
            f"an image that is sent as base64 may have at most {most} characters, but this one has {len(text)}; shrink"
            " the image."
        )
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (ValueError, binascii.Error):
        raise OptionError(
            f"an image must be sent as base64, but {text[:24]!r}... is not base64; encode the file."
        ) from None


def read_image(data: bytes) -> Image:
    """Checks an image file. Returns the file together with the dimensions in its
    header.

    Raises OptionError for a format other than PNG, JPEG or GIF, a damaged header, and a
    file or image that is too large or too narrow.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise OptionError(
            f"an image file may have at most {MAX_IMAGE_BYTES} bytes, but this one has {len(data)} or more; shrink it."
        )
    found = _dimensions(data)
    if found is None:
        raise OptionError(
            "an image must be a PNG, JPEG or GIF file, but this one is another kind of file, or is damaged; convert it,"
            " or send another image."
        )
    width, height, pixel_bytes = found
    if not 0 < width * height <= DECODED_BYTES // pixel_bytes:
        raise OptionError(
            f"an image of this kind must have 1 to {DECODED_BYTES // pixel_bytes} pixels, but this one is {width} x"
            f" {height}; send an image of another size."
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise OptionError(
            f"an image's longer side may be at most {MAX_ASPECT_RATIO} times the shorter side, but this one is"
            f" {width} x {height}; crop the image."
        )
    return Image(data, width, height)


def _dimensions(data: bytes) -> tuple[int, int, int] | None:
    """Returns the width and height that the decoder (stb_image) will read, and the
    bytes of memory per pixel that it needs. Returns None if the header is damaged or
    its format is not PNG, JPEG or GIF."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
            width, height, depth, interlaced = struct.unpack_from(">IIB3xB", data, 16)
            pixel_bytes = WIDE_BYTES if depth == 16 else PLAIN_BYTES
            return width, height, pixel_bytes + (INTERLACED_BYTES if interlaced else 0)
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return *struct.unpack_from("<HH", data, 6), GIF_BYTES
        if data.startswith(b"\xff\xd8") and (frame := jpeg_frame(data)) >= 0:
            height, width = struct.unpack_from(">HH", data, frame + 4)
            return (
                width,
                height,
                WIDE_BYTES if data[frame] == JPEG_FRAMES[-1] else PLAIN_BYTES,
            )
    except struct.error:  # the header ends early
        pass
    return None


def text_of(content: Any) -> str:
    """Returns the text of a message's content, without its images. Text parts are
    joined by line breaks. For None, returns ""."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(
        str(part.get("text", "")) for part in content if part.get("type") == "text"
    )


def images_of(message: Message) -> list[str]:
    """Returns the images of a message, in base64."""
    return [str(part.get("data", "")) for part in _parts(message) if _is_image(part)]


def has_images(messages: Sequence[Message]) -> bool:
    """Returns True if any of the messages has an image."""
    return any(_is_image(part) for message in messages for part in _parts(message))


@dataclass(frozen=True)
class Marked:
    """Messages in which each image is replaced by the string `marker`, which is random
    so that no user can guess it. `images` has the images in the order of the
    markers."""

    messages: Sequence[Message]
    images: tuple[Image, ...]
    marker: str

    def pieces(self, text: str) -> list[str] | None:
        """Splits the rendered `text` at the markers. Returns None if the number of
        markers is not the number of images."""
        found = text.split(self.marker)
        return found if len(found) == len(self.images) + 1 else None


def mark_images(messages: Sequence[Message]) -> Marked:
    """Returns the messages with a marker in place of each image. Raises OptionError for
    an image that cannot be used, or for too many images."""
    marker = f"<image-{secrets.token_hex(8)}>"
    parts = [
        part for message in messages for part in _parts(message) if _is_image(part)
    ]
    if len(parts) > MAX_IMAGES:
        raise OptionError(
            f"a request may have at most {MAX_IMAGES} images, but this one has {len(parts)}; leave some out."
        )
    images = tuple(
        read_image(decode_base64(str(part.get("data", "")))) for part in parts
    )
    return Marked([_with_text(message, marker) for message in messages], images, marker)


def _with_text(message: Message, marker: str) -> Message:
    """Returns the message with its parts joined into one string, in which `marker`
    replaces each image. A line break separates adjacent texts. A message whose content
    is not a list of parts is returned unchanged."""
    parts = _parts(message)
    if not parts:
        return message
    text = ""
    for is_image, group in itertools.groupby(parts, _is_image):
        found = list(group)
        text += marker * len(found) if is_image else text_of(found)
    return {**message, "content": text}


def _parts(message: Message) -> Sequence[Part]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Part) -> bool:
    return part.get("type") == "image"
