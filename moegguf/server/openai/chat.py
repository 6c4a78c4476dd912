"""POST /v1/chat/completions: the next message of a conversation, whole or streamed; and what OpenAI's other endpoints
share with it.

Follows OpenAI's API reference and llama-server's extensions. Every number of a body has limits; unknown keys are
ignored, as OpenAI's clients often get new ones; `null` is the same as absent. Sampling parameters become Ollama's
options, so that a model's defaults are applied in one place. Images come as data URLs; an audio part is refused by its
type. Replies have additional keys: `timings` and `prompt_progress` as llama-server writes them, `moe` of our own.
Thinking is `reasoning` (as in Ollama) and `reasoning_content` (as in llama-server).
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

from moegguf.generate.request import MAX_TOP_LOGPROBS, AnswerSummary, Delta, Message, PromptProgress, Request, Sampling
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body, Whole, without_nulls
from moegguf.server.common.conversation import Json, Reply, RequestBody, about_prompt, conversation
from moegguf.server.common.messages import Messages, Tool, messages_of, with_entry_messages
from moegguf.server.common.options import MAX_TOKEN, SamplingOptions, Stops, in_range, sampling_of
from moegguf.server.common.replies import cut_object, event_line, logprob_objects, moe_object
from moegguf.serving.events import Done, Event

EFFORTS: Mapping[str, bool | str] = {
    "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "max", "max": "max",
}  # fmt: skip

# Bodies


def _not_zero(value: int) -> int:
    """Raises ValueError for 0; -1 is no limit, as in llama-server."""
    if value == 0:
        raise ValueError("must be at least 1, or -1 for no limit, but is 0")
    return value


def token_ids(biases: Any) -> Any:
    """`logit_bias` with token ids as keys, which are strings in JSON. Raises ValueError."""
    biases = without_nulls(biases)
    if not isinstance(biases, dict):
        return biases
    wrong = next((key for key in biases if not (key.isascii() and key.isdigit() and int(key[:11]) <= MAX_TOKEN)), None)
    if wrong is not None:
        raise ValueError(f"a key must be a token id, but is {wrong[:40]!r}")
    return {int(key): bias for key, bias in biases.items()}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Limit = Annotated[Whole, Field(ge=-1, le=MAX_ANSWER_TOKENS), AfterValidator(_not_zero)]
Choices = Annotated[Whole, Field(ge=1, le=limits.CHOICES)]
Biases = Annotated[dict[int | str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=4096)]
TopLogprobs = Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class _StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(RequestBody, SamplingOptions):
    """The fields that chat and completion share."""

    stream_options: _StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Limit | None = None
    stop: Annotated[Stops | None, BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = None
    logit_bias: Annotated[Biases, BeforeValidator(token_ids)] | None = None
    thinking_budget_tokens: Whole | None = in_range("reasoning_budget_tokens")
    ignore_eos: bool | None = None  # llama-server's and vLLM's: the answer ends at its limit only
    return_progress: bool | None = None
    truncate: bool | None = None  # a prompt longer than the context is no error
    shift: bool | None = None  # Ollama's: a prompt loses its middle then, and an answer goes on in a full context
    json_schema: dict[str, Any] | None = None  # llama-server's, as is the grammar (in GBNF): the answer follows it
    grammar: str | None = None

    @property
    def thinking_budget(self) -> int | None:
        """Tokens of thinking, by either of llama-server's names."""
        given = self.reasoning_budget_tokens
        return self.thinking_budget_tokens if given is None else given

    def sampling(self, entry: ModelEntry, most: int | None) -> Sampling:
        """Returns the sampling parameters: the body's own keys, then `options`, then the entry's parameters. `most`:
        tokens of the answer, -1 for no limit, None for the default."""
        own = self.model_dump(include=set(SamplingOptions.model_fields))
        own |= {"num_predict": most, "reasoning_budget_tokens": self.thinking_budget}
        biases = self.logit_bias or {}
        return replace(
            sampling_of(entry, self.options, **own),
            logit_bias={token: bias for token, bias in biases.items() if isinstance(token, int)},
            text_bias=tuple((text, bias) for text, bias in biases.items() if isinstance(text, str)),
            ignore_eos=bool(self.ignore_eos),
        )

    def request(self, entry: ModelEntry, most: int | None, **fields: Any) -> Request:
        """Returns a request with the fields that all of these endpoints share, and `fields`. `most`: as of
        `sampling`."""
        shared = {
            "format": self.json_schema,
            "grammar": self.grammar or None,
            "truncate": bool(self.truncate),
            "shift": bool(self.shift),
            "sampling": self.sampling(entry, most),
        }
        return Request(**{**shared, **fields})

    @property
    def n_answers(self) -> int:
        """Returns the number of answers to each prompt."""
        return self.n or 1

    def repeated(self, request: Request) -> list[Request]:
        """Returns the same request for each answer, with the seeds that follow its own."""
        first = request.sampling.seed
        seeds = [None if first is None else (first + i) & 0xFFFFFFFF for i in range(self.n_answers)]
        return [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]


