"""Tests text in other encodings: byte order marks, bytes that are not UTF-8, and halves
of surrogate pairs."""

from io import BytesIO

import pytest

from moegguf.text import (
    decode_text,
    in_utf8,
    to_utf8,
    without_password,
    without_surrogates,
)

FILES = {
    "UTF-8": b"caf\xc3\xa9\r\n",
    "UTF-8 with a mark": b"\xef\xbb\xbfcaf\xc3\xa9\r\n",
    "UTF-16 LE": b"\xff\xfec\0a\0f\0\xe9\0\r\0\n\0",
    "UTF-16 BE": b"\xfe\xff\0c\0a\0f\0\xe9\0\r\0\n",
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_decode_text_follows_a_byte_order_mark(data: bytes) -> None:
    assert decode_text(data) == decode_text(data, "strict") == "caf\xe9\r\n"
    read = in_utf8(BytesIO(data)).read()
    assert read.decode("utf-8-sig") == "caf\xe9\r\n"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:secret@host:1/path", "http://***@host:1/path"),
        ("me:secret@host", "***@host"),
        ("https://me:s@c/r et@[::1]:80", "https://***@[::1]:80"),
        ("http://host:1/path", "http://host:1/path"),
        ("host:80", "host:80"),
        ("/models/a:b@c", "/models/a:b@c"),
        ("", ""),
    ],
)
def test_without_password_hides_credentials(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_decode_text_replaces_invalid_bytes() -> None:
    assert decode_text(b"caf\xe9") == "caf\ufffd"
    assert decode_text(b"\xff\xfea\0\0\xd8b\0c") == "a\ufffdb\ufffd"
    assert (
        in_utf8(BytesIO(b"\xff\xfea\0\0\xd8b\0c")).read() == "a\ufffdb\ufffd".encode()
    )
    assert decode_text(b"") == "" and in_utf8(BytesIO(b"")).read() == b""


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("caf\xe9 \N{GRINNING FACE}", "caf\xe9 \N{GRINNING FACE}"),
        ("caf\udce9", "caf\ufffd"),
        ("caf\udcc3\udca9", "caf\xe9"),
        ("\ud83d\ude00 \ud83d\udca9", "\N{GRINNING FACE} \N{PILE OF POO}"),
        ("a\ud800b\udfff\udce9", "a\ufffdb\ufffd\ufffd"),
    ],
)
def test_to_utf8_encodes_strings_with_surrogates(text: str, valid: str) -> None:
    assert to_utf8(text) == valid.encode()
    assert without_surrogates(text) == valid
