"""The protocol between server and worker: lines of JSON over a Unix socket, each one message with a `kind`.

Dataclasses are sent as the fields that differ from their defaults and rebuilt from their type hints. Bytes are sent as
base64, errors by class name. No pickle: a message can only become one of the types named here. Does not know processes
or models.

To the worker: load (config), generate (id, generation, stream), embed (id, inputs, truncate, normalize; or query, whose
documents are the inputs), tokenize (id, text, special), detokenize (id, tokens), count and render (id, generation),
budget (id, expert_cache_bytes, vram_cache_bytes), experts (id, watch_s), cancel (id). From it: loading (fraction; null
while the file is tried), warning (text), ready (ready), failed (error), event (id, and the event under its class name),
end (id, value or error, stats, decisions).
"""

from __future__ import annotations

import base64
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import moegguf.errors
from moegguf.errors import MoeggufError, OptionError, WorkerError
from moegguf.generate.request import Delta, PromptProgress

if TYPE_CHECKING:
    from moegguf.engine.plan import Plan

MAX_MESSAGE_BYTES = 128 << 20  # a prompt of 8 MiB as escapes is 48 MiB; vectors of 8,000 texts are 87 MiB

Message = dict[str, Any]
Kind = TypeVar("Kind")

EVENTS: dict[str, type[Delta] | type[PromptProgress]] = {kind.__name__: kind for kind in (Delta, PromptProgress)}


@dataclass(frozen=True)
class LoadConfig:
    """The model that a worker loads, and how: most fields are keywords of `Llama`, with its defaults.

    `plan`: which memory has what; None: made by the worker, from the budgets. `n_ctx`: of each of the `n_seq_max`
    sequences; None: as planned. `type_k`, `type_v`: names, such as "q8_0". `verbose`: llama.cpp's log is written;
    `silent`: nor its errors.
    """

    name: str
    path: str
    n_ctx: int | None = None
    plan: Plan | None = None
    n_seq_max: int = 1
    mmproj: str | None = None
    lora_path: str | None = None
    lora_scale: float | None = None
    n_batch: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    flash_attn: bool | None = None
    embedding: bool = False
    expert_cache: str | None = None
    vram_cache: str | None = None
    placement: str | None = None
    draft: str | None = None
    strategy: str | None = None
    policy: str | None = None
    predictor: str | None = None
    prefetch: bool | None = None
    warm_start: bool | None = None
    context_store: str | None = None
    verbose: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Ready:
    """The reply of a worker that has loaded its model. `plan`: moegguf.engine.plan.Plan as JSON. `n_parallel`: requests
    that it answers at once."""

    n_ctx: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    n_parallel: int = 1
    reads_images: bool = False


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as one line. Raises OptionError when it is too long or cannot be written as JSON."""
    try:
        line = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"a request has a value that JSON cannot hold ({error}); remove it.") from None
    if len(line) >= MAX_MESSAGE_BYTES:
        raise OptionError(f"a request has {len(line)} bytes, but at most {MAX_MESSAGE_BYTES} are accepted; shorten it.")
    return line + b"\n"


def decode(line: bytes | bytearray) -> Message:
    """The message in a line. Raises WorkerError for an invalid one."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkerError(f"invalid JSON on a worker's socket ({error}).") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise WorkerError("a message without a kind on a worker's socket.")
    return message


def _plain(value: Any) -> Any:
    """The `default` of json.dumps: converts the types that JSON does not have."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: item for name, default in _defaults(type(value)) if (item := getattr(value, name)) != default}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__}")


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """(field, default); MISSING for a field without default, which is therefore always sent."""
    return tuple((f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(kind))


def build(kind: type[Kind], data: Any) -> Kind:
    """The dataclass `kind` from its JSON as `encode` wrote it. Raises WorkerError when the JSON does not fit."""
    reader: Callable[[Any], Any] = _reader(typing.cast(Any, kind))
    try:
        return typing.cast(Kind, reader(data))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise WorkerError(f"a worker's message is not a valid {kind.__name__} ({error}).") from None


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """The function that converts JSON to the type of a hint; types that JSON has are passed through."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _object_reader(typing.cast(type, hint))
    if hint is bytes:
        return base64.b64decode
    if origin is tuple and len(inner) == 2 and inner[1] is ...:
        read = _reader(inner[0])
        return lambda items: tuple(map(read, items))
    if origin is tuple:
        reads = [_reader(part) for part in inner]
        return lambda items: tuple(read(item) for read, item in zip(reads, items, strict=True))
    if origin in (typing.Union, types.UnionType):
        kinds = [part for part in inner if is_dataclass(part) or typing.get_origin(part) is tuple or part is bytes]
        read_other = _reader(kinds[0] if kinds else object)
        return lambda item: None if item is None else read_other(item)
    if inner and inner[0] is int and isinstance(origin, type) and issubclass(origin, Mapping):
        return lambda items: {int(name): item for name, item in items.items()}  # JSON keys are strings
    return lambda item: item


def _object_reader(kind: type) -> Callable[[Any], Any]:
    names: dict[str, Any] = {}
    if kind is LoadConfig:  # by a worker only: it takes a tenth of a second, which `moegguf run` does without
        from moegguf.engine.plan import Plan

        names = {"Plan": Plan}
    hints = typing.get_type_hints(kind, localns=names)
    readers = {f.name: _reader(hints[f.name]) for f in fields(kind)}
    return lambda data: kind(**{name: readers[name](item) for name, item in data.items()})


def encode_error(error: BaseException) -> Message:
    """The class name and the message of an error."""
    return {"class": type(error).__name__, "message": str(error) or type(error).__name__}


def build_error(data: Any) -> MoeggufError:
    """The error from its JSON: of its own class if that is in moegguf.errors, else a MoeggufError with its name."""
    name, message = str(data.get("class")), str(data.get("message"))
    kind = getattr(moegguf.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MoeggufError):
        return kind(message)
    return MoeggufError(f"{name}: {message}")
