"""Request bodies: JSON, parsed and validated, whatever the Content-Type.

`curl -d` labels JSON as a form, so that header is ignored. Size, nesting, number of values and numbers are limited
before any object is built; of a repeated key the last one counts.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from moegguf.server.common import limits
from moegguf.server.common.errors import BodyRefusedError, HttpError

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # an unterminated one extends to the end
NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MISSING = "missing request body"
HELD = "moegguf.held_body"  # key of the scope: the `HeldBody` of a request


class Bodies:
    """Middleware that bounds the bytes of all bodies together, each from its arrival to the end of its request."""

    def __init__(self, app: ASGIApp, most_bytes: int = limits.ALL_BODIES_BYTES) -> None:
        self._app = app
        self.most_bytes = most_bytes
        self.n_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = scope[HELD] = HeldBody(self)
        try:
            await self._app(scope, receive, send)
        finally:
            held.free()


class HeldBody:
    """The bytes of one request's body that are in memory."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Notes that bytes have arrived. Raises BodyRefusedError 503."""
        self.n_bytes += n_bytes
        self._bodies.n_bytes += n_bytes
        if self._bodies.n_bytes > self._bodies.most_bytes:
            self.free()
            raise BodyRefusedError(
                503,
                f"server busy: its requests together may have {self._bodies.most_bytes >> 20} MiB; try again later",
                headers={"retry-after": "1"},
            )

    def free(self) -> None:
        """Notes that they are in memory no more."""
        self._bodies.n_bytes -= self.n_bytes
        self.n_bytes = 0


class Body(BaseModel):
    """Base of all requests: strict types, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


T = TypeVar("T", bound=BaseModel)


async def read_body(request: Request, kind: type[T], limit: int = limits.BODY_BYTES) -> T:
    """The body of `request` as a `kind`. Raises HttpError: 400 for an invalid body, 408, 413 and 415 for a slow, large
    or compressed one, 503 while those of other requests are too much."""
    return parse_body(await read_bytes(request, limit), kind)


def parse_body(raw: bytes, kind: type[T]) -> T:
    """JSON text as a `kind`. Raises HttpError 400 that names the first invalid field."""
    return _validated(kind.model_validate, parse_object(raw))


def parse_fields(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Texts of a form as a `kind`. Raises HttpError 400 that names the first invalid field."""
    return _validated(kind.model_validate_strings, fields)


def _validated(validate: Callable[[Mapping[str, Any]], T], fields: Mapping[str, Any]) -> T:
    try:
        return validate(fields)
    except ValidationError as error:
        raise HttpError(400, explain(error)) from None


async def read_bytes(request: Request, limit: int = limits.BODY_BYTES) -> bytes:
    """The whole body, at most `limit` bytes. Raises HttpError 408, 413, 415, 499, 503."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large(limit)
    held: HeldBody = request.scope[HELD]
    parts = []
    try:
        async with asyncio.timeout(limits.READ_S):
            async for part in chunks(request):
                held.add(len(part))
                if held.n_bytes > limit:
                    raise too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {limits.READ_S:.0f} s") from None
    return b"".join(parts)


async def chunks(request: Request) -> AsyncGenerator[bytes]:
    """The body as it arrives; b"" is its end. Raises HttpError 408 when nothing of it arrives for READ_S, 415 for a
    compressed one, which could expand to any size, and 499."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(
            415, f"bodies are taken as they are, not with Content-Encoding {coding[:40]!r}; send plain JSON"
        )
    stream, chunk = request.stream(), None
    try:
        while chunk != b"":
            async with asyncio.timeout(limits.READ_S):
                chunk = await anext(stream)
            yield chunk
    except TimeoutError:
        raise HttpError(408, f"nothing of the body arrived for {limits.READ_S:.0f} s") from None
    except ClientDisconnect:
        raise HttpError(499, "request canceled") from None


def too_large(limit: int) -> BodyRefusedError:
    """The error for a body of more than `limit` bytes."""
    return BodyRefusedError(413, f"request body too large: at most {limit >> 20} MiB are taken")


def parse_object(raw: bytes) -> dict[str, Any]:
    """JSON text as a dict whose numbers are finite and within 64 bits and whose strings are valid Unicode."""
    if not raw.strip():
        raise HttpError(400, MISSING)
    check_structure(raw)
    try:
        value = json.loads(
            raw.decode("utf-8"), parse_int=_integer, parse_float=_finite, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise HttpError(400, f"invalid request body: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise HttpError(400, f"invalid request body: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"invalid request body: expected a JSON object, not {_kind(value)}")
    if SURROGATE.search(raw):
        _refuse_lone_surrogates(value)
    return value


def check_structure(raw: bytes) -> None:
    """Raises HttpError 400 for JSON with too deep nesting or too many values, without building any."""
    n_quotes = raw.count(b'"') - raw.count(b'\\"')  # at least one for each string, at most two
    marks = b"" if n_quotes > 4 * limits.JSON_VALUES else STRING.sub(b"", raw).translate(None, NOT_STRUCTURE)
    if n_quotes > 4 * limits.JSON_VALUES or len(marks) > limits.JSON_VALUES:
        raise HttpError(400, f"invalid request body: more than {limits.JSON_VALUES} values")
    depth = 0
    for mark in marks.replace(b",", b""):
        depth += 1 if mark in b"[{" else -1
        if depth > limits.JSON_DEPTH:
            raise HttpError(400, f"invalid request body: nested deeper than {limits.JSON_DEPTH} levels")


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << (limits.INT_BITS - 1)) <= (value := int(text)) < 1 << (limits.INT_BITS - 1):
        raise HttpError(400, f"invalid request body: {text[:24]} does not fit {limits.INT_BITS} bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise HttpError(400, f"invalid request body: {text[:24]} is not a finite number")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise HttpError(400, f"invalid request body: {text} is not JSON")


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise HttpError(400, "invalid request body: a surrogate without its pair") from None


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return kinds.get(type(value), "null")


def explain(error: ValidationError) -> str:
    """The first validation error as text: the field, and the rule."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    text = first["msg"].removeprefix("Value error, ").replace(" after validation, not", ", but has")
    return f"{where}: {text[:1].lower()}{text[1:]}" if where else text
