"""POST /v1/responses: the next items of a conversation; /v1/responses/input_tokens
counts the tokens of its prompt.

Responses are stored for a day by default (`MOEGGUF_RESPONSES_AGE`), unless the request
has `store: false`. A request that names an earlier response continues its conversation,
with the instructions of the new request. Tools that run on OpenAI's servers (web
search, computer use, ...) are dropped with a warning in the log, as in llama-server,
since clients send them together with their own functions.

An answer is a list of items: thinking, text and tool calls. A stream has events for
each item's beginning, growth and end; without a stream only the last object is sent.
Thinking is never shortened: if the request has `reasoning.summary`, the whole thinking
is sent in the fields and events of a summary, otherwise as `reasoning_text`. `timings`
and `moe` are additions, as in chats.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)
from starlette.datastructures import State
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moegguf.errors import MoeggufError, UnknownIdError
from moegguf.generate.images import text_of
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    Event,
    Message,
    Request,
    ToolCall,
)
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.body import Body, without_nulls
from moegguf.server.common.conversation import (
    EventReply,
    Json,
    about_prompt,
    conversation,
)
from moegguf.server.common.errors import HttpError
from moegguf.server.common.messages import (
    SEARCH_RESULT,
    Messages,
    messages_of,
    own_tools,
    read_parts,
)
from moegguf.server.common.options import Name
from moegguf.server.common.replies import dumps, event_line, logprob_objects, usage
from moegguf.server.openai import chat
from moegguf.serving.responses import ResponseStore

log = logging.getLogger(__name__)

MAX_METADATA = 16
CALL = "_call"  # the type of each item that calls a tool ends with this
# Fields of a call that are not arguments.
CALL_FIELDS = ("type", "id", "call_id", "name", "status")
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
# `encrypted_content` of this server begins with this; the rest is plain base64.
REASONING_PREFIX = "moegguf:"
# Sampling settings in a response.
SETTINGS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
ECHOED = (
    "instructions",
    "max_output_tokens",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)
MESSAGES: TypeAdapter[Any] = TypeAdapter(Messages)
# {role: separator between merged messages}.
BETWEEN = {"assistant": "\n", "system": "\n\n"}

NOT_STORED = "responses are not stored here; send the whole conversation as input"
REFUSED = {
    "conversation": "conversations are not stored; send previous_response_id, or the whole conversation as input",
    "prompt": "prompts are not stored; send instructions and input",
    "background": "a response is computed while its request lasts; leave it out",
}

# Bodies


def _thinking_of(item: Json) -> Any:
    """Returns the text of a reasoning item in an earlier answer. The client may have
    kept the text as `content`, `summary` or `encrypted_content`. Returns "" if there is
    only the `encrypted_content` of another server, or none of the three."""
    if parts := item.get("content") or item.get("summary"):
        return read_parts(parts)
    _, prefix, text = str(item.get("encrypted_content") or "").partition(
        REASONING_PREFIX
    )
    try:
        return base64.b64decode(text, validate=True).decode() if prefix else ""
    except ValueError:
        return ""


def _called(item: Json, kind: str) -> Json:
    """Returns the name and the arguments of the tool call in an item. A function's
    arguments are in the field `arguments`. The arguments of another tool are the fields
    that are neither null nor in `CALL_FIELDS`."""
    own = {
        name: value
        for name, value in item.items()
        if name not in CALL_FIELDS and value is not None
    }
    arguments = item.get("arguments") if kind == "function_call" else own
    return {"name": item.get("name") or kind.removesuffix(CALL), "arguments": arguments}


def _output_of(output: Any) -> Any:
    """Returns a tool's output as the content of a message. None, texts and lists of
    parts are returned unchanged; other values become JSON text."""
    is_parts = isinstance(output, list) and all(
        isinstance(part, dict) and part.get("type") for part in output
    )
    return (
        output
        if output is None or isinstance(output, str) or is_parts
        else dumps(output)
    )


def _messages_with(item: Any) -> list[Any]:
    """Converts an item to a list of one chat message. The list is empty, with a warning
    in the log, for an unknown item and for a call to a tool that ran on OpenAI's
    servers. Raises ValueError for a reference to a stored item, or an item without a
    type."""
    if not isinstance(item, dict):
        return [item]
    kind = str(item.get("type") or ("message" if "role" in item else "item_reference"))
    if kind == "message":
        return [item]
    call_id = item.get("call_id")
    if kind == "function_call" or (kind.endswith(CALL) and call_id):
        return [
            {
                "role": "assistant",
                "tool_calls": [{"id": call_id, "function": _called(item, kind)}],
            }
        ]
    if kind.endswith(f"{CALL}_output"):
        content = _output_of(item.get("output"))
        return [
            {
                "role": "tool",
                "tool_call_id": call_id or item.get("id"),
                "content": content,
            }
        ]
    if kind == "reasoning":
        return [{"role": "assistant", "reasoning": _thinking_of(item)}]
    if kind == SEARCH_RESULT:
        return [{"role": "user", "content": [item]}]
    if kind == "item_reference":
        raise ValueError(
            "an item has no type, or refers to a stored item; send previous_response_id, or the item itself"
        )
    log.warning("the item of type %.60r cannot be read here and is left out", kind)
    return []


def _messages_of(given: Any) -> Any:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return (
        [message for item in given for message in _messages_with(item)]
        if isinstance(given, list)
        else given
    )


def _joined(messages: Iterable[Message]) -> list[Message]:
    """Merges consecutive assistant messages into one. A message with thinking is not
    merged with the message before it, because it begins another answer. Also merges
    consecutive system messages, because many templates accept only one."""
    groups: list[list[Message]] = []
    for message in messages:
        role = message["role"]
        if (
            groups
            and groups[-1][0]["role"] == role
            and role in BETWEEN
            and "thinking" not in message
        ):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else _one_of(group) for group in groups]


def _one_of(group: Sequence[Message]) -> Message:
    texts = (text for message in group if (text := text_of(message["content"])))
    calls = [call for message in group for call in message.get("tool_calls", ())]
    content = BETWEEN[group[0]["role"]].join(texts)
    return {**group[0], "content": content, **({"tool_calls": calls} if calls else {})}


def _functions_of(tools: Any) -> Any:
    return own_tools(tools, ("function",), "parameters")


class _TextOptions(Body):
    format: chat.Format | None = None
    verbosity: Literal["low", "medium", "high"] = "medium"


class ResponsesBody(chat.ToolsBody):
    """The body of /v1/responses."""

    messages: Annotated[Messages, Field(alias="input"), BeforeValidator(_messages_of)]
    instructions: str | None = None
    tools: Annotated[chat.Tools, BeforeValidator(_functions_of)] = []
    max_output_tokens: chat.Limit | None = None
    text: _TextOptions = _TextOptions()
    truncation: Literal["auto", "disabled"] = "disabled"
    include: Annotated[list[str], Field(max_length=limits.STOPS)] = []
    metadata: Annotated[
        dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(without_nulls)
    ] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: Name | None = None
    store: bool = True
    conversation: Any = None
    prompt: Any = None
    background: Any = None

    @field_validator(*REFUSED)
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> None:
        if without_nulls(value):
            raise ValueError(f"is not supported: {REFUSED[info.field_name or '']}")

    # Store for the response; None: it is not stored.
    _responses: ResponseStore | None = None
    # Earlier messages of the conversation.
    _history: list[Message] = PrivateAttr(default_factory=list)

    async def look_up(self, state: State) -> None:
        """Selects the store for the response. Reads the conversation that ends with the
        previous response, if the body names one. Raises HttpError 400 if the previous
        response is not stored or the conversation has too many messages. Also raises
        OptionError, BusyError or StorageError."""
        responses: ResponseStore | None = state.responses
        if responses is not None and responses.stores and self.store:
            self._responses = responses
        if self.previous_response_id is None:
            return
        if responses is None:
            raise HttpError(f"previous_response_id: is not supported: {NOT_STORED}")
        try:
            self._history = await asyncio.to_thread(
                responses.history, self.previous_response_id
            )
        except UnknownIdError as error:
            raise HttpError(
                f"previous_response_id: {error}", code="previous_response_not_found"
            ) from None
        if len(self._history) + len(self.messages) > limits.MESSAGES:
            raise HttpError(
                f"the conversation has more than {limits.MESSAGES} messages; begin a new one"
            )

    @property
    def is_stored(self) -> bool:
        """True if the response must be stored."""
        return self._responses is not None

    def new_messages(self) -> list[Message]:
        """Returns the messages of the body's input, without the earlier
        conversation."""
        return list(messages_of(self.messages, self._history))

    async def keep(self, response: Json) -> None:
        """Stores the response with the messages of its turn (input and answer), if
        `is_stored` is True. An error of the store is only logged."""
        if self._responses is None:
            return
        answer = MESSAGES.validate_python(_messages_of(response["output"]))
        turn = [*self.new_messages(), *_joined(messages_of(answer))]
        try:
            await asyncio.to_thread(
                self._responses.add, response, self.previous_response_id, turn
            )
        except (MoeggufError, OSError) as error:
            log.warning("the response %s is not stored: %s", response["id"], error)

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        """Returns a list of one request, for the message that follows the stored
        conversation and the input."""
        effort = self.reasoning.effort
        instructions = (
            [{"role": "system", "content": self.instructions}]
            if self.instructions
            else []
        )
        request = self.next_message(
            entry,
            _joined([*instructions, *self._history, *self.new_messages()]),
            self.text.format,
            self.max_output_tokens,
            self.top_logprobs is not None or LOGPROBS in self.include,
            think=chat.EFFORTS[effort] if effort else None,
            truncate=self.truncation == "auto",
        )
        return [request]


# Replies


class _Form(NamedTuple):
    """The names that one kind of item (message, reasoning or summary) has in objects
    and events."""

    prefix: str  # beginning of the item's id
    number: str  # key of the part's index in an event
    part: str  # name of the part in event types
    text: str  # name of the text in event types
    kind: str  # value of "type" in the part
    key: str  # key of the list of parts in the item


MESSAGE = _Form(
    "msg", "content_index", "content_part", "output_text", "output_text", "content"
)
REASONING = _Form(
    "rs", "content_index", "content_part", "reasoning_text", "reasoning_text", "content"
)
SUMMARY = _Form(
    "rs",
    "summary_index",
    "reasoning_summary_part",
    "reasoning_summary_text",
    "summary_text",
    "summary",
)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class _ResponseReply(EventReply):
    """The reply of /v1/responses."""

    def __post_init__(self) -> None:
        self._settings = _settings(self.body, self.requests[0])
        self._output: list[Json] = []  # complete items
        self._form = MESSAGE  # names of the item that is still growing
        self._item: Json = {}
        self._part: Json = {}
        self._keys: Json = {}  # fields that all events of the growing item have
        self._n_events = 0
        self._object: Json = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": self.name,
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

    async def keep(self) -> None:
        await self.body.keep(self._object)

    def error_line(self, error: HttpError, path: str) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._object |= {
            "status": "failed",
            "error": {"code": code, "message": str(error)},
            "output": self._output,
        }
        return event_line(
            self._event("response.failed", response=self._object), "response.failed"
        )

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _begin_block(self, kind: str) -> Iterator[Json]:
        form = (
            MESSAGE
            if kind == "text"
            else SUMMARY
            if self._settings["reasoning"]["summary"]
            else REASONING
        )
        message = {
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        reasoning = {
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }
        self._form, self._item = (
            form,
            {"id": _new_id(form.prefix), **(message if form is MESSAGE else reasoning)},
        )
        self._part = {
            "type": form.kind,
            "text": "",
            **({"annotations": [], "logprobs": []} if form is MESSAGE else {}),
        }
        self._keys = {
            "item_id": self._item["id"],
            "output_index": len(self._output),
            form.number: 0,
        }
        yield self._event(
            "response.output_item.added",
            output_index=len(self._output),
            item=self._item,
        )
        yield self._event(f"response.{form.part}.added", **self._keys, part=self._part)

    def _grow(self, text: str, delta: Delta) -> Iterator[Json]:
        self._part["text"] += text
        more = {}
        if self._form is MESSAGE:
            more["logprobs"] = logprob_objects(delta.logprobs)
            self._part["logprobs"] += more["logprobs"]
        yield self._event(
            f"response.{self._form.text}.delta", **self._keys, delta=text, **more
        )

    def _end_block(
        self, kind: str, summary: AnswerSummary | None = None
    ) -> Iterator[Json]:
        form, item, part = self._form, self._item, self._part
        more = {"logprobs": part["logprobs"]} if form is MESSAGE else {}
        yield self._event(
            f"response.{form.text}.done", **self._keys, text=part["text"], **more
        )
        yield self._event(f"response.{form.part}.done", **self._keys, part=part)
        item["status"] = (
            "incomplete" if summary and summary.finish == "length" else "completed"
        )
        item[form.key].append(part)
        if form is not MESSAGE and ENCRYPTED_REASONING in self.body.include:
            # Clients send this text back unchanged.
            item["encrypted_content"] = (
                REASONING_PREFIX + base64.b64encode(part["text"].encode()).decode()
            )
        yield self._item_done(item)

    def _item_done(self, item: Json) -> Json:
        self._output.append(item)
        return self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=item
        )

    def _call(self, call: ToolCall) -> Iterator[Json]:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        keys = {"item_id": _new_id("fc"), "output_index": len(self._output)}
        item = {
            "id": keys["item_id"],
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
        }
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event(
            "response.output_item.added", output_index=keys["output_index"], item=begun
        )
        yield self._event(
            "response.function_call_arguments.delta", **keys, delta=arguments
        )
        yield self._event(
            "response.function_call_arguments.done",
            **keys,
            name=call.name,
            arguments=arguments,
        )
        yield self._item_done({**item, "status": "completed", "arguments": arguments})

    def _finish(self, summary: AnswerSummary) -> Iterator[Json]:
        is_cut = summary.finish == "length"
        status = "incomplete" if is_cut else "completed"
        if all(item["type"] == "reasoning" for item in self._output):
            # Clients expect a text item, even if it is empty.
            yield from self._begin_block("text")
            yield from self._end_block("text", summary)
        self._object |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": usage(
                summary.whole_prompt_tokens,
                summary.cached_tokens,
                summary.answer_tokens,
                summary.thinking_tokens,
                cache_write_tokens=0,
            ),
            **chat.statistics(summary),
        }
        yield self._event(f"response.{status}", response=self._object)


def _settings(body: ResponsesBody, request: Request) -> Json:
    reasoning, choice = body.reasoning, body.tool_choice
    shown_choice: Any = choice
    if isinstance(choice, chat.ToolChoice):
        named = [{"type": "function", "name": name} for name in choice.names]
        allowed = {"type": choice.type, "mode": choice.mode, "tools": named}
        shown_choice = named[0] if choice.type == "function" else allowed
    form = (
        body.text.format.model_dump(by_alias=True, exclude_none=True)
        if body.text.format
        else {"type": "text"}
    )
    shown = {"name", "description", "parameters", "strict"}
    functions = (tool.function.model_dump(include=shown) for tool in body.tools)
    return {
        **body.model_dump(include=set(ECHOED)),
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_calls,
        "reasoning": {
            "effort": reasoning.effort,
            "summary": reasoning.summary or reasoning.generate_summary,
        },
        "service_tier": "default",
        "previous_response_id": body.previous_response_id,
        "store": body.is_stored,
        **{name: getattr(request.sampling, name) for name in SETTINGS},
        "text": {"format": form, "verbosity": body.text.verbosity},
        "tool_choice": shown_choice,
        "tools": [
            {"type": "function", **function, "strict": bool(function["strict"])}
            for function in functions
        ],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation,
    }


def _stored(request: HttpRequest) -> tuple[ResponseStore, str]:
    """Returns the store of responses and the id in the request's path."""
    return request.app.state.responses, request.path_params["response"]


def _retrieve(request: HttpRequest) -> Response:  # called on a thread
    responses, response_id = _stored(request)
    return JSONResponse(responses.get(response_id))


def _delete(request: HttpRequest) -> Response:  # called on a thread
    responses, response_id = _stored(request)
    responses.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


ResponsesBody.reply_kind = _ResponseReply

routes = [
    conversation("/v1/responses", ResponsesBody),
    about_prompt(
        "/v1/responses/input_tokens", ResponsesBody, "count", "input_tokens",
        object="response.input_tokens",
    ),
    Route("/v1/responses/{response}", _retrieve),
    Route("/v1/responses/{response}", _delete, methods=["DELETE"]),
]  # fmt: skip
