"""Ollama's request bodies (api/types.go), each field with its type and limits. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from moegguf.generate.options import MAX_TOKENS, MAX_TOP_LOGPROBS, THINK_LEVELS
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.options import KeepAlive, Options, Tool, ToolCall


def _level(value: bool | str | None) -> bool | str | None:
    if isinstance(value, str) and value not in THINK_LEVELS:
        raise ValueError(f'invalid think value: {value[:40]!r} (must be "high", "medium", "low", "max", true or false)')
    return value


def _format(value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(value, str) and value not in ("", "json"):
        raise ValueError(f'invalid format: {value[:40]!r}; expected "json" or a JSON schema')
    return value or None


ModelText = Annotated[str | None, Field(max_length=limits.NAME_CHARS)]


class ModelBody(Body):
    """A request about one model; `name` is the deprecated form of `model`."""

    model: ModelText = None
    name: ModelText = None

    @property
    def model_name(self) -> str:
        """`model`, or `name`."""
        return self.model or self.name or ""

    @model_validator(mode="after")
    def _has_name(self) -> ModelBody:
        if not self.model_name:
            raise ValueError("model is required")
        return self


class ChatMessage(Body):
    """One message; tool calls carry their arguments as an object."""

    role: Annotated[str, Field(min_length=1, max_length=32), AfterValidator(str.lower)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class GenerationBody(ModelBody):
    """The fields that chat and generate share."""

    options: Options | None = None
    stream: bool | None = None
    think: Annotated[bool | str | None, AfterValidator(_level)] = None
    format: Annotated[str | dict[str, Any] | None, AfterValidator(_format)] = None
    keep_alive: KeepAlive = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives per token; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatRequest(GenerationBody):
    """The body of /api/chat."""

    messages: Annotated[list[ChatMessage] | None, Field(max_length=limits.MESSAGES)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=limits.TOOLS)] = None


class GenerateRequest(GenerationBody):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[int] | None, Field(max_length=MAX_TOKENS)] = None
    raw: bool | None = None
    images: list[Any] | None = None


class EmbedRequest(ModelBody):
    """The body of /api/embed."""

    input: str | Annotated[list[str], Field(max_length=limits.INPUTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int | None, Field(ge=0, le=1 << 20)] = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsRequest(ModelBody):
    """The body of /api/embeddings."""

    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class ShowRequest(ModelBody):
    """The body of /api/show."""

    verbose: bool | None = None
    system: str | None = None
    options: Options | None = None


class PullRequest(ModelBody):
    """The body of /api/pull."""

    stream: bool | None = None


class CreateRequest(ModelBody):
    """The body of /api/create. `from_` or `files` give the weights; the rest is stored with the new name."""

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
    """The body of /api/copy."""

    source: Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]
    destination: Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]
