"""What every API does with a question: reads it, runs its generations, and sends the reply, whole or streamed.

An API has a body that makes `GenerationRequest`s (`Question`), and encodes events (`Reply`). Neither waits: leases,
loops, errors in mid stream, disconnects and counts for `/metrics` are here.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from moegguf.generate.request import Delta, GenerationRequest, ToolCall
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError, http_error
from moegguf.server.common.lookup import check_conversation, look_up
from moegguf.server.common.options import Loading
from moegguf.server.common.streams import LineResponse, Lines, SseResponse, WholeResponse, event_line
from moegguf.server.metrics import record
from moegguf.serving.events import Done, Event, join

if TYPE_CHECKING:
    from moegguf.serving.background import BackgroundLeases
    from moegguf.serving.manager import ModelManager

Json = dict[str, Any]

BACKGROUND = (b"priority", b"u=7")  # RFC 9218: the urgency of what nobody waits for
_BACKGROUND = re.compile(r"(^|,)\s*u=7\s*(,|;|$)")


class Question(Loading):
    """A body that asks for answers."""

    stream: bool | None = None

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The name of the model."""

    @property
    def streams(self) -> bool:
        """Whether the reply is streamed."""
        return bool(self.stream)

    @property
    def parallel_calls(self) -> bool:
        """Whether an answer may have several tool calls; else only the first is sent."""
        return True

    @abstractmethod
    def generations(self, entry: ModelEntry, known: Details) -> Sequence[GenerationRequest]:
        """What the model is asked, in turn, with the entry's defaults. Raises MoeggufError."""


class Reply(ABC):
    """The answers to one question in the form of an API."""

    response: ClassVar[type[LineResponse]] = SseResponse  # of a stream
    end: ClassVar[bytes] = b""  # the last line of a stream
    n_calls = 0

    @abstractmethod
    def lines(self, event: Event) -> bytes:
        """What a stream sends for an event."""

    @abstractmethod
    def add(self, delta: Delta, done: Done) -> None:
        """Takes an answer for `whole`."""

    @abstractmethod
    def whole(self) -> Json:
        """The reply as one object."""

    def failure(self, error: HttpError) -> bytes:
        """What ends a stream after an error in place of the response's `error_line`; empty for that."""
        return b""

    def numbered(self, calls: Iterable[ToolCall]) -> Iterator[tuple[int, ToolCall]]:
        """Tool calls with their number among all of the reply."""
        for call in calls:
            self.n_calls += 1
            yield self.n_calls - 1, call


class EventReply(Reply):
    """A reply in named events that tell the beginning, growth and end of each block: thinking, text or call, in the
    order in which they come. `open`: the kind of the block that still grows."""

    started = False
    open = ""

    @abstractmethod
    def begin(self, event: Event) -> Iterator[Json]:
        """The events before all others; `event`: the first of the answer."""

    @abstractmethod
    def begin_block(self, kind: str) -> Iterator[Json]:
        """A new block, "thinking" or "text"."""

    @abstractmethod
    def grow(self, text: str, delta: Delta) -> Iterator[Json]:
        """More text of the open block."""

    @abstractmethod
    def end_block(self, kind: str, done: Done | None = None) -> Iterator[Json]:
        """The end of a block; `done`: the answer ends with it."""

    @abstractmethod
    def call(self, call: ToolCall) -> Iterator[Json]:
        """A tool call as a block."""

    @abstractmethod
    def finish(self, done: Done) -> Iterator[Json]:
        """The events after all blocks, which complete the object."""

    def stream(self, event: Event) -> Iterator[Json]:
        """The events, each with its `type`, for one of the answer."""
        if not self.started:
            self.started = True
            yield from self.begin(event)
        if isinstance(event, Delta):
            yield from self._blocks(event)
        elif isinstance(event, Done):
            yield from self._close(event)
            yield from self.finish(event)

    def _blocks(self, delta: Delta) -> Iterator[Json]:
        if delta.thinking:
            yield from self._add("thinking", delta.thinking, delta)
        if delta.text or (delta.logprobs and not delta.thinking):
            yield from self._add("text", delta.text, delta)
        for _, call in self.numbered(delta.tool_calls):
            yield from self._close()
            yield from self.call(call)

    def _add(self, kind: str, text: str, delta: Delta) -> Iterator[Json]:
        if self.open != kind:
            yield from self._close()
            self.open = kind
            yield from self.begin_block(kind)
        yield from self.grow(text, delta)

    def _close(self, done: Done | None = None) -> Iterator[Json]:
        kind, self.open = self.open, ""
        if kind:
            yield from self.end_block(kind, done)

    def lines(self, event: Event) -> bytes:
        """Server-sent events with their names."""
        return b"".join(event_line(item["type"], item) for item in self.stream(event))

    def add(self, delta: Delta, done: Done) -> None:
        """As a stream, of which only the object is kept."""
        for _ in (*self.stream(delta), *self.stream(done)):
            pass


