"""The conversation in a request of OpenAI's or Anthropic's API: messages with text and
images, tools and tool calls.

The common format is OpenAI's chat format. Requests to OpenAI's Responses API and to
Anthropic's API are converted to this format, and then validated by the same pydantic
model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moegguf.errors import OptionError
from moegguf.generate.images import image_part, text_of
from moegguf.generate.request import Message
from moegguf.models.entry import ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.body import Body, parse_json, without_nulls

log = logging.getLogger(__name__)

_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.IGNORECASE)
_TEXTS = (
    "text",
    "input_text",
    "output_text",
    "reasoning_text",
    "summary_text",
    "refusal",
)
_IMAGES = ("image_url", "input_image")
SEARCH_RESULT = "search_result"
READABLE = (*_TEXTS, *_IMAGES, "image", SEARCH_RESULT)

Part = dict[str, str]
FunctionName = Annotated[str, Field(min_length=1, max_length=256)]

# Messages


def _image_of_url(url: Any) -> Part:
    """Returns the part for an image in a data URL. Raises ValueError for any other URL:
    the server fetches nothing."""
    if not isinstance(url, str):
        raise ValueError('image_url must be {"url": "data:image/png;base64,..."}')
    found = _DATA_URL.match(url[:100])
    if found is None:
        raise ValueError(
            f"an image is sent as data:image/png;base64,..., but this is {url[:40]!r}; the server fetches nothing"
        )
    return _image_of_base64(url[found.end() :])


def _image_of_base64(data: str) -> Part:
    """Returns the part for an image in base64. Raises ValueError if the image cannot be
    used."""
    try:
        return image_part(data)
    except OptionError as error:
        raise ValueError(str(error)) from None


def part_of(part: Any) -> Part:
    """Converts one part of a message's content to a text or an image. A `search_result`
    becomes a text. An image comes as a data URL or as base64. Raises ValueError for any
    other part and for an unusable image."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == SEARCH_RESULT:
        return {"type": "text", "text": _text_of_result(part)}
    if kind == "image" and isinstance(part.get("data"), str):
        return _image_of_base64(part["data"])
    if kind in _IMAGES:
        given = part.get("image_url")
        return _image_of_url(given.get("url") if isinstance(given, dict) else given)
    if isinstance(kind, str) and kind not in _TEXTS:
        raise ValueError(
            f"parts of type {kind[:40]!r} are not supported; send text or images"
        )
    text = (
        part.get("refusal" if kind == "refusal" else "text")
        if isinstance(kind, str)
        else None
    )
    if not isinstance(text, str):
        raise ValueError('a part must be {"type": "text", "text": "..."}')
    return {"type": "text", "text": text}


def _text_of_result(part: dict[str, Any]) -> str:
    head, found = (
        [str(part[name]) for name in ("title", "source") if part.get(name)],
        part.get("content"),
    )
    text = text_of(read_parts(found)) if isinstance(found, list) else str(found or "")
    return "\n".join([*head, text])


def _readable(parts: Iterable[Any]) -> Iterator[Any]:
    """Yields the parts that `part_of` does not refuse because of their type. Leaves out
    the other parts, with a warning in the log."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in READABLE:
            log.warning(
                "the part of type %.60r cannot be read here and is left out", kind
            )
        else:
            yield part


def read_parts(content: Any) -> Any:
    """Returns the parts of a message's content as one string, joined by newlines, or as
    a list if there are images. Content that is not a list is returned unchanged. Raises
    ValueError for a part that is neither text nor image."""
    if not isinstance(content, list):
        return content
    parts = [part_of(part) for part in content]
    return (
        parts
        if any(part["type"] == "image" for part in parts)
        else "\n".join(part["text"] for part in parts)
    )


def _arguments(given: Any) -> Any:
    """Parses the arguments of a tool call if they are JSON text, as OpenAI's clients
    send them. An empty string and JSON's null mean no arguments. Raises ValueError for
    text that is not JSON."""
    if not isinstance(given, str):
        return given
    try:
        found = parse_json(given.encode()) if given.strip() else None
    except ValueError as error:
        raise ValueError("must be the text of a JSON object") from error
    return {} if found is None else found


Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


class _CalledFunction(Body):
    name: FunctionName
    arguments: Arguments = {}


class ToolCall(Body):
    """A tool call in an earlier answer. The input of one of OpenAI's custom tools is a
    string, which becomes the argument `input`."""

    id: str | None = None
    function: _CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, given: Any) -> Any:
        custom = given.get("custom") if isinstance(given, dict) else None
        if not isinstance(custom, dict):
            return given
        return {
            **given,
            "function": {
                "name": custom.get("name"),
                "arguments": {"input": custom.get("input") or ""},
            },
        }


class ChatMessage(Body):
    """A message in OpenAI's chat format."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] = ""
    name: str | None = None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, given: Any, info: ValidationInfo) -> Any:
        """Reads the parts of the content. In earlier answers and tool results, drops
        parts that only another server can read."""
        if isinstance(given, list) and info.data.get("role") in (
            "assistant",
            "tool",
            "function",
        ):
            given = list(_readable(given))
        return read_parts(given)

    def as_message(self, tool_names: Mapping[str, str]) -> Message:
        """Returns the message for `Request`. `tool_names`: {id of an earlier tool call:
        name of its function}."""
        message: Message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.role in ("tool", "function"):
            name = self.name or tool_names.get(self.tool_call_id or "")
            known = {"tool_call_id": self.tool_call_id, "tool_name": name}
            message |= {"role": "tool", **without_nulls(known)}
        if thinking := self.reasoning_content or self.reasoning:
            message["thinking"] = thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id or "", "function": dict(call.function)}
                for call in self.tool_calls
            ]
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MESSAGES)]


