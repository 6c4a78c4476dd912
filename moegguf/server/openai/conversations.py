"""POST /v1/chat/completions: the next message of a conversation; /v1/responses: its next items, and
/v1/responses/input_tokens: the tokens of its prompt.

Nothing is stored: an id of a response cannot be looked up later.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.server.common.conversation import answers, count_tokens, read_question, respond
from moegguf.server.openai.objects import ChatReply
from moegguf.server.openai.responses_objects import ResponseReply
from moegguf.server.openai.responses_schema import ResponsesBody
from moegguf.server.openai.schema import ChatBody


async def chat_completions(request: Request) -> Response:
    """The next message, whole or streamed."""
    body, entry, generations = await read_question(request, ChatBody)
    reply = ChatReply(entry.name, entry.digest, logprobs=bool(body.logprobs), **body.stream_form())
    return respond(body, answers(request, body, entry, generations), reply)


async def responses(request: Request) -> Response:
    """The next items, whole or streamed."""
    body, entry, generations = await read_question(request, ResponsesBody)
    reply = ResponseReply(body, entry.name, generations[0])
    return respond(body, answers(request, body, entry, generations), reply)


async def input_tokens(request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    return await count_tokens(
        request, ResponsesBody, lambda n: {"object": "response.input_tokens", "input_tokens": n}
    )


routes = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
]
