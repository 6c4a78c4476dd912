"""Replies of chat and completion: runs the generation and sends its events, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moegguf.generate.request import Delta, GenerationRequest, PromptProgress
from moegguf.models.entry import ModelEntry
from moegguf.server.common.answering import answer_events
from moegguf.server.common.options import keep_alive_seconds
from moegguf.server.common.streams import Lines, SseResponse, WholeResponse, dumps
from moegguf.server.openai.objects import ChatReply, CompletionReply
from moegguf.server.openai.schema import GenerationBody
from moegguf.serving.events import Done, Event

Reply = ChatReply | CompletionReply


def respond(body: GenerationBody, events: AsyncGenerator[Event], reply: Reply) -> Response:
    """The reply with the answers in `events`, streamed if `stream` is true."""
    if body.stream:
        return SseResponse(_lines(events, reply, progress=bool(body.return_progress)))
    return WholeResponse(_whole(events, reply))


def events_of(
    request: Request, body: GenerationBody, entry: ModelEntry, *generations: GenerationRequest
) -> AsyncGenerator[Event]:
    """The events of each generation, as the body asks for them."""
    return answer_events(
        request,
        entry,
        *generations,
        overrides=body.overrides(),
        keep_alive_s=keep_alive_seconds(body.keep_alive),
        stream=bool(body.stream),
    )


async def _lines(events: AsyncGenerator[Event], reply: Reply, *, progress: bool) -> Lines:
    started = False
    async with aclosing(events):
        async for event in events:
            first = [] if started else [reply.first()]  # before the last chunk of a choice ends it
            if items := list(_items(reply, event, progress=progress)):
                yield b"".join(_sse(dumps(item)) for item in [*first, *items])
                started = not isinstance(event, Done)
    yield _sse("[DONE]")


def _sse(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def _items(reply: Reply, event: Event, *, progress: bool) -> Iterator[dict[str, Any]]:
    """The chunks of an event."""
    if isinstance(event, Delta):
        yield from reply.chunks(event)
    elif isinstance(event, Done):
        yield from reply.last(event)
    elif isinstance(event, PromptProgress) and progress:
        yield reply.progress(event)


async def _whole(events: AsyncGenerator[Event], reply: Reply) -> dict[str, Any]:
    deltas: list[Delta] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                deltas.append(event)
            elif isinstance(event, Done):
                reply.add(deltas, event)
                deltas = []
    return reply.whole()
