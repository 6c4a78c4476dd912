"""OpenAI's request bodies, checked and converted to a `GenerationRequest`.

Every number has limits; unknown keys are ignored, as OpenAI's clients often get new ones; `null` is the same as absent.
Sampling parameters become Ollama's options, so that a model's defaults are applied in one place. Images come as data
URLs; an audio part is refused by its type. Follows OpenAI's API reference and llama-server's extensions. Does not know
HTTP.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from moegguf.generate.options import MAX_TOP_LOGPROBS
from moegguf.generate.request import GenerationRequest, Message, Sampling
from moegguf.models.entry import Details, ModelEntry
from moegguf.models.recipe import MAX_SEED, MAX_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.content import Part, call_of, content_of, image_of_url, text_part, tool_message
from moegguf.server.common.conversation import Question
from moegguf.server.common.options import (
    MAX_TOKEN,
    CalledFunction,
    Function,
    ModelName,
    Stop,
    Tool,
    ToolCall,
    with_entry_messages,
)

MAX_BIASES = 4096

EFFORTS: Mapping[str, bool | str] = {
    "none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "max", "max": "max",
}  # fmt: skip

# Ollama's options that are also keys of the body, under the same name.
OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "repeat_penalty", "repeat_last_n",
    "presence_penalty", "frequency_penalty", "exact",
)  # fmt: skip

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def one_answer(n: int) -> int:
    """Raises ValueError for `n` or `best_of` above 1: one request gets one answer."""
    if n != 1:
        raise ValueError(f"must be 1, but is {n}; send another request for another answer")
    return n


def list_of_stops(value: Any) -> Any:
    """`stop` as a list."""
    return [value] if isinstance(value, str) else value


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


Limit = Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(not_zero)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-100, le=100)]


def read_parts(content: Any) -> Any:
    """A message's content: its texts joined by newlines, or with images a list of parts (moegguf.generate.images).

    Raises ValueError for a part that is neither.
    """
    return content_of([_part(part) for part in content]) if isinstance(content, list) else content


def _part(part: Any) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str):
            raise ValueError('image_url must be {"url": "data:image/png;base64,..."}')
        return image_of_url(url)
    text = part.get(kind) if kind in ("text", "refusal") else None
    if isinstance(text, str):
        return text_part(text)
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise ValueError(f"parts of type {kind[:40]!r} are not supported; send text or image_url")
    raise ValueError('a part must be {"type": "text", "text": "..."}')


def arguments_of(text: Any) -> Any:
    """A call's arguments, parsed from JSON text. Raises ValueError."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError("must be the text of a JSON object") from error
    return value


class FunctionWithExtras(Function):
    """A function whose additional keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")


class OpenAITool(Tool):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionWithExtras


class FunctionCall(CalledFunction):
    """`function` of a tool call. `arguments` is sent as JSON text."""

    arguments: Annotated[dict[str, Any], BeforeValidator(arguments_of)]


class OpenAIToolCall(ToolCall):
    """A tool call of an earlier answer."""

    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[dict[str, str]] | None, BeforeValidator(read_parts)] = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[OpenAIToolCall] | None = None
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


class SchemaFormat(Body):
    """`json_schema` of a response format."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # llama-server's, with json_object

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    def as_format(self) -> str | Mapping[str, Any] | None:
        """The `format` of a `GenerationRequest`."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_ or "json"


class NamedFunction(Body):
    """A function by name."""

    name: str


class AllowedTool(Body):
    """An element of `allowed_tools.tools`."""

    function: NamedFunction


class AllowedTools(Body):
    """`allowed_tools` of a tool choice."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoice(Body):
    """`tool_choice` as an object: one function, or a subset of the tools."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _has_its_type(self) -> ToolChoice:
        if getattr(self, self.type) is None:
            raise ValueError(f"{self.type} is missing")
        return self


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationBody(Question):
    """The fields that chat and completion share. A prompt longer than the context is an error unless `truncate` is
    true; `shift` (Ollama's, off here) lets a prompt lose its middle then, and an answer go on in a full context."""

    model: ModelName
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
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES), BeforeValidator(token_ids)] | None = None
    exact: bool | None = None
    return_progress: bool | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def model_name(self) -> str:
        """`model`."""
        return self.model

    def sampling(self, entry: ModelEntry) -> Sampling:
        """The sampling parameters: the body's own keys, then `options`, then the entry's parameters."""
        own = {name: getattr(self, name) for name in OPTIONS}
        sampling = self.sampling_with(entry, **own, num_predict=self.max_answer_tokens())
        return replace(sampling, logit_bias=self.logit_bias or {})

    def max_answer_tokens(self) -> int | None:
        """Maximum length of the answer, -1 for no limit, None for the default."""
        return self.max_tokens


class Reasoning(Body):
    """`reasoning`."""

    effort: Effort | None = None


class ToolsBody(GenerationBody):
    """The fields of a conversation with tools."""

    tools: Annotated[list[OpenAITool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
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
        wanted = self._chosen_names()
        if self.tool_choice == "required" and not known:
            raise ValueError("tool_choice 'required' needs tools")
        if missing := sorted(wanted - known):
            raise ValueError(f"tool_choice names {missing[0][:80]!r}, which is not among the tools")
        return self

    def _chosen_names(self) -> set[str]:
        """Functions that the tool choice names."""
        if not isinstance(self.tool_choice, ToolChoice):
            return set()
        if self.tool_choice.function is not None:
            return {self.tool_choice.function.name}
        allowed = self.tool_choice.allowed_tools
        return {tool.function.name for tool in allowed.tools} if allowed else set()

    def offered_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools in the prompt."""
        allowed = isinstance(self.tool_choice, ToolChoice) and self.tool_choice.allowed_tools is not None
        wanted = self._chosen_names()
        return tuple(
            tool.model_dump(exclude_none=True)
            for tool in self.tools or ()
            if not allowed or tool.function.name in wanted
        )

    def wanted_choice(self) -> str:
        """The `tool_choice` of a `GenerationRequest`."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return choice or "auto"
        if choice.function is not None:
            return choice.function.name
        return choice.allowed_tools.mode if choice.allowed_tools else "auto"


class ChatBody(ToolsBody):
    """The body of /v1/chat/completions. `top_logprobs` has an effect only with `logprobs`.

    An assistant's message at the end is continued, as by llama-server, unless `continue_final_message` is false or
    `add_generation_prompt` true (vLLM's names).
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MESSAGES)]
    max_completion_tokens: Limit | None = None
    response_format: ResponseFormat | None = None
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
        return GenerationRequest(
            messages=with_entry_messages(self._messages(), entry),
            template=entry.template,
            tools=self.offered_tools(),
            tool_choice=self.wanted_choice(),
            format=self.response_format.as_format() if self.response_format else None,
            think=self._think(),
            template_options=self.chat_template_kwargs or {},
            truncate=bool(self.truncate),
            shift=bool(self.shift),
            continue_final_message=self._continues(),
            n_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            sampling=self.sampling(entry),
        )

    def _continues(self) -> bool:
        if self.continue_final_message is None:
            return not self.add_generation_prompt
        return self.continue_final_message

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
