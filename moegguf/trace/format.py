"""The trace file: an .npz of blocks, which is written while the model runs and fully
checked when it is read.

The file is a zip. Block number i consists of the members NAME.i.npy (i with six
digits), with the names and shapes of `Trace`'s arrays. A block's pass_start is relative
to the block's first token. The last member, `header.json`, lists the blocks, so a
truncated file has no header. `numpy.load(path, allow_pickle=False)` opens a trace
without moegguf. Inputs are stored uncompressed, because they hardly compress;
everything else is compressed (deflate).

This module imports pydantic, which is slow. Programs should import this module only if
they read or write traces.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator
from safetensors import SafetensorError

from moegguf.atomic_write import can_be_replaced
from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.native.events import Bools, Phase
from moegguf.trace.trace import MAX_TEXT, Trace, TraceHeader

MAX_BLOCKS = 1 << 20
MAX_TOKENS = 1 << 31

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Sequence = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Flag = Annotated[int, Field(ge=0, le=1)]


class Block(NamedTuple):
    """The size of one block of a trace file, and which optional arrays it has."""

    n_pass: Count
    n_tokens: Count
    inputs: Flag  # 1: the block has the routers' inputs
    # 1: passes mix requests or phases, so the block stores them for each token.
    batches: Flag


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
            raise ValueError(
                f"layers must be in rising order, each from 0 to {self.n_layer - 1}"
            )
        if self.n_expert_used > self.n_expert:
            raise ValueError(f"n_expert_used is more than the {self.n_expert} experts")
        return self


class FileHeader(BaseModel, strict=True):
    """The header of a trace file."""

    format: Literal["moegguf-trace"] = "moegguf-trace"
    version: Literal[2] = 2
    shape: _Shape
    model: Text
    fingerprint: Text
    labels: dict[Sequence, Text]
    settings: dict[Text, int | FiniteFloat | Text]
    # True: the file has the router weights that multiply the experts' outputs.
    weights: bool
    inputs: bool  # True: blocks may have the routers' inputs; False: no block has them
    n_pass: Count
    n_tokens: Count
    # blocks in the order of the file.
    blocks: Annotated[list[Block], Field(max_length=MAX_BLOCKS)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(
            not 0 < block.n_pass <= block.n_tokens or block.inputs > self.inputs
            for block in self.blocks
        ):
            raise ValueError(
                "a block must have at least one pass, at least one token per pass, and inputs only if `inputs` is true"
            )
        if (self.n_pass, self.n_tokens) != _sizes(self.blocks):
            raise ValueError("n_pass and n_tokens must be the sums over the blocks")
        if self.inputs and self.shape.n_embd == 0:
            raise ValueError("n_embd must be above 0, because inputs were recorded")
        return self

    @property
    def about(self) -> TraceHeader:
        """The fields of this header that a `Trace` in memory keeps."""
        return TraceHeader(self.model, self.fingerprint, self.labels, self.settings)


def _sizes(blocks: Iterable[Block]) -> tuple[int, int]:
    """Returns the number of passes and the number of tokens in all blocks."""
    return sum(block.n_pass for block in blocks), sum(
        block.n_tokens for block in blocks
    )


def decode(data: bytes, step: str = "record the trace again") -> FileHeader:
    """Parses a header. Raises TraceError for the first field that is missing or breaks
    a rule. `step` ends the error's text."""
    try:
        return FileHeader.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        rule = first["msg"].removeprefix("Value error, ")
        raise TraceError(
            f"trace header: {where}: {rule}, but is {first['input']!r:.40}; {step}."
        ) from error


MAX_HEADER_BYTES = 32 << 20
HEADER = "header.json"
MAX_TRACE_BYTES = 16 << 30  # largest size of a whole trace in memory, in bytes
_NPY_BYTES = 4096  # largest size of a member's npy header, in bytes
_DEFLATE_LEVEL = 1  # other levels change the size of routing by less than a tenth
# Exceptions that zipfile, numpy, json, safetensors and csv raise for invalid data
DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, ArithmeticError, EOFError, LookupError,
    MemoryError, RuntimeError, SyntaxError, TypeError, ValueError, SafetensorError, csv.Error,
)  # fmt: skip


def check(trace: Trace, step: str = "record it again") -> None:
    """Raises TraceError for the first rule that the values of a trace break. `step`
    ends the error's text. Types and shapes must already be right."""
    for holds, name, rule in _rules(trace):
        if not holds:
            raise TraceError(f"{name} {rule}; this trace breaks the rule, so {step}.")


