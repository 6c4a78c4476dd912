"""Replies that take long: lines as they come (NDJSON, server-sent events), or one JSON object at the end.

Each stops its work when the client disconnects. An error before the first byte gets its own status; after that it
becomes the last line. Does not know the content of the lines.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from moegguf.errors import BusyError
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError, error_response, http_error

Lines = AsyncGenerator[bytes, None]
ErrorLine = Callable[[HttpError, str], bytes]
Kind = TypeVar("Kind", bound=BaseModel)


def dumps(value: Any) -> str:
    """Compact JSON. Raises ValueError on NaN, which is not JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_line(value: Any) -> bytes:
    """An object for a LineResponse."""
    return dumps(value).encode() + b"\n"


def event_line(data: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event, with a name or without."""
    return f"{f'event: {name}' if name else ''}\ndata: {dumps(data)}\n\n".lstrip().encode()


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class CancellableResponse(Response):
    """A response whose `work` is cancelled when the client disconnects. `ping_line` is sent while nothing else is, in
    formats that have such a line."""

    ping_line = b""

    def __init__(self) -> None:
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self.work(scope, receive, send))
        disconnect = asyncio.create_task(self._wait_for_disconnect(receive, send))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server is shutting down, and has waited long enough
            await _end(work, disconnect)
            await self.fail(BusyError("the server is shutting down; try again later."), scope, receive, send)
            return
        finally:
            await _end(work, disconnect)
        if not work.cancelled():
            work.result()

    async def fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends an error in place of the reply."""
        await error_response(error, scope["path"])(scope, receive, send)

    @abstractmethod
    async def work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Computes and sends the reply."""

    async def _wait_for_disconnect(self, receive: Receive, send: Send) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            try:
                async with asyncio.timeout(limits.PING_S if self.ping_line else None):
                    message = await receive()
            except TimeoutError:
                await self._send(send, self.ping_line)

    async def _send(self, send: Send, line: bytes, more: bool = True) -> None:
        """Sends a part of the body."""
        await send({"type": "http.response.body", "body": line, "more_body": more})


class WholeResponse(CancellableResponse):
    """The object that `answer` computes, as JSON."""

    media_type = "application/json; charset=utf-8"

    def __init__(self, answer: Awaitable[Any]) -> None:
        super().__init__()
        self._answer = answer

    async def work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Awaits the answer, then sends it or its error."""
        try:
            response: Response = JSONResponse(await self._answer, media_type=self.media_type)
        except Exception as error:
            response = error_response(error, scope["path"])
        await response(scope, receive, send)


def computed(
    path: str, kind: type[Kind], compute: Callable[[Request, Kind], Awaitable[Any]], limit: int = limits.BODY_BYTES
) -> Route:
    """An endpoint that replies with the object that is computed of a body, unless the client leaves before."""

    async def respond(request: Request) -> Response:
        return WholeResponse(compute(request, await read_body(request, kind, limit)))

    return Route(path, respond, methods=["POST"])


class LineResponse(CancellableResponse):
    """The items of `lines`, each sent at once: JSON objects, or with a `ping_line` server-sent events, each with its
    blank line. `lines` is always closed. `error_line`: the last one after an error behind the first byte, by default
    its JSON."""

    def __init__(self, lines: Lines, error_line: ErrorLine | None = None, ping_line: bytes = b"") -> None:
        super().__init__()
        self._lines = lines
        self._error_line = error_line or (lambda error, path: json_line(error.body(path)))
        self._started = False
        self.ping_line = ping_line
        self.status_code = 200
        self.media_type = "text/event-stream; charset=utf-8" if ping_line else "application/x-ndjson"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the lines, then a line for an error."""
        try:
            async with aclosing(self._lines) as lines:
                async for line in lines:
                    await self._send(send, line)
        except Exception as error:
            return await self.fail(error, scope, receive, send)
        await self._send(send, b"", more=False)

    async def fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends an error in place of the reply, or of the rest of it."""
        if not self._started:
            return await super().fail(error, scope, receive, send)
        await self._send(send, self._error_line(http_error(error), scope["path"]))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, line: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await super()._send(send, line, more)
