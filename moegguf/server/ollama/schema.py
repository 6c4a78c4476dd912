"""Ollama's request bodies (api/types.go), each field with its type and limits. Unknown fields are ignored.

Those of chat and generate are converted to a `GenerationRequest`: the entry's system message, messages, parameters and
template are defaults for those of the request.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from moegguf.generate.images import MAX_IMAGES, with_images
from moegguf.generate.request import MAX_TOP_LOGPROBS, THINK_LEVELS, GenerationRequest, Message
from moegguf.models.entry import Details, ModelEntry
from moegguf.models.recipe import is_go_template
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.conversation import Question
from moegguf.server.common.lookup import check_capabilities
from moegguf.server.common.options import Loading, ModelName, Options, Tool, ToolCall, with_entry_messages


def _level(value: bool | str | None) -> bool | str | None:
    if isinstance(value, str) and value not in THINK_LEVELS:
        raise ValueError(f'invalid think value: {value[:40]!r} (must be "high", "medium", "low", "max", true or false)')
    return value


def _format(value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(value, str) and value not in ("", "json"):
        raise ValueError(f'invalid format: {value[:40]!r}; expected "json" or a JSON schema')
    return value or None


Images = Annotated[list[str], Field(max_length=MAX_IMAGES)]  # base64


class ModelBody(Body):
    """A request about one model; `name` is the deprecated form of `model`."""

    model: ModelName

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: dict[str, Any]) -> dict[str, Any]:
        if not (name := given.get("model") or given.get("name")):
            raise ValueError("model is required")
        return {**given, "model": name}


class ChatMessage(Body):
    """One message; tool calls carry their arguments as an object."""

    role: Annotated[str, Field(min_length=1, max_length=32), AfterValidator(str.lower)]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_message(self) -> Message:
        """The message for `GenerationRequest`: without null fields, always with `content`. Raises OptionError."""
        fields = self.model_dump(exclude_none=True, exclude={"images", "content"})
        return {**fields, "content": with_images(self.content or "", self.images or ())}


class GenerationBody(ModelBody, Question):
    """The fields that chat and generate share."""

    think: Annotated[bool | str | None, AfterValidator(_level)] = None
    format: Annotated[str | dict[str, Any] | None, AfterValidator(_format)] = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    details: bool | None = None  # ours: lines with `prompt_progress`, and `timing` and `decisions` at the end

    @property
    def streams(self) -> bool:
        """True by default."""
        return self.stream is not False

    def common_fields(self, entry: ModelEntry) -> dict[str, Any]:
        """The fields of a `GenerationRequest` that both requests share."""
        return {
            "format": self.format,
            "think": self.think,
            "truncate": self.truncate is not False,
            "shift": self.shift is not False,
            "n_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "sampling": self.sampling_with(entry),
        }


class ChatRequest(GenerationBody):
    """The body of /api/chat."""

    messages: Annotated[list[ChatMessage] | None, Field(max_length=limits.MESSAGES)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=limits.TOOLS)] = None

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        """The only request."""
        # Ollama says this before it judges images.
        check_capabilities(entry, known, {"vision": any(message.images for message in self.messages or ())})
        messages = with_entry_messages((message.as_message() for message in self.messages or ()), entry)
        tools = tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())
        return [GenerationRequest(messages=messages, tools=tools, template=entry.template, **self.common_fields(entry))]


class GenerateRequest(GenerationBody):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[int] | None, Field(max_length=MAX_ANSWER_TOKENS)] = None
    raw: bool | None = None
    images: Images | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> GenerateRequest:
        if self.raw and (self.template or self.system or self.context):
            raise ValueError("raw mode does not support template, system, or context")
        if self.template and is_go_template(self.template):
            raise ValueError("template: is in Go's language; write it in Jinja, as the model's own (/api/show has it)")
        if self.images and (self.raw or self.suffix):
            raise ValueError("raw mode and suffix do not support images; send them with a prompt for the template")
        return self

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        """The only request: the prompt through the chat template, or as it is with `raw` or `suffix`."""
        needs = {"generate": True, "vision": bool(self.images), "insert": bool(self.suffix)}
        check_capabilities(entry, known, {**needs, "thinking": bool(self.think)})
        fields, prompt = self.common_fields(entry), self.prompt or ""
        if self.raw or self.suffix:
            return [GenerationRequest(prompt=prompt, suffix=self.suffix or None, return_context=not self.raw, **fields)]
        system = entry.system if self.system is None else self.system
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if not self.context:
            messages += [dict(message) for message in entry.messages]
        return [
            GenerationRequest(
                messages=(*messages, {"role": "user", "content": with_images(prompt, self.images or ())}),
                return_context=True,
                context=tuple(self.context or ()),
                template=self.template or entry.template,
                **fields,
            )
        ]


class EmbedRequest(ModelBody, Loading):
    """The body of /api/embed."""

    input: str | Annotated[list[str], Field(max_length=limits.INPUTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int | None, Field(ge=0, le=1 << 20)] = None


class EmbeddingsRequest(ModelBody, Loading):
    """The body of /api/embeddings."""

    prompt: str | None = None


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
