"""Runs generations for a request: their events, from the model's queue to the statistics of `/metrics` and a reply."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import ModelEntry
from moegguf.server.common.streams import Lines, event_line
from moegguf.server.metrics import record
from moegguf.serving.events import Event, LoadOverrides

if TYPE_CHECKING:
    from moegguf.serving.background import BackgroundLeases
    from moegguf.serving.manager import ModelManager

BACKGROUND = (b"priority", b"u=7")  # RFC 9218: the urgency of what nobody waits for
_BACKGROUND = re.compile(r"(^|,)\s*u=7\s*(,|;|$)")


def leases_of(request: Request) -> ModelManager | BackgroundLeases:
    """What gives a request the use of a model: `lease`. With `Priority: u=7` others come first."""
    state = request.app.state
    return state.background if _BACKGROUND.search(request.headers.get("priority", "")) else state.manager


async def answer_events(
    request: Request,
    entry: ModelEntry,
    *generations: GenerationRequest,
    overrides: LoadOverrides,
    keep_alive_s: float | None,
    stream: bool,
) -> AsyncGenerator[Event]:
    """The events of each generation in turn; a `Done` ends each. Without `stream` each has one `Delta`.

    Closing it stops the answer. Between two generations other requests have their turn.
    """
    async with leases_of(request).lease(entry, overrides, keep_alive_s) as lease:
        for generation in generations:
            async with aclosing(lease.answer(generation, stream=stream)) as events:
                async for event in events:
                    record(request.app.state, entry.name, event)
                    yield event


async def count_tokens(
    request: Request, entry: ModelEntry, generation: GenerationRequest, overrides: LoadOverrides
) -> int:
    """The tokens of a conversation's prompt, through the model's own template; loads the model if needed, and does not
    wait for running answers."""
    manager: ModelManager = request.app.state.manager
    async with manager.lease(entry, overrides, will_answer=False) as lease:
        return await lease.count(generation)


class Reply(Protocol):
    """A reply in named events, of which the last one completes `whole`."""

    def stream(self, event: Event) -> Iterable[dict[str, Any]]:
        """The events, each with its `type`, for one of an answer."""

    @property
    def whole(self) -> dict[str, Any]:
        """The reply as one object."""


async def event_lines(events: AsyncGenerator[Event], reply: Reply) -> Lines:
    """The reply as server-sent events."""
    async with aclosing(events):
        async for event in events:
            if lines := b"".join(event_line(item["type"], item) for item in reply.stream(event)):
                yield lines


async def whole_object(events: AsyncGenerator[Event], reply: Reply) -> dict[str, Any]:
    """The reply as one object."""
    async with aclosing(events):
        async for event in events:
            for _ in reply.stream(event):
                pass  # the last one completes the object
    return reply.whole
