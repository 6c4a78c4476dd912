"""Forms with a file (multipart/form-data): the file goes where the caller says as it arrives, never into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from moegguf.errors import MoeggufError
from moegguf.server.common import limits
from moegguf.server.common.body import chunks, too_large
from moegguf.server.common.errors import BodyRefusedError, HttpError, http_error

FILE = "file"


@dataclass
class Form:
    """What a form has besides the contents of its file. `filename`: None without a file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_form(request: Request, write: Callable[[bytes], object], most_bytes: int) -> Form:
    """Reads a form; `write` gets the contents of its part `file`, at most `most_bytes`. Raises HttpError 400, 408, 413,
    415, 499, and what `write` raises, as a reply to a client that is still sending."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
        raise BodyRefusedError(400, "the body must be multipart/form-data, with the fields 'purpose' and 'file'")
    parts = _Parts(write, most_bytes)
    parser = MultipartParser(boundary, parts.callbacks())
    try:
        async for chunk in chunks(request):
            parser.write(chunk)
            if parts.ended:
                return parts.form
        raise HttpError(400, "the form has no end; is the body complete?")
    except FormParserError as error:
        raise BodyRefusedError(400, f"invalid multipart/form-data: {str(error)[:200]}") from None
    except MoeggufError as error:
        found = http_error(error)
        raise BodyRefusedError(found.status, str(found), found.code, found.headers) from None


class _Parts:
    """The parser's callbacks: collects small fields, hands the file on."""

    def __init__(self, write: Callable[[bytes], object], most_bytes: int) -> None:
        self.form = Form()
        self.ended = False
        self._write = write
        self._most_bytes = most_bytes
        self._n_file_bytes = self._n_other_bytes = self._n_parts = 0
        self._header: list[bytearray] = [bytearray(), bytearray()]  # name and value
        self._disposition = b""
        self._name = ""
        self._is_file = False

    def callbacks(self) -> Any:
        """The callbacks, by the parser's names."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": lambda data, start, end: self._add(bytes(data[start:end])),
            "on_end": self._end,
        }

    def _count(self, n_bytes: int) -> None:
        self._n_other_bytes += n_bytes
        if self._n_other_bytes > limits.FORM_BYTES:
            raise HttpError(413, f"the form has more than {limits.FORM_BYTES >> 10} KiB besides its file")

    def _begin(self) -> None:
        self._n_parts += 1
        if self._n_parts > limits.FORM_PARTS:
            raise HttpError(400, f"the form has more than {limits.FORM_PARTS} parts")
        self._disposition = b""

    def _add_header(self, which: int, data: bytes) -> None:
        self._count(len(data))
        self._header[which] += data

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == FILE
        if self._is_file:
            if self.form.filename is not None:
                raise HttpError(400, "the form has more than one file; send one at a time")
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self.form.filename = filename[: limits.FILE_NAME_CHARS] or FILE

    def _add(self, data: bytes) -> None:
        if not self._is_file:
            self._count(len(data))
            self.form.fields[self._name] = self.form.fields.get(self._name, "") + data.decode("utf-8", "replace")
            return
        self._n_file_bytes += len(data)
        if self._n_file_bytes > self._most_bytes:
            raise too_large(self._most_bytes)
        self._write(data)

    def _end(self) -> None:
        self.ended = True
