"""/api/chat and /api/generate: the next message of a conversation, and the answer to
one prompt.

A request without a question only loads or unloads the model. Bodies and replies are in
Ollama's format (api/types.go). The model entry supplies the first messages, and the
system message, parameters and template that a request does not have. With `raw` or
`suffix`, /api/generate uses only the entry's parameters. With `context`, it leaves out
the first messages.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moegguf.generate.images import MAX_IMAGES, with_images
from moegguf.generate.request import (
    MAX_TOP_LOGPROBS,
    REPEAT_LIMIT,
    THINK_LEVELS,
    AnswerSummary,
    Delta,
    Event,
    Message,
    Request,
)
from moegguf.models.entry import Details, ModelEntry
from moegguf.models.recipe import is_go_template
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits, replies
from moegguf.server.common.body import Body, Whole
from moegguf.server.common.conversation import Json, Reply, RequestBody, conversation
from moegguf.server.common.messages import ToolCall, Tools, chat_fields
from moegguf.server.common.options import Name, find, sampling_of

# expiry in replies for a model that never expires; Ollama sends a similar year
NEVER = datetime(2318, 1, 1, tzinfo=UTC)


def _level(value: bool | str | None) -> bool | str | None:
    if isinstance(value, str) and value not in THINK_LEVELS:
        raise ValueError(
            f'invalid think value: {value[:40]!r} (must be "high", "medium", "low", "max", true or false)'
        )
    return value


def _format(value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(value, str) and value not in ("", "json"):
        raise ValueError(
            f'invalid format: {value[:40]!r}; expected "json" or a JSON schema'
        )
    return None if value == "" else value


Images = Annotated[list[str], Field(max_length=MAX_IMAGES)]  # images in base64


class ModelBody(Body):
    """The body of a request about one model. `name` is the deprecated name of
    `model`."""

    model: Name
    _begun_ns: int = PrivateAttr(default_factory=time.perf_counter_ns)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: dict[str, Any]) -> dict[str, Any]:
        if not (name := given.get("model") or given.get("name")):
            raise ValueError("model is required")
        return {**given, "model": name}

    @property
    def age_ns(self) -> int:
        """Returns the nanoseconds since the body was read."""
        return time.perf_counter_ns() - self._begun_ns


class ChatMessage(Body):
    """One message of a conversation. The arguments of a tool call are a JSON object.
    JSON text, as in OpenAI's API, is also accepted."""

    role: Annotated[str, Field(min_length=1, max_length=32), AfterValidator(str.lower)]
    content: str = ""
    thinking: str | None = None
    images: Images = []
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_message(self) -> Message:
        """Returns the message for `Request`, without null fields, but always with
        `content`. Raises OptionError for an image that cannot be used."""
        fields = self.model_dump(exclude_none=True, exclude={"images", "content"})
        return {**fields, "content": with_images(self.content, self.images)}


class _GenerationBody(ModelBody, RequestBody):
    think: Annotated[bool | str | None, AfterValidator(_level)] = None
    format: Annotated[str | dict[str, Any] | None, AfterValidator(_format)] = None
    stream: bool = True
    truncate: bool = True
    shift: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    # moegguf's addition: a stream has lines with `prompt_progress`, and at its end
    # `timing` (an `AnswerSummary`)
    details: bool = False

    @property
    @abstractmethod
    def has_question(self) -> bool:
        """True if there is a question. Otherwise the model is only loaded or
        unloaded."""

    def request(self, entry: ModelEntry, **fields: Any) -> Request:
        """Returns a request with the fields that /api/chat and /api/generate share, and
        with the given `fields`."""
        return Request(
            format=self.format,
            think=self.think,
            truncate=self.truncate,
            shift=self.shift,
            repeat_limit=REPEAT_LIMIT,
            n_logprobs=self.top_logprobs if self.logprobs else None,
            sampling=sampling_of(entry, self.options),
            **fields,
        )

    async def respond(self, request: HttpRequest) -> Response:
        """Answers the question in the body. Without a question, loads the model, or
        unloads it if `keep_alive` is 0."""
        if self.has_question:
            return await super().respond(request)
        state, keep_alive_s = request.app.state, self.keep_alive_s()
        entry = await asyncio.to_thread(find, state.catalog, self.model)

        async def work() -> Json:
            if keep_alive_s == 0:
                await state.manager.unload(entry.name)
            else:
                await state.manager.load(entry.name, self.overrides(), keep_alive_s)
            return _Reply(self, entry, ()).without_content(
                "unload" if keep_alive_s == 0 else "load"
            )

        return replies.WholeResponse(work())


class ChatRequest(_GenerationBody):
    """The body of /api/chat."""

    messages: Annotated[list[ChatMessage], Field(max_length=limits.MESSAGES)] = []
    tools: Tools = []

    @property
    def has_question(self) -> bool:
        """True if there are messages."""
        return bool(self.messages)

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        """Returns a list of one request, for the next message of the conversation."""
        messages = (message.as_message() for message in self.messages)
        return [self.request(entry, **chat_fields(entry, messages, self.tools))]


