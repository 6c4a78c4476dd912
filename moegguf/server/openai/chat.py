"""POST /v1/chat/completions: the next message of a conversation, whole or streamed.
OpenAI's other endpoints use parts of this module.

The API follows OpenAI's reference and llama-server's extensions. Sizes and numbers in a
body are limited. Unknown keys are ignored, because OpenAI's clients often get new ones,
and `null` is treated as absent. Sampling parameters become Ollama's options, so that a
model's defaults are applied in one place. Images come as data URLs or base64; audio is
refused. Replies have additional keys: `timings` and (if requested) `prompt_progress` as
in llama-server, and moegguf's own, such as `moe`. Thinking is sent twice, as
`reasoning` (Ollama's key) and as `reasoning_content` (llama-server's key).
"""

from __future__ import annotations

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moegguf.generate.request import (
    MAX_TOP_LOGPROBS,
    AnswerSummary,
    Delta,
    Event,
    Message,
    PromptProgress,
    Request,
    Sampling,
    prompt_fields,
)
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body, Whole, without_nulls
from moegguf.server.common.conversation import (
    Json,
    Reply,
    RequestBody,
    about_prompt,
    conversation,
)
from moegguf.server.common.messages import (
    Messages,
    Tool,
    chat_fields,
    check_choice,
    messages_of,
)
from moegguf.server.common.options import (
    MAX_TOKEN,
    SamplingOptions,
    Stops,
    Text,
    in_range,
    sampling_of,
)
from moegguf.server.common.replies import (
    cut_object,
    event_line,
    logprob_objects,
    moe_object,
)

EFFORTS: Mapping[str, bool | str] = {
    "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "max", "max": "max",
}  # fmt: skip

# Bodies


def _check_limit(value: int) -> int:
    """Returns a limit unchanged, but raises ValueError for 0. As in llama-server, -1
    means no limit."""
    if value == 0:
        raise ValueError("must be at least 1, or -1 for no limit, but is 0")
    return value


def token_ids(biases: Any) -> Any:
    """Converts the keys of a `logit_bias` object, which are strings in JSON, to token
    ids, and leaves out biases that are null. Returns other values unchanged. Raises
    ValueError for a key that is not a token id."""
    biases = without_nulls(biases)
    if not isinstance(biases, dict):
        return biases
    wrong = next(
        (
            key
            for key in biases
            if not (key.isascii() and key.isdigit() and int(key[:11]) <= MAX_TOKEN)
        ),
        None,
    )
    if wrong is not None:
        raise ValueError(
            f"a key must be a token id (0 to {MAX_TOKEN}), but is {wrong[:40]!r}"
        )
    return {int(key): bias for key, bias in biases.items()}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Limit = Annotated[
    Whole, Field(ge=-1, le=MAX_ANSWER_TOKENS), AfterValidator(_check_limit)
]
Choices = Annotated[Whole, Field(ge=1, le=limits.CHOICES)]
Biases = Annotated[
    dict[int | str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=4096)
]
TopLogprobs = Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class _StreamOptions(Body):
    include_usage: bool = False


