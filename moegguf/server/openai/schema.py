"""OpenAI's request bodies, checked and converted to a `GenerationRequest`.

Every number has limits; unknown keys are ignored, as OpenAI's clients often get new ones; `null` is the same as absent.
Sampling parameters become Ollama's options, so that a model's defaults are applied in one place. Images come as data
URLs; an audio part is refused by its type. Follows OpenAI's API reference and llama-server's extensions. Does not know
HTTP.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from moegguf.generate.request import MAX_TOP_LOGPROBS, GenerationRequest, Message, Sampling
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.conversation import Question
from moegguf.server.common.options import (
    MAX_TOKEN,
    Function,
    SamplingOptions,
    Stop,
    Tool,
    ToolCall,
    call_of,
    content_of,
    part_of,
    tool_message,
    with_entry_messages,
)

MAX_BIASES = 4096

EFFORTS: Mapping[str, bool | str] = {
    "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "max", "max": "max",
}  # fmt: skip

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def not_zero(value: int) -> int:
    """Raises ValueError for 0; -1 is no limit, as in llama-server."""
    if value == 0:
        raise ValueError("must be at least 1, or -1 for no limit, but is 0")
    return value


def token_ids(biases: Any) -> Any:
    """`logit_bias` with token ids as keys, which are strings in JSON. Raises ValueError."""
    if not isinstance(biases, dict):
        return biases
    wrong = next((key for key in biases if not (key.isascii() and key.isdigit() and int(key[:11]) <= MAX_TOKEN)), None)
    if wrong is not None:
        raise ValueError(f"a key must be a token id, but is {wrong[:40]!r}")
    return {int(key): bias for key, bias in biases.items()}


Limit = Annotated[int, Field(ge=-1, le=MAX_ANSWER_TOKENS), AfterValidator(not_zero)]
Choices = Annotated[int, Field(ge=1, le=limits.CHOICES)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def read_parts(content: Any) -> Any:
    """A message's content: its texts joined by newlines, or with images a list of parts (moegguf.generate.images).
    Raises ValueError for a part that is neither."""
    if not isinstance(content, list):
        return content
    return content_of([part_of(part, {"text": "text", "refusal": "refusal"}, "image_url") for part in content])


class FunctionWithExtras(Function):
    """A function whose additional keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")


class OpenAITool(Tool):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionWithExtras


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[dict[str, str]] | None, BeforeValidator(read_parts)] = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def as_message(self, tool_names: Mapping[str, str]) -> Message:
        """The message for `GenerationRequest`. `tool_names`: {id of an earlier call: name of its function}."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: Message = {"role": role, "content": self.content or ""}
        if role == "tool":
            name = self.name or tool_names.get(self.tool_call_id or "")
            message = tool_message(self.content or "", self.tool_call_id, name)
        if thinking := self.reasoning_content or self.reasoning:
            message["thinking"] = thinking
        if self.tool_calls:
            message["tool_calls"] = [
                call_of(call.id or "", call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        return message


def format_of(given: Any) -> Any:
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

    def wanted(self) -> str | Mapping[str, Any] | None:
        """The `format` of a `GenerationRequest`."""
        return None if self.type == "text" else self.schema_ or "json"


def choice_of(choice: Any) -> Any:
    """`tool_choice` as a `ToolChoice` has it; chat nests it deeper than responses. Raises ValueError."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind not in ("function", "allowed_tools"):
        raise ValueError(f"choices of type {str(kind)[:40]!r} are not supported; name a function")
    found = choice.get(kind, choice)
    tools = [found] if kind == "function" else found.get("tools") if isinstance(found, dict) else None
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{kind} is missing, or has no names of functions")
    return {"type": kind, "mode": found.get("mode", "auto"), "names": names}


