"""Anthropic's Messages API: POST /v1/messages returns the next message of a
conversation.

/v1/messages/count_tokens counts the tokens of a conversation. Unknown fields, such as
`cache_control` and beta fields, are ignored. Tools that run on Anthropic's servers (web
search, ...) are dropped with a warning in the log, since clients send them together
with their own tools. An answer is a list of blocks: thinking, text and tool calls in
the order in which the model wrote them. A stream has events for the beginning, the
growth and the end of each block. Without a stream only the message is sent.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    Event,
    Message,
    PromptProgress,
    Request,
    ToolCall,
)
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common.body import Body, Whole
from moegguf.server.common.conversation import (
    EventReply,
    Json,
    RequestBody,
    about_prompt,
    conversation,
)
from moegguf.server.common.errors import HttpError
from moegguf.server.common.messages import (
    Messages,
    Tools,
    chat_fields,
    check_choice,
    messages_of,
    own_tools,
    read_parts,
)
from moegguf.server.common.options import MAX_TOKEN, Stops, in_range, sampling_of
from moegguf.server.common.replies import dumps, event_line

ROLES = ("user", "assistant", "system")
# Claude Code begins its system prompt with a billing header that contains a different
# checksum in every request. The header is removed, since otherwise no request could
# reuse the computed prompt of an earlier request.
_BILLING_HEADER = re.compile(r"x-anthropic-billing-header:(?:\s*\w+=[^;\s]*;)+\s*")


def _blocks_of(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [] if content is None else [{"type": "text", "text": content}]


class _TextBlock(Body):
    type: Literal["text"]
    text: str


def _part_of(block: Any) -> Any:
    """Converts a content block to a part of a chat message. Raises ValueError for a
    source that is not supported, such as a document at a URL."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in ("image", "document"):
        return block
    source = block.get("source")
    match (kind, source if isinstance(source, dict) else {}):
        case "image", {"type": "base64", "data": str(data)}:
            return {"type": "image", "data": data}
        case "image", {"type": "url", "url": str(url)}:
            return {"type": "image_url", "image_url": url}
        case "document", {"type": "text", "data": str(data)}:
            title = block.get("title")
            return {"type": "text", "text": f"{title}\n{data}" if title else data}
    form = (
        '{"type": "text", "data": "..."}'
        if kind == "document"
        else '{"type": "base64", "data": "..."}'
    )
    raise ValueError(
        f"the source of a block of type {kind!r} must be {form}, but is {dumps(source):.80}"
    )


def _chat_messages(message: Any) -> list[Any]:
    """Converts one of Anthropic's messages to chat messages: one for each tool result,
    then one with all other blocks if there are any. Drops redacted thinking, which only
    Anthropic can read. Raises ValueError for an unknown role or an unsupported
    source."""
    if not isinstance(message, dict):
        return [message]
    if message.get("role") not in ROLES:
        raise ValueError(
            f"a role must be one of {', '.join(ROLES)}, but is {dumps(message.get('role')):.40}"
        )
    results: list[Json] = []
    parts, thinking, calls = [], [], []
    for block in _blocks_of(message.get("content")):
        match block:
            case {"type": "tool_result"}:
                content = [_part_of(each) for each in _blocks_of(block.get("content"))]
                error = (
                    [{"type": "text", "text": "Error:"}]
                    if block.get("is_error")
                    else []
                )
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.get("tool_use_id"),
                        "content": error + content,
                    }
                )
            case {"type": "tool_use"}:
                calls.append(
                    {
                        "id": block.get("id"),
                        "function": {**block, "arguments": block.get("input")},
                    }
                )
            case {"type": "thinking" | "redacted_thinking"}:
                thinking += (
                    [{"type": "text", "text": block["thinking"]}]
                    if block.get("thinking")
                    else []
                )
            case _:
                parts.append(_part_of(block))
    more = {"reasoning": read_parts(thinking), "tool_calls": calls}
    found = {key: each for key, each in more.items() if each}
    return (
        [*results, {"role": message["role"], "content": parts, **found}]
        if parts or found
        else results
    )


def _messages_of(given: Any) -> Any:
    return (
        [each for message in given for each in _chat_messages(message)]
        if isinstance(given, list)
        else given
    )


def _own_tools(tools: Any) -> Any:
    return own_tools(tools, (None, "custom"), "input_schema")


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Thinking(Body):
    """The field `thinking`. `budget_tokens` may be below Anthropic's minimum of 1,024
    tokens; None means the default of the model or the server."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = in_range("reasoning_budget_tokens")


class _OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _OutputFormat | None = None


class _CountBody(RequestBody):
    """The body of /v1/messages/count_tokens. As an extension, `options` accepts
    Ollama's options."""

    messages: Annotated[Messages, BeforeValidator(_messages_of)]
    system: Annotated[list[_TextBlock], BeforeValidator(_blocks_of)] = []
    tools: Annotated[Tools, BeforeValidator(_own_tools)] = []
    tool_choice: _ToolChoice = _ToolChoice()
    thinking: _Thinking = _Thinking(type="disabled")
    output_config: _OutputConfig = _OutputConfig()

    @model_validator(mode="after")
    def _check_choice(self) -> _CountBody:
        choice = self.tool_choice
        names = [choice.name] if choice.type == "tool" else ()
        check_choice(self.tools, choice.type, names)
        return self

    def requests(self, entry: ModelEntry, known: Details) -> Sequence[Request]:
        choice, effort = self.tool_choice, self.output_config.effort
        # The model does not think unless the request has the field `thinking`, as in
        # Anthropic's API. The field is ignored for a model that cannot think, since
        # clients send it to every model.
        thinks = self.thinking.type != "disabled" and "thinking" in known.capabilities
        request = Request(
            **chat_fields(entry, self._messages(), self.tools),
            tool_choice=choice.name
            if choice.type == "tool"
            else choice.type.replace("any", "required"),
            think=("max" if effort == "xhigh" else effort or True) if thinks else False,
        )
        return [request]

    def _messages(self) -> Iterable[Message]:
        texts = [
            text
            for block in self.system
            if (text := _BILLING_HEADER.sub("", block.text, count=1))
        ]
        if texts:
            yield {"role": "system", "content": "\n".join(texts)}
        yield from messages_of(self.messages)


