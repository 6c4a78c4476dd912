"""POST /v1/messages: the next message of a conversation; /v1/messages/count_tokens counts its tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from moegguf.generate.images import has_images
from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import ModelEntry
from moegguf.server.anthropic.objects import MessageReply
from moegguf.server.anthropic.schema import CountBody, MessagesBody
from moegguf.server.common.answering import answer_events, count_tokens
from moegguf.server.common.body import read_body
from moegguf.server.common.lookup import check_capabilities, look_up
from moegguf.server.common.options import keep_alive_seconds
from moegguf.server.common.streams import Lines, SseResponse, WholeResponse, event_line
from moegguf.serving.events import Event

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
    return MessageStream(_lines(events, reply)) if body.stream else WholeResponse(_whole(events, reply))


async def count(request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    body, entry, generation = await _read(request, CountBody)

    async def work() -> dict[str, Any]:
        return {"input_tokens": await count_tokens(request, entry, generation, body.overrides())}

    return WholeResponse(work())


async def _read(request: Request, kind: type[Kind]) -> tuple[Kind, ModelEntry, GenerationRequest]:
    body = await read_body(request, kind)
    entry, known = await look_up(request.app.state.catalog, body.model)
    generation = body.generation(entry, thinks="thinking" in known.capabilities)
    needs = {
        "chat": True,
        "vision": has_images(generation.messages or ()),
        "tools": bool(generation.tools) and generation.tool_choice != "none",
    }
    check_capabilities(entry, known, needs)
    return body, entry, generation


class MessageStream(SseResponse):
    """The events of a message."""

    def error_line(self, body: Mapping[str, Any]) -> bytes:
        """The event with the error."""
        return event_line("error", body)

    async def ping(self, send: Send) -> None:
        """Sends an event that clients ignore."""
        await self._send(send, event_line("ping", {"type": "ping"}))


async def _lines(events: AsyncGenerator[Event], reply: MessageReply) -> Lines:
    async with aclosing(events):
        async for event in events:
            if lines := b"".join(event_line(item["type"], item) for item in reply.stream(event)):
                yield lines


async def _whole(events: AsyncGenerator[Event], reply: MessageReply) -> dict[str, Any]:
    async with aclosing(events):
        async for event in events:
            for _ in reply.stream(event):
                pass  # the last one completes the message
    return reply.whole


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count, methods=["POST"]),
]