class GenerationBody(RequestBody, SamplingOptions):
    """The fields that the bodies of chats, responses and completions share, including
    llama-server's completions."""

    stream_options: _StreamOptions = _StreamOptions()
    n: Choices = 1
    max_tokens: Limit | None = None
    stop: Annotated[
        Stops | None, BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
    ] = None
    logit_bias: Annotated[Biases, BeforeValidator(token_ids)] = {}
    thinking_budget_tokens: Whole | None = in_range("reasoning_budget_tokens")
    # If True, end tokens are never sampled; no effect with a schema or grammar.
    ignore_eos: bool = False
    return_progress: bool = False
    # If True, a prompt longer than the context is cut; otherwise it is an error.
    truncate: bool = False
    # If True, when an answer fills the context, older tokens are dropped.
    shift: bool = False
    # Schema that the answer satisfies (as in llama-server).
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None  # GBNF grammar that the answer matches

    @property
    def thinking_budget(self) -> int | None:
        """Returns the maximum number of thinking tokens, or None if the body sets none.
        llama-server has two names for this field; `reasoning_budget_tokens` takes
        precedence over `thinking_budget_tokens`."""
        given = self.reasoning_budget_tokens
        return self.thinking_budget_tokens if given is None else given

    def sampling(self, entry: ModelEntry, most: int | None) -> Sampling:
        """Returns the sampling parameters. The body's own keys take precedence over
        `options`, and `options` over the entry's parameters. `most` is the maximum
        number of answer tokens. If `most` is below 1, there is no maximum. If it is
        None, the maximum comes from `options` or the entry, if either has one."""
        biases = self.logit_bias.items()
        own = self.model_dump(include=set(SamplingOptions.model_fields))
        own |= {
            "num_predict": most,
            "reasoning_budget_tokens": self.thinking_budget,
            "logit_bias": {
                token: bias for token, bias in biases if isinstance(token, int)
            },
            "text_bias": tuple(each for each in biases if isinstance(each[0], str)),
            "ignore_eos": self.ignore_eos,
        }
        return sampling_of(entry, self.options, **own)

    def request(self, entry: ModelEntry, most: int | None, **fields: Any) -> Request:
        """Returns a request with the fields of this class, and with the given `fields`,
        which take precedence. `most` is the maximum number of answer tokens, as in
        `sampling`."""
        shared = {
            "format": self.json_schema,
            "grammar": self.grammar or None,
            "truncate": self.truncate,
            "shift": self.shift,
            "sampling": self.sampling(entry, most),
        }
        return Request(**{**shared, **fields})

    @property
    def n_answers(self) -> int:
        """Returns the number of answers to each prompt."""
        return self.n

    def repeated(self, request: Request) -> list[Request]:
        """Returns a copy of a request for each answer. If the request has a seed, the
        copies have consecutive seeds."""
        first = request.sampling.seed
        seeds = [
            None if first is None else (first + i) & 0xFFFFFFFF
            for i in range(self.n_answers)
        ]
        return [
            replace(request, sampling=replace(request.sampling, seed=seed))
            for seed in seeds
        ]

    def for_prompts(self, base: Request, prompts: Iterable[Text]) -> list[Request]:
        """Returns a copy of `base` for each answer to each of the `prompts`."""
        requests = (replace(base, **prompt_fields(prompt)) for prompt in prompts)
        return [each for request in requests for each in self.repeated(request)]


def _choice_of(choice: Any) -> Any:
    """Converts a `tool_choice` object to the fields of a `ToolChoice`. A chat nests
    these fields deeper than a response does. Returns other values unchanged. Raises
    ValueError for an object that names no function."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind not in ("function", "allowed_tools"):
        raise ValueError(
            f"choices of type {str(kind)[:40]!r} are not supported; name a function"
        )
    found = choice.get(kind) or choice
    try:
        tools = [found] if kind == "function" else found["tools"]
        names = [(tool.get("function") or tool)["name"] for tool in tools]
        mode = found.get("mode") or "auto"
    except (AttributeError, KeyError, TypeError):  # a part has another form
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{kind} must contain at least one function, and each function must have a name"
        )
    return {"type": kind, "mode": mode, "names": names}


class ToolChoice(Body):
    """The field `tool_choice` if it is an object. It names one function that must be
    called, or the allowed tools."""

    type: Literal["function", "allowed_tools"]
    mode: Literal["auto", "required"]
    names: list[str]


class OpenAITool(Tool):
    """A tool that the model may call. OpenAI's chat has only tools of type
    "function"."""

    type: Literal["function"] = "function"


Tools = Annotated[list[OpenAITool], Field(max_length=limits.TOOLS)]


class Reasoning(Body):
    """The field `reasoning`: how much the model thinks, and how /v1/responses sends the
    thinking."""

    effort: Effort | None = None
    # OpenRouter's name for the thinking budget, in tokens.
    max_tokens: Whole = in_range("reasoning_budget_tokens")
    # If set, /v1/responses sends the thinking as a summary, otherwise as text.
    summary: str | None = None
    generate_summary: str | None = None  # deprecated name of `summary`


def _format_of(given: Any) -> Any:
    """Converts `response_format` to the fields of a `Format`. The fields of its object
    `json_schema` move up to the level of `type`."""
    named = given.get("json_schema") if isinstance(given, dict) else None
    return {"type": given.get("type"), **named} if isinstance(named, dict) else given


class Format(Body):
    """The format of the answer: `response_format` in chats, `text.format` in responses.
    As in llama-server, `schema` is also allowed with the type json_object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Format:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("schema is missing")
        return self


