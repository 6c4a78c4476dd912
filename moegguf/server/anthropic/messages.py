"""POST /v1/messages: the next message of a conversation; /v1/messages/count_tokens counts its tokens."""

from __future__ import annotations

from starlette.routing import Route

from moegguf.server.anthropic.objects import MessageReply
from moegguf.server.anthropic.schema import CountBody, MessagesBody
from moegguf.server.common.conversation import Conversation, counting

MESSAGES = Conversation(MessagesBody, lambda body, entry, _: MessageReply(entry.name, body.max_tokens))
COUNT = counting(CountBody, lambda n: {"input_tokens": n})

routes = [MESSAGES.at("/v1/messages"), Route("/v1/messages/count_tokens", COUNT, methods=["POST"])]
