"""HTTP responses that send a stream of lines (NDJSON or server-sent events) or one JSON
value, and parts of JSON objects that several APIs share.

Each response stops its work when the client disconnects. An error before the first byte
sets the HTTP status. A later error becomes the last line of the stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from moegguf.engine.stats import Stats
from moegguf.engine.vocabulary import to_utf8
from moegguf.errors import BusyError
from moegguf.generate.request import AnswerSummary, TokenChance, TokenLogprob
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError, error_response, http_error

# Lowest log probability that is sent; it also replaces minus infinity, which JSON
# cannot express.
MIN_LOGPROB = -9999.0

Lines = AsyncGenerator[bytes, None]
ErrorLine = Callable[[HttpError, str], bytes]
Kind = TypeVar("Kind", bound=BaseModel)


def dumps(value: Any) -> str:
    """Returns a value as compact JSON. Raises ValueError for NaN and infinity, which
    JSON cannot express."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_line(value: Any) -> bytes:
    """Returns a value as JSON in UTF-8 with a newline at the end: one line of a
    LineResponse."""
    return to_utf8(dumps(value)) + b"\n"


def event_line(data: Mapping[str, Any], name: str = "") -> bytes:
    """Returns a server-sent event in UTF-8 whose data is `data` as JSON. If `name` is
    empty, the event has no name."""
    return to_utf8(
        f"{f'event: {name}' if name else ''}\ndata: {dumps(data)}\n\n".lstrip()
    )


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class LineResponse(Response):
    """A response that sends each item of `lines` as soon as `lines` yields it. The
    content type is text/event-stream if there is a `ping_line`, and
    application/x-ndjson otherwise.

    A `ping_line` is sent every PING_S seconds, so that the connection stays open. After
    an error in mid-stream, `error_line` creates the last line; by default, this line is
    the error's JSON. `lines` is closed at the end, even if the client disconnects.
    """

    ping_line = b""

    def __init__(
        self, lines: Lines, error_line: ErrorLine | None = None, ping_line: bytes = b""
    ) -> None:
        self.background = None
        self._lines = lines
        self._error_line = error_line or (
            lambda error, path: json_line(error.body(path))
        )
        self._started = False
        self.ping_line = ping_line
        self.status_code = 200
        self.media_type = (
            "text/event-stream; charset=utf-8" if ping_line else "application/x-ndjson"
        )
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        disconnect = asyncio.create_task(self._wait_for_disconnect(receive, send))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The server is shutting down and no longer waits for running answers.
            await end(work, disconnect)
            await self._fail(
                BusyError("the server is shutting down; try again later."),
                scope,
                receive,
                send,
            )
            return
        finally:
            await end(work, disconnect)
        if not work.cancelled():
            work.result()

    async def _wait_for_disconnect(self, receive: Receive, send: Send) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            try:
                async with asyncio.timeout(limits.PING_S if self.ping_line else None):
                    message = await receive()
            except TimeoutError:
                await self._send(send, self.ping_line)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._lines) as lines:
                async for line in lines:
                    await self._send(send, line)
        except Exception as error:
            return await self._fail(error, scope, receive, send)
        await self._send(send, b"", more=False)

    async def _fail(
        self, error: Exception, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._started:
            return await error_response(error, scope["path"])(scope, receive, send)
        await self._send(send, self._error_line(http_error(error), scope["path"]))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, line: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": line, "more_body": more})


class WholeResponse(LineResponse):
    """A response whose body is the result of `answer` as JSON. `answer` is cancelled if
    the client disconnects."""

    _started = False

    def __init__(self, answer: Awaitable[Any]) -> None:
        self.background = None
        self._answer = answer

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(
                to_utf8(dumps(await self._answer)),
                media_type="application/json; charset=utf-8",
            )
        except Exception as error:
            response = error_response(error, scope["path"])
        await response(scope, receive, send)


def computed(
    path: str,
    kind: type[Kind],
    compute: Callable[[HttpRequest, Kind], Awaitable[Any]],
    limit: int = limits.BODY_BYTES,
) -> Route:
    """Returns a route for POST requests at `path`. The body of a request must be a
    `kind` and have at most `limit` bytes. The reply is the value that `compute` returns
    for the body, as JSON. `compute` is cancelled if the client disconnects."""

    async def respond(request: HttpRequest) -> Response:
        return WholeResponse(compute(request, await read_body(request, kind, limit)))

    return Route(path, respond, methods=["POST"])


def to_ns(seconds: float) -> int:
    """Converts seconds to whole nanoseconds, the unit of durations in Ollama's API."""
    return round(seconds * 1e9)


def logprob_objects(
    logprobs: Iterable[TokenLogprob], *, with_ids: bool = False
) -> list[dict[str, Any]]:
    """Returns one JSON object per token, as in the `logprobs` of OpenAI's chat replies.
    `with_ids` adds the ids of tokens. If a character is split between tokens, each
    object has only the bytes of its own token."""

    def token_object(chance: TokenChance) -> dict[str, Any]:
        number = {"id": chance.token} if with_ids else {}
        logprob = max(chance.logprob, MIN_LOGPROB)
        return {
            **number,
            "token": chance.text,
            "logprob": logprob,
            "bytes": list(chance.piece),
        }

    return [
        {
            **token_object(each),
            "top_logprobs": [token_object(other) for other in each.top],
        }
        for each in logprobs
    ]


def moe_object(stats: Stats) -> dict[str, Any]:
    """Returns the expert statistics that moegguf adds to replies in other APIs'
    formats. These are the hit rate, the number of lookups, the bytes read in total and
    per token, and the stall time in ns."""
    return {
        "hit_rate": round(stats.hit_rate, 6),
        "lookups": stats.lookups,
        "bytes_read": stats.bytes_read,
        "bytes_per_token": round(stats.bytes_per_token),
        "stall_duration": to_ns(stats.stall_s),
    }


def present(**fields: Any) -> dict[str, Any]:
    """Returns only the fields that are neither empty nor zero. Ollama's Go code omits
    empty fields and zeros."""
    return {name: value for name, value in fields.items() if value}


def cut_object(summary: AnswerSummary) -> dict[str, int]:
    """Returns the counts of messages and tokens that were cut from a prompt to fit the
    context, and the number of context shifts. Zeros are left out."""
    return present(
        cut_messages=summary.cut_messages,
        cut_tokens=summary.cut_tokens,
        context_shifts=summary.n_shifts,
    )


def usage(
    n_input: int, n_cached: int, n_output: int, n_thinking: int, **details: int
) -> dict[str, Any]:
    """Returns the object `usage` of OpenAI's responses and batches. `n_input` includes
    the `n_cached` tokens."""
    return {
        "input_tokens": n_input,
        "input_tokens_details": {"cached_tokens": n_cached, **details},
        "output_tokens": n_output,
        "output_tokens_details": {"reasoning_tokens": n_thinking},
        "total_tokens": n_input + n_output,
    }


def page(
    request: HttpRequest,
    objects: Sequence[dict[str, Any]],
    most: int,
    default: int,
    suffix: str = "",
) -> dict[str, Any]:
    """Returns one page of a list as a JSON object, with at most `limit` of `objects`.
    The page begins after the object with the id `after`, or ends before the object with
    the id `before`. Without either id, the page is the beginning of the list.

    `limit`, `after` and `before` come from the request's query, where the names of the
    ids end with `suffix`. `default` and `most` are the default and the maximum of
    `limit`. Raises HttpError 400 for an invalid `limit`, for an id that is not in the
    list, and if both ids are given.
    """
    query = request.query_params
    text = query.get("limit") or str(default)
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    limit = int(text) if is_number else 0
    if not 1 <= limit <= most:
        raise HttpError(
            f"limit: must be a whole number from 1 to {most}, but is {text[:40]!r}"
        )
    after, before = query.get(f"after{suffix}"), query.get(f"before{suffix}")
    if after and before:
        raise HttpError(
            f"after{suffix} and before{suffix} cannot be given together; leave one out"
        )
    rest = objects
    if here := after or before:
        ids = [each["id"] for each in objects]
        if here not in ids:
            raise HttpError(
                f"{'after' if after else 'before'}{suffix}: there is no {here:.80} in this list; give an id from"
                " the list"
            )
        at = ids.index(here)
        rest = objects[at + 1 :] if after else objects[:at]
    data = rest[-limit:] if before else rest[:limit]
    return {
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rest) > len(data),
    }
