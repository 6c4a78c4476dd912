"""Parts of a chat request of OpenAI's: messages, tools and which of them to call, the form of the answer.

Follows OpenAI's API reference. Text only: a picture or a sound is refused by the name of its part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from moegguf.generate.request import Message
from moegguf.server.common.body import Body


def joined_text(content: Any) -> Any:
    """A message's content as one text: its parts, each on a line of its own."""
    if not isinstance(content, list):
        return content
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if isinstance(text, str):
        return text
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise ValueError(f"parts of type {kind[:40]!r} are not supported; send text")
    raise ValueError('a part must be {"type": "text", "text": "..."}')


class Function(Body):
    """A function's name and the JSON schema of its arguments; more keys go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function

    def as_dict(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class FunctionCall(Body):
    """A call that an earlier answer asked for. `arguments` arrive as the text of a JSON object."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(lambda text: arguments_of(text))]


class MadeCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


def arguments_of(text: Any) -> Any:
    """The object that a call's arguments are the text of."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError("must be the text of a JSON object") from error
    return value


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, BeforeValidator(joined_text)] = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None

    def as_message(self, tool_names: Mapping[str, str]) -> Message:
        """`tool_names`: the function of each call so far, by the call's id."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: Message = {"role": role, "content": self.content or ""}
        if thinking := self.reasoning_content or self.reasoning:
            message["thinking"] = thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id or "", "function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in self.tool_calls
            ]
        if role == "tool":
            if self.tool_call_id is not None:
                message["tool_call_id"] = self.tool_call_id
            if name := self.name or tool_names.get(self.tool_call_id or ""):
                message["tool_name"] = name
        return message


class SchemaFormat(Body):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # llama-server's, with json_object

    @model_validator(mode="after")
    def has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    def as_format(self) -> str | Mapping[str, Any] | None:
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_ or "json"


class NamedFunction(Body):
    name: str


class AllowedTool(Body):
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoice(Body):
    """A choice that is more than a word: one function, or some of them."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def has_its_kind(self) -> ToolChoice:
        if getattr(self, self.type) is None:
            raise ValueError(f"{self.type} is missing")
        return self