class _MessagesBody(_CountBody):
    max_tokens: Annotated[Whole, Field(ge=1, le=MAX_ANSWER_TOKENS)]
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_TOKEN)] | None = None
    stop_sequences: Stops | None = None
    # An extension: has the same effect as `exact` in `options`.
    exact: bool | None = None

    def requests(self, entry: ModelEntry, known: Details) -> Sequence[Request]:
        [request] = super().requests(entry, known)
        sampling = sampling_of(
            entry, self.options, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            stop=self.stop_sequences, exact=self.exact, num_predict=self.max_tokens,
            reasoning_budget_tokens=self.thinking.budget_tokens,
        )  # fmt: skip
        output = self.output_config.format
        schema = output.schema_ if output else None
        return [
            replace(
                request, format=schema, truncate=False, shift=False, sampling=sampling
            )
        ]

    @property
    def parallel_calls(self) -> bool:
        return not self.tool_choice.disable_parallel_tool_use


def _usage(summary: AnswerSummary) -> Json:
    """Returns the token counts. `input_tokens` counts the prompt tokens that were
    computed for this request, and `cache_read_input_tokens` the prompt tokens that were
    cached."""
    return {
        "input_tokens": summary.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": summary.cached_tokens,
        "output_tokens": summary.answer_tokens,
        "output_tokens_details": {"thinking_tokens": summary.thinking_tokens},
    }


class _MessageReply(EventReply):
    ping_line = event_line({"type": "ping"}, "ping")

    def __post_init__(self) -> None:
        # Blocks of the answer; the last one may still grow.
        self._content: list[Json] = []
        self._message: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(AnswerSummary()),
        }

    def whole(self) -> Json:
        return self._message

    def error_line(self, error: HttpError, path: str) -> bytes:
        return event_line(error.body(path), "error")

    def _begin(self, event: Event) -> Iterator[Json]:
        # Zeros, unless the first event is the prompt's progress, which has the counts.
        known = AnswerSummary()
        if isinstance(event, PromptProgress):
            known = AnswerSummary(
                prompt_tokens=event.n_tokens - event.n_cached,
                cached_tokens=event.n_cached,
            )
        yield {
            "type": "message_start",
            "message": {**self._message, "content": [], "usage": _usage(known)},
        }

    def _begin_block(self, kind: str) -> Iterator[Json]:
        yield self._new_block(
            {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        )

    def _grow(self, text: str, delta: Delta) -> Iterator[Json]:
        self._content[-1][self.open] += text
        yield self._delta({"type": f"{self.open}_delta", self.open: text})

    def _new_block(self, block: Json) -> Json:
        self._content.append(block)
        return {
            "type": "content_block_start",
            "index": len(self._content) - 1,
            "content_block": dict(block),
        }

    def _delta(self, delta: Json) -> Json:
        return {
            "type": "content_block_delta",
            "index": len(self._content) - 1,
            "delta": delta,
        }

    def _end_block(
        self, kind: str, summary: AnswerSummary | None = None
    ) -> Iterator[Json]:
        if kind == "thinking":
            block = self._content[-1]
            # Clients do not verify it.
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta(
                {"type": "signature_delta", "signature": block["signature"]}
            )
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _call(self, call: ToolCall) -> Iterator[Json]:
        yield self._new_block(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        )
        self._content[-1]["input"] = call.arguments
        yield self._delta(
            {
                "type": "input_json_delta",
                "partial_json": json.dumps(call.arguments, ensure_ascii=False),
            }
        )
        yield from self._end_block("tool_use")

    def _finish(self, summary: AnswerSummary) -> Iterator[Json]:
        reason = (
            "tool_use"
            if self.n_calls
            else "stop_sequence"
            if summary.stop_string
            else "end_turn"
        )
        if summary.finish == "length":
            is_full = summary.answer_tokens < self.body.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        stop = {"stop_reason": reason, "stop_sequence": summary.stop_string or None}
        self._message |= {**stop, "usage": _usage(summary)}
        yield {"type": "message_delta", "delta": stop, "usage": self._message["usage"]}
        yield {"type": "message_stop"}


_MessagesBody.reply_kind = _MessageReply

routes = [
    conversation("/v1/messages", _MessagesBody),
    about_prompt("/v1/messages/count_tokens", _CountBody, "count", "input_tokens"),
]
