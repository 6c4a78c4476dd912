"""The body of /v1/responses, checked and converted to a `GenerationRequest`.

Responses are not stored: a request that refers to an earlier one is refused, with what to send instead. Tools that run
at OpenAI (web search, computer use, ...) are left out with a warning in the log, as in llama-server: clients offer them
beside their own functions.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from moegguf.generate.images import text_of
from moegguf.generate.request import MAX_TOP_LOGPROBS, GenerationRequest, Message
from moegguf.models.entry import ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.options import (
    Arguments,
    FunctionName,
    call_of,
    content_of,
    part_of,
    text_part,
    tool_message,
    with_entry_messages,
)
from moegguf.server.openai.schema import EFFORTS, Format, Limit, OpenAITool, Reasoning, ToolsBody

log = logging.getLogger(__name__)

MAX_METADATA = 16
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
REASONING_PREFIX = "moegguf:"  # of our `encrypted_content`, which only carries the text back to us
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

STATELESS = "responses are not stored; send the whole conversation as input"
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "prompts are not stored; send instructions and input",
    "background": "a response is computed while its request lasts; leave it out",
}


def parts_of(content: Any) -> Any:
    """A message's content as neutral parts. Raises ValueError for a part that is neither text nor an image."""
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        return content
    return [part_of(part, TEXTS, "input_image") for part in content]


Parts = Annotated[list[dict[str, str]], BeforeValidator(parts_of)]


def _assistant_message(messages: list[Message]) -> Message:
    """The answer at the end of `messages`, to which several items belong; added if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


class _MessageItem(Body):
    """A message, or an answer's text."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    def add_to(self, messages: list[Message], tool_names: Mapping[str, str]) -> None:
        """Adds it. Instructions in a row are one system message: many templates know only one."""
        text = text_of(self.content)
        if self.role == "user":
            messages.append({"role": "user", "content": content_of(self.content)})
        elif self.role == "assistant":
            message = _assistant_message(messages)
            message["content"] = f"{message['content']}\n{text}" if message["content"] else text
        elif messages and messages[-1]["role"] == "system":
            messages[-1]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": "system", "content": text})


class _CallItem(Body):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: Arguments

    def add_to(self, messages: list[Message], tool_names: Mapping[str, str]) -> None:
        calls = _assistant_message(messages).setdefault("tool_calls", [])
        calls.append(call_of(self.call_id, self.name, self.arguments))


class _CallOutputItem(Body):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts

    def add_to(self, messages: list[Message], tool_names: Mapping[str, str]) -> None:
        messages.append(tool_message(content_of(self.output), self.call_id, tool_names.get(self.call_id)))


class _ReasoningText(Body):
    text: str


class _ReasoningItem(Body):
    """The thinking of an earlier answer. Its text is in one of three places, depending on what the client kept."""

    type: Literal["reasoning"]
    content: list[_ReasoningText] | None = None
    summary: list[_ReasoningText] | None = None
    encrypted_content: str | None = None

    def add_to(self, messages: list[Message], tool_names: Mapping[str, str]) -> None:
        parts = self.content or self.summary or ()
        if thinking := "\n".join(part.text for part in parts) or _decrypted(self.encrypted_content or ""):
            messages.append({"role": "assistant", "content": "", "thinking": thinking})


def encrypted(thinking: str) -> str:
    """`encrypted_content`: the thinking in a form that no client shows or changes."""
    return REASONING_PREFIX + base64.b64encode(thinking.encode()).decode()


def _decrypted(content: str) -> str:
    """The thinking in our `encrypted_content`; "" for that of another server."""
    _, prefix, text = content.partition(REASONING_PREFIX)
    try:
        return base64.b64decode(text, validate=True).decode() if prefix else ""
    except ValueError:
        return ""


Item = Annotated[_MessageItem | _CallItem | _CallOutputItem | _ReasoningItem, Field(discriminator="type")]


def _items_of(given: Any) -> Any:
    """`input` as a list of items. Raises ValueError for one that refers to a stored item."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    return [_item(item) for item in given]


def _item(item: Any) -> Any:
    if not isinstance(item, dict) or (isinstance(item.get("type"), str) and item["type"] != "item_reference"):
        return item
    if "role" not in item:
        raise ValueError(f"an item has no type or refers to a stored one, but {STATELESS}")
    return {**item, "type": "message"}


def _functions_of(tools: Any) -> Any:
    """The functions among `tools`, in the form of chat's tools."""
    if not isinstance(tools, list):
        return tools
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") != "function":
            log.warning("the tool of type %.60r is not a function and left out", tool.get("type"))
    return [_function(tool) for tool in tools if not isinstance(tool, dict) or tool.get("type") == "function"]


def _function(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    return {"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}


class _TextOptions(Body):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(ToolsBody):
    """The body of /v1/responses."""

    input: Annotated[list[Item], Field(min_length=1, max_length=limits.MESSAGES), BeforeValidator(_items_of)]
    instructions: str | None = None
    tools: Annotated[list[OpenAITool], Field(max_length=limits.TOOLS), BeforeValidator(_functions_of)] | None = None
    max_output_tokens: Limit | None = None
    text: _TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Field(max_length=limits.STOPS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
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

    def max_answer_tokens(self) -> int | None:
        """`max_output_tokens`."""
        return self.max_output_tokens

    def includes(self, what: str) -> bool:
        """Whether `include` has `what`."""
        return what in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        """Whether thinking is sent as a summary."""
        return bool(self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary))

    def generation(self, entry: ModelEntry) -> GenerationRequest:
        """The request, with the entry's defaults."""
        effort = self.reasoning.effort if self.reasoning else None
        logprobs = self.top_logprobs is not None or self.includes(LOGPROBS)
        return GenerationRequest(
            messages=with_entry_messages(self._messages(), entry),
            template=entry.template,
            tools=self.offered_tools(),
            tool_choice=self.wanted_choice(),
            format=self.text.format.wanted() if self.text and self.text.format else None,
            think=EFFORTS[effort] if effort else None,
            truncate=self.truncation == "auto",
            shift=bool(self.shift),
            n_logprobs=(self.top_logprobs or 0) if logprobs else None,
            sampling=self.sampling(entry),
        )

    def _messages(self) -> list[Message]:
        names = {item.call_id: item.name for item in self.input if isinstance(item, _CallItem)}
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in self.input:
            item.add_to(messages, names)
        return messages
