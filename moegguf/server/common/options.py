"""What the bodies of every API share: messages from the parts that they send (texts, images as base64 or data URLs,
tool calls and their results), tools, and options for loading and sampling with Ollama's names and ranges.

Unknown options are ignored with a warning in the log; those that Ollama has removed, without one.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from moegguf.engine.machine import count_cpus
from moegguf.errors import OptionError
from moegguf.generate.images import image_part
from moegguf.generate.request import Message, Sampling, sampling_with
from moegguf.models.details import parameters_of
from moegguf.models.entry import ModelEntry
from moegguf.models.recipe import PARAMETERS, RANGES
from moegguf.quantities import parse_duration, parse_expert_cache
from moegguf.server.common import limits
from moegguf.server.common.body import Body, explain
from moegguf.server.common.errors import HttpError
from moegguf.serving.events import LoadOverrides

Part = dict[str, str]

_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.IGNORECASE)


def text_part(text: str) -> Part:
    """The part for a text."""
    return {"type": "text", "text": text}


def image_of_base64(data: str) -> Part:
    """The part for an image as base64. Raises ValueError when it cannot be used."""
    try:
        return image_part(data)
    except OptionError as error:
        raise ValueError(str(error)) from None


def image_of_url(url: str) -> Part:
    """The part for an image in a data URL. Raises ValueError for any other URL: the server fetches nothing."""
    found = _DATA_URL.match(url[:100])
    if found is None:
        raise ValueError(
            f"an image is sent as data:image/png;base64,..., but this is {url[:40]!r}; the server fetches nothing"
        )
    return image_of_base64(url[found.end() :])


def part_of(part: Any, texts: Mapping[str, str], image_kind: str) -> Part:
    """A part of OpenAI's messages: a text, under {its type: its key}, or an image. Raises ValueError for others."""
    kind = part.get("type") if isinstance(part, dict) else None
    first = next(iter(texts))
    if kind == image_kind:
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str):
            raise ValueError('image_url must be {"url": "data:image/png;base64,..."}')
        return image_of_url(url)
    if isinstance(kind, str) and kind not in texts:
        raise ValueError(f"parts of type {kind[:40]!r} are not supported; send {first} or {image_kind}")
    text = part.get(texts[kind]) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise ValueError(f'a part must be {{"type": "{first}", "text": "..."}}')
    return text_part(text)


def content_of(parts: Sequence[Part]) -> str | list[Part]:
    """The content of a message: one text, its parts joined by newlines, unless there are images."""
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)


def call_of(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call of an assistant's message."""
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def tool_message(content: Any, call_id: str | None, name: str | None) -> Message:
    """The message with what a tool returned; without the id or name where it is None."""
    known = {"tool_call_id": call_id, "tool_name": name}
    return {"role": "tool", "content": content} | {key: value for key, value in known.items() if value is not None}


log = logging.getLogger(__name__)

MAX_TOKEN = 2**31 - 1  # llama.cpp's token ids have 32 bits
KeepAlive = int | float | str | None
ModelName = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS)]
FunctionName = Annotated[str, Field(min_length=1, max_length=256)]


def _integral(value: Any) -> Any:
    """Accepts 4096.0 for 4096: some clients write all numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _budget(value: str | int | None) -> str | None:
    if value is not None:
        parse_expert_cache(str(value))
    return None if value is None else str(value)


def _in_range(name: str) -> Any:
    least, most = RANGES.get(name, (None, None))
    return Field(default=None, ge=least, le=most)


def are_tokens(given: Any) -> bool:
    """Whether a value is a text as its tokens, one or more."""
    return isinstance(given, list) and bool(given) and all(type(t) is int and 0 <= t <= MAX_TOKEN for t in given)


Whole = Annotated[int | None, BeforeValidator(_integral)]
Number = float | None
Budget = Annotated[str | int | None, AfterValidator(_budget)]
Stop = Annotated[str, Field(max_length=limits.STOP_CHARS)]


class SamplingOptions(Body):
    """How tokens are chosen: Ollama's options, which are also keys of OpenAI's bodies, and `exact`: other requests
    change no bit. seed -1: random. None: the model's parameter, or the default."""

    seed: Whole = _in_range("seed")
    temperature: Number = _in_range("temperature")
    top_k: Whole = _in_range("top_k")
    top_p: Number = _in_range("top_p")
    min_p: Number = _in_range("min_p")
    typical_p: Number = _in_range("typical_p")
    repeat_last_n: Whole = _in_range("repeat_last_n")
    repeat_penalty: Number = _in_range("repeat_penalty")
    presence_penalty: Number = _in_range("presence_penalty")
    frequency_penalty: Number = _in_range("frequency_penalty")
    stop: Annotated[list[Stop] | None, Field(max_length=limits.STOPS)] = None
    exact: bool | None = None


