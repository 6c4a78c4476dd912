"""/api/chat and /api/generate: the next message of a conversation, and the answer to one prompt; without a question
they load or unload the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.conversation import Conversation
from moegguf.server.common.lookup import find
from moegguf.server.common.streams import WholeResponse
from moegguf.server.ollama.objects import ChatReply, GenerateReply, Reply
from moegguf.server.ollama.schema import ChatRequest, GenerateRequest, GenerationBody


def route(path: str, kind: type[GenerationBody], reply_kind: type[Reply], *questions: str) -> Route:
    """The endpoint at `path`; a body without any of the fields `questions` only loads or unloads the model."""

    def encode(body: GenerationBody, entry: ModelEntry, generations: Sequence[GenerationRequest]) -> Reply:
        return reply_kind(entry.name, with_details=bool(body.details), with_context=generations[0].return_context)

    conversation = Conversation(kind, encode)

    async def respond(request: Request) -> Response:
        start_ns = time.perf_counter_ns()
        body = await read_body(request, kind, limits.IMAGES_BODY_BYTES)
        if any(getattr(body, name) for name in questions):
            return await conversation.respond_to(request, body, start_ns)
        return await load_only(request, body, reply_kind)

    return Route(path, respond, methods=["POST"])


async def load_only(request: Request, body: GenerationBody, kind: type[Reply]) -> Response:
    """Loads the model, or unloads it with `keep_alive` 0; replies without content."""
    state, keep_alive_s = request.app.state, body.keep_alive_s()
    entry = await asyncio.to_thread(find, state.catalog, body.model_name)
    reply = kind(entry.name)

    async def work() -> dict[str, Any]:
        if keep_alive_s == 0:
            await state.manager.unload(entry.name)
            return reply.without_content("unload")
        await state.manager.load(entry.name, body.overrides(), keep_alive_s)
        return reply.without_content("load")

    return WholeResponse(work())


routes = [
    route("/api/chat", ChatRequest, ChatReply, "messages"),
    route("/api/generate", GenerateRequest, GenerateReply, "prompt", "suffix", "images"),
]
