"""POST /v1/responses: the next items of a conversation; /v1/responses/input_tokens counts the tokens of its prompt.

Responses are not stored: a request that refers to an earlier one is refused, with what to send instead. Tools that run
at OpenAI (web search, computer use, ...) are left out with a warning in the log, as in llama-server: clients offer them
beside their own functions. An answer is a list of items: thinking, text and calls in the order in which they come. A
stream tells each item's beginning, growth and end; without a stream only the last object is sent. Thinking is raw, so
it is `reasoning_text` unless the request wants a summary. `timings` and `moe` are additions, as in chat.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from moegguf.generate.images import text_of
from moegguf.generate.request import Delta, GenerationRequest, Message, ToolCall
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.conversation import EventReply, Json, Reply, about_prompt, conversation
from moegguf.server.common.errors import HttpError
from moegguf.server.common.options import Arguments, FunctionName, content_of, part_of, text_part, tool_message
from moegguf.server.common.replies import event_line, usage
from moegguf.server.openai import chat
from moegguf.serving.events import Done, Event

log = logging.getLogger(__name__)

MAX_METADATA = 16
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
REASONING_PREFIX = "moegguf:"  # of our `encrypted_content`, which only carries the text back to us
SETTINGS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")  # of sampling that a response tells
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

STATELESS = "responses are not stored; send the whole conversation as input"
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "prompts are not stored; send instructions and input",
    "background": "a response is computed while its request lasts; leave it out",
}

# Bodies


def _parts_of(content: Any) -> Any:
    if isinstance(content, str):
        return [text_part(content)]
    return [part_of(part, TEXTS, "input_image") for part in content] if isinstance(content, list) else content


_Parts = Annotated[list[dict[str, str]], BeforeValidator(_parts_of)]


class _MessageItem(Body):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class _CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: Arguments


class _CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts


class _ReasoningText(Body):
    text: str


class _ReasoningItem(Body):
    """The thinking of an earlier answer. Its text is in one of three places, depending on what the client kept."""

    type: Literal["reasoning"]
    content: list[_ReasoningText] | None = None
    summary: list[_ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The thinking; "" for the `encrypted_content` of another server."""
        if parts := self.content or self.summary:
            return "\n".join(part.text for part in parts)
        _, prefix, text = (self.encrypted_content or "").partition(REASONING_PREFIX)
        try:
            return base64.b64decode(text, validate=True).decode() if prefix else ""
        except ValueError:
            return ""