def _choice_of(choice: Any) -> Any:
    """`tool_choice` as a `ToolChoice` has it; chat nests it deeper than responses. Raises ValueError."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind not in ("function", "allowed_tools"):
        raise ValueError(f"choices of type {str(kind)[:40]!r} are not supported; name a function")
    found = choice.get(kind) or choice
    tools = [found] if kind == "function" else found.get("tools") if isinstance(found, dict) else None
    names = []
    for tool in tools if isinstance(tools, list) else ():
        function = (tool.get("function") or tool) if isinstance(tool, dict) else None
        names.append(function.get("name") if isinstance(function, dict) else None)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{kind} is missing, or has no names of functions")
    return {"type": kind, "mode": found.get("mode") or "auto", "names": names}


class ToolChoice(Body):
    """`tool_choice` as an object: one function, or with `mode` a subset of the tools."""

    type: Literal["function", "allowed_tools"]
    mode: Literal["auto", "required"]
    names: list[str]


class OpenAITool(Tool):
    """A tool that the model may call."""

    type: Literal["function"] = "function"


Tools = Annotated[list[OpenAITool], Field(max_length=limits.TOOLS)]


class Reasoning(Body):
    """`reasoning`. With a summary, responses send the thinking as one; else as text. `max_tokens` is OpenRouter's."""

    effort: Effort | None = None
    max_tokens: Whole = in_range("reasoning_budget_tokens")
    summary: str | None = None
    generate_summary: str | None = None


def _format_of(given: Any) -> Any:
    """`response_format` as the fields of a `Format`; chat has a schema one level deeper than responses."""
    named = given.get("json_schema") if isinstance(given, dict) else None
    return {"type": given.get("type"), **named} if isinstance(named, dict) else given


class Format(Body):
    """`response_format` of chat, `text.format` of responses; `schema` with json_object is llama-server's."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Format:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("schema is missing")
        return self


class ToolsBody(GenerationBody):
    """The fields of a conversation with tools."""

    tools: Tools | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ToolChoice | None, BeforeValidator(_choice_of)] = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def parallel_calls(self) -> bool:
        """`parallel_tool_calls`, true by default."""
        return self.parallel_tool_calls is not False

    @property
    def thinking_budget(self) -> int | None:
        """Tokens of thinking, by llama-server's or by OpenRouter's name."""
        given = super().thinking_budget
        return self.reasoning.max_tokens if given is None and self.reasoning else given

    @model_validator(mode="after")
    def _choice_has_tools(self) -> ToolsBody:
        known = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice == "required" and not known:
            raise ValueError("tool_choice 'required' needs tools")
        wanted = self.tool_choice.names if isinstance(self.tool_choice, ToolChoice) else ()
        if missing := sorted(set(wanted) - known):
            raise ValueError(f"tool_choice names {missing[0][:80]!r}, which is not among the tools")
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
        """Returns the request for the next message, with the entry's defaults, the tools, and `fields`."""
        choice: Any = self.tool_choice
        tools = self.tools or ()
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
            messages=with_entry_messages(messages, entry),
            template=entry.template,
            tools=tuple(tool.model_dump(exclude_none=True) for tool in tools),
            tool_choice=choice or "auto",
            strict=format_ is not None and bool(format_.strict),
            n_logprobs=(self.top_logprobs or 0) if logprobs else None,
            **fields,
        )