class _GenerateRequest(_GenerationBody):
    operation = "generate"

    prompt: str = ""
    suffix: str = ""
    system: str | None = None
    template: str = ""
    context: Annotated[list[Whole], Field(max_length=MAX_ANSWER_TOKENS)] = []
    raw: bool = False
    images: Images = []

    @model_validator(mode="after")
    def _check_fields(self) -> _GenerateRequest:
        if self.raw and (self.template or self.system or self.context):
            raise ValueError("raw mode does not support template, system, or context")
        if self.template and is_go_template(self.template):
            raise ValueError(
                "template: is in Go's language; write it in Jinja, like the model's own (see /api/show)"
            )
        if self.images and (self.raw or self.suffix):
            raise ValueError(
                "raw mode and suffix do not support images; send them with a prompt for the template"
            )
        return self

    @property
    def has_question(self) -> bool:
        return bool(self.prompt or self.suffix or self.images)

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        """Returns a list of one request. The prompt passes through the chat template,
        unless the body has `raw` or `suffix`."""
        if self.raw or self.suffix:
            return [
                self.request(
                    entry,
                    prompt=self.prompt,
                    suffix=self.suffix or None,
                    return_context=not self.raw,
                )
            ]
        system = entry.system if self.system is None else self.system
        messages: list[Message] = (
            [{"role": "system", "content": system}] if system else []
        )
        if not self.context:
            messages += [dict(message) for message in entry.messages]
        question = {"role": "user", "content": with_images(self.prompt, self.images)}
        return [
            self.request(
                entry,
                messages=(*messages, question),
                context=tuple(self.context),
                template=self.template or entry.template,
                return_context=True,
            )
        ]


def time_text(moment: datetime | None) -> str:
    """Formats an aware time as RFC 3339 in UTC, with microseconds. None becomes
    NEVER."""
    return (
        (moment or NEVER)
        .astimezone(UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
    )


class _Reply(Reply):
    """The reply of /api/chat, which has a `message`, or of /api/generate, which has a
    `response`."""

    ping_line = b""

    def __post_init__(self) -> None:
        # Nanoseconds from reading the body to finding the model's entry.
        self._found_ns = self.body.age_ns
        self._whole: Json = {}

    def lines(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return (
                replies.json_line(self._object(self._delta(event) | {"done": False}))
                if event != Delta()
                else b""
            )
        if isinstance(event, AnswerSummary):
            end = self._content() | self._end(event)
            if self.body.details:
                end["timing"] = asdict(event)
            return replies.json_line(self._object(end))
        progress = {"prompt_progress": asdict(event), "done": False}
        return replies.json_line(self._object(progress)) if self.body.details else b""

    def add(self, delta: Delta, summary: AnswerSummary) -> None:
        self._whole = self._object(self._delta(delta) | self._end(summary))

    def whole(self) -> Json:
        return self._whole

    def without_content(self, reason: str) -> Json:
        return self._object(self._content() | {"done": True, "done_reason": reason})

    def _object(self, rest: Json) -> Json:
        return {"model": self.name, "created_at": time_text(datetime.now(UTC)), **rest}

    def _content(self, text: str = "", **more: Any) -> Json:
        if isinstance(self.body, ChatRequest):
            return {
                "message": {
                    "role": "assistant",
                    "content": text,
                    **replies.present(**more),
                }
            }
        return {"response": text, **replies.present(**more)}

    def _delta(self, delta: Delta) -> Json:
        calls = [
            {
                "id": call.id,
                "function": {
                    "index": index,
                    "name": call.name,
                    "arguments": dict(call.arguments),
                },
            }
            for index, call in self.numbered(delta.tool_calls)
        ]
        logprobs = replies.logprob_objects(delta.logprobs)
        return self._content(
            delta.text, thinking=delta.thinking, tool_calls=calls
        ) | replies.present(logprobs=logprobs)

    def _end(self, summary: AnswerSummary) -> Json:
        """Returns the fields of the last object, such as token counts, and durations in
        ns. `load_duration` is the time for finding the model, and for loading it if it
        was not in memory."""
        return {
            "done": True,
            "done_reason": summary.finish,
            **replies.present(
                context=list(summary.context) if self.requests[0].return_context else []
            ),
            "total_duration": self.body.age_ns,
            "load_duration": self._found_ns + replies.to_ns(summary.load_s),
            **replies.present(
                prompt_eval_count=summary.whole_prompt_tokens,
                prompt_cached_count=summary.cached_tokens,
                prompt_eval_duration=replies.to_ns(summary.prompt_s),
                eval_count=summary.answer_tokens,
                eval_duration=replies.to_ns(summary.answer_s),
            ),
            **replies.cut_object(summary),
            "moe": replies.moe_object(summary.stats),
        }


_GenerationBody.reply_kind = _Reply

routes = [
    conversation("/api/chat", ChatRequest),
    conversation("/api/generate", _GenerateRequest),
]
