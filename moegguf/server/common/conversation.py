"""Answers requests of every API that generate text: reads a body, lets a model answer
its requests, and sends the reply, whole or as a stream.

Each API defines bodies that create `Request`s (`RequestBody`) and replies that encode
events (`Reply`). This module takes leases of models, runs the requests of a body, and
counts tokens for `/metrics`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from starlette.datastructures import State
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from moegguf.errors import MoeggufError
from moegguf.generate.images import has_images
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    Event,
    Request,
    Sampling,
    ToolCall,
    join,
    sampling_with,
)
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import (
    Adapters,
    Loading,
    Name,
    check_capabilities,
    loaded_of,
    look_up,
    scale_of,
)
from moegguf.server.common.replies import (
    LineResponse,
    Lines,
    WholeResponse,
    computed,
    end,
    event_line,
    json_line,
)
from moegguf.server.metrics import record
from moegguf.serving.clients import current_owner
from moegguf.serving.lease import Lease
from moegguf.settings import Settings

Json = dict[str, Any]


@dataclass
class Reply(ABC):
    """The reply to one body in the format of one API. It contains an answer to each
    request of the body."""

    body: Any
    entry: ModelEntry
    requests: Sequence[Request]

    # Sent at intervals, so that the stream stays open.
    ping_line: ClassVar[bytes] = b": ping\n\n"
    n_calls = 0  # number of tool calls sent so far in this answer

    def __post_init__(self) -> None:  # noqa: B027 (not every API needs it)
        """Prepares the state of an API's reply."""

    @property
    def name(self) -> str:
        """Returns the model's name as the body spells it, or the entry's name if the
        body has none."""
        return self.body.model or self.entry.name

    async def prepare(self, lease: Lease) -> None:  # noqa: B027 (most need nothing)
        """Reads from the model what the reply needs before the answer begins. The base
        class reads nothing."""

    async def keep(self) -> None:  # noqa: B027 (most keep nothing)
        """Stores a complete reply before its end is sent. The base class stores
        nothing."""

    @abstractmethod
    def lines(self, event: Event) -> bytes:
        """Returns the lines that a stream sends for an event."""

    @abstractmethod
    def add(self, delta: Delta, summary: AnswerSummary) -> None:
        """Adds a complete answer to the reply that `whole` returns."""

    @abstractmethod
    def whole(self) -> Any:
        """Returns the complete reply: one object, or a list of objects in APIs that
        allow this."""

    def error_line(self, error: HttpError, path: str) -> bytes:
        """Returns the line that ends a stream of a request at `path` with an error."""
        body = error.body(path)
        return event_line(body) if self.ping_line else json_line(body)

    def numbered(self, calls: Iterable[ToolCall]) -> Iterator[tuple[int, ToolCall]]:
        """Yields (index in the answer, tool call) for each of `calls` that is sent. If
        the body allows no parallel calls, only the first call of an answer is sent."""
        for call in calls:
            if self.n_calls and not self.body.parallel_calls:
                return
            self.n_calls += 1
            yield self.n_calls - 1, call