class ChatBody(ToolsBody):
    """The body of /v1/chat/completions. `top_logprobs` has an effect only with `logprobs`. An assistant's message at
    the end is continued, as by llama-server, unless `continue_final_message` is false or `add_generation_prompt` true
    (vLLM's names). `add_generation_prompt` false: the prompt ends with the last message."""

    messages: Messages
    max_completion_tokens: Limit | None = None
    response_format: Annotated[Format | None, BeforeValidator(_format_of)] = None
    reasoning_effort: Effort | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None

    @model_validator(mode="after")
    def _continues_or_begins(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true; send one of them")
        return self

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        """Returns one for each choice."""
        continues, most = self.continue_final_message, self.max_completion_tokens
        request = self.next_message(
            entry,
            messages_of(self.messages),
            self.response_format,
            self.max_tokens if most is None else most,  # the former is deprecated
            bool(self.logprobs),
            think=self._think(),
            template_options=self.chat_template_kwargs or {},
            continue_final_message=not self.add_generation_prompt if continues is None else continues,
            begins_answer=self.add_generation_prompt is not False,
        )
        return self.repeated(request)

    def _think(self) -> bool | str | None:
        if self.think is not None:
            return self.think
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        if effort is not None:
            return EFFORTS[effort]
        given = self.chat_template_kwargs or {}
        enabled = given.get("enable_thinking", given.get("thinking"))
        return enabled if isinstance(enabled, bool) else None


# Replies


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0


def statistics(summary: AnswerSummary) -> Json:
    """Additional keys of a complete reply: llama-server's `timings` (token counts, times in milliseconds), and ours."""
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
    """llama-server's `prompt_progress`: tokens of the prompt, time in milliseconds."""
    return {
        "total": progress.n_tokens,
        "cache": progress.n_cached,
        "processed": progress.n_done,
        "time_ms": round(progress.seconds * 1e3),
    }


def _total(summary: AnswerSummary, later: AnswerSummary) -> AnswerSummary:
    """Returns the statistics of two answers to one request together."""
    names = "prompt_tokens cached_tokens answer_tokens prompt_s answer_s cut_messages cut_tokens n_shifts stats".split()
    return replace(later, **{name: getattr(summary, name) + getattr(later, name) for name in names})


class ChoicesReply(Reply):
    """The reply to one body, of one choice or more in turn. Its objects share id and time."""

    prefix, whole_kind, chunk_kind = "", "", ""
    empty: ClassVar[Mapping[str, Any]] = {}  # a choice of a chunk without content
    started = False  # the current choice

    def __post_init__(self) -> None:
        options = self.body.stream_options
        self.n_answers = self.body.n_answers  # answers to each prompt, whose tokens count once
        self.n_choices = len(self.requests)
        self.logprobs = self.requests[0].n_logprobs is not None
        self._include_usage = bool(options and options.include_usage)
        self._choices: list[Json] = []  # complete choices of a whole reply
        self._summaries: list[AnswerSummary] = []  # summaries of the complete choices
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": f"moegguf-{self.entry.digest[:12]}",
        }

    @abstractmethod
    def _first(self) -> Json:
        """Returns the chunk before all others of a choice."""

    @abstractmethod
    def _chunks(self, delta: Delta) -> list[Json]:
        """Returns the chunks of a delta; none for an empty one."""

    @property
    def index(self) -> int:
        """Number of the current choice."""
        return len(self._summaries)

    def lines(self, event: Event) -> bytes:
        """Server-sent events without a name."""
        first = [] if self.started else [self._first()]  # made now, as the last chunk of a choice ends the choice
        items: list[Json] = []
        if isinstance(event, Delta):
            items = self._chunks(event)
        elif isinstance(event, Done):
            items = self._last(event)
        elif self.body.return_progress:
            items = [self._chunk(self.empty, prompt_progress=prompt_progress(event))]
        if not items:
            return b""
        self.started = not isinstance(event, Done)
        is_end = isinstance(event, Done) and self.index == self.n_choices
        return b"".join(map(event_line, [*first, *items])) + (b"data: [DONE]\n\n" if is_end else b"")

    def _finish(self, done: Done) -> str:
        """Returns OpenAI's `finish_reason`, which has no "cancelled"."""
        if done.summary.finish == "length":  # the last call may be cut
            return "length"
        return "tool_calls" if self.n_calls else "stop"

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _chunk(self, choice: Mapping[str, Any], **more: Any) -> Json:
        choices = [{"index": self.index, "finish_reason": None, "logprobs": None, **choice}]
        if self._include_usage:
            more = {"usage": None, **more}  # OpenAI sends null in all chunks except the last
        return self._object(self.chunk_kind, choices, **more)

    def _end_choice(self, done: Done) -> None:
        self._summaries.append(done.summary)
        self.n_calls = 0

    def _last(self, done: Done) -> list[Json]:
        """Returns the chunk with `finish_reason`, and after the last choice a chunk with `usage` if requested.

        The last chunk of all has the statistics of all choices.
        """
        chunk = self._chunk({**self.empty, "finish_reason": self._finish(done)})
        self._end_choice(done)
        if self.index < self.n_choices:
            return [chunk]
        if not self._include_usage:
            return [{**chunk, **self._statistics()}]
        return [chunk, self._object(self.chunk_kind, [], usage=self._usage(), **self._statistics())]

    def _add(self, choice: Mapping[str, Any], done: Done) -> None:
        reason = {"finish_reason": self._finish(done)}
        self._choices.append({"index": self.index, "logprobs": None, **choice, **reason})
        self._end_choice(done)

    def whole(self) -> Json:
        """The object of a reply that is not streamed, after `add` of every choice."""
        return self._object(self.whole_kind, self._choices, usage=self._usage(), **self._statistics())

    def _statistics(self) -> Json:
        return statistics(reduce(_total, self._summaries))

    def _usage(self) -> Json:
        """Each prompt counts once."""
        prompts = reduce(_total, self._summaries[:: self.n_answers])
        n_answer = reduce(_total, self._summaries).answer_tokens
        return {
            "prompt_tokens": prompts.whole_prompt_tokens,
            "completion_tokens": n_answer,
            "total_tokens": prompts.whole_prompt_tokens + n_answer,
            "prompt_tokens_details": {"cached_tokens": prompts.cached_tokens},
        }


