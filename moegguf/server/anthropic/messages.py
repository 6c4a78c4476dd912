"""POST /v1/messages: the next message of a conversation; /v1/messages/count_tokens counts its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import ModelEntry
from moegguf.server.anthropic.objects import MessageReply
from moegguf.server.anthropic.schema import CountBody, MessagesBody
from moegguf.server.common import limits
from moegguf.server.common.answering import answer_events, count_tokens, event_lines, whole_object
from moegguf.server.common.body import read_body
from moegguf.server.common.lookup import check_conversation, look_up
from moegguf.server.common.options import keep_alive_seconds
from moegguf.server.common.streams import SseResponse, WholeResponse, event_line

Kind = TypeVar("Kind", bound=CountBody)


async def messages(request: Request) -> Response:
    """The next message, whole or streamed."""
    body, entry, generation = await _read(request, MessagesBody)
    reply = MessageReply(entry.name, body.max_tokens, parallel=body.parallel_calls)
    events = answer_events(
        request,
        entry,
        generation,
        overrides=body.overrides(),
        keep_alive_s=keep_alive_seconds(body.keep_alive),
        stream=bool(body.stream),
    )
    return MessageStream(event_lines(events, reply)) if body.stream else WholeResponse(whole_object(events, reply))


async def count(request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    body, entry, generation = await _read(request, CountBody)

    async def work() -> dict[str, Any]:
        return {"input_tokens": await count_tokens(request, entry, generation, body.overrides())}

    return WholeResponse(work())


async def _read(request: Request, kind: type[Kind]) -> tuple[Kind, ModelEntry, GenerationRequest]:
    body = await read_body(request, kind, limits.IMAGES_BODY_BYTES)
    entry, known = await look_up(request.app.state.catalog, body.model)
    generation = body.generation(entry, thinks="thinking" in known.capabilities)
    check_conversation(entry, known, generation)
    return body, entry, generation


class MessageStream(SseResponse):
    """The events of a message."""

    def error_line(self, body: Mapping[str, Any]) -> bytes:
        """The event with the error."""
        return event_line("error", body)

    async def ping(self, send: Send) -> None:
        """Sends an event that clients ignore."""
        await self._send(send, event_line("ping", {"type": "ping"}))


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count, methods=["POST"]),
]