def _items_of(given: Any) -> Any:
    """`input` as a list of items. Raises ValueError for one that refers to a stored item."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    items = []
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and (not isinstance(item.get("type"), str) or item["type"] == "item_reference"):
            if "role" not in item:
                raise ValueError(f"an item has no type or refers to a stored one, but {STATELESS}")
            item = {**item, "type": "message"}
        items.append(item)
    return items if isinstance(given, list) else given


def _functions_of(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    found: list[Any] = []
    for tool in tools:
        if not isinstance(tool, dict):
            found.append(tool)
        elif tool.get("type") == "function":
            function = {name: tool.get(name) for name in ("name", "description", "parameters")}
            found.append({"type": "function", "function": function})
        else:
            log.warning("the tool of type %.60r is not a function and left out", tool.get("type"))
    return found


class _TextOptions(Body):
    format: chat.Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


_Item = Annotated[_MessageItem | _CallItem | _CallOutputItem | _ReasoningItem, Field(discriminator="type")]


class ResponsesBody(chat.ToolsBody):
    input: Annotated[list[_Item], Field(min_length=1, max_length=limits.MESSAGES), BeforeValidator(_items_of)]
    instructions: str | None = None
    tools: Annotated[chat.Tools, BeforeValidator(_functions_of)] | None = None
    max_output_tokens: chat.Limit | None = None
    text: _TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Field(max_length=limits.STOPS)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None

    @field_validator(*REFUSED)
    @classmethod
    def _is_not_used(cls, value: Any, info: ValidationInfo) -> None:
        if value:
            raise ValueError(f"is not supported: {REFUSED[info.field_name or '']}")

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        effort = self.reasoning.effort if self.reasoning else None
        request = self.request(
            entry,
            self._messages(),
            self.text.format if self.text else None,
            self.top_logprobs is not None or LOGPROBS in (self.include or ()),
            think=chat.EFFORTS[effort] if effort else None,
            truncate=self.truncation == "auto",
            sampling=self.sampling(entry, self.max_output_tokens),
        )
        return [request]

    def _messages(self) -> list[Message]:
        """The messages of all items, of which several may belong to one answer. Instructions in a row are one system
        message: many templates know only one."""
        names = {item.call_id: item.name for item in self.input if isinstance(item, _CallItem)}
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []

        def last(role: str) -> Message:
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": ""})
            return messages[-1]

        def add_text(role: str, text: str, between: str) -> None:
            message = last(role)
            message["content"] = f"{message['content']}{between}{text}" if message["content"] else text

        for item in self.input:
            if isinstance(item, _CallItem):
                calls = last("assistant").setdefault("tool_calls", [])
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "function": function})
            elif isinstance(item, _CallOutputItem):
                messages.append(tool_message(content_of(item.output), item.call_id, names.get(item.call_id)))
            elif isinstance(item, _ReasoningItem):
                if text := item.text:
                    messages.append({"role": "assistant", "content": "", "thinking": text})
            elif item.role == "user":
                messages.append({"role": "user", "content": content_of(item.content)})
            elif item.role == "assistant":
                add_text("assistant", text_of(item.content), "\n")
            else:
                add_text("system", text_of(item.content), "\n\n")
        return messages

    def reply(self, entry: ModelEntry, generations: Sequence[GenerationRequest]) -> Reply:
        return _ResponseReply(self, entry.name, generations[0])


# Replies


class _Form(NamedTuple):
    """Names in the objects and events of an item whose text grows."""

    prefix: str  # of its id
    number: str  # the event's key of the part's number
    part: str  # in the names of the part's events
    text: str  # in the names of the text's events
    kind: str  # of the part
    key: str  # the item's of its parts


MESSAGE = _Form("msg", "content_index", "content_part", "output_text", "output_text", "content")
REASONING = _Form("rs", "content_index", "content_part", "reasoning_text", "reasoning_text", "content")
SUMMARY = _Form("rs", "summary_index", "reasoning_summary_part", "reasoning_summary_text", "summary_text", "summary")


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class _ResponseReply(EventReply):
    """The response to one request. `n_ctx` tokens or `max_output_tokens` reached: it is incomplete."""

    def __init__(self, body: ResponsesBody, model: str, generation: GenerationRequest) -> None:
        self._encrypts = ENCRYPTED_REASONING in (body.include or ())
        self._with_logprobs = generation.n_logprobs is not None
        self._settings = _settings(body, generation)
        self._output: list[Json] = []  # complete items
        self._form = MESSAGE  # of the item that grows
        self._item: Json = {}
        self._part: Json = {}
        self._keys: Json = {}  # of its events
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
            **self._settings,
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

    def _begin_block(self, kind: str) -> Iterator[Json]:
        form = MESSAGE if kind == "text" else SUMMARY if self._settings["reasoning"]["summary"] else REASONING
        message = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        reasoning = {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        self._form, self._item = form, {"id": _new_id(form.prefix), **(message if form is MESSAGE else reasoning)}
        self._part = {"type": form.kind, "text": "", **({"annotations": [], "logprobs": []} if form is MESSAGE else {})}
        self._keys = {"item_id": self._item["id"], "output_index": len(self._output), form.number: 0}
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        yield self._event(f"response.{form.part}.added", **self._keys, part=self._part)

    def _grow(self, text: str, delta: Delta) -> Iterator[Json]:
        self._part["text"] += text
        more = {}
        if self._form is MESSAGE:
            more["logprobs"] = chat.logprob_objects(delta.logprobs, no_bytes=[]) if self._with_logprobs else []
            self._part["logprobs"] += more["logprobs"]
        yield self._event(f"response.{self._form.text}.delta", **self._keys, delta=text, **more)

    def _end_block(self, kind: str, done: Done | None = None) -> Iterator[Json]:
        form, item, part = self._form, self._item, self._part
        more = {"logprobs": part["logprobs"]} if form is MESSAGE else {}
        yield self._event(f"response.{form.text}.done", **self._keys, text=part["text"], **more)
        yield self._event(f"response.{form.part}.done", **self._keys, part=part)
        item["status"] = "incomplete" if done and done.timing.finish == "length" else "completed"
        item[form.key].append(part)
        if form is not MESSAGE and self._encrypts:  # in a form that no client shows or changes
            item["encrypted_content"] = REASONING_PREFIX + base64.b64encode(part["text"].encode()).decode()
        yield self._item_done(item)

    def _item_done(self, item: Json) -> Json:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: ToolCall) -> Iterator[Json]:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        keys = {"item_id": _new_id("fc"), "output_index": len(self._output)}
        item = {"id": keys["item_id"], "type": "function_call", "call_id": call.id, "name": call.name}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=keys["output_index"], item=begun)
        yield self._event("response.function_call_arguments.delta", **keys, delta=arguments)
        yield self._event("response.function_call_arguments.done", **keys, name=call.name, arguments=arguments)
        yield self._item_done({**item, "status": "completed", "arguments": arguments})

    def _finish(self, done: Done) -> Iterator[Json]:
        timing, is_cut = done.timing, done.timing.finish == "length"
        status, n_prompt = "incomplete" if is_cut else "completed", timing.prompt_tokens + timing.cached_tokens
        if all(item["type"] == "reasoning" for item in self._output):
            yield from self._begin_block("text")  # clients expect a text, also an empty one
            yield from self._end_block("text", done)
        counts = n_prompt, timing.cached_tokens, timing.answer_tokens, timing.thinking_tokens
        self._object |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": usage(*counts, cache_write_tokens=0),
            **chat.statistics(timing),
        }
        yield self._event(f"response.{status}", response=self._object)


def _settings(body: ResponsesBody, generation: GenerationRequest) -> Json:
    text, reasoning, given = body.text, body.reasoning, body.tool_choice
    choice: str | Json = "auto"
    if isinstance(given, chat.ToolChoice):
        named: list[Json] = [{"type": "function", "name": name} for name in given.names]
        choice = named[0] if given.type == "function" else {"type": given.type, "mode": given.mode, "tools": named}
    elif given:
        choice = given
    form = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    functions = (tool.function for tool in body.tools or ())
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_calls,
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
        **{name: getattr(generation.sampling, name) for name in SETTINGS},
        "text": {"format": form, "verbosity": text.verbosity if text and text.verbosity else "medium"},
        "tool_choice": choice,
        "tools": [
            {"type": "function", "name": each.name, "description": each.description, "parameters": each.parameters}
            | {"strict": False}
            for each in functions
        ],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


routes = [
    conversation("/v1/responses", ResponsesBody),
    about_prompt(
        "/v1/responses/input_tokens", ResponsesBody, "count",
        lambda n: {"object": "response.input_tokens", "input_tokens": n},
    ),
]  # fmt: skip
