"""The header of a trace file: what its JSON holds, and within which limits.

Not imported before a trace is read or written: pydantic takes a twentieth of a second to load.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, NoReturn, Self

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.trace.trace import MAX_TEXT, TRACE_VERSION, TraceHeader

MAX_BLOCKS = 1 << 20
MAX_TOKENS = 1 << 31

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Sequence = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Flag = Literal[0, 1]


class Block(NamedTuple):
    """One block of a trace file: how many passes and tokens it has, and whether it holds the router's inputs, and
    the request and phase of each token, where some of its passes have tokens of several.
    """

    n_pass: int
    n_tokens: int
    inputs: int
    batches: int


class _Shape(BaseModel, strict=True, extra="forbid"):
    n_layer: Annotated[int, Field(ge=1, le=4096)]
    n_expert: Annotated[int, Field(ge=1, le=32767)]
    n_expert_used: Annotated[int, Field(ge=1, le=1024)]
    layers: Annotated[tuple[int, ...], Field(min_length=1)]
    n_embd: Annotated[int, Field(ge=0, le=1 << 20)]
    n_vocab: Annotated[int, Field(ge=0, le=1 << 30)]
    expert_bytes: Annotated[int, Field(ge=1, le=1 << 50)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        rising = all(a < b for a, b in pairwise(self.layers))
        if not rising or self.layers[0] < 0 or self.layers[-1] >= self.n_layer:
            raise ValueError(f"layers must rise from 0 to below {self.n_layer}")
        if self.n_expert_used > self.n_expert:
            raise ValueError(f"n_expert_used is more than the {self.n_expert} experts")
        return self


class _Head(BaseModel, strict=True):
    format: Literal["moegguf-trace"]
    version: Annotated[int, Field(ge=1, le=TRACE_VERSION)]
    shape: _Shape
    model: Text
    fingerprint: Text
    labels: dict[Sequence, Text]
    settings: dict[Text, int | FiniteFloat | Text]
    weights: bool
    inputs: bool
    n_pass: Count
    n_tokens: Count
    # Version 1 had no passes of several requests, and no field for them.
    blocks: Annotated[
        list[tuple[Count, Count, Flag, Flag] | tuple[Count, Count, Flag]], Field(max_length=MAX_BLOCKS)
    ]


@dataclass(frozen=True)
class FileHeader:
    """The header of a trace file. weights, inputs: whether these were recorded. blocks: the file's blocks, in order."""

    shape: MoeShape
    header: TraceHeader
    weights: bool
    inputs: bool
    blocks: tuple[Block, ...]

    @property
    def n_pass(self) -> int:
        """Passes of all blocks."""
        return sum(block.n_pass for block in self.blocks)

    @property
    def n_tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(block.n_tokens for block in self.blocks)

    def encode(self) -> bytes:
        """The JSON text. Raises TraceError when `decode` would refuse it."""
        facts = {
            "format": "moegguf-trace",
            "shape": asdict(self.shape),
            **asdict(self.header),
            "weights": self.weights,
            "inputs": self.inputs,
            "n_pass": self.n_pass,
            "n_tokens": self.n_tokens,
            "blocks": self.blocks,
        }
        data = json.dumps(facts).encode()
        decode(data)
        return data


def decode(data: bytes) -> FileHeader:
    """Parses a header. Raises TraceError for the first field that is missing or out of its limits."""
    try:
        head = _Head.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        _fail(f"{where}: {first['msg']}, but is {first['input']!r:.40}")
    blocks = tuple(Block(*(*block, 0)[:4]) for block in head.blocks)
    about = TraceHeader(head.model, head.fingerprint, head.labels, head.settings)
    found = FileHeader(MoeShape(**head.shape.model_dump()), about, head.weights, head.inputs, blocks)
    if any(not 0 < block.n_pass <= block.n_tokens or block.inputs > head.inputs for block in blocks):
        _fail("blocks have at least a pass and a token per pass, and inputs only where they were recorded")
    if (head.n_pass, head.n_tokens) != (found.n_pass, found.n_tokens):
        _fail(f"n_pass and n_tokens are {head.n_pass} and {head.n_tokens}, but not those of its blocks")
    if head.inputs and found.shape.n_embd == 0:
        _fail("n_embd is 0, but inputs were recorded")
    return found


def _fail(rule: str) -> NoReturn:
    raise TraceError(f"trace header: {rule}; record the trace again.")
