"""A trace on disk: an .npz file of blocks, written while the model runs and checked to the last byte when read.

The file is a zip. Block i is the members NAME.00000i.npy, with the names and shapes of `Trace`'s arrays (pass_start
counts from the block's first token); `header.json` is the last member and says how many blocks there are, so a file
that was cut short has none. `numpy.load(path, allow_pickle=False)` opens it without moegguf. Inputs are stored as they
are (they hardly compress), everything else is deflated.
"""

from __future__ import annotations

import io
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.controller.trace import Trace, TraceHeader
from moegguf.controller.trace_check import check
from moegguf.controller.trace_header import MAX_BLOCKS, MAX_HEADER_BYTES, Block, FileHeader, decode
from moegguf.errors import TraceError

HEADER = "header.json"
BLOCK_BYTES = 64 << 20  # of one block in memory, unless a single pass has more
MAX_TRACE_BYTES = 16 << 30  # of a whole trace in memory
_NPY_BYTES = 4096  # more than the header of any member takes
_DEFLATE_LEVEL = 1  # routing shrinks to the same size within a tenth at any level
# What zipfile and numpy raise on bytes that make no sense to them.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, ArithmeticError, EOFError, LookupError,
    MemoryError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip

Spec = dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]


def _spec(shape: MoeShape, n_pass: int, n_tokens: int, *, weights: bool, inputs: bool) -> Spec:
    """Type and shape of each array of so many passes and tokens."""
    chosen = (len(shape.layers), n_tokens, shape.n_expert_used)
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
        spec["inputs"] = (np.float16, (len(shape.layers), n_tokens, shape.n_embd))
    return spec


def _spec_bytes(spec: Spec) -> int:
    return sum(_array_bytes(*entry) for entry in spec.values())


def _array_bytes(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> int:
    n = np.dtype(dtype).itemsize
    for size in shape:
        n *= size  # Python's integers: a lying header must not wrap around
    return n


def _member(name: str, block: int) -> str:
    return f"{name}.{block:06d}.npy"


def partial_of(path: Path) -> Path:
    """Where a trace lies until it is complete."""
    return path.with_name(path.name + ".partial")


class TraceWriter:
    """Writes a trace block by block to PATH.partial, which becomes PATH at close().

    A recording that was killed leaves no file that looks complete. As a context manager it discards what it wrote when
    there was an exception. Raises TraceError when the disk refuses or a block does not fit the shape.
    """

    def __init__(self, path: str | os.PathLike[str], shape: MoeShape, *, weights: bool, inputs: bool) -> None:
        self.path = Path(path)
        self.partial = partial_of(self.path)
        self.shape, self.weights, self.inputs = shape, weights, inputs
        self._blocks: list[Block] = []
        try:
            self._zip = zipfile.ZipFile(self.partial, "w", zipfile.ZIP_DEFLATED, compresslevel=_DEFLATE_LEVEL)
        except OSError as error:
            self._refused(error)

    def add(self, block: Trace) -> None:
        """Appends these passes. Inputs may be missing from some blocks."""
        has_inputs = block.inputs is not None
        spec = _spec(self.shape, block.n_pass, block.n_tokens, weights=self.weights, inputs=has_inputs)
        if (has_inputs and not self.inputs) or len(self._blocks) == MAX_BLOCKS:
            raise TraceError(f"{self.path.name}: block {len(self._blocks)} does not fit; open the writer for it.")
        for name, (dtype, shape) in spec.items():
            array = getattr(block, name)
            if array is None or array.dtype != dtype or array.shape != shape:
                raise TraceError(f"{self.path.name}: {name} must be {np.dtype(dtype)} {shape}; give a whole block.")
        try:
            for name in spec:
                self._write(name, getattr(block, name))
        except OSError as error:
            self._refused(error)
        self._blocks.append(Block(block.n_pass, block.n_tokens, has_inputs))

    def close(self, header: TraceHeader) -> None:
        """Writes the header and gives the file its name."""
        file_header = FileHeader(self.shape, header, self.weights, self.inputs, tuple(self._blocks))
        data = file_header.encode()
        try:
            self._zip.writestr(HEADER, data)
            self._zip.close()
            os.replace(self.partial, self.path)
        except OSError as error:
            self._refused(error)

    def discard(self) -> None:
        """Removes what was written."""
        try:
            self._zip.close()
        except OSError:  # the disk is full: what is there goes anyway
            pass
        finally:
            self.partial.unlink(missing_ok=True)

    def _write(self, name: str, array: npt.NDArray[Any]) -> None:
        member = _member(name, len(self._blocks))
        # A ZipInfo is stored, a name is deflated.
        target: str | zipfile.ZipInfo = zipfile.ZipInfo(member) if name == "inputs" else member
        with self._zip.open(target, "w", force_zip64=array.nbytes > 1 << 30) as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)

    def _refused(self, error: OSError) -> NoReturn:
        raise TraceError(
            f"{self.path}: the trace cannot be written ({error.strerror or error}); choose another place."
        ) from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        if kind is not None:
            self.discard()