class Options(SamplingOptions):
    """The other options of Ollama that have an effect here, and `expert_cache` with its alias `moe_cache_ram`.

    num_predict -1 and -2: until the model ends or the context is full; num_keep: tokens that stay when it is, -1: the
    prompt; num_thread 0 and num_ctx 0: the default; num_thread: at most the processors. num_batch has no effect in a
    request, whose passes others share: it belongs to a name (`create`).
    """

    num_ctx: Whole = _in_range("num_ctx")
    num_batch: Whole = _in_range("num_batch")
    num_thread: Whole = _in_range("num_thread")
    expert_cache: Budget = None
    moe_cache_ram: Budget = None
    draft: Literal["auto", "off", "ngram", "mtp"] | None = None
    num_predict: Whole = _in_range("num_predict")
    num_keep: Whole = _in_range("num_keep")

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown(cls, given: Any) -> Any:
        known = cls.model_fields.keys() | PARAMETERS.keys()
        for name in given.keys() - known if isinstance(given, Mapping) else ():
            log.warning("the option %.60r is unknown and ignored", name)
        return given

    def overrides(self) -> LoadOverrides:
        """The options for loading."""
        given = self.model_dump(exclude_none=True, exclude={"num_batch"})
        if self.num_thread:  # more would spin for each other, and one request would hold up the machine
            given["num_thread"] = min(self.num_thread, count_cpus())
        return LoadOverrides.of({"expert_cache": self.moe_cache_ram} | given)

    def sampling(self) -> Sampling:
        """The options for sampling; those of `Sampling` where an option is None."""
        return sampling_with(Sampling(), self.model_dump(exclude_none=True))


class Loading(Body):
    """The fields of a body that may load a model."""

    options: Options | None = None
    keep_alive: KeepAlive = None

    def overrides(self) -> LoadOverrides:
        """The options for loading."""
        return (self.options or Options()).overrides()

    def sampling_with(self, entry: ModelEntry, **own: Any) -> Sampling:
        """The sampling parameters: the body's `own` keys by Ollama's names, unless they are None, then `options`, then
        the entry's parameters. Raises HttpError 400 for invalid ones of the entry."""
        given = {name: value for name, value in own.items() if value is not None}
        return options_of(self.options, entry).model_copy(update=given).sampling()

    def keep_alive_s(self) -> float | None:
        """How long the model stays loaded when it is idle: inf for ever, None for the setting. Raises OptionError."""
        return None if self.keep_alive is None else parse_duration(self.keep_alive)


class Function(Body):
    """A function and the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: str | None = "function"
    function: Function


def _arguments(given: Any) -> Any:
    """The arguments of a call, which OpenAI's clients send as JSON text. Raises ValueError."""
    try:
        return json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ValueError("must be the text of a JSON object") from error


Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


class _CalledFunction(Body):
    name: FunctionName
    arguments: Arguments = Field(default_factory=dict)


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str | None = None
    function: _CalledFunction


def options_of(given: Options | None, entry: ModelEntry) -> Options:
    """The request's options, then the model's parameters. Raises HttpError 400 for invalid parameters of the model."""
    own = parameters_of(entry)
    if not own:
        return given or Options()
    try:
        return Options.model_validate({**own, **(given.model_dump(exclude_none=True) if given else {})})
    except ValidationError as error:
        raise HttpError(400, f"parameters of {entry.name}: {explain(error)}") from None


def with_entry_messages(given: Iterable[Message], entry: ModelEntry) -> tuple[Message, ...]:
    """A conversation after the entry's own messages; its system message first unless `given` begins with one."""
    given = tuple(given)
    own = [dict(message) for message in entry.messages]
    if entry.system and not (given and given[0]["role"] == "system"):
        own.insert(0, {"role": "system", "content": entry.system})
    return (*own, *given)
