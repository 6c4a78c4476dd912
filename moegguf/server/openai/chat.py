"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.server.common import limits
from moegguf.server.common.body import read_body
from moegguf.server.common.lookup import check_conversation, look_up
from moegguf.server.openai.answers import events_of, respond
from moegguf.server.openai.objects import ChatReply
from moegguf.server.openai.schema import ChatBody


async def chat_completions(request: Request) -> Response:
    """The next message, whole or streamed."""
    body = await read_body(request, ChatBody, limits.IMAGES_BODY_BYTES)
    entry, known = await look_up(request.app.state.catalog, body.model)
    generation = body.generation(entry)
    check_conversation(entry, known, generation)
    reply = ChatReply(
        entry.name,
        entry.digest,
        include_usage=body.include_usage,
        logprobs=bool(body.logprobs),
        parallel=body.parallel_tool_calls is not False,
    )
    return respond(body, events_of(request, body, entry, generation), reply)


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
