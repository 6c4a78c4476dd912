"""POST /v1/responses: the next items of a conversation; /v1/responses/input_tokens counts the tokens of its prompt.
Nothing is stored: an id of a response cannot be looked up later.

An answer is a list of items: thinking, text and calls in the order in which they come. A stream tells each item's
beginning, growth and end; without a stream only the last object is sent. Thinking is raw, so it is `reasoning_text`
unless the request wants a summary. `timings` and `moe` are additions, as in chat.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moegguf.generate.request import Delta, GenerationRequest, TokenLogprob, ToolCall
from moegguf.server.common.conversation import Conversation, EventReply, Json, about_prompt
from moegguf.server.common.errors import HttpError
from moegguf.server.common.objects import usage
from moegguf.server.common.streams import event_line
from moegguf.server.openai.chat import chat_logprobs, statistics
from moegguf.server.openai.responses_schema import ENCRYPTED_REASONING, ResponsesBody, encrypted
from moegguf.server.openai.schema import OpenAITool, ToolChoice
from moegguf.serving.events import Done, Event


@dataclass(frozen=True)
class _Form:
    """Names in the objects and events of an item whose text grows."""

    prefix: str  # of its id
    index: str  # the event's key of the part's number
    part: str  # in the names of the part's events
    text: str  # in the names of the text's events
    kind: str  # of the part


MESSAGE = _Form("msg", "content_index", "content_part", "output_text", "output_text")
REASONING = _Form("rs", "content_index", "content_part", "reasoning_text", "reasoning_text")
SUMMARY = _Form("rs", "summary_index", "reasoning_summary_part", "reasoning_summary_text", "summary_text")


@dataclass
class _OpenItem:
    """An item whose text still grows. `output_index`: its number in the output."""

    form: _Form
    output_index: int
    encrypts: bool = False
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = _new_id(self.form.prefix)

    @property
    def keys(self) -> Json:
        return {"item_id": self.id, "output_index": self.output_index, self.form.index: 0}

    def part(self) -> Json:
        more = {"annotations": [], "logprobs": list(self.logprobs)} if self.form is MESSAGE else {}
        return {"type": self.form.kind, "text": self.text, **more}

    def object(self, status: str) -> Json:
        """The item; in progress it has no part yet."""
        parts = [] if status == "in_progress" else [self.part()]
        if self.form is MESSAGE:
            return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}
        both: Json = {"summary": [], "content": []} | {"summary" if self.form is SUMMARY else "content": parts}
        secret = {"encrypted_content": encrypted(self.text)} if self.encrypts and parts else {}
        return {"id": self.id, "type": "reasoning", "status": status, **both, **secret}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _logprob_objects(logprobs: Iterable[TokenLogprob]) -> list[Json]:
    """Those of chat, but `bytes` is always a list: empty for a token with part of a character."""
    found: list[Json] = chat_logprobs(logprobs)["content"]
    for each in found:
        for token in (each, *each["top_logprobs"]):
            token["bytes"] = token["bytes"] or []
    return found


class _ResponseReply(EventReply):
    """The response to one request. `n_ctx` tokens or `max_output_tokens` reached: it is incomplete."""

    def __init__(self, body: ResponsesBody, model: str, generation: GenerationRequest) -> None:
        self._body = body
        self._with_logprobs = generation.n_logprobs is not None
        self._output: list[Json] = []
        self._item = _OpenItem(MESSAGE, 0)  # which may still grow
        self._n_events = 0
        self._object: Json = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **_settings(body, generation),
        }

    def _begin(self, event: Event) -> Iterator[Json]:
        yield self._event("response.created", response=dict(self._object))
        yield self._event("response.in_progress", response=dict(self._object))

    def whole(self) -> Json:
        return self._object

    def error_line(self, error: HttpError, path: str) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._object |= {"status": "failed", "error": {"code": code, "message": str(error)}, "output": self._output}
        return event_line(self._event("response.failed", response=self._object), "response.failed")

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _grow(self, text: str, delta: Delta) -> Iterator[Json]:
        item, more = self._item, {}
        item.text += text
        if item.form is MESSAGE:
            more["logprobs"] = _logprob_objects(delta.logprobs) if self._with_logprobs else []
            item.logprobs += more["logprobs"]
        yield self._event(f"response.{item.form.text}.delta", **item.keys, delta=text, **more)

    def _begin_block(self, kind: str) -> Iterator[Json]:
        form = MESSAGE if kind == "text" else SUMMARY if self._body.wants_summary else REASONING
        item = self._item = _OpenItem(form, len(self._output), self._body.includes(ENCRYPTED_REASONING))
        yield self._event("response.output_item.added", output_index=item.output_index, item=item.object("in_progress"))
        yield self._event(f"response.{form.part}.added", **item.keys, part=item.part())

    def _end_block(self, kind: str, done: Done | None = None) -> Iterator[Json]:
        item = self._item
        more = {"logprobs": item.logprobs} if item.form is MESSAGE else {}
        yield self._event(f"response.{item.form.text}.done", **item.keys, text=item.text, **more)
        yield self._event(f"response.{item.form.part}.done", **item.keys, part=item.part())
        yield self._item_done(item.object("incomplete" if done and done.timing.finish == "length" else "completed"))

    def _item_done(self, item: Json) -> Json:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: ToolCall) -> Iterator[Json]:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        keys = {"item_id": _new_id("fc"), "output_index": len(self._output)}
        item = {"id": keys["item_id"], "type": "function_call", "call_id": call.id, "name": call.name}
        yield self._event(
            "response.output_item.added",
            output_index=keys["output_index"],
            item={**item, "status": "in_progress", "arguments": ""},
        )
        yield self._event("response.function_call_arguments.delta", **keys, delta=arguments)
        yield self._event("response.function_call_arguments.done", **keys, name=call.name, arguments=arguments)
        yield self._item_done({**item, "status": "completed", "arguments": arguments})

    def _finish(self, done: Done) -> Iterator[Json]:
        timing, is_cut = done.timing, done.timing.finish == "length"
        status = "incomplete" if is_cut else "completed"
        if all(item["type"] == "reasoning" for item in self._output):
            yield from self._begin_block("text")  # clients expect a text, also an empty one
            yield from self._end_block("text", done)
        self._object |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": usage(
                timing.prompt_tokens + timing.cached_tokens,
                timing.cached_tokens,
                timing.answer_tokens,
                timing.thinking_tokens,
                cache_write_tokens=0,
            ),
            **statistics(timing),
        }
        yield self._event(f"response.{status}", response=self._object)


def _settings(body: ResponsesBody, generation: GenerationRequest) -> Json:
    """The request's settings as they were applied."""
    text, reasoning = body.text, body.reasoning
    format_ = text.format if text and text.format else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "background": False,
        "temperature": generation.sampling.temperature,
        "top_p": generation.sampling.top_p,
        "presence_penalty": generation.sampling.presence_penalty,
        "frequency_penalty": generation.sampling.frequency_penalty,
        "text": {
            "format": format_.model_dump(by_alias=True, exclude_none=True) if format_ else {"type": "text"},
            "verbosity": text.verbosity if text and text.verbosity else "medium",
        },
        "tool_choice": _choice(body),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _tool(tool: OpenAITool) -> Json:
    function = tool.function
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": False,
    }


def _choice(body: ResponsesBody) -> str | Json:
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return choice or "auto"
    named: list[Json] = [{"type": "function", "name": name} for name in choice.names]
    return named[0] if choice.type == "function" else {"type": choice.type, "mode": choice.mode, "tools": named}


RESPONSES = Conversation(
    ResponsesBody, lambda body, entry, generations: _ResponseReply(body, entry.name, generations[0])
)
COUNT = about_prompt(
    "/v1/responses/input_tokens", ResponsesBody, "count",
    lambda n: {"object": "response.input_tokens", "input_tokens": n},
)  # fmt: skip
routes = [RESPONSES.at("/v1/responses"), COUNT]
