"""The header of a trace file: JSON text to checked facts and back. Nothing in it is believed before it is checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, NoReturn

from moegguf.controller.shape import MoeShape
from moegguf.controller.trace import TRACE_VERSION, TraceHeader
from moegguf.errors import TraceError

FORMAT = "moegguf-trace"
MAX_HEADER_BYTES = 32 << 20
MAX_TEXT = 4096  # characters of a label, a name or a setting
MAX_BLOCKS = 1 << 20
MAX_TOKENS = 1 << 31
_LIMITS = {
    "n_layer": (1, 4096),
    "n_expert": (1, 32767),
    "n_expert_used": (1, 1024),
    "n_embd": (0, 1 << 20),
    "n_vocab": (0, 1 << 30),
    "expert_bytes": (1, 1 << 50),
}


@dataclass(frozen=True)
class Block:
    """One block of a trace file: how many passes and tokens it has, and whether the router's inputs are in it."""

    n_pass: int
    n_tokens: int
    inputs: bool


@dataclass(frozen=True)
class FileHeader:
    """All a trace file says of itself. weights, inputs: what was recorded. blocks: the parts of the file, in order."""

    shape: MoeShape
    header: TraceHeader
    weights: bool
    inputs: bool
    blocks: tuple[Block, ...]

    @property
    def n_pass(self) -> int:
        return sum(block.n_pass for block in self.blocks)

    @property
    def n_tokens(self) -> int:
        return sum(block.n_tokens for block in self.blocks)

    def encode(self) -> bytes:
        """The JSON text. Raises TraceError when `decode` would refuse it."""
        facts = {
            "format": FORMAT,
            "shape": asdict(self.shape),
            **asdict(self.header),
            "weights": self.weights,
            "inputs": self.inputs,
            "n_pass": self.n_pass,
            "n_tokens": self.n_tokens,
            "blocks": [[block.n_pass, block.n_tokens, int(block.inputs)] for block in self.blocks],
        }
        try:
            data = json.dumps(facts, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TraceError(f"trace header: cannot be written as JSON ({error}); check its settings.") from error
        decode(data)
        return data


def decode(data: bytes) -> FileHeader:
    """The facts in a header. Raises TraceError for the first one that is missing or out of its limits."""
    try:
        raw = json.loads(data, parse_constant=lambda word: _fail("", f"{word} is not a number"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"trace header: is not valid JSON ({error}); record the trace again.") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        _fail("format", f"must be {FORMAT!r}; this is another kind of file")
    version = _int(raw, "version", 0, 1 << 31)
    if version != TRACE_VERSION:
        _fail("version", f"must be {TRACE_VERSION}, but is {version}; this moegguf cannot read it")
    weights, inputs = _bool(raw, "weights"), _bool(raw, "inputs")
    found = FileHeader(_shape(raw.get("shape")), _facts(raw), weights, inputs, _blocks(raw.get("blocks"), inputs))
    for key, expected in (("n_pass", found.n_pass), ("n_tokens", found.n_tokens)):
        if _int(raw, key, 0, MAX_TOKENS) != expected:
            _fail(key, f"is {raw[key]}, but its blocks have {expected}")
    if inputs and found.shape.n_embd == 0:
        _fail("n_embd", "is 0, but inputs were recorded")
    return found


def _fail(key: str, rule: str) -> NoReturn:
    raise TraceError(f"trace header: {key} {rule}; record the trace again.")


def _int(raw: dict[str, Any], key: str, low: int, high: int) -> int:
    value = raw.get(key)
    if type(value) is not int or not low <= value <= high:
        _fail(key, f"must be a whole number from {low} to {high}, but is {value!r:.40}")
    return value


def _bool(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if type(value) is not bool:
        _fail(key, f"must be true or false, but is {value!r:.40}")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        _fail(key, f"must be text of at most {MAX_TEXT} characters, but is {value!r:.40}")
    return value


def _shape(raw: object) -> MoeShape:
    if not isinstance(raw, dict) or set(raw) != {field.name for field in fields(MoeShape)}:
        _fail("shape", f"must have the sizes of a model, but is {raw!r:.80}")
    numbers = {key: _int(raw, key, *limits) for key, limits in _LIMITS.items()}
    layers = raw["layers"]
    if not isinstance(layers, list) or any(type(il) is not int for il in layers):
        _fail("layers", f"must be a list of layer numbers, but is {layers!r:.40}")
    rising = all(a < b for a, b in pairwise(layers))
    if not layers or not rising or layers[0] < 0 or layers[-1] >= numbers["n_layer"]:
        _fail("layers", f"must rise from 0 to below {numbers['n_layer']}, but is {layers!r:.40}")
    if numbers["n_expert_used"] > numbers["n_expert"]:
        _fail("n_expert_used", f"is {numbers['n_expert_used']}, more than the {numbers['n_expert']} experts")
    return MoeShape(layers=tuple(layers), **numbers)


def _facts(raw: dict[str, Any]) -> TraceHeader:
    labels, settings = raw.get("labels"), raw.get("settings")
    if not isinstance(labels, dict) or not isinstance(settings, dict):
        _fail("labels and settings", "must both be there")
    for key, value in settings.items():
        if type(value) not in (int, float):
            _text(value, f"setting {key!r:.40}")
    return TraceHeader(
        model=_text(raw.get("model"), "model"),
        fingerprint=_text(raw.get("fingerprint"), "fingerprint"),
        labels={_sequence(key): _text(value, "label") for key, value in labels.items()},
        settings={_text(key, "setting"): value for key, value in settings.items()},
    )


def _sequence(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
        _fail("labels", f"belong to numbers of sequences, not to {key!r:.40}")
    return int(key)


def _blocks(raw: object, inputs: bool) -> tuple[Block, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_BLOCKS:
        _fail("blocks", f"must be a list of at most {MAX_BLOCKS}, but is {raw!r:.40}")
    return tuple(_block(item, inputs) for item in raw)


def _block(raw: object, inputs: bool) -> Block:
    if not isinstance(raw, list) or len(raw) != 3 or any(type(value) is not int for value in raw):
        _fail("blocks", f"must be [passes, tokens, inputs], but one is {raw!r:.40}")
    n_pass, n_tokens, has_inputs = raw
    if not (0 < n_pass <= n_tokens <= MAX_TOKENS and has_inputs in ((0, 1) if inputs else (0,))):
        _fail("blocks", f"have at least a pass and a token per pass, but one is {raw!r:.40}")
    return Block(n_pass, n_tokens, bool(has_inputs))