class ToolsBody(GenerationBody):
    """The fields that the bodies of chats and responses share."""

    tools: Tools = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice, BeforeValidator(_choice_of)
    ] = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    top_logprobs: TopLogprobs | None = None

    @property
    def parallel_calls(self) -> bool:
        """True unless the body forbids several tool calls in one answer
        (`parallel_tool_calls` is false)."""
        return self.parallel_tool_calls

    @property
    def thinking_budget(self) -> int | None:
        """Returns the maximum number of thinking tokens, or None if the body sets none.
        The body sets it by one of llama-server's names, or else by OpenRouter's
        `reasoning.max_tokens`."""
        given = super().thinking_budget
        return self.reasoning.max_tokens if given is None else given

    @model_validator(mode="after")
    def _check_choice(self) -> ToolsBody:
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            check_choice(self.tools, "", choice.names)
        else:
            check_choice(self.tools, choice, ())
        return self

    def next_message(
        self,
        entry: ModelEntry,
        messages: Iterable[Message],
        format_: Format | None,
        most: int | None,
        logprobs: bool,
        **fields: Any,
    ) -> Request:
        """Returns the request for the next message of a conversation, with the entry's
        defaults, the format of the answer, the tools that the model may use, and the
        given `fields`."""
        choice: Any = self.tool_choice
        tools = self.tools
        if isinstance(choice, ToolChoice):
            if choice.type == "allowed_tools":
                tools = [tool for tool in tools if tool.function.name in choice.names]
            choice = choice.names[0] if choice.type == "function" else choice.mode
        if format_ is not None and format_.type != "text":
            fields["format"] = format_.schema_ or self.json_schema or "json"
        elif self.json_schema is not None:
            fields["format"] = self.json_schema or "json"
        return self.request(
            entry,
            most,
            **chat_fields(entry, messages, tools),
            tool_choice=choice,
            strict=format_ is not None and bool(format_.strict),
            n_logprobs=(self.top_logprobs or 0) if logprobs else None,
            **fields,
        )


class ChatBody(ToolsBody):
    """The body of /v1/chat/completions.

    If the last message is an assistant's message, the answer continues this message, as
    in llama-server. The answer is a new message instead if `continue_final_message` is
    false or `add_generation_prompt` is true. If `add_generation_prompt` is false, the
    prompt ends with the last message. Both names are vLLM's.
    """

    messages: Messages
    max_completion_tokens: Limit | None = None
    response_format: Annotated[Format | None, BeforeValidator(_format_of)] = None
    reasoning_effort: Effort | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool = False  # `top_logprobs` has an effect only if this is true

    @model_validator(mode="after")
    def _check_ending(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt cannot both be true; send one of them"
            )
        return self

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        """Returns one request for each of the `n` answers (choices) to the
        conversation."""
        continues, most = self.continue_final_message, self.max_completion_tokens
        request = self.next_message(
            entry,
            messages_of(self.messages),
            self.response_format,
            # max_tokens is the deprecated name.
            self.max_tokens if most is None else most,
            self.logprobs,
            think=self._think(),
            template_options=self.chat_template_kwargs,
            continue_final_message=not self.add_generation_prompt
            if continues is None
            else continues,
            begins_answer=self.add_generation_prompt is not False,
        )
        return self.repeated(request)

    def _think(self) -> bool | str | None:
        if self.think is not None:
            return self.think
        effort = self.reasoning_effort or self.reasoning.effort
        if effort is not None:
            return EFFORTS[effort]
        given = self.chat_template_kwargs
        enabled = given.get("enable_thinking", given.get("thinking"))
        return enabled if isinstance(enabled, bool) else None


# Replies


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0


