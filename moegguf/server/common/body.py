"""Reads request bodies: JSON, which is parsed and validated, and forms with a file. The
file's bytes are passed on as they arrive, and are never collected in memory.

The Content-Type header of JSON is ignored, because `curl -d` labels JSON as a form. The
size, the number of values and large numbers are checked before a JSON body is parsed;
pydantic's parser limits the nesting. If a key is repeated, the last value is used. A
lone surrogate, which JavaScript leaves when it cuts a string inside a character,
becomes U+FFFD, as in Go.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from io import BytesIO
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from moegguf.errors import MoeggufError
from moegguf.quantities import MIB
from moegguf.server.common import limits
from moegguf.server.common.errors import BodyRefusedError, HttpError, http_error

# An unclosed string matches to the end.
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# A number that may not fit into 64 bits.
LARGE_NUMBER = re.compile(rb"(?<![.\d])(?:\d{20}|[\d.]++[eE]\+?\d{3,}+)")
# Possible beginnings of a lone surrogate.
HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
# Keys of an ASGI scope: the `Bodies` object, and the number of bytes that this object
# counts for the request.
BODIES, N_BYTES = "moegguf.bodies", "moegguf.n_bytes"


class Bodies:
    """Middleware that limits the bytes of all request bodies in memory. A body that
    `read_bytes` reads is counted until its request has ended. File uploads are not
    counted."""

    def __init__(self, app: ASGIApp, most_bytes: int = limits.ALL_BODIES_BYTES) -> None:
        self._app = app
        self.most_bytes = most_bytes
        self.n_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[BODIES], scope[N_BYTES] = self, 0
        try:
            await self._app(scope, receive, send)
        finally:
            self._free(scope)

    def add(self, scope: Scope, n_bytes: int) -> int:
        """Counts `n_bytes` that have arrived for a request, and returns the number of
        bytes of its body so far. Raises BodyRefusedError 503 if all bodies together
        exceed `most_bytes`."""
        scope[N_BYTES] += n_bytes
        self.n_bytes += n_bytes
        if self.n_bytes > self.most_bytes:
            self._free(scope)
            message = f"server busy: its requests together may have up to {self.most_bytes >> 20} MiB; try again later"
            raise BodyRefusedError(message, 503, headers={"retry-after": "1"})
        return int(scope[N_BYTES])

    def _free(self, scope: Scope) -> None:
        self.n_bytes -= scope[N_BYTES]
        scope[N_BYTES] = 0


def without_nulls(given: Any) -> Any:
    """Returns a copy of a mapping without the fields that are null. Returns any other
    value unchanged."""
    if not isinstance(given, Mapping):
        return given
    return {name: value for name, value in given.items() if value is not None}


class Body(BaseModel):
    """Base class of request bodies and their parts. Types are strict, null is treated
    as absent, and unknown fields are ignored unless a subclass allows them."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        return without_nulls(given)


def integral(value: Any) -> Any:
    """Returns an integral float as an int (8 for 8.0), and any other value
    unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(integral)]
"""A whole number. 8.0 is accepted for 8: some clients write all numbers as floats."""


T = TypeVar("T", bound=BaseModel)


async def read_body(
    request: HttpRequest, kind: type[T], limit: int = limits.BODY_BYTES
) -> T:
    """Reads the body of `request` as a `kind`.

    Raises HttpError 400 for an invalid body, 408 for a slow one, 413 for a large one,
    and 415 for a compressed one. Raises HttpError 499 if the client disconnects, and
    503 if the bodies of all requests together are too large.
    """
    return parse_body(await read_bytes(request, limit), kind)


def parse_body(raw: bytes, kind: type[T]) -> T:
    """Parses JSON text as a `kind`. Raises HttpError 400, which names the first invalid
    field if the text is an object."""
    return parse_fields(parse_object(raw), kind)


def parse_fields(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Validates the fields of a `kind` and builds it. Raises HttpError 400, which names
    the first invalid field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise HttpError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """Returns the first validation error as text: the field, and the rule that its
    value breaks."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[
        0
    ]
    where = ".".join(str(part) for part in first["loc"])[:200]
    text = (
        first["msg"]
        .removeprefix("Value error, ")
        .replace(" after validation, not", ", but has")
    )
    return f"{where}: {text[:1].lower()}{text[1:]}" if where else text


async def read_bytes(request: HttpRequest, limit: int = limits.BODY_BYTES) -> bytes:
    """Returns the whole body, which may have at most `limit` bytes. Raises HttpError
    408, 413, 415, 499 or 503."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large(limit)
    bodies: Bodies = request.scope[BODIES]
    parts = []
    try:
        async with asyncio.timeout(limits.READ_S):
            async for part in chunks(request):
                if bodies.add(request.scope, len(part)) > limit:
                    raise too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise HttpError(
            f"the body did not arrive within {limits.READ_S:.0f} s", 408
        ) from None
    return b"".join(parts)


async def chunks(request: HttpRequest) -> AsyncGenerator[bytes]:
    """Yields the body as it arrives, and b"" at its end. Raises HttpError 408 if
    nothing arrives for READ_S, 415 for a compressed body, which could expand to any
    size, and 499 if the client disconnects."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(
            f"a body must not be compressed, but has Content-Encoding {coding[:40]!r}; send plain JSON",
            415,
        )
    stream, chunk = request.stream(), None
    try:
        while chunk != b"":
            async with asyncio.timeout(limits.READ_S):
                chunk = await anext(stream)
            yield chunk
    except TimeoutError:
        raise HttpError(
            f"no more of the body arrived for {limits.READ_S:.0f} s; check the connection, and send the request again",
            408,
        ) from None
    except ClientDisconnect:
        raise HttpError("request canceled", 499) from None


