"""The bodies of Anthropic's Messages API, checked and converted to a `GenerationRequest`.

Unknown fields, such as those of betas and `cache_control`, are ignored. Tools that run at Anthropic (web search, ...)
are left out with a warning in the log: clients offer them beside their own. Does not know HTTP.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from moegguf.generate.request import GenerationRequest, Message
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.conversation import Question
from moegguf.server.common.options import (
    MAX_TOKEN,
    FunctionName,
    Part,
    Stop,
    call_of,
    content_of,
    image_of_base64,
    image_of_url,
    text_part,
    tool_message,
    with_entry_messages,
)

log = logging.getLogger(__name__)

# Claude Code begins its system prompt with a header for billing whose checksum differs in every request: with it, no
# part of the prompt could be reused from the request before.
_BILLING_HEADER = re.compile(r"x-anthropic-billing-header:(?:\s*\w+=[^;\s]*;)+\s*")


def blocks_of(content: Any) -> Any:
    """Content as a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


class _TextBlock(Body):
    type: Literal["text"]
    text: str

    @property
    def part(self) -> Part:
        return text_part(self.text)


def _image_of(source: Any) -> Any:
    """The image in a source. Raises ValueError for one that would have to be fetched."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64" and isinstance(source.get("data"), str):
        return image_of_base64(source["data"])
    if kind == "url" and isinstance(source.get("url"), str):
        return image_of_url(source["url"])
    raise ValueError('must be {"type": "base64", "media_type": "image/png", "data": "..."}')


class _ImageBlock(Body):
    type: Literal["image"]
    part: Annotated[Part, BeforeValidator(_image_of), Field(alias="source")]


class _TextSource(Body):
    type: Literal["text"]
    data: str


class _DocumentBlock(Body):
    """A document of plain text."""

    type: Literal["document"]
    source: _TextSource
    title: str | None = None

    @property
    def part(self) -> Part:
        return text_part(f"{self.title}\n{self.source.data}" if self.title else self.source.data)


class _ThinkingBlock(Body):
    """The thinking of an earlier answer; its signature is not needed."""

    type: Literal["thinking"]
    thinking: str


class _RedactedThinkingBlock(Body):
    """Thinking that only Anthropic can read: ignored."""

    type: Literal["redacted_thinking"]


class _ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]


ContentBlock = _TextBlock | _ImageBlock | _DocumentBlock


class _ToolResultBlock(Body):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Annotated[ContentBlock, Field(discriminator="type")]], BeforeValidator(blocks_of)] = Field(
        default_factory=list
    )
    is_error: bool | None = None

    def as_message(self, tool_names: dict[str, str]) -> Message:
        """The message of a tool; one that failed says so."""
        parts = [block.part for block in self.content]
        content = content_of([text_part("Error:"), *parts] if self.is_error else parts)
        return tool_message(content, self.tool_use_id, tool_names.get(self.tool_use_id))


Block = Annotated[
    ContentBlock | _ThinkingBlock | _RedactedThinkingBlock | _ToolUseBlock | _ToolResultBlock,
    Field(discriminator="type"),
]


class MessageParam(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(blocks_of)]

    def as_messages(self, tool_names: dict[str, str]) -> Iterable[Message]:
        """The results of tools in it, then the rest. Adds the names of its calls to `tool_names`, by id."""
        yield from (block.as_message(tool_names) for block in self.content if isinstance(block, _ToolResultBlock))
        parts = [block.part for block in self.content if isinstance(block, ContentBlock)]
        message: Message = {"role": self.role, "content": content_of(parts)}
        if thinking := "\n".join(block.thinking for block in self.content if isinstance(block, _ThinkingBlock)):
            message["thinking"] = thinking
        if calls := [block for block in self.content if isinstance(block, _ToolUseBlock)]:
            tool_names.update((call.id, call.name) for call in calls)
            message["tool_calls"] = [call_of(call.id, call.name, call.input) for call in calls]
        if parts or len(message) > 2:
            yield message


def _own_tools(tools: Any) -> Any:
    """The tools that the client runs."""
    if not isinstance(tools, list):
        return tools
    foreign = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") not in (None, "custom")]
    for tool in foreign:
        log.warning("the tool of type %.60r does not run here and is left out", tool["type"])
    return [tool for tool in tools if tool not in foreign]


class _ToolParam(Body):
    """A tool that the model may call."""

    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]

    def as_tool(self) -> dict[str, Any]:
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Body):
    """`thinking`. Its budget is not kept: the model ends its thinking itself, or by `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class _OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _OutputFormat | None = None


class CountBody(Question):
    """The body of /v1/messages/count_tokens. `options` are Ollama's, as an extension."""

    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=limits.MESSAGES)]
    system: Annotated[list[_TextBlock], BeforeValidator(blocks_of)] = Field(default_factory=list)
    tools: Annotated[list[_ToolParam], Field(max_length=limits.TOOLS), BeforeValidator(_own_tools)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None

    @model_validator(mode="after")
    def _choice_has_tools(self) -> CountBody:
        choice, known = self.tool_choice, {tool.name for tool in self.tools or ()}
        if choice and choice.type == "any" and not known:
            raise ValueError("tool_choice 'any' needs tools")
        if choice and choice.type == "tool" and choice.name not in known:
            raise ValueError(f"tool_choice names {(choice.name or '')[:80]!r}, which is not among the tools")
        return self

    def generations(self, entry: ModelEntry, known: Details) -> Sequence[GenerationRequest]:
        """The only request."""
        return [self.generation(entry, thinks="thinking" in known.capabilities)]

    def generation(self, entry: ModelEntry, *, thinks: bool) -> GenerationRequest:
        """The request, with the entry's defaults. `thinks`: the model can think; one that cannot answers without, as
        in Ollama, since clients ask every model for it."""
        return GenerationRequest(
            messages=with_entry_messages(self._messages(), entry),
            template=entry.template,
            tools=tuple(tool.as_tool() for tool in self.tools or ()),
            tool_choice=self._tool_choice(),
            think=thinks and self._think(),
        )

    def _messages(self) -> Iterable[Message]:
        names: dict[str, str] = {}
        texts = [text for block in self.system if (text := _BILLING_HEADER.sub("", block.text, count=1))]
        if texts:
            yield {"role": "system", "content": "\n".join(texts)}
        for message in self.messages:
            yield from message.as_messages(names)

    def _tool_choice(self) -> str:
        choice = self.tool_choice or _ToolChoice(type="auto")
        return choice.name or "auto" if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)

    def _think(self) -> bool | str:
        """Off unless asked for, as Anthropic's API."""
        if self.thinking is None or self.thinking.type == "disabled":
            return False
        effort = self.output_config.effort if self.output_config else None
        return {"xhigh": "max"}.get(effort, effort) if effort else True


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_ANSWER_TOKENS)]
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=limits.STOPS)] | None = None
    exact: bool | None = None  # as in `options`

    def generation(self, entry: ModelEntry, *, thinks: bool) -> GenerationRequest:
        """The request, with the entry's defaults."""
        sampling = self.sampling_with(
            entry, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences,
            exact=self.exact, num_predict=self.max_tokens,
        )  # fmt: skip
        output = self.output_config.format if self.output_config else None
        return replace(
            super().generation(entry, thinks=thinks),
            format=output.schema_ if output else None,
            truncate=False,
            shift=False,
            sampling=sampling,
        )

    @property
    def parallel_calls(self) -> bool:
        """Whether an answer may have several calls."""
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)