def _function_name(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


class ToolChoice(Body):
    """`tool_choice` as an object: one function, or with `mode` a subset of the tools."""

    type: Literal["function", "allowed_tools"]
    mode: Literal["auto", "required"]
    names: list[str]


Choice = Annotated[Literal["none", "auto", "required"] | ToolChoice | None, BeforeValidator(choice_of)]


class _StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(Question, SamplingOptions):
    """The fields that chat and completion share. A prompt longer than the context is an error unless `truncate` is
    true; `shift` (Ollama's, off here) lets a prompt lose its middle then, and an answer go on in a full context."""

    stream_options: _StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Limit | None = None
    stop: Annotated[
        list[Stop] | None, Field(max_length=limits.STOPS), BeforeValidator(lambda v: [v] if isinstance(v, str) else v)
    ] = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES), BeforeValidator(token_ids)] | None = None
    return_progress: bool | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def sampling(self, entry: ModelEntry) -> Sampling:
        """The sampling parameters: the body's own keys, then `options`, then the entry's parameters."""
        own = self.model_dump(include=set(SamplingOptions.model_fields))
        sampling = self.sampling_with(entry, **own, num_predict=self.max_answer_tokens())
        return replace(sampling, logit_bias=self.logit_bias or {})

    def repeated(self, generation: GenerationRequest, n: int | None) -> list[GenerationRequest]:
        """The same request for each of `n` answers (None: one), with the seeds that follow its own."""
        first = generation.sampling.seed
        seeds = [None if first is None else (first + i) & 0xFFFFFFFF for i in range(n or 1)]
        return [replace(generation, sampling=replace(generation.sampling, seed=seed)) for seed in seeds]

    def max_answer_tokens(self) -> int | None:
        """Maximum length of the answer, -1 for no limit, None for the default."""
        return self.max_tokens


class Reasoning(Body):
    """`reasoning`. With a summary, responses send the thinking as one; else as text."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ToolsBody(GenerationBody):
    """The fields of a conversation with tools."""

    tools: Annotated[list[OpenAITool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None

    @property
    def parallel_calls(self) -> bool:
        """`parallel_tool_calls`, true by default."""
        return self.parallel_tool_calls is not False

    @abstractmethod
    def generation(self, entry: ModelEntry) -> GenerationRequest:
        """The request, with the entry's defaults."""

    def generations(self, entry: ModelEntry, known: Details) -> Sequence[GenerationRequest]:
        """That one."""
        return [self.generation(entry)]

    @model_validator(mode="after")
    def _choice_has_tools(self) -> ToolsBody:
        """Raises ValueError for a tool choice without its tools."""
        known = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice == "required" and not known:
            raise ValueError("tool_choice 'required' needs tools")
        wanted = self.tool_choice.names if isinstance(self.tool_choice, ToolChoice) else ()
        if missing := sorted(set(wanted) - known):
            raise ValueError(f"tool_choice names {missing[0][:80]!r}, which is not among the tools")
        return self

    def offered_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools in the prompt."""
        choice = self.tool_choice
        names = choice.names if isinstance(choice, ToolChoice) and choice.type == "allowed_tools" else None
        tools = (tool for tool in self.tools or () if names is None or tool.function.name in names)
        return tuple(tool.model_dump(exclude_none=True) for tool in tools)

    def wanted_choice(self) -> str:
        """The `tool_choice` of a `GenerationRequest`."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return choice or "auto"
        return choice.names[0] if choice.type == "function" else choice.mode


class ChatBody(ToolsBody):
    """The body of /v1/chat/completions. `top_logprobs` has an effect only with `logprobs`. An assistant's message at
    the end is continued, as by llama-server, unless `continue_final_message` is false or `add_generation_prompt` true
    (vLLM's names)."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MESSAGES)]
    max_completion_tokens: Limit | None = None
    response_format: Annotated[Format | None, BeforeValidator(format_of)] = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _continues_or_begins(self) -> ChatBody:
        """Raises ValueError for both."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true; send one of them")
        return self

    def max_answer_tokens(self) -> int | None:
        """`max_completion_tokens`, or the deprecated `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def generation(self, entry: ModelEntry) -> GenerationRequest:
        """The request, with the entry's defaults."""
        continues = self.continue_final_message
        return GenerationRequest(
            messages=with_entry_messages(self._messages(), entry),
            template=entry.template,
            tools=self.offered_tools(),
            tool_choice=self.wanted_choice(),
            format=self.response_format.wanted() if self.response_format else None,
            think=self._think(),
            template_options=self.chat_template_kwargs or {},
            truncate=bool(self.truncate),
            shift=bool(self.shift),
            continue_final_message=not self.add_generation_prompt if continues is None else continues,
            n_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            sampling=self.sampling(entry),
        )

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        """One for each choice."""
        return self.repeated(self.generation(entry), self.n)

    def _messages(self) -> tuple[Message, ...]:
        names = {call.id or "": call.function.name for message in self.messages for call in message.tool_calls or ()}
        return tuple(message.as_message(names) for message in self.messages)

    def _think(self) -> bool | str | None:
        if self.think is not None:
            return self.think
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        if effort is not None:
            return EFFORTS[effort]
        enabled = (self.chat_template_kwargs or {}).get("enable_thinking")
        return enabled if isinstance(enabled, bool) else None
