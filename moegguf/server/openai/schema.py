"""What OpenAI's clients ask, checked, and as a `GenerationRequest`.

Numbers keep to limits before they reach C; an unknown key is ignored, as OpenAI's clients send new ones every month;
`null` is the same as absent. Sampling becomes Ollama's options, so that one place knows the model's defaults.
Follows OpenAI's API reference and llama-server's extensions. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moegguf.generate.options import MAX_SEED, MAX_TOKENS
from moegguf.generate.request import GenerationRequest, Message, Sampling
from moegguf.models.entry import Entry
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.options import MAX_TOKEN, KeepAlive, ModelName, Options, Stop, options_of
from moegguf.server.openai.parts import ChatMessage, ResponseFormat, Tool, ToolChoice
from moegguf.serving.events import LoadOptions

MAX_BIASES = 4096

EFFORTS: Mapping[str, bool | str] = {
    "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "max", "max": "max",
}  # fmt: skip

# Those of Ollama's options that have a key of their own here, under the same name.
OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "repeat_penalty", "repeat_last_n",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def one_answer(n: int) -> int:
    """Of `n` and `best_of`, only 1 is served: a model writes one answer at a time."""
    if n != 1:
        raise ValueError(f"must be 1, but is {n}; ask again for another answer")
    return n


def list_of_stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def not_zero(value: int) -> int:
    """-1 stands for no limit, as in llama-server."""
    if value == 0:
        raise ValueError("must be at least 1, or -1 for no limit, but is 0")
    return value


def token_numbers(biases: Any) -> Any:
    """`logit_bias` with numbers as keys, which JSON can only write as text."""
    if not isinstance(biases, dict):
        return biases
    wrong = next((key for key in biases if not (key.isascii() and key.isdigit() and int(key[:11]) <= MAX_TOKEN)), None)
    if wrong is not None:
        raise ValueError(f"a key must be the number of a token, but is {wrong[:40]!r}")
    return {int(key): bias for key, bias in biases.items()}


Limit = Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(not_zero)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Body):
    include_usage: bool | None = None


class AnswerBody(Body):
    """What chat and completion have in common. A prompt that does not fit is an error unless `truncate` is true."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, AfterValidator(one_answer)] | None = None
    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: Annotated[list[Stop], Field(max_length=limits.STOPS), BeforeValidator(list_of_stops)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES), BeforeValidator(token_numbers)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None
    return_progress: bool | None = None
    truncate: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, entry: Entry) -> Sampling:
        """How tokens are chosen: OpenAI's keys go before `options`, and these before what the model's name says."""
        named = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}
        if (limit := self.limit()) is not None:
            named["num_predict"] = limit
        options = options_of(self.options, entry).model_copy(update=named)
        return replace(options.sampling(), logit_bias=self.logit_bias or {})

    def load(self) -> LoadOptions:
        """How the model is to be opened."""
        return (self.options or Options()).load()

    def limit(self) -> int | None:
        """Tokens of the answer at most, -1 for no limit; None when nothing was said."""
        return self.max_tokens


class Reasoning(Body):
    effort: Effort | None = None


class ChatBody(AnswerBody):
    """The body of /v1/chat/completions. `top_logprobs` counts only with `logprobs`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MESSAGES)]
    max_completion_tokens: Limit | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def names_its_tools(self) -> ChatBody:
        """A choice of tools needs these tools."""
        known = {tool.function.name for tool in self.tools or ()}
        wanted = self._wanted()
        if self.tool_choice == "required" and not known:
            raise ValueError("tool_choice 'required' needs tools")
        if missing := sorted(wanted - known):
            raise ValueError(f"tool_choice names {missing[0][:80]!r}, which is not among the tools")
        return self

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def generation(self, entry: Entry) -> GenerationRequest:
        """What the model gets, with what its name adds."""
        own = [dict(message) for message in entry.messages]
        given = self._messages()
        if entry.system and given[0]["role"] != "system":
            own.insert(0, {"role": "system", "content": entry.system})
        return GenerationRequest(
            messages=(*own, *given),
            template=entry.template,
            tools=self._offered(),
            tool_choice=self._choice(),
            format=self.response_format.as_format() if self.response_format else None,
            think=self._think(),
            template_options=self.chat_template_kwargs or {},
            truncate=bool(self.truncate),
            n_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            sampling=self.sampling(entry),
        )

    def _messages(self) -> tuple[Message, ...]:
        names = {call.id or "": call.function.name for said in self.messages for call in said.tool_calls or ()}
        return tuple(message.as_message(names) for message in self.messages)

    def _wanted(self) -> set[str]:
        """Functions that the choice names."""
        if not isinstance(self.tool_choice, ToolChoice):
            return set()
        if self.tool_choice.function is not None:
            return {self.tool_choice.function.name}
        allowed = self.tool_choice.allowed_tools
        return {tool.function.name for tool in allowed.tools} if allowed else set()

    def _offered(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the model is told about."""
        allowed = isinstance(self.tool_choice, ToolChoice) and self.tool_choice.allowed_tools is not None
        wanted = self._wanted()
        return tuple(tool.as_dict() for tool in self.tools or () if not allowed or tool.function.name in wanted)

    def _choice(self) -> str:
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return choice or "auto"
        if choice.function is not None:
            return choice.function.name
        return choice.allowed_tools.mode if choice.allowed_tools else "auto"

    def _think(self) -> bool | str | None:
        if self.think is not None:
            return self.think
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        if effort is not None:
            return EFFORTS[effort]
        enabled = (self.chat_template_kwargs or {}).get("enable_thinking")
        return enabled if isinstance(enabled, bool) else None
