"""Paths of images in a message, as `ollama run` finds them: typed, or dragged onto the terminal.

A path begins with /, ./, ../ or ~/ and ends with a known extension; spaces in it are escaped, or it is in quotes. What
names no file stays text. Knows no model.
"""

from __future__ import annotations

import re
from pathlib import Path

from moegguf.errors import OptionError
from moegguf.generate.images import MAX_IMAGE_BYTES, read_image
from moegguf.terminal.messages import print_message

_EXTENSION = r"\.(?:png|jpe?g|gif|webp|bmp)"
_START = r"(?:~|\.{1,2})?/"
_PATH = re.compile(
    rf"""(?P<quote>["'])(?P<quoted>{_START}[^"'\n]*?{_EXTENSION})(?P=quote)"""
    rf"|(?<!\S)(?P<bare>{_START}(?:\\.|[^\s\\])*?{_EXTENSION})(?![\w/])",
    re.IGNORECASE,
)


def extract_images(text: str) -> tuple[str, list[bytes]]:
    """`text` without the paths of images, and these files, each named on stderr.

    Raises OptionError for a file that cannot be read, or is no image that can be used.
    """
    images: list[bytes] = []

    def replaced(match: re.Match[str]) -> str:
        name = _name(match)
        data = _read(Path(name).expanduser())
        if data is None:
            return match[0]
        images.append(data)
        print_message(f"Added image '{name}'")
        return ""

    rest = _PATH.sub(replaced, text)
    return (rest.strip() if images else text), images


def begins_with_image(text: str) -> bool:
    """Whether the first word is the path of a file that ends like an image."""
    match = _PATH.match(text.lstrip())
    return match is not None and _is_file(Path(_name(match)).expanduser())


def _name(match: re.Match[str]) -> str:
    return match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _read(path: Path) -> bytes | None:
    """The file's bytes; None when there is no such file."""
    if not _is_file(path):
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise OptionError(f"the image '{path}' cannot be read ({error}); check the file.") from None
    try:
        read_image(data)
    except OptionError as error:
        raise OptionError(f"'{path}': {error}") from None
    return data