def messages_of(
    given: Sequence[ChatMessage], earlier: Sequence[Message] = ()
) -> Iterator[Message]:
    """Returns the messages for `Request`. A tool result gets the function's name from
    its tool call, which may be among the `earlier` messages."""
    names = {
        call["id"]: call["function"]["name"]
        for message in earlier
        for call in message.get("tool_calls", ())
    }
    names |= {
        call.id or "": call.function.name
        for message in given
        for call in message.tool_calls
    }
    return (message.as_message(names) for message in given)


def chat_fields(
    entry: ModelEntry, messages: Iterable[Message], tools: Iterable[Tool]
) -> dict[str, Any]:
    """Returns the fields of a `Request` for the next message of a conversation: the
    model entry's template, the entry's system message and other messages followed by
    `messages`, and the tools. The entry's system message is left out if `messages`
    begins with a system message."""
    given = tuple(messages)
    own = [dict(message) for message in entry.messages]
    if entry.system and not (given and given[0]["role"] == "system"):
        own.insert(0, {"role": "system", "content": entry.system})
    return {
        "messages": (*own, *given),
        "template": entry.template,
        "tools": tuple(tool.model_dump(exclude_none=True) for tool in tools),
    }


# Tools


class Function(Body):
    """A function and the JSON schema of its arguments. If `strict`, a schema that no
    grammar can express is refused. Additional keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: str | None = "function"
    function: Function


Tools = Annotated[list[Tool], Field(max_length=limits.TOOLS)]


def check_choice(tools: Iterable[Tool], choice: str, names: Iterable[str]) -> None:
    """Raises ValueError if a `tool_choice` names a tool that is not among `tools`, or
    is "any" or "required" although there are no tools."""
    known = {tool.function.name for tool in tools}
    if choice in ("any", "required") and not known:
        raise ValueError(f"tool_choice {choice!r} needs tools")
    if missing := sorted(set(names) - known):
        raise ValueError(
            f"tool_choice names {missing[0][:80]!r}, which is not among the tools"
        )


def own_tools(tools: Any, kinds: Sequence[str | None], schema: str) -> Any:
    """Returns the tools of the given `kinds` in the format of OpenAI's chat. `schema`
    is the key of their parameters. Values that are not objects are returned unchanged.

    Tools of other kinds are dropped with a warning in the log. Most of them run on
    OpenAI's or Anthropic's servers, and clients send them together with their own
    tools.
    """
    if not isinstance(tools, list):
        return tools
    found: list[Any] = []
    keys = {
        "name": "name",
        "description": "description",
        schema: "parameters",
        "strict": "strict",
    }
    for tool in tools:
        if not isinstance(tool, dict):
            found.append(tool)
        elif tool.get("type") in kinds:
            found.append(
                {
                    "type": "function",
                    "function": {ours: tool.get(name) for name, ours in keys.items()},
                }
            )
        else:
            log.warning(
                "the tool of type %.60r does not run here and is left out",
                tool.get("type"),
            )
    return found
