"""Converts between Python's strings and the bytes of files, requests and terminals, and
hides passwords in addresses."""

from __future__ import annotations

import codecs
import io
import re
import tempfile
from contextlib import suppress
from typing import BinaryIO

COPY_CHARACTERS = 1 << 20
# Matches the user and password of a URL, up to the last @, since a password may contain
# @.
_CREDENTIALS = re.compile(r"(?s)(?:(?<=://)|\A(?![^/]*://)(?=[^/]*:)).*@")


def to_utf8(text: str) -> bytes:
    """Encodes any string in UTF-8. If all surrogates stand for bytes that Python could
    not decode (in arguments and paths), these bytes are read as UTF-8. Otherwise
    surrogate pairs, which JSON may contain, are joined. Characters that stay invalid
    become U+FFFD."""
    with suppress(UnicodeEncodeError):
        return text.encode()
    with suppress(UnicodeEncodeError):
        return text.encode(errors="surrogateescape").decode(errors="replace").encode()
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def without_surrogates(text: str) -> str:
    """Returns `text` with its surrogates, which other programs cannot read, replaced as
    in `to_utf8`."""
    return to_utf8(text).decode()


def without_password(address: str) -> str:
    """Hides the user and password in an address, for messages and logs:
    "http://***@host" for "http://user:pw@host"."""
    return _CREDENTIALS.sub("***@", address)


def decode_text(data: bytes, errors: str = "replace") -> str:
    """Decodes a file's contents as UTF-16 if they begin with UTF-16's byte order mark,
    otherwise as UTF-8. A byte order mark is removed."""
    return data.decode(_encoding_of(data), errors)


def in_utf8(file: BinaryIO) -> BinaryIO:
    """Returns a temporary copy in UTF-8 if `file` is in UTF-16, otherwise `file`
    itself, rewound to its start. `file` must be seekable."""
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
    return (
        "utf-16"
        if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        else "utf-8-sig"
    )
