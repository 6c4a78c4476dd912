"""Text between Python's strings and the bytes of files, requests and terminals."""

from __future__ import annotations

import codecs
import io
import re
import tempfile
from contextlib import suppress
from typing import BinaryIO

COPY_CHARACTERS = 1 << 20
# Up to the last @: a password may have others.
_CREDENTIALS = re.compile(r"(?s)(?:(?<=://)|\A(?![^/]*://)(?=[^/]*:)).*@")


def to_utf8(text: str) -> bytes:
    """Returns UTF-8 of any string. Bytes of arguments and paths that the locale could not read are read as UTF-8.
    Halves of surrogate pairs, which JSON may have, are joined. What is left of both becomes U+FFFD."""
    with suppress(UnicodeEncodeError):
        return text.encode()
    with suppress(UnicodeEncodeError):
        return text.encode(errors="surrogateescape").decode(errors="replace").encode()
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def without_surrogates(text: str) -> str:
    """Returns `text` as other programs can read it: see `to_utf8`."""
    return to_utf8(text).decode()


def without_password(address: str) -> str:
    """Returns an address as it may be shown and logged: "http://***@host" for "http://user:password@host"."""
    return _CREDENTIALS.sub("***@", address)


def decode_text(data: bytes, errors: str = "replace") -> str:
    """Returns the text of a file: UTF-8, or what its byte order mark says, which is left out."""
    return data.decode(_encoding_of(data), errors)


def in_utf8(file: BinaryIO) -> BinaryIO:
    """Returns a temporary copy in UTF-8 of a file in UTF-16; any other `file` as it is, at its start. `file` must be
    seekable."""
    file.seek(0)
    encoding = _encoding_of(file.read(2))
    file.seek(0)
    if encoding != "utf-16":
        return file
    copy: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    source = io.TextIOWrapper(file, encoding, errors="replace", newline="")
    while text := source.read(COPY_CHARACTERS):
        copy.write(text.encode())
    source.detach()  # `file` stays open
    copy.seek(0)
    return copy


def _encoding_of(data: bytes) -> str:
    return "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