def write(path: str | os.PathLike[str], trace: Trace) -> None:
    """Writes `trace` to `path`, replacing what was there. Raises TraceError when it cannot be written."""
    weights, inputs = trace.weights is not None, trace.inputs is not None
    with TraceWriter(path, trace.shape, weights=weights, inputs=inputs) as writer:
        for block in _blocks(trace):
            writer.add(block)
        writer.close(trace.header)


def _blocks(trace: Trace) -> Iterator[Trace]:
    """The trace in parts of at most BLOCK_BYTES, or of one pass."""
    weights, inputs = trace.weights is not None, trace.inputs is not None
    token_bytes = _spec_bytes(_spec(trace.shape, 0, 1, weights=weights, inputs=inputs))
    most_tokens = max(1, BLOCK_BYTES // token_bytes)
    first = 0
    while first < trace.n_pass:
        end = int(np.searchsorted(trace.pass_start, trace.pass_start[first] + most_tokens, side="right")) - 1
        end = min(max(end, first + 1), trace.n_pass)
        yield _part(trace, first, end)
        first = end


def _part(trace: Trace, first: int, end: int) -> Trace:
    passes, tokens = slice(first, end), slice(int(trace.pass_start[first]), int(trace.pass_start[end]))
    return replace(
        trace,
        pass_sequence=trace.pass_sequence[passes],
        pass_phase=trace.pass_phase[passes],
        pass_first_token=trace.pass_first_token[passes],
        pass_ns=trace.pass_ns[passes],
        pass_start=trace.pass_start[first : end + 1] - trace.pass_start[first],
        tokens=trace.tokens[tokens],
        expert_ids=trace.expert_ids[:, tokens],
        weights=None if trace.weights is None else trace.weights[:, tokens],
        inputs=None if trace.inputs is None else trace.inputs[:, tokens],
    )


def read(path: str | os.PathLike[str], max_bytes: int = MAX_TRACE_BYTES) -> Trace:
    """The trace at `path`, every rule checked. Raises TraceError when it is missing, damaged or too large.

    Nothing is unpacked before its declared size has been compared with what the header implies, and that with
    `max_bytes`.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, max_bytes)
    except TraceError as error:
        raise TraceError(f"{path.name}: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: the trace cannot be read ({error.strerror or error}); check the path.") from error
    except _DAMAGE as error:
        raise TraceError(f"{path.name}: the trace is damaged or incomplete ({error}); record it again.") from error


def _read(archive: zipfile.ZipFile, max_bytes: int) -> Trace:
    header = _read_header(archive)
    specs = [
        _spec(header.shape, block.n_pass, block.n_tokens, weights=header.weights, inputs=block.inputs)
        for block in header.blocks
    ]
    _check_members(archive.infolist(), specs)
    spec = _spec(header.shape, header.n_pass, header.n_tokens, weights=header.weights, inputs=header.inputs)
    if _spec_bytes(spec) > max_bytes:
        raise TraceError(f"holds {_spec_bytes(spec)} bytes, at most {max_bytes} are allowed; record a shorter one.")
    # Zeros, not empty: blocks may lack inputs, and pages never written to take no memory.
    arrays: dict[str, Any] = {name: np.zeros(shape, dtype) for name, (dtype, shape) in spec.items()}
    first_pass = first_token = 0
    for number, (block, block_spec) in enumerate(zip(header.blocks, specs, strict=True)):
        for name, (dtype, shape) in block_spec.items():
            part = _load(archive, _member(name, number), np.dtype(dtype), shape)
            _place(arrays[name], name, part, first_pass, slice(first_token, first_token + block.n_tokens))
        first_pass, first_token = first_pass + block.n_pass, first_token + block.n_tokens
    trace = Trace(header.shape, header.header, **arrays)
    check(trace)
    return trace


def _read_header(archive: zipfile.ZipFile) -> FileHeader:
    members = {info.filename: info for info in archive.infolist()}
    info = members.get(HEADER)
    if info is None or info.file_size > MAX_HEADER_BYTES:
        raise TraceError(f"there must be a {HEADER} of at most {MAX_HEADER_BYTES} bytes; record the trace again.")
    if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in members.values()):
        raise TraceError("its members must be stored or deflated; record the trace again.")
    header = decode(archive.read(HEADER))
    if len(header.blocks) > len(members):
        raise TraceError(f"has {len(members)} members for {len(header.blocks)} blocks; record the trace again.")
    return header


def _check_members(infos: list[zipfile.ZipInfo], specs: list[Spec]) -> None:
    """All members of all blocks, each of the size its array has, and no others."""
    expected = {_member(name, i): _array_bytes(*entry) for i, spec in enumerate(specs) for name, entry in spec.items()}
    names = {info.filename for info in infos}
    if names != {HEADER, *expected} or len(names) != len(infos):
        odd = sorted(names ^ {HEADER, *expected})[:3]
        raise TraceError(f"its members must be those of {len(specs)} blocks, but see {odd}; record the trace again.")
    for info in infos:
        n_bytes = expected.get(info.filename)
        if n_bytes is not None and not n_bytes < info.file_size <= n_bytes + _NPY_BYTES:
            raise TraceError(
                f"{info.filename} says it has {info.file_size} bytes, but {n_bytes} and a header are expected;"
                " record the trace again."
            )


def _load(archive: zipfile.ZipFile, member: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    data = archive.read(member)  # checks the CRC
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise TraceError(f"{member} has npy version {version}, must be (1, 0); record the trace again.")
    found = np.lib.format.read_array_header_1_0(file)
    if found != (shape, False, dtype) or len(data) - file.tell() != _array_bytes(dtype, shape):
        raise TraceError(f"{member} must be {dtype} {shape}, but is {found}; record the trace again.")
    array: npt.NDArray[Any] = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise TraceError(f"{member} has values that are not finite; record the trace again.")
    return array


def _place(target: npt.NDArray[Any], name: str, part: npt.NDArray[Any], first_pass: int, tokens: slice) -> None:
    """Puts a block's array where it belongs in the whole."""
    if name == "pass_start":
        if part[0] != 0 or part[-1] != tokens.stop - tokens.start:
            raise TraceError(f"pass_start must go from 0 to {tokens.stop - tokens.start}; record the trace again.")
        target[first_pass : first_pass + len(part)] = part + tokens.start
    elif name.startswith("pass_"):
        target[first_pass : first_pass + len(part)] = part
    elif name == "tokens":
        target[tokens] = part
    else:
        target[:, tokens] = part
