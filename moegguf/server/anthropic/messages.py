"""POST /v1/messages: the next message of a conversation; /v1/messages/count_tokens counts its tokens.

An answer is a list of blocks: thinking, text and calls in the order in which they come. A stream tells each block's
beginning, growth and end; without a stream only the message is sent.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator

from moegguf.generate.request import Delta, PromptProgress, Timing, ToolCall
from moegguf.server.anthropic.schema import CountBody, MessagesBody
from moegguf.server.common.conversation import Conversation, EventReply, Json, about_prompt
from moegguf.server.common.errors import HttpError
from moegguf.server.common.streams import event_line
from moegguf.serving.events import Done, Event


def usage(timing: Timing) -> Json:
    """Token counts. `input_tokens` are those computed for this request; the others of the prompt were cached."""
    return {
        "input_tokens": timing.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": timing.cached_tokens,
        "output_tokens": timing.answer_tokens,
        "output_tokens_details": {"thinking_tokens": timing.thinking_tokens},
    }


class _MessageReply(EventReply):
    """The message for one request."""

    ping_line = event_line({"type": "ping"}, "ping")

    def __init__(self, model: str, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._content: list[Json] = []  # the last block may still grow
        self._message: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(Timing()),
        }

    def whole(self) -> Json:
        return self._message

    def error_line(self, error: HttpError, path: str) -> bytes:
        return event_line(error.body(path), "error")

    def _begin(self, event: Event) -> Iterator[Json]:
        known = Timing()  # a prompt's counts are known when its progress came first
        if isinstance(event, PromptProgress):
            known = Timing(prompt_tokens=event.n_tokens - event.n_cached, cached_tokens=event.n_cached)
        yield {"type": "message_start", "message": {**self._message, "content": [], "usage": usage(known)}}

    def _begin_block(self, kind: str) -> Iterator[Json]:
        yield self._new_block({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))

    def _grow(self, text: str, delta: Delta) -> Iterator[Json]:
        self._content[-1][self.open] += text
        yield self._delta({"type": f"{self.open}_delta", self.open: text})

    def _new_block(self, block: Json) -> Json:
        self._content.append(block)
        return {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _end_block(self, kind: str, done: Done | None = None) -> Iterator[Json]:
        if kind == "thinking":
            block = self._content[-1]
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()  # nothing checks it
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _call(self, call: ToolCall) -> Iterator[Json]:
        yield self._new_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._content[-1]["input"] = call.arguments
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments, ensure_ascii=False)})
        yield from self._end_block("tool_use")

    def _finish(self, done: Done) -> Iterator[Json]:
        stop = {"stop_reason": self._stop_reason(done.timing), "stop_sequence": done.timing.stop_string or None}
        self._message |= {**stop, "usage": usage(done.timing)}
        yield {"type": "message_delta", "delta": stop, "usage": self._message["usage"]}
        yield {"type": "message_stop"}

    def _stop_reason(self, timing: Timing) -> str:
        if timing.finish == "length":
            return "max_tokens" if timing.answer_tokens >= self._max_tokens else "model_context_window_exceeded"
        if self.n_calls:
            return "tool_use"
        return "stop_sequence" if timing.stop_string else "end_turn"


MESSAGES = Conversation(MessagesBody, lambda body, entry, _: _MessageReply(entry.name, body.max_tokens))
COUNT = about_prompt("/v1/messages/count_tokens", CountBody, "count", lambda n: {"input_tokens": n})
routes = [MESSAGES.at("/v1/messages"), COUNT]
