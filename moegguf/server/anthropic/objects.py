"""Anthropic's message object and its stream of events, from the events of an answer.

An answer is a list of blocks: thinking, text and calls in the order in which they come. A stream tells each block's
beginning, growth and end; without a stream only the message is sent.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

from moegguf.generate.request import Delta, PromptProgress, Timing, ToolCall
from moegguf.serving.events import Done, Event

Json = dict[str, Any]


def usage(timing: Timing) -> Json:
    """Token counts. `input_tokens` are those computed for this request; the others of the prompt were cached."""
    return {
        "input_tokens": timing.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": timing.cached_tokens,
        "output_tokens": timing.answer_tokens,
        "output_tokens_details": {"thinking_tokens": timing.thinking_tokens},
    }


def signature_of(thinking: str) -> str:
    """A signature, which clients send back with the thinking; nothing checks it."""
    return hashlib.sha256(thinking.encode()).hexdigest()


class MessageReply:
    """The message for one request: `stream` gives the events of each event of the answer; after the last one, `whole`
    is the message. `parallel` False: only the first call is sent."""

    def __init__(self, model: str, max_tokens: int, *, parallel: bool) -> None:
        self._max_tokens = max_tokens
        self._parallel = parallel
        self._started = False
        self._content: list[Json] = []  # the last block may still grow
        self._open = ""  # the type of that block
        self.whole: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(Timing()),
        }

    def stream(self, event: Event) -> Iterator[Json]:
        """The events for one of the answer."""
        if not self._started:
            self._started = True
            yield self._start(event)
        if isinstance(event, Delta):
            yield from self._grow(event)
        elif isinstance(event, Done):
            yield from self._end(event)

    def _start(self, event: Event) -> Json:
        known = Timing()  # a prompt's counts are known when its progress came first
        if isinstance(event, PromptProgress):
            known = Timing(prompt_tokens=event.n_tokens - event.n_cached, cached_tokens=event.n_cached)
        return {"type": "message_start", "message": {**self.whole, "content": [], "usage": usage(known)}}

    def _grow(self, delta: Delta) -> Iterator[Json]:
        if delta.thinking:
            yield from self._add("thinking", delta.thinking)
        if delta.text:
            yield from self._add("text", delta.text)
        for call in delta.tool_calls:
            if self._parallel or not self._n_calls:
                yield from self._call(call)

    @property
    def _n_calls(self) -> int:
        return sum(block["type"] == "tool_use" for block in self._content)

    def _add(self, kind: str, text: str) -> Iterator[Json]:
        if self._open != kind:
            yield from self._close()
            yield self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
            self._open = kind
        self._content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Json) -> Json:
        self._content.append(block)
        return {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> Iterator[Json]:
        kind, self._open = self._open, ""
        if kind == "thinking":
            block = self._content[-1]
            block["signature"] = signature_of(block["thinking"])
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        if kind:
            yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _call(self, call: ToolCall) -> Iterator[Json]:
        yield from self._close()
        yield self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._content[-1]["input"] = call.arguments
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments, ensure_ascii=False)})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _end(self, done: Done) -> Iterator[Json]:
        yield from self._close()
        stop = {"stop_reason": self._stop_reason(done.timing), "stop_sequence": done.timing.stop_string or None}
        self.whole |= {**stop, "usage": usage(done.timing)}
        yield {"type": "message_delta", "delta": stop, "usage": self.whole["usage"]}
        yield {"type": "message_stop"}

    def _stop_reason(self, timing: Timing) -> str:
        if timing.finish == "length":
            return "max_tokens" if timing.answer_tokens >= self._max_tokens else "model_context_window_exceeded"
        if self._n_calls:
            return "tool_use"
        return "stop_sequence" if timing.stop_string else "end_turn"