def statistics(summary: AnswerSummary) -> Json:
    """Returns the additional keys of a complete reply: llama-server's `timings` (token
    counts, times in milliseconds), and moegguf's own keys."""
    prompt_ms, predicted_ms = summary.prompt_s * 1e3, summary.answer_s * 1e3
    timings = {
        "cache_n": summary.cached_tokens,
        "prompt_n": summary.prompt_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _per(prompt_ms, summary.prompt_tokens),
        "prompt_per_second": _per(summary.prompt_tokens, summary.prompt_s),
        "predicted_n": summary.answer_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _per(predicted_ms, summary.answer_tokens),
        "predicted_per_second": _per(summary.answer_tokens, summary.answer_s),
    }
    return {"timings": timings, "moe": moe_object(summary.stats), **cut_object(summary)}


def prompt_progress(progress: PromptProgress) -> Json:
    """Returns llama-server's `prompt_progress` object: counts of prompt tokens, and the
    time in milliseconds."""
    return {
        "total": progress.n_tokens,
        "cache": progress.n_cached,
        "processed": progress.n_done,
        "time_ms": round(progress.seconds * 1e3),
    }


def _total(summary: AnswerSummary, later: AnswerSummary) -> AnswerSummary:
    """Returns a copy of `later` in which the counts and times that a reply reports are
    the sums of both summaries."""
    names = "prompt_tokens cached_tokens answer_tokens prompt_s answer_s cut_messages cut_tokens n_shifts stats".split()
    return replace(
        later, **{name: getattr(summary, name) + getattr(later, name) for name in names}
    )


class ChoicesReply(Reply):
    """The reply to one body. It has one or more choices (answers), whose events come
    one choice after another. All objects of a reply have the same id and time."""

    prefix, whole_kind, chunk_kind = "", "", ""
    # The fields that a choice has in a chunk without content.
    empty: ClassVar[Mapping[str, Any]] = {}
    started = False  # True if chunks of the current choice were sent

    def __post_init__(self) -> None:
        self.n_answers = self.body.n_answers  # number of answers to each prompt
        self.n_choices = len(self.requests)
        self.logprobs = self.requests[0].n_logprobs is not None
        self._include_usage = self.body.stream_options.include_usage
        self._choices: list[Json] = []  # complete choices, if the reply is not streamed
        # Statistics of the complete choices, streamed or not.
        self._summaries: list[AnswerSummary] = []
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": f"moegguf-{self.entry.digest[:12]}",
        }

    @abstractmethod
    def _first(self) -> Json:
        """Returns the first chunk of a choice."""

    @abstractmethod
    def _chunks(self, delta: Delta) -> list[Json]:
        """Returns the chunks for a delta, or [] if the delta is empty."""

    @property
    def index(self) -> int:
        """Returns the index of the current choice."""
        return len(self._summaries)

    def lines(self, event: Event) -> bytes:
        """Returns the server-sent events (without names) for an event of the answer."""
        # Made before `_last` below moves on to the next choice.
        first = [] if self.started else [self._first()]
        items: list[Json] = []
        if isinstance(event, Delta):
            items = self._chunks(event)
        elif isinstance(event, AnswerSummary):
            items = self._last(event)
        elif self.body.return_progress:
            items = [self._chunk(self.empty, prompt_progress=prompt_progress(event))]
        if not items:
            return b""
        self.started = not isinstance(event, AnswerSummary)
        is_end = isinstance(event, AnswerSummary) and self.index == self.n_choices
        return b"".join(map(event_line, [*first, *items])) + (
            b"data: [DONE]\n\n" if is_end else b""
        )

    def _finish(self, summary: AnswerSummary) -> str:
        """Returns OpenAI's `finish_reason`: "length", "tool_calls" or "stop". OpenAI
        has no value for a cancelled answer, so such an answer gets one of the last
        two."""
        # Even after tool calls, since the last call may be incomplete.
        if summary.finish == "length":
            return "length"
        return "tool_calls" if self.n_calls else "stop"

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _chunk(self, choice: Mapping[str, Any], **more: Any) -> Json:
        choices = [
            {"index": self.index, "finish_reason": None, "logprobs": None, **choice}
        ]
        if self._include_usage:
            # OpenAI sends null in all chunks except the last.
            more = {"usage": None, **more}
        return self._object(self.chunk_kind, choices, **more)

    def _end_choice(self, summary: AnswerSummary) -> None:
        self._summaries.append(summary)
        self.n_calls = 0

    def _last(self, summary: AnswerSummary) -> list[Json]:
        """Returns the last chunk of a choice, which has `finish_reason`.

        After the last choice, a chunk with `usage` follows if the client requested it.
        The last chunk of the reply has the statistics of all choices.
        """
        chunk = self._chunk({**self.empty, "finish_reason": self._finish(summary)})
        self._end_choice(summary)
        if self.index < self.n_choices:
            return [chunk]
        if not self._include_usage:
            return [{**chunk, **self._statistics()}]
        return [
            chunk,
            self._object(
                self.chunk_kind, [], usage=self._usage(), **self._statistics()
            ),
        ]

    def _add(self, choice: Mapping[str, Any], summary: AnswerSummary) -> None:
        reason = {"finish_reason": self._finish(summary)}
        self._choices.append(
            {"index": self.index, "logprobs": None, **choice, **reason}
        )
        self._end_choice(summary)

    def whole(self) -> Json:
        """Returns the object of a reply that is not streamed. `add` must already have
        been called for each choice."""
        return self._object(
            self.whole_kind, self._choices, usage=self._usage(), **self._statistics()
        )

    def _statistics(self) -> Json:
        return statistics(reduce(_total, self._summaries))

    def _usage(self) -> Json:
        """Returns the object `usage`. The tokens of a prompt are counted only once,
        even if the prompt has several answers."""
        prompts = reduce(_total, self._summaries[:: self.n_answers])
        n_answer = reduce(_total, self._summaries).answer_tokens
        return {
            "prompt_tokens": prompts.whole_prompt_tokens,
            "completion_tokens": n_answer,
            "total_tokens": prompts.whole_prompt_tokens + n_answer,
            "prompt_tokens_details": {"cached_tokens": prompts.cached_tokens},
        }