def _rules(trace: Trace) -> Iterator[tuple[Any, str, str]]:
    """Yields (True if the rule holds, name of an array, text of the rule). A later rule
    can be computed only if the earlier rules hold."""
    starts = trace.pass_start
    tokens = trace.tokens
    ids = trace.expert_ids
    n_vocab = trace.shape.n_vocab or np.iinfo(np.int32).max
    n_expert = trace.shape.n_expert
    chosen: Bools = ids >= 0
    used = np.asarray(chosen.any(axis=1, keepdims=True))
    uniform = (used[:, :, 1:] <= used[:, :, :-1]).all() and (
        chosen == (chosen[:, :, :1] & used)
    ).all()
    yield (np.diff(starts) > 0).all(), "pass_start", "must rise: each pass has a token"
    at_ends = starts[0] == 0 and starts[-1] == trace.n_tokens
    yield at_ends, "pass_start", f"must go from 0 to {trace.n_tokens}"
    of_phases = f"must be at most {max(Phase):d}"
    yield (trace.pass_phase <= max(Phase)).all(), "pass_phase", of_phases
    first = trace.pass_first_token
    yield (first >= -1).all(), "pass_first_token", "must be at least -1"
    known = (tokens >= -1) & (tokens < n_vocab)
    yield known.all(), "tokens", f"must be from -1 to below {n_vocab}"
    known = (ids >= -1) & (ids < n_expert)
    yield known.all(), "expert_ids", f"must be from -1 to below {n_expert}"
    of_layers = (
        "must hold the same number of experts for each token of a layer, followed by -1"
    )
    yield uniform, "expert_ids", of_layers
    yield (trace.phase_of <= max(Phase)).all(), "token_phase", of_phases
    of_last_tokens = "must contain a pass's last tokens if some tokens are missing"
    yield _computes_last_tokens(trace), "expert_ids", of_last_tokens


def _computes_last_tokens(trace: Trace) -> bool:
    """Returns True if each layer was computed for all, for none or for the last tokens
    of each pass. Checks only passes of a single request and phase."""
    lengths = np.diff(trace.pass_start)
    of_pass = np.repeat(
        np.stack([trace.pass_sequence, trace.pass_phase]), lengths, axis=1
    )
    other = (of_pass != np.stack([trace.sequence_of, trace.phase_of])).any(axis=0)
    n_others = np.diff(np.concatenate([[0], np.cumsum(other)])[trace.pass_start])
    computed = trace.expert_ids[:, :, 0] >= 0
    ends = computed[:, :-1] & ~computed[:, 1:] & np.repeat(n_others == 0, lengths)[:-1]
    # Not a fault: the next token belongs to another pass.
    ends[:, trace.pass_start[1:-1] - 1] = False
    return not bool(ends.any())


Spec = dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]


def _spec(shape: MoeShape, block: Block, weights: bool) -> Spec:
    """Returns the type and shape of each array of a block."""
    n_pass, n_tokens, inputs, batches = block
    chosen = (shape.n_moe_layer, n_tokens, shape.n_expert_used)
    spec: Spec = {
        "pass_sequence": (np.int32, (n_pass,)),
        "pass_phase": (np.uint8, (n_pass,)),
        "pass_first_token": (np.int32, (n_pass,)),
        "pass_ns": (np.int64, (n_pass,)),
        "pass_start": (np.int64, (n_pass + 1,)),
        "tokens": (np.int32, (n_tokens,)),
        "expert_ids": (np.int16, chosen),
    }
    if weights:
        spec["weights"] = (np.float16, chosen)
    if inputs:
        spec["inputs"] = (np.float16, (shape.n_moe_layer, n_tokens, shape.n_embd))
    if batches:
        spec |= {
            "token_sequence": (np.int32, (n_tokens,)),
            "token_phase": (np.uint8, (n_tokens,)),
        }
    return spec


def _spec_bytes(spec: Spec) -> int:
    return sum(_array_bytes(*entry) for entry in spec.values())


