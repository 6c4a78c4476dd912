"""What clients send to /api: Ollama's requests and options (api/types.go), each field with its type and its ends.

Fields that nobody knows are left out; options that nobody knows are left out with a warning in the log, those that
Ollama itself has given up silently.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from moegguf.generate.options import MAX_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.options import KeepAlive, Options

log = logging.getLogger(__name__)

LEVELS = ("low", "medium", "high", "max")


def _level(value: bool | str | None) -> bool | str | None:
    if isinstance(value, str) and value not in LEVELS:
        raise ValueError(f'invalid think value: {value[:40]!r} (must be "high", "medium", "low", "max", true or false)')
    return value


def _format(value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(value, str) and value not in ("", "json"):
        raise ValueError(f'invalid format: {value[:40]!r}; expected "json" or a JSON schema')
    return value or None


ModelText = Annotated[str | None, Field(max_length=limits.NAME_CHARS)]


class Named(Body):
    """Every request about one model; `name` is the older word for `model`."""

    model: ModelText = None
    name: ModelText = None

    @property
    def model_name(self) -> str:
        return self.model or self.name or ""

    @model_validator(mode="after")
    def _has_name(self) -> Named:
        if not self.model_name:
            raise ValueError("model is required")
        return self


class Call(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any] = Field(default_factory=dict)


class Calling(Body):
    id: Annotated[str | None, Field(max_length=256)] = None
    function: Call


class ChatMessage(Body):
    """One message; tool calls carry their arguments as an object."""

    role: Annotated[str, Field(min_length=1, max_length=32), AfterValidator(str.lower)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Calling] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: str | None = "function"
    function: Function


class Answering(Named):
    """What chat and generate share."""

    options: Options | None = None
    stream: bool | None = None
    think: Annotated[bool | str | None, AfterValidator(_level)] = None
    format: Annotated[str | dict[str, Any] | None, AfterValidator(_format)] = None
    keep_alive: KeepAlive = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=limits.TOP_LOGPROBS)] = None

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatRequest(Answering):
    messages: Annotated[list[ChatMessage] | None, Field(max_length=limits.MESSAGES)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=limits.TOOLS)] = None


class GenerateRequest(Answering):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[int] | None, Field(max_length=MAX_TOKENS)] = None
    raw: bool | None = None
    images: list[Any] | None = None


class EmbedRequest(Named):
    input: str | Annotated[list[str], Field(max_length=limits.INPUTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int | None, Field(ge=0, le=1 << 20)] = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsRequest(Named):
    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class ShowRequest(Named):
    verbose: bool | None = None
    system: str | None = None
    options: Options | None = None


class PullRequest(Named):
    stream: bool | None = None


class CreateRequest(Named):
    """`from_` and `files` say where the weights come from; the rest is what the new name adds."""

    from_: Annotated[str | None, Field(alias="from", max_length=limits.NAME_CHARS)] = None
    files: Annotated[dict[str, str] | None, Field(max_length=1024)] = None
    adapters: dict[str, str] | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: Annotated[list[ChatMessage] | None, Field(max_length=limits.MESSAGES)] = None
    quantize: str | None = None
    stream: bool | None = None


class CopyRequest(Body):
    source: Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]
    destination: Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]
