"""/api/chat and /api/generate: convert a body to a `GenerationRequest`, and its events to Ollama's objects.

The entry's system message, messages, parameters and template are defaults for those of the request.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.generate.images import with_images
from moegguf.generate.request import GenerationRequest, Message
from moegguf.models.entry import ModelEntry
from moegguf.models.recipe import is_go_template
from moegguf.server.common import limits
from moegguf.server.common.answering import answer_events
from moegguf.server.common.body import read_body
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import check_capabilities, check_conversation, find, look_up
from moegguf.server.common.options import Options, keep_alive_seconds, options_of, with_entry_messages
from moegguf.server.common.streams import Lines, NdjsonResponse, WholeResponse
from moegguf.server.ollama.objects import ChatReply, GenerateReply, Reply
from moegguf.server.ollama.schema import ChatMessage, ChatRequest, GenerateRequest, GenerationBody
from moegguf.serving.events import Done


async def chat(request: Request) -> Response:
    """The next message of a conversation; without messages, loads or unloads the model."""
    start_ns = time.perf_counter_ns()
    body = await read_body(request, ChatRequest, limits.IMAGES_BODY_BYTES)
    if not body.messages:
        return await load_only(request, body, ChatReply)
    entry, known = await look_up(request.app.state.catalog, body.model_name)
    # As Ollama: said before images are judged.
    check_capabilities(entry, known, {"vision": any(message.images for message in body.messages)})
    generation = chat_generation(body, entry)
    check_conversation(entry, known, generation)
    return respond(request, body, entry, generation, ChatReply(entry.name, start_ns))


async def generate(request: Request) -> Response:
    """The answer to one prompt; without a prompt, loads or unloads the model."""
    start_ns = time.perf_counter_ns()
    body = await read_body(request, GenerateRequest, limits.IMAGES_BODY_BYTES)
    if body.raw and (body.template or body.system or body.context):
        raise HttpError(400, "raw mode does not support template, system, or context")
    if body.template and is_go_template(body.template):
        raise HttpError(400, "template: is in Go's language; write it in Jinja, as the model's own (/api/show has it)")
    if body.images and (body.raw or body.suffix):
        raise HttpError(400, "raw mode and suffix do not support images; send them with a prompt for the template")
    if not body.prompt and not body.suffix and not body.images:
        return await load_only(request, body, GenerateReply)
    entry, known = await look_up(request.app.state.catalog, body.model_name)
    needs = {"generate": True, "vision": bool(body.images), "insert": bool(body.suffix), "thinking": bool(body.think)}
    check_capabilities(entry, known, needs)
    reply = GenerateReply(entry.name, start_ns, with_context=not body.raw)
    return respond(request, body, entry, prompt_generation(body, entry), reply)


async def load_only(request: Request, body: GenerationBody, kind: type[Reply]) -> Response:
    """Loads the model, or unloads it with `keep_alive` 0; replies without content."""
    state, keep_alive_s = request.app.state, keep_alive_seconds(body.keep_alive)
    entry = await asyncio.to_thread(find, state.catalog, body.model_name)
    reply = kind(entry.name, time.perf_counter_ns())
    overrides = (body.options or Options()).overrides()

    async def work() -> dict[str, Any]:
        if keep_alive_s == 0:
            await state.manager.unload(entry.name)
            return reply.without_content("unload")
        await state.manager.load(entry.name, overrides, keep_alive_s)
        return reply.without_content("load")

    return WholeResponse(work())


def respond(
    request: Request, body: GenerationBody, entry: ModelEntry, generation: GenerationRequest, reply: Reply
) -> Response:
    """The reply to `generation`, streamed unless `stream` is false."""
    streams = body.stream is not False
    reply.with_details = bool(body.details)
    events = answer_events(
        request,
        entry,
        generation,
        overrides=(body.options or Options()).overrides(),
        keep_alive_s=keep_alive_seconds(body.keep_alive),
        stream=streams,
    )

    async def lines() -> Lines:
        async with aclosing(events) as found:
            async for event in found:
                if line := reply.line(event):
                    yield line

    async def whole() -> dict[str, Any]:
        async with aclosing(events) as found:
            async for event in found:
                reply.add(event)
                if isinstance(event, Done):
                    return reply.whole(event)
        raise HttpError(500, "the answer has ended without its statistics")

    return NdjsonResponse(lines()) if streams else WholeResponse(whole())


def chat_generation(body: ChatRequest, entry: ModelEntry) -> GenerationRequest:
    """The request of /api/chat."""
    return GenerationRequest(
        messages=with_entry_messages(map(message_of, body.messages or ()), entry),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in body.tools or ()),
        template=entry.template,
        **common_fields(body, entry),
    )


def prompt_generation(body: GenerateRequest, entry: ModelEntry) -> GenerationRequest:
    """The request of /api/generate: the prompt through the chat template, or as it is with `raw` or `suffix`."""
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        return GenerationRequest(
            prompt=prompt, suffix=body.suffix or None, return_context=not body.raw, **common_fields(body, entry)
        )
    system = entry.system if body.system is None else body.system
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if not body.context:
        messages += [dict(message) for message in entry.messages]
    return GenerationRequest(
        messages=(*messages, {"role": "user", "content": with_images(prompt, body.images or ())}),
        return_context=True,
        context=tuple(body.context or ()),
        template=body.template or entry.template,
        **common_fields(body, entry),
    )


def common_fields(body: GenerationBody, entry: ModelEntry) -> dict[str, Any]:
    """The fields of a `GenerationRequest` that both requests share."""
    return {
        "format": body.format,
        "think": body.think,
        "truncate": body.truncate is not False,
        "shift": body.shift is not False,
        "n_logprobs": body.n_logprobs,
        "sampling": options_of(body.options, entry).sampling(),
    }


def message_of(message: ChatMessage) -> Message:
    """A message for `GenerationRequest`: without null fields, always with `content`. Raises OptionError."""
    fields = message.model_dump(exclude_none=True, exclude={"images", "content"})
    return {**fields, "content": with_images(message.content or "", message.images or ())}


routes = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
]
