"""The protocol between server and worker: lines of JSON over a Unix socket. Each line
is a message with a `kind`.

A dataclass is sent as an object with the fields that differ from their defaults, and is
rebuilt from its type hints. Bytes are sent as base64, errors as class name and text.
Pickle is not used: a receiver builds only the types that it expects. This module does
not start processes or load models.

Messages to the worker, each with an id:
- load (config, a `LoadConfig`) is the first message. Its value is a `Ready`.
- generate (request, stream), embed (inputs, truncate, normalize, num_ctx, client_key), rank (query, documents,
  client_key), tokenize (text, special, add_special), pieces (tokens), detokenize (prompt), count (request), render
  (request)
- slot (action, slot, owner, path, most_bytes), budget ({option of a budget: bytes})
- experts (watch_s, client_key; None: counts the requests of all clients)
- cancel has the id of the message to cancel.

Messages from the worker:
- event (id, event)
- end (id, value or error; also stats and decisions if the model is loaded)
- warning (text), decision (fields)

An event, or a value whose class is in `SENT`, is a field that has the name of its
class. Any other value is the field `value`.
"""

from __future__ import annotations

import base64
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import moegguf.errors
from moegguf.errors import MoeggufError, OptionError, WorkerError
from moegguf.generate.request import AnswerSummary, Delta, Embeddings, PromptProgress
from moegguf.serving.events import Snapshot

# A prompt of 8 MiB can grow to 48 MiB as JSON escapes, and the vectors of 8,000 texts
# can need 87 MiB.
MAX_MESSAGE_BYTES = 128 << 20

Message = dict[str, Any]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class LoadProgress:
    """An event during a load: the share of the model that has been read so far."""

    share: float  # 0 to 1


@dataclass(frozen=True)
class Ready:
    """The reply of a worker that has loaded its model."""

    n_ctx: int
    n_parallel: int = 1  # maximum number of requests that the worker answers at once


SENT: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        LoadProgress, Ready, PromptProgress, Delta, AnswerSummary, Embeddings, Snapshot,
    )
}  # fmt: skip
"""{name of a class: class of events and values that a worker sends}"""


def encode(message: Mapping[str, Any]) -> bytes:
    """Encodes a message as one line of JSON. Writes NaN and infinite numbers as
    Python's json module does, although JSON has none. Raises OptionError if the line is
    too long, or if a value cannot be encoded."""
    try:
        line = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            "a request contains a value that cannot be written as JSON, because its type is unknown or it nests too"
            f" deeply ({error}); remove the value."
        ) from None
    if len(line) >= MAX_MESSAGE_BYTES:
        raise OptionError(
            f"a request has {len(line)} bytes, but must have fewer than {MAX_MESSAGE_BYTES}; shorten it."
        )
    return line + b"\n"


def decode(line: bytes | bytearray) -> Message:
    """Decodes the message in a line. Raises WorkerError for an invalid message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkerError(f"invalid JSON on a worker's socket ({error}).") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise WorkerError("a message without a kind on a worker's socket.")
    return message


def _plain(value: Any) -> Any:
    """Converts a dataclass, a mapping, a path or bytes to one of JSON's own types.
    json.dumps calls this function for other types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            name: item
            for name, default in _defaults(type(value))
            if (item := getattr(value, name)) != default
        }
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a {type(value).__name__}")


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Returns (field name, default) for each field of a dataclass. A field without a
    default has MISSING, so that its value always differs and is sent."""
    return tuple(
        (f.name, f.default if f.default_factory is MISSING else f.default_factory())
        for f in fields(kind)
    )


def build(kind: type[Kind], data: Any) -> Kind:
    """Rebuilds a value of type `kind` from parsed JSON that `encode` wrote. Raises
    WorkerError if the conversion fails. Values of JSON's own types are not checked."""
    read = _reader(typing.cast(Any, kind))
    try:
        return read(data)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).rstrip(".")
        raise WorkerError(
            f"a worker's message is not a valid {kind.__name__} ({reason})."
        ) from None


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Returns a function that converts parsed JSON to the type `hint`. For one of
    JSON's own types, the returned function changes nothing. In a tuple or a union, only
    the first type may need a conversion, and a tuple's other elements have this type or
    one of JSON's own types."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        kind: Any = hint
        hints = typing.get_type_hints(kind)
        readers = {f.name: _reader(hints[f.name]) for f in fields(kind)}
        return lambda data: kind(
            **{name: readers[name](item) for name, item in data.items()}
        )
    if hint is Path:
        return Path
    if hint is bytes:
        return base64.b64decode
    if origin is tuple:
        read = _reader(inner[0])
        return lambda items: tuple(map(read, items))
    if origin in (typing.Union, types.UnionType):
        read_other = _reader(inner[0])
        return lambda item: None if item is None else read_other(item)
    if origin is Mapping and inner[0] is int:
        # JSON keys are strings.
        return lambda items: {int(name): item for name, item in items.items()}
    return lambda item: item


def named(value: Any) -> Message:
    """Returns an event or a value as the field of a message."""
    name = type(value).__name__
    return {name if name in SENT else "value": value}


def build_named(message: Message) -> Any:
    """Rebuilds the event or the value in a message of a worker. Raises WorkerError if
    the conversion fails, and KeyError for a message without a value."""
    for name, item in message.items():
        if name in SENT:
            return build(SENT[name], item)
    return message["value"]


def encode_error(error: BaseException) -> Message:
    """Converts an error to JSON: its class name and its text."""
    return {
        "class": type(error).__name__,
        "message": str(error) or type(error).__name__,
    }


def build_error(data: Any) -> MoeggufError:
    """Rebuilds an error from its JSON. An error whose class is not in moegguf.errors
    becomes a MoeggufError, and its text begins with the name of the class."""
    name, message = str(data.get("class")), str(data.get("message"))
    kind = getattr(moegguf.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MoeggufError):
        return kind(message)
    return MoeggufError(f"{name}: {message}")
