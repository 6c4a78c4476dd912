"""POST /v1/messages: the next message of a conversation; /v1/messages/count_tokens counts its tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.server.anthropic.objects import MessageReply
from moegguf.server.anthropic.schema import CountBody, MessagesBody
from moegguf.server.common.conversation import answers, count_tokens, read_question, respond


async def messages(request: Request) -> Response:
    """The next message, whole or streamed."""
    body, entry, generations = await read_question(request, MessagesBody)
    return respond(body, answers(request, body, entry, generations), MessageReply(entry.name, body.max_tokens))


async def count(request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    return await count_tokens(request, CountBody, lambda n: {"input_tokens": n})


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count, methods=["POST"]),
]