class EventReply(Reply):
    """A reply whose stream has named events: for the beginning, the growth and the end
    of each block. A block is thinking, text or a tool call."""

    started = False
    # Kind of the block that is still growing, "thinking" or "text"; "" if there is
    # none.
    open = ""

    # Each API's reply implements these methods. They return the events to send.
    # First events of the reply, created from the answer's first event.
    _begin: Callable[[Event], Iterator[Json]]
    # Beginning of a block, "thinking" or "text".
    _begin_block: Callable[[str], Iterator[Json]]
    _grow: Callable[[str, Delta], Iterator[Json]]  # more text in the open block
    # End of a block; the answer's summary if the answer ends here.
    _end_block: Callable[[str, AnswerSummary | None], Iterator[Json]]
    _call: Callable[[ToolCall], Iterator[Json]]  # the whole block of a tool call
    # Last events of the reply, which complete the object.
    _finish: Callable[[AnswerSummary], Iterator[Json]]

    def _events(self, event: Event) -> Iterator[Json]:
        if not self.started:
            self.started = True
            yield from self._begin(event)
        if isinstance(event, Delta):
            if event.thinking:
                yield from self._add("thinking", event.thinking, event)
            if event.text or (event.logprobs and not event.thinking):
                yield from self._add("text", event.text, event)
            for _, call in self.numbered(event.tool_calls):
                yield from self._close()
                yield from self._call(call)
        elif isinstance(event, AnswerSummary):
            yield from self._close(event)
            yield from self._finish(event)

    def _add(self, kind: str, text: str, delta: Delta) -> Iterator[Json]:
        if self.open != kind:
            yield from self._close()
            self.open = kind
            yield from self._begin_block(kind)
        yield from self._grow(text, delta)

    def _close(self, summary: AnswerSummary | None = None) -> Iterator[Json]:
        kind, self.open = self.open, ""
        if kind:
            yield from self._end_block(kind, summary)

    def lines(self, event: Event) -> bytes:
        """Returns the server-sent events for an event of the answer, each with its
        name."""
        return b"".join(event_line(item, item["type"]) for item in self._events(event))

    def add(self, delta: Delta, summary: AnswerSummary) -> None:
        """Creates the events of a stream and discards them: creating them builds the
        object that `whole` returns."""
        for event in (delta, summary):
            list(self._events(event))


class RequestBody(Loading):
    """A body of at most `limit` bytes for which a model generates answers."""

    limit: ClassVar[int] = limits.IMAGES_BODY_BYTES
    reply_kind: ClassVar[type[Reply]]
    # Ollama's name of the operation for which the body needs a model.
    operation: ClassVar[str] = "chat"

    model: Name
    stream: bool = False
    # Llama-server's field: LoRA scales, 0 if not listed; None: the server's scales.
    lora: Adapters | None = None

    @property
    def parallel_calls(self) -> bool:
        """True if an answer may have several tool calls."""
        return True

    async def look_up(self, state: State) -> None:
        """Reads stored data to which the body refers, such as an earlier response.
        Raises MoeggufError. The base class reads nothing."""

    @abstractmethod
    def requests(self, entry: ModelEntry, known: Details) -> Sequence[Request]:
        """Returns the requests of the body, with the entry's defaults, in the order in
        which their answers are sent. Raises MoeggufError."""

    async def respond(self, request: HttpRequest) -> Response:
        """Returns the response to an HTTP request that has this body. Raises
        MoeggufError."""
        state = request.app.state
        reply = await _new_reply(state, self)
        if not self.stream:
            return WholeResponse(_whole(state, reply))
        return LineResponse(_lines(state, reply), reply.error_line, reply.ping_line)

    async def whole_reply(self, state: State) -> Any:
        """Returns the complete reply as a JSON value, without a stream. Raises
        MoeggufError."""
        return await _whole(state, await _new_reply(state, self))


Kind = TypeVar("Kind", bound=RequestBody)


def conversation(path: str, kind: type[RequestBody]) -> Route:
    """Returns a route for POST requests at `path`. `kind` is the class of their bodies,
    and a model answers each body."""

    async def respond(request: HttpRequest) -> Response:
        body = await read_body(request, kind, kind.limit)
        return await body.respond(request)

    return Route(path, respond, methods=["POST"])


def about_prompt(
    path: str, kind: type[Kind], what: str, key: str, **more: str
) -> Route:
    """Returns a route for POST requests at `path`. The reply is a fact about a
    conversation's prompt; no answer is generated.

    `what` is "count" for the number of tokens, or "render" for the text that the chat
    template produces. The reply has this value under `key`, and the fields `more`. The
    endpoint loads the model if needed, but does not wait for running answers.
    """

    async def compute(request: HttpRequest, body: Kind) -> Json:
        entry, requests = await _read_requests(request.app.state, body)
        async with request.app.state.manager.lease(
            entry, body.overrides(), will_answer=False
        ) as lease:
            return {**more, key: await lease.value(what, request=requests[0])}

    return computed(path, kind, compute, kind.limit)