def too_large(limit: int) -> BodyRefusedError:
    """Returns the error for a body of more than `limit` bytes, with status 413."""
    most = f"{limit} bytes" if limit % MIB else f"{limit // MIB} MiB"
    return BodyRefusedError(
        f"request body too large: at most {most} are accepted; send less", 413
    )


# JSON


def parse_json(raw: bytes) -> Any:
    """Parses JSON text. A lone surrogate becomes U+FFFD, and a number that is too large
    for a float becomes infinity. Raises ValueError for invalid JSON, which includes the
    words NaN and Infinity."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        if not HALF.search(raw):
            raise
        try:
            text = json.dumps(json.loads(raw), ensure_ascii=False)
        except (ValueError, RecursionError):
            raise error from None
    return from_json(HALF_CHARACTER.sub("\ufffd", text), allow_inf_nan=False)


def parse_value(raw: bytes) -> Any:
    """Parses JSON text. Raises HttpError 400 if the text is empty or invalid, has more
    than limits.JSON_VALUES values, or has a number that is too large."""
    if not raw.strip():
        raise HttpError("missing request body")
    # Two for each string, one for an unclosed string.
    n_quotes = raw.count(b'"') - raw.count(b'\\"')
    without_strings = (
        STRING.sub(b"", raw)
        if n_quotes <= 4 * limits.JSON_VALUES
        else b"," * (limits.JSON_VALUES + 1)
    )
    if len(without_strings.translate(None, NOT_STRUCTURE)) > limits.JSON_VALUES:
        raise HttpError(
            f"invalid request body: more than {limits.JSON_VALUES} values; send fewer"
        )
    try:
        if any(
            number.isdigit() or math.isinf(float(number))
            for number in LARGE_NUMBER.findall(without_strings)
        ):
            raise ValueError(
                "a number does not fit in 64 bits, or has more than 19 digits before its decimal point"
            )
        return parse_json(raw)
    except ValueError as error:
        raise HttpError(f"invalid request body: {error}") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parses JSON text, which must be an object. Raises HttpError 400 as `parse_value`
    does, and for any other value."""
    value = parse_value(raw)
    if not isinstance(value, dict):
        kinds = {
            bool: "a boolean",
            int: "a number",
            float: "a number",
            str: "a string",
            list: "an array",
        }
        raise HttpError(
            f"invalid request body: expected a JSON object, not {kinds.get(type(value), 'null')}"
        )
    return value


# Forms


class _FormFile(UploadFile):
    """The uploaded file of a form. Passes its bytes to `sink` as they arrive, and
    raises an error if there are more than `most_bytes`."""

    def __init__(
        self, filename: str, sink: Callable[[bytes], object], most_bytes: int
    ) -> None:
        super().__init__(BytesIO(), filename=filename)
        self._sink, self._most_bytes = sink, most_bytes
        self._left_bytes = most_bytes

    async def write(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise too_large(self._most_bytes)
        self._sink(data)

    async def seek(self, offset: int) -> None:
        """Does nothing: the parser rewinds the file, but the file is not read again."""


class _FormParser(MultiPartParser):
    """Starlette's parser of forms, except that `new_file` creates the object for the
    uploaded file."""

    new_file: Callable[[str], UploadFile]

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if self._current_part.file is not None:
            self._current_part.file = self.new_file(
                self._current_part.file.filename or "file"
            )


async def read_form(
    request: HttpRequest, write: Callable[[bytes], object], most_bytes: int
) -> tuple[str | None, dict[str, str]]:
    """Reads a form with one file at most, and passes the file's bytes to `write` as
    they arrive.

    Returns the file's name (None if there is no file in the field `file`) and the
    form's other fields. Raises BodyRefusedError 400, 408, 413 (more than `most_bytes`
    bytes), 415 or 499. A MoeggufError that `write` raises becomes a BodyRefusedError
    with the HTTP status for this error.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
        raise BodyRefusedError(
            "the body must be multipart/form-data, with the fields 'purpose' and 'file'"
        )
    limited = {
        "max_files": 1,
        "max_fields": limits.FORM_FIELDS,
        "max_part_size": limits.FORM_PART_BYTES,
    }
    parser = _FormParser(request.headers, chunks(request), **limited)
    parser.new_file = lambda name: _FormFile(
        name[: limits.FILE_NAME_CHARS], write, most_bytes
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BodyRefusedError(
            f"invalid multipart/form-data: {error.message[:200]}"
        ) from None
    except MoeggufError as error:
        found = http_error(error)
        raise BodyRefusedError(
            str(found), found.status, found.code, found.headers
        ) from None
    file = form.get("file")
    fields = {key: value for key, value in form.items() if isinstance(value, str)}
    return file.filename if isinstance(file, UploadFile) else None, fields
