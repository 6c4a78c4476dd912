"""/api/chat and /api/generate: the next message of a conversation, and the answer to one prompt."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.models.recipe import is_go_template
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.conversation import answers, respond, understood
from moegguf.server.common.errors import HttpError
from moegguf.server.common.lookup import find
from moegguf.server.common.streams import WholeResponse
from moegguf.server.ollama.objects import ChatReply, GenerateReply, Reply
from moegguf.server.ollama.schema import ChatRequest, GenerateRequest, GenerationBody


async def chat(request: Request) -> Response:
    """The next message of a conversation; without messages, loads or unloads the model."""
    start_ns = time.perf_counter_ns()
    body = await read_body(request, ChatRequest, limits.IMAGES_BODY_BYTES)
    if not body.messages:
        return await load_only(request, body, ChatReply)
    return await reply_to(request, body, ChatReply, start_ns)


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
    return await reply_to(request, body, GenerateReply, start_ns)


async def reply_to(request: Request, body: GenerationBody, kind: type[Reply], start_ns: int) -> Response:
    """The reply, streamed unless `stream` is false."""
    _, entry, generations = await understood(request, body)
    with_context = generations[0].return_context
    reply = kind(entry.name, start_ns, with_details=bool(body.details), with_context=with_context)
    return respond(body, answers(request, body, entry, generations), reply)


async def load_only(request: Request, body: GenerationBody, kind: type[Reply]) -> Response:
    """Loads the model, or unloads it with `keep_alive` 0; replies without content."""
    state, keep_alive_s = request.app.state, body.keep_alive_s()
    entry = await asyncio.to_thread(find, state.catalog, body.model_name)
    reply = kind(entry.name, time.perf_counter_ns())

    async def work() -> dict[str, Any]:
        if keep_alive_s == 0:
            await state.manager.unload(entry.name)
            return reply.without_content("unload")
        await state.manager.load(entry.name, body.overrides(), keep_alive_s)
        return reply.without_content("load")

    return WholeResponse(work())


routes = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
]