Kind = TypeVar("Kind", bound=Question)
Asked = tuple[Kind, ModelEntry, Sequence[GenerationRequest]]


async def read_question(request: Request, kind: type[Kind], limit: int = limits.IMAGES_BODY_BYTES) -> Asked[Kind]:
    """The body, the model's entry, and what the model is asked. Raises MoeggufError."""
    body = await read_body(request, kind, limit)
    return await understood(request, body)


async def understood(request: Request, body: Kind) -> Asked[Kind]:
    """The same for a body that has been read."""
    entry, known = await look_up(request.app.state.catalog, body.model_name)
    generations = body.generations(entry, known)
    check_conversation(entry, known, generations[0])
    return body, entry, generations


def leases_of(request: Request) -> ModelManager | BackgroundLeases:
    """What gives a request the use of a model: `lease`. With `Priority: u=7` others come first."""
    state = request.app.state
    return state.background if _BACKGROUND.search(request.headers.get("priority", "")) else state.manager


async def answers(
    request: Request, body: Question, entry: ModelEntry, generations: Sequence[GenerationRequest]
) -> AsyncGenerator[Event]:
    """The events of each generation in turn; a `Done` ends each. Closing it stops the answer. Between two generations
    other requests have their turn."""
    async with leases_of(request).lease(entry, body.overrides(), body.keep_alive_s()) as lease:
        for generation in generations:
            has_call = False
            async with aclosing(lease.answer(generation, stream=body.streams)) as events:
                async for event in events:
                    if isinstance(event, Delta) and event.tool_calls and not body.parallel_calls:
                        event = replace(event, tool_calls=() if has_call else event.tool_calls[:1])
                        has_call = True
                    record(request.app.state, entry.name, event)
                    yield event


def respond(body: Question, events: AsyncGenerator[Event], reply: Reply) -> Response:
    """The reply with the answers in `events`."""
    return reply.response(_lines(events, reply)) if body.streams else WholeResponse(_whole(events, reply))


async def _lines(events: AsyncGenerator[Event], reply: Reply) -> Lines:
    try:
        async with aclosing(events):
            async for event in events:
                if lines := reply.lines(event):
                    yield lines
        if reply.end:
            yield reply.end
    except Exception as error:
        if not (line := reply.failure(http_error(error))):
            raise
        yield line


async def _whole(events: AsyncGenerator[Event], reply: Reply) -> Json:
    deltas: list[Delta] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                deltas.append(event)
            elif isinstance(event, Done):
                reply.add(join(deltas), event)
                deltas = []
    return reply.whole()


async def count_tokens(request: Request, kind: type[Question], encode: Callable[[int], Json]) -> Response:
    """The tokens of a conversation's prompt, through the model's own template; loads the model if needed, and does not
    wait for running answers."""
    body, entry, (generation,) = await read_question(request, kind)

    async def work() -> Json:
        async with request.app.state.manager.lease(entry, body.overrides(), will_answer=False) as lease:
            return encode(await lease.count(generation))

    return WholeResponse(work())