def _array_bytes(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> int:
    # Computed in Python integers, which no forged header can make overflow
    return np.dtype(dtype).itemsize * math.prod(shape)


def _member(name: str, block: int) -> str:
    return f"{name}.{block:06d}.npy"


def partial_of(path: Path) -> Path:
    """Returns the temporary path, beside `path`, at which a trace is written until it
    is complete."""
    return path.with_name(path.name + ".partial")


class TraceWriter:
    """Writes a trace block by block to PATH.partial, which `close` renames to PATH.

    If the recording is killed, PATH remains unchanged. Raises TraceError if a write
    fails, if PATH is not a file that can be replaced, if a header is invalid, or if a
    block has wrong shapes. The constructor only checks the header that it gets.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: MoeShape,
        header: TraceHeader,
        *,
        weights: bool,
        inputs: bool,
    ) -> None:
        self.path = Path(path)
        self.partial = partial_of(self.path)
        self.shape = shape
        self.weights = weights
        self.inputs = inputs
        self._blocks: list[Block] = []
        # Raises TraceError for an invalid header now, not only in `close`.
        self._encoded(header)
        if not can_be_replaced(self.path):
            raise TraceError(
                f"a trace must be a file, but {str(self.path)!r} is not a regular file; give a file's path, not a"
                " folder, pipe or device."
            )
        with self._writing():
            self._zip = zipfile.ZipFile(
                self.partial, "w", zipfile.ZIP_DEFLATED, compresslevel=_DEFLATE_LEVEL
            )

    def add(self, block: Trace) -> None:
        """Appends the passes of `block`. The block may lack inputs even if the writer
        accepts inputs. Raises TraceError."""
        added = Block(
            block.n_pass,
            block.n_tokens,
            inputs=int(block.inputs is not None),
            batches=int(block.token_sequence is not None),
        )
        spec = _spec(self.shape, added, self.weights)
        if added.inputs and not self.inputs:
            raise TraceError(
                f"{self.path.name}: a block has inputs, but the writer accepts none; open the writer with inputs."
            )
        if len(self._blocks) == MAX_BLOCKS:
            raise TraceError(
                f"{self.path.name}: a trace may have up to {MAX_BLOCKS} blocks, but this one needs more; record fewer"
                " requests in each trace."
            )
        for name, (dtype, shape) in spec.items():
            array = getattr(block, name)
            if array is None or array.dtype != dtype or array.shape != shape:
                raise TraceError(
                    f"{self.path.name}: {name} must be an array of {np.dtype(dtype)} with the shape {shape}; give this"
                    " array."
                )
        with self._writing():
            for name in spec:
                member = _member(name, len(self._blocks))
                array = getattr(block, name)
                # zipfile stores a member opened by a ZipInfo without compression, and
                # compresses a member opened by name.
                target: str | zipfile.ZipInfo = (
                    zipfile.ZipInfo(member) if name == "inputs" else member
                )
                with self._zip.open(
                    target, "w", force_zip64=array.nbytes > 1 << 30
                ) as file:
                    np.lib.format.write_array(
                        file, np.ascontiguousarray(array), allow_pickle=False
                    )
        self._blocks.append(added)

    def close(self, header: TraceHeader) -> None:
        """Writes the header and renames the file to PATH. Raises TraceError."""
        data = self._encoded(header)
        with self._writing():
            self._zip.writestr(HEADER, data)
            self._zip.close()
            os.replace(self.partial, self.path)

    def _encoded(self, header: TraceHeader) -> bytes:
        """Returns a header as JSON in UTF-8. Raises TraceError if `decode` would reject
        it."""
        n_pass, n_tokens = _sizes(self._blocks)
        facts = {
            "shape": asdict(self.shape),
            **asdict(header),
            "weights": self.weights,
            "inputs": self.inputs,
            "n_pass": n_pass,
            "n_tokens": n_tokens,
            "blocks": self._blocks,
        }
        step = "a trace file cannot hold this value, so correct it"
        checked = decode(json.dumps(facts).encode(), step)
        return checked.model_dump_json().encode()

    def discard(self) -> None:
        """Removes the unfinished file. Does nothing after `close` has succeeded."""
        # Closing fails if the disk is full, but the file is removed anyway.
        with suppress(OSError):
            self._zip.close()
        self.partial.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(
                f"{self.path}: the trace cannot be written ({error.strerror or error}); make room on the disk, or"
                " choose another place."
            ) from error


def write(path: str | os.PathLike[str], trace: Trace) -> None:
    """Writes `trace` to `path`, replacing an existing file. Raises TraceError if it
    cannot be written."""
    writer = TraceWriter(
        path,
        trace.shape,
        trace.header,
        weights=trace.weights is not None,
        inputs=trace.inputs is not None,
    )
    try:
        if trace.n_pass:
            writer.add(trace)
        writer.close(trace.header)
    finally:
        writer.discard()


def read(path: str | os.PathLike[str], max_bytes: int = MAX_TRACE_BYTES) -> Trace:
    """Reads the trace at `path` and checks every rule. Raises TraceError if it is
    missing, damaged, or larger than `max_bytes` in memory.

    The header implies the sizes of all arrays. They are added up before anything but
    the header is unpacked. Before an array is unpacked, the size that the zip file
    declares for it is compared with its implied size. Unknown members are ignored.
    """
    path = Path(path)
    with (
        reading(path, "the trace is damaged or incomplete", "record it again"),
        zipfile.ZipFile(path) as archive,
    ):
        return _read(archive, max_bytes)


@contextmanager
def reading(path: Path, damage: str, step: str) -> Iterator[None]:
    """Converts errors of reading a file, such as OSError and errors for invalid data,
    into a TraceError with the file's name. `damage` and `step` are the fault and the
    next step in the error for invalid data."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{path.name}: {error}") from error
    except OSError as error:
        raise TraceError(
            f"{path}: the file cannot be read ({error.strerror or error}); check the path."
        ) from error
    except DAMAGE as error:
        raise TraceError(f"{path.name}: {damage} ({error}); {step}.") from error