class _ChatReply(ChoicesReply):
    prefix, whole_kind, chunk_kind = (
        "chatcmpl",
        "chat.completion",
        "chat.completion.chunk",
    )
    empty: ClassVar[Mapping[str, Any]] = {"delta": {}}

    def _first(self) -> Json:
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def _chunks(self, delta: Delta) -> list[Json]:
        """Returns one chunk each for the delta's thinking, text and tool calls, in this
        order; a missing part has no chunk. The first chunk has the logprobs, and is
        empty if the delta has nothing else."""
        found = self._parts(delta) or ([{}] if delta.logprobs else [])
        chunks = [self._chunk({"delta": part}) for part in found]
        if chunks and delta.logprobs:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(delta)
        return chunks

    def _parts(self, delta: Delta) -> list[Json]:
        """Returns a message's fields for the thinking, the text and the tool calls of a
        delta, as separate objects."""
        parts: list[Json] = []
        if delta.thinking:
            parts.append(
                {"reasoning": delta.thinking, "reasoning_content": delta.thinking}
            )
        if delta.text:
            parts.append({"content": delta.text})
        calls = []
        for index, call in self.numbered(delta.tool_calls):
            function = {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            }
            calls.append(
                {
                    "index": index,
                    "id": call.id,
                    "type": "function",
                    "function": function,
                }
            )
        return [*parts, {"tool_calls": calls}] if calls else parts

    def _logprobs(self, delta: Delta) -> Json | None:
        return {"content": logprob_objects(delta.logprobs)} if self.logprobs else None

    def add(self, delta: Delta, summary: AnswerSummary) -> None:
        message: Json = {"role": "assistant", "content": ""}
        for part in self._parts(delta):
            message |= part
        if self.n_calls and not delta.text:
            message["content"] = None
        self._add({"message": message, "logprobs": self._logprobs(delta)}, summary)


ChatBody.reply_kind = _ChatReply

routes = [
    conversation("/v1/chat/completions", ChatBody),
    about_prompt(
        "/v1/chat/completions/input_tokens", ChatBody, "count", "input_tokens"
    ),
]
