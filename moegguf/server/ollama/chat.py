"""/api/chat and /api/generate: from a body to a `GenerationRequest`, and from its deltas to Ollama's objects.

What the model's name adds (system, messages, parameters, template) counts where the request says nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.generate.request import GenerationRequest, Message
from moegguf.models.entry import Entry
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import check_able, find, look_up
from moegguf.server.common.options import Options, keep_alive_s, options_of
from moegguf.server.common.streams import Lines, NdjsonResponse, WholeResponse
from moegguf.server.metrics import note
from moegguf.server.ollama.replies import ChatReply, GenerateReply, Reply
from moegguf.server.ollama.schema import Answering, ChatMessage, ChatRequest, GenerateRequest
from moegguf.serving.events import Done, Event

if TYPE_CHECKING:
    from moegguf.serving.manager import ModelManager


async def chat(request: Request) -> Response:
    """Answers the last of some messages; without any it loads the model, or lets it go."""
    begun_ns = time.perf_counter_ns()
    body = await read_body(request, ChatRequest)
    if not body.messages:
        return await load_only(request, body, ChatReply)
    entry, known = await look_up(request.app.state.catalog, body.model_name)
    needs = {
        "chat": True,
        "vision": any(message.images for message in body.messages),
        "tools": bool(body.tools),
        "thinking": bool(body.think),
    }
    check_able(entry, known, needs)
    return respond(request, body, entry, chat_ask(body, entry), ChatReply(entry.name, begun_ns))


async def generate(request: Request) -> Response:
    """Answers one prompt; without one it loads the model, or lets it go."""
    begun_ns = time.perf_counter_ns()
    body = await read_body(request, GenerateRequest)
    if body.raw and (body.template or body.system or body.context):
        raise HttpError(400, "raw mode does not support template, system, or context")
    if not body.prompt and not body.suffix and not body.images:
        return await load_only(request, body, GenerateReply)
    entry, known = await look_up(request.app.state.catalog, body.model_name)
    needs = {"generate": True, "vision": bool(body.images), "insert": bool(body.suffix), "thinking": bool(body.think)}
    check_able(entry, known, needs)
    reply = GenerateReply(entry.name, begun_ns, tells_context=not body.raw)
    return respond(request, body, entry, generate_ask(body, entry), reply)


async def load_only(request: Request, body: Answering, kind: type[Reply]) -> Response:
    """One object that says that the model is there, or gone when it should stay for no time."""
    state, stay_s = request.app.state, keep_alive_s(body.keep_alive)
    entry = await asyncio.to_thread(find, state.catalog, body.model_name)
    reply = kind(entry.name, time.perf_counter_ns())
    load = (body.options or Options()).load()

    async def work() -> dict[str, Any]:
        if stay_s == 0:
            await state.manager.unload(entry.name)
            return reply.nothing("unload")
        await state.manager.load(entry.name, load, stay_s)
        return reply.nothing("load")

    return WholeResponse(work())


def respond(request: Request, body: Answering, entry: Entry, generation: GenerationRequest, reply: Reply) -> Response:
    """The answer to `ask` as it comes, or all of it at its end."""
    manager: ModelManager = request.app.state.manager
    load, stay_s = (body.options or Options()).load(), keep_alive_s(body.keep_alive)
    streams = body.stream is not False

    @asynccontextmanager
    async def events() -> AsyncIterator[AsyncIterator[Event]]:
        async with (
            manager.lease(entry, load, stay_s) as lease,
            aclosing(lease.answer(generation, stream=streams)) as found,
        ):  # type: ignore[type-var]
            yield found

    async def lines() -> Lines:
        async with events() as found:
            async for event in found:
                note(request.app.state, entry.name, event)
                if line := reply.line(event):
                    yield line

    async def whole() -> dict[str, Any]:
        async with events() as found:
            async for event in found:
                note(request.app.state, entry.name, event)
                reply.keep(event)
                if isinstance(event, Done):
                    return reply.whole(event)
        raise HttpError(500, "the answer has ended without its figures")

    return NdjsonResponse(lines()) if streams else WholeResponse(whole())


def chat_ask(body: ChatRequest, entry: Entry) -> GenerationRequest:
    """What /api/chat asks the model."""
    given = [message_of(message) for message in body.messages or ()]
    own = [dict(message) for message in entry.messages]
    if entry.system and given[0]["role"] != "system":
        own.insert(0, {"role": "system", "content": entry.system})
    return GenerationRequest(
        messages=(*own, *given),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in body.tools or ()),
        template=entry.template,
        **shared(body, entry),
    )


def generate_ask(body: GenerateRequest, entry: Entry) -> GenerationRequest:
    """What /api/generate asks: the prompt through the model's template, or as it is when raw or around a gap."""
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        return GenerationRequest(
            prompt=prompt, suffix=body.suffix or None, return_context=not body.raw, **shared(body, entry)
        )
    system = entry.system if body.system is None else body.system
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if not body.context:
        messages += [dict(message) for message in entry.messages]
    return GenerationRequest(
        messages=(*messages, {"role": "user", "content": prompt}),
        return_context=True,
        context=tuple(body.context or ()),
        template=body.template or entry.template,
        **shared(body, entry),
    )


def shared(body: Answering, entry: Entry) -> dict[str, Any]:
    """The fields of a `GenerationRequest` that both requests fill alike."""
    return {
        "format": body.format,
        "think": body.think,
        "truncate": body.truncate is not False,
        "n_logprobs": body.n_logprobs,
        "sampling": options_of(body.options, entry).sampling(),
    }


def message_of(message: ChatMessage) -> Message:
    """A message as the engine takes it: only the fields that say something, and always a content."""
    found = message.model_dump(exclude_none=True, exclude={"images"})
    return {"content": "", **found}


routes = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
]