def _read(archive: zipfile.ZipFile, max_bytes: int) -> Trace:
    header = _read_header(archive)
    moe = MoeShape(**header.shape.model_dump())
    batches = max((block.batches for block in header.blocks), default=0)
    whole = Block(header.n_pass, header.n_tokens, header.inputs, batches)
    spec = _spec(moe, whole, header.weights)
    if _spec_bytes(spec) > max_bytes:
        raise TraceError(
            f"it has {_spec_bytes(spec)} bytes, but at most {max_bytes} are allowed; record fewer tokens, or leave out"
            " --inputs."
        )
    # np.zeros, because blocks may lack inputs. Pages of zeros that are never written
    # use no memory.
    arrays: dict[str, Any] = {
        name: np.zeros(shape, dtype) for name, (dtype, shape) in spec.items()
    }
    first_pass = first_token = 0
    for number, block in enumerate(header.blocks):
        tokens = slice(first_token, first_token + block.n_tokens)
        for name, (dtype, shape) in _spec(moe, block, header.weights).items():
            part = _load(archive, _member(name, number), np.dtype(dtype), shape)
            _copy_block(arrays[name], name, part, first_pass, tokens)
        if batches and not block.batches:
            _fill_in(arrays, slice(first_pass, first_pass + block.n_pass))
        first_pass += block.n_pass
        first_token += block.n_tokens
    trace = Trace(moe, header.about, **arrays)
    check(trace)
    return trace


def _read_header(archive: zipfile.ZipFile) -> FileHeader:
    if (
        HEADER not in archive.namelist()
        or archive.getinfo(HEADER).file_size > MAX_HEADER_BYTES
    ):
        raise TraceError(
            f"{HEADER} is missing in this file, or is larger than {MAX_HEADER_BYTES} bytes; give a file that `moegguf"
            " trace` recorded."
        )
    return decode(archive.read(HEADER))


def _load(
    archive: zipfile.ZipFile, member: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    n_bytes = _array_bytes(dtype, shape)
    found_bytes = archive.getinfo(member).file_size
    if not n_bytes < found_bytes <= n_bytes + _NPY_BYTES:
        raise TraceError(
            f"{member} has {found_bytes} bytes, but {n_bytes} and a header are expected; record the trace again."
        )
    file = io.BytesIO(archive.read(member))  # also checks the CRC
    array = np.lib.format.read_array(file, allow_pickle=False)
    if array.shape != shape or array.dtype != dtype or file.read(1):
        found = f"{array.dtype} {array.shape}"
        raise TraceError(
            f"{member} must be {dtype} {shape}, but is {found}; record the trace again."
        )
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise TraceError(
            f"{member} has values that are not finite; record the trace again."
        )
    return array


def _copy_block(
    target: npt.NDArray[Any],
    name: str,
    part: npt.NDArray[Any],
    first_pass: int,
    tokens: slice,
) -> None:
    """Copies an array of one block to its place in the array of the whole trace. Raises
    TraceError if pass_start does not go from 0 to the block's number of tokens."""
    if name == "pass_start":
        if part[0] != 0 or part[-1] != tokens.stop - tokens.start:
            raise TraceError(
                f"pass_start must go from 0 to {tokens.stop - tokens.start}; record the trace again."
            )
        target[first_pass : first_pass + len(part)] = part + tokens.start
    elif name.startswith("pass_"):
        target[first_pass : first_pass + len(part)] = part
    elif name.startswith("token"):
        target[tokens] = part
    else:
        target[:, tokens] = part


def _fill_in(arrays: dict[str, Any], passes: slice) -> None:
    """Sets the request and phase of each token in these passes to the request and phase
    of the token's pass."""
    starts = arrays["pass_start"][passes.start : passes.stop + 1]
    for of_token, of_pass in (
        ("token_sequence", "pass_sequence"),
        ("token_phase", "pass_phase"),
    ):
        arrays[of_token][starts[0] : starts[-1]] = np.repeat(
            arrays[of_pass][passes], np.diff(starts)
        )