async def _new_reply(state: State, body: RequestBody) -> Reply:
    return body.reply_kind(body, *await _read_requests(state, body))


async def _read_requests(
    state: State, body: RequestBody
) -> tuple[ModelEntry, Sequence[Request]]:
    """Returns the entry of the body's model and the body's requests. Each request gets
    the hash of the client's API key, the scale of the LoRA adapter and, if it has none,
    the server's thinking budget. Raises MoeggufError, for example if the model lacks a
    capability that a request needs."""
    entry, known = await look_up(state, body.model)
    await body.look_up(state)
    client_key = current_owner.get()
    owner = "" if state.settings.share_contexts else client_key
    lora_scale = (
        (state.lora_scales or {}).get(entry.name)
        if body.lora is None
        else scale_of(entry, body.lora)
    )
    requests = [
        replace(
            request,
            client_key=client_key,
            owner=owner,
            sampling=_with_budget(request.sampling, state.settings),
            lora_scale=lora_scale,
        )
        for request in body.requests(entry, known)
    ]
    first = requests[0]
    needs = {
        body.operation: True,
        "insert": first.suffix is not None,
        "vision": has_images(first.messages or ()),
        "tools": bool(first.tools),
        "thinking": bool(first.think),
    }
    check_capabilities(entry, known, needs)
    return entry, requests


def _with_budget(sampling: Sampling, settings: Settings) -> Sampling:
    """Returns the sampling parameters. If the thinking budget, or the message for its
    end, is not set, the value comes from the server's settings."""
    names = "reasoning_budget_tokens", "reasoning_budget_message"
    defaults = {
        name: getattr(settings, name)
        for name in names
        if getattr(sampling, name) in (None, "")
    }
    return sampling_with(sampling, defaults)


async def _answers(state: State, reply: Reply) -> AsyncGenerator[Event]:
    """Yields the events of all requests of a reply, one request after another. An
    `AnswerSummary` ends the events of each.

    Several of these requests may be processed at once, up to the model's `n_parallel`.
    After each request, waiting requests of other clients get their turn. Closing the
    generator stops the answers.
    """
    body, entry, requests = reply.body, reply.entry, reply.requests
    queues: list[asyncio.Queue[Event | Exception]] = [asyncio.Queue() for _ in requests]
    left = iter(zip(requests, queues, strict=True))
    use = entry, body.overrides(), body.keep_alive_s()

    async def compute(lease: Lease) -> None:
        for request, queue in left:
            try:
                async with aclosing(
                    lease.answer(request, stream=body.stream)
                ) as events:
                    async for event in events:
                        queue.put_nowait(event)
            except Exception as error:
                queue.put_nowait(error)
                return

    async def compute_beside() -> None:
        with suppress(MoeggufError):  # the other leases then process all requests
            async with state.manager.lease(*use) as lease:
                await compute(lease)

    async with state.manager.lease(*use) as lease:
        await reply.prepare(lease)
        loaded = loaded_of(state, entry)
        n_beside = min(loaded.n_parallel if loaded else 1, len(requests)) - 1
        tasks = [
            asyncio.create_task(compute(lease)),
            *(asyncio.create_task(compute_beside()) for _ in range(n_beside)),
        ]
        try:
            for queue in queues:
                event = None
                while not isinstance(event, AnswerSummary):
                    event = await queue.get()
                    if isinstance(event, Exception):
                        raise event
                    record(state, entry.name, event)
                    yield event
        finally:
            await end(*tasks)


async def _lines(state: State, reply: Reply) -> Lines:
    async with aclosing(_answers(state, reply)) as events:
        async for event in events:
            lines = reply.lines(event)
            if isinstance(event, AnswerSummary):
                await reply.keep()
            if lines:
                yield lines


async def _whole(state: State, reply: Reply) -> Any:
    deltas: list[Delta] = []
    async with aclosing(_answers(state, reply)) as events:
        async for event in events:
            if isinstance(event, Delta):
                deltas.append(event)
            elif isinstance(event, AnswerSummary):
                reply.add(join(deltas), event)
                deltas = []
    await reply.keep()
    return reply.whole()