class _ChatReply(ChoicesReply):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    empty: ClassVar[Mapping[str, Any]] = {"delta": {}}

    def _first(self) -> Json:
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def _chunks(self, delta: Delta) -> list[Json]:
        """Returns one chunk each for thinking, text and calls, in this order; log probabilities are in the first."""
        found = self._parts(delta) or ([{}] if delta.logprobs else [])
        chunks = [self._chunk({"delta": part}) for part in found]
        if chunks and delta.logprobs:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(delta)
        return chunks

    def _parts(self, delta: Delta) -> list[Json]:
        """Returns the fields of a message that a delta has: thinking, text, calls."""
        parts: list[Json] = []
        if delta.thinking:
            parts.append({"reasoning": delta.thinking, "reasoning_content": delta.thinking})
        if delta.text:
            parts.append({"content": delta.text})
        calls = []
        for index, call in self.numbered(delta.tool_calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            calls.append({"index": index, "id": call.id, "type": "function", "function": function})
        return [*parts, {"tool_calls": calls}] if calls else parts

    def _logprobs(self, delta: Delta) -> Json | None:
        return {"content": logprob_objects(delta.logprobs)} if self.logprobs else None

    def add(self, delta: Delta, done: Done) -> None:
        message: Json = {"role": "assistant", "content": ""}
        for part in self._parts(delta):
            message |= part
        if self.n_calls and not delta.text:
            message["content"] = None
        self._add({"message": message, "logprobs": self._logprobs(delta)}, done)


ChatBody.reply_kind = _ChatReply

routes = [
    conversation("/v1/chat/completions", ChatBody),
    about_prompt("/v1/chat/completions/input_tokens", ChatBody, "count", lambda n: {"input_tokens": n}),
]
