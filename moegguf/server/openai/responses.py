"""POST /v1/responses: the next items of a conversation; /v1/responses/input_tokens counts its tokens.

Nothing is stored: an id of a response cannot be looked up later.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.answering import count_tokens, event_lines, whole_object
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import http_error
from moegguf.server.common.lookup import check_conversation, look_up
from moegguf.server.common.streams import Lines, SseResponse, WholeResponse, event_line
from moegguf.server.openai.answers import events_of
from moegguf.server.openai.responses_objects import ResponseReply
from moegguf.server.openai.responses_schema import ResponsesBody
from moegguf.serving.events import Event


async def responses(request: Request) -> Response:
    """The next items, whole or streamed."""
    body, entry, generation = await _read(request)
    reply = ResponseReply(body, entry.name, generation)
    events = events_of(request, body, entry, generation)
    return ResponsesStream(_lines(events, reply)) if body.stream else WholeResponse(whole_object(events, reply))


async def input_tokens(request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    body, entry, generation = await _read(request)

    async def count() -> dict[str, Any]:
        n_tokens = await count_tokens(request, entry, generation, body.overrides())
        return {"object": "response.input_tokens", "input_tokens": n_tokens}

    return WholeResponse(count())


async def _read(request: Request) -> tuple[ResponsesBody, ModelEntry, GenerationRequest]:
    body = await read_body(request, ResponsesBody, limits.IMAGES_BODY_BYTES)
    entry, known = await look_up(request.app.state.catalog, body.model)
    generation = body.generation(entry)
    check_conversation(entry, known, generation)
    return body, entry, generation


class ResponsesStream(SseResponse):
    """The events of a response."""

    def error_line(self, body: Mapping[str, Any]) -> bytes:
        """The event for an error outside the answer, such as the end of the server."""
        error = body["error"]
        fields = {"code": error["code"], "message": error["message"], "param": None, "sequence_number": 0}
        return event_line("error", {"type": "error", **fields})


async def _lines(events: AsyncGenerator[Event], reply: ResponseReply) -> Lines:
    try:
        async with aclosing(event_lines(events, reply)) as lines:
            async for line in lines:
                yield line
    except Exception as error:
        if not reply.started:
            raise
        failed = reply.failed(http_error(error))
        yield event_line(failed["type"], failed)


routes = [
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
]
