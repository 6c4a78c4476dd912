"""POST /v1/chat/completions: the next message of a conversation; /v1/responses: its next items, and
/v1/responses/input_tokens: the tokens of its prompt.

Nothing is stored: an id of a response cannot be looked up later.
"""

from __future__ import annotations

from starlette.routing import Route

from moegguf.server.common.conversation import Conversation, counting
from moegguf.server.openai.objects import ChatReply
from moegguf.server.openai.responses_objects import ResponseReply
from moegguf.server.openai.responses_schema import ResponsesBody
from moegguf.server.openai.schema import ChatBody

CHAT = Conversation(ChatBody, lambda body, entry, _: ChatReply(body, entry))
RESPONSES = Conversation(
    ResponsesBody, lambda body, entry, generations: ResponseReply(body, entry.name, generations[0])
)
COUNT = counting(ResponsesBody, lambda n: {"object": "response.input_tokens", "input_tokens": n})

routes = [
    CHAT.at("/v1/chat/completions"),
    RESPONSES.at("/v1/responses"),
    Route("/v1/responses/input_tokens", COUNT, methods=["POST"]),
]
