"""Reads and checks the header of one GGUF file (versions 2 and 3) before llama.cpp
reads it.

A file that breaks a rule of the format raises ModelFormatError with the key or tensor
and the offset in bytes. Every count and length is limited before memory is allocated.
The file is not memory-mapped. Arrays of strings (such as the vocabulary), long arrays
of numbers and long strings are skipped. experts.py interprets the tensors.
"""

from __future__ import annotations

import functools
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NoReturn, Self

from moegguf.errors import (
    ExpertIOError,
    ModelFormatError,
    ModelNotFoundError,
    OptionError,
)

MAGIC = b"GGUF"
MAX_STRINGS = 1 << 22  # maximum number of strings in one array
MAX_ALL_STRINGS = 1 << 23  # maximum number of strings in all arrays of a file
KEPT_TOTAL_BYTES = 12 << 20  # maximum number of bytes for a file's key-values in memory
CHUNK_BYTES = 1 << 20
FETCH_AGAIN = "the file is damaged or incomplete: fetch it again"


@dataclass
class Cursor:
    """Reads a file of `size` bytes from its start. Only one chunk is in memory at a
    time.

    Every read raises ModelFormatError at the end of the file, and OSError when the disk
    fails.
    """

    file: BinaryIO
    size: int
    label: str  # name of the file in messages
    n_strings: int = 0  # number of strings in arrays so far
    kept_bytes: int = 0  # bytes of key-values kept in memory so far
    what: str = "header"  # part of the header that is being read, for error messages

    @property
    def pos(self) -> int:
        """The current offset in the file, in bytes."""
        return self.file.tell()

    def fail(
        self, rule: str, at: int | None = None, step: str = FETCH_AGAIN
    ) -> NoReturn:
        """Raises ModelFormatError with the current key or tensor, the offset `at`
        (default: the current one) and the next step."""
        offset = self.pos if at is None else at
        raise ModelFormatError(
            f"{self.label}: {self.what}, at offset {offset}: {rule}; {step}."
        )

    def _check_end(self, n: int) -> None:
        if self.pos + n > self.size:
            self.fail(f"needs {n} bytes but the file ends at {self.size}")

    def take(self, n: int) -> bytes:
        """Reads the next `n` bytes. `n` must not be larger than a chunk."""
        self._check_end(n)
        data = self.file.read(n)
        if len(data) < n:
            self.fail("the file got shorter while it was read")
        return data

    def u32(self) -> int:
        """Reads the next 4 bytes as an unsigned little-endian number."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """Reads the next 8 bytes as an unsigned little-endian number."""
        return int.from_bytes(self.take(8), "little")

    def skip(self, n: int) -> None:
        """Moves forward by `n` bytes without reading them."""
        self._check_end(n)
        self.file.seek(n, os.SEEK_CUR)

    def length(self, most: int, what: str) -> int:
        """Reads the length of a string in bytes. Raises ModelFormatError if it is above
        `most`."""
        n = self.u64()
        if n > most:
            self.fail(
                f"{what} is {n} bytes long, but at most {most} are allowed",
                self.pos - 8,
            )
        return n

    def keep(self, n: int) -> None:
        """Adds `n` to the number of bytes kept in memory. Raises ModelFormatError if
        the sum exceeds KEPT_TOTAL_BYTES."""
        self.kept_bytes += n
        if self.kept_bytes > KEPT_TOTAL_BYTES:
            self.fail(
                f"the key-values may take {KEPT_TOTAL_BYTES} bytes of memory, but take {self.kept_bytes} so far"
            )

    def skip_strings(self, count: int) -> None:
        """Moves past `count` strings of an array. Raises ModelFormatError if there are
        too many strings, or if the file ends before the end of the last one."""
        self.n_strings += count
        if count > MAX_STRINGS:
            self.fail(
                f"an array of {count} strings is too long: at most {MAX_STRINGS} are allowed"
            )
        if self.n_strings > MAX_ALL_STRINGS:
            self.fail(
                f"the arrays have {self.n_strings} strings so far, but at most {MAX_ALL_STRINGS} are allowed"
            )
        if count * 8 > self.size - self.pos:
            self.fail(
                f"{count} strings do not fit before the end of the file at {self.size}"
            )
        read = self.file.read
        seek = self.file.seek
        unpack = struct.Struct("<Q").unpack
        try:
            # Only built-in functions are called while the lengths are plausible, for
            # speed: a vocabulary has some 100,000 strings.
            for _ in range(count):
                (n,) = unpack(read(8))
                if n > self.size:
                    self.skip(n)  # raises the error
                seek(n, os.SEEK_CUR)
        except struct.error:  # the file ends here; take() raises the error
            self.take(8)
        self._check_end(0)


# {ggml type: (name, elements per block, bytes per block)}
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

MAX_KV = 1 << 16
MAX_TENSORS = 1 << 15
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 63
MAX_STRING_BYTES = 64 << 20
# Maximum number of elements in an array of numbers, as in llama.cpp.
MAX_ITEMS = 1 << 30
MAX_ALIGNMENT = 1 << 20
KEPT_STRING_BYTES = 1 << 20  # strings of this size or longer are skipped, not kept
KEPT_ITEMS = 1024  # longer arrays are skipped, not kept

STRING = 8
ARRAY = 9
# {GGUF type: format}.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))

Value = bool | int | float | str | tuple[bool | int | float, ...]
StrPath = str | os.PathLike[str]  # a path as callers may give it


def ggml_type(name: str) -> int:
    """Returns the number of the ggml type `name`, in upper or lower case. Raises
    OptionError for an unknown name."""
    for number, (known, *_) in GGML_TYPES.items():
        if known.lower() == name.lower():
            return number
    raise OptionError(
        f"there is no type {name!r}; known types: {', '.join(known for known, *_ in GGML_TYPES.values())}."
    )


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The entry of one tensor in a file's header."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]  # (ne0, ne1, ...), where ne0 is a row's length
    offset: int  # bytes from the start of the file to the tensor's data
    n_bytes: int

    @property
    def type_name(self) -> str:
        """The name of the ggml type, such as "Q4_K"."""
        return GGML_TYPES[self.ggml_type][0]


@dataclass(frozen=True)
class FileVersion:
    """A file's path, size and identity at one point in time. A later change of the file
    is detected by comparing identities."""

    path: Path
    n_bytes: int
    dev: int
    ino: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path, info: os.stat_result, **more: int) -> Self:
        """Returns the FileVersion of the file at `path`, made from the file's status
        `info`. `more` holds the values of fields that a subclass adds."""
        return cls(
            path,
            info.st_size,
            info.st_dev,
            info.st_ino,
            info.st_mtime_ns,
            info.st_ctime_ns,
            **more,
        )

    @classmethod
    def now(cls, path: Path) -> Self | None:
        """Returns the FileVersion of the file at `path` as it is now; None if the
        file's status cannot be read, for example because there is no such file."""
        try:
            return cls.of(path, path.stat())
        except (OSError, ValueError):  # ValueError: a zero byte in the path
            return None

    @property
    def identity(self) -> tuple[int, ...]:
        """Numbers that differ between files and change with every write, if the file
        system records change times. A program can reset a file's modification time, but
        not its change time. The change time also changes when the file is renamed or
        linked, or its owner or mode changes."""
        return self.dev, self.ino, self.n_bytes, self.mtime_ns, self.ctime_ns

    def is_as_read(self, fd: int) -> bool:
        """Returns True if the open file `fd` is the file of this version and has not
        changed since."""
        return FileVersion.of(self.path, os.fstat(fd)).identity == self.identity

    def is_changed(self) -> bool:
        """Returns True if the file at this path now has a different identity, for
        example because it was written to or replaced. Returns False if the file's
        status cannot be read now, for example because it was deleted."""
        now = FileVersion.now(self.path)
        return now is not None and now.identity != self.identity


@dataclass(frozen=True)
class Shard(FileVersion):
    """One GGUF file: a shard of a model, an adapter or a projector."""

    # Offset of the tensors' data; the file's size if the file ends earlier.
    header_bytes: int = 0


@dataclass(frozen=True)
class GgufFile:
    """The checked header of one file."""

    shard: Shard
    # Scalars, strings below 1 MiB, and short arrays of numbers, by key.
    metadata: Mapping[str, Value]
    arrays: Mapping[str, int]  # {key: number of elements} of every array
    tensors: tuple[TensorInfo, ...]

    @property
    def name(self) -> str:
        """The file's name without folders, for error messages."""
        return self.shard.path.name

    def tensor_error(self, tensor: TensorInfo, rule: str) -> ModelFormatError:
        """Returns the error for a tensor that breaks a rule."""
        return ModelFormatError(
            f"{self.name}: tensor '{tensor.name}', data at offset {tensor.offset}: {rule};"
            " the file cannot be run: convert or fetch it again."
        )


def _read_array(cur: Cursor) -> tuple[Value | None, int]:
    """Reads an array. Returns its numbers and its number of elements. Returns None
    instead of the numbers for an array of strings, and for an array of more than
    KEPT_ITEMS elements."""
    gguf_type = cur.u32()
    count = cur.u64()
    if gguf_type == STRING:
        cur.skip_strings(count)
        return None, count
    if gguf_type not in _SCALARS:
        cur.fail(f"array elements of type {gguf_type} are not allowed")
    if count > MAX_ITEMS:
        cur.fail(
            f"an array of {count} elements is too long: at most {MAX_ITEMS} are allowed"
        )
    items = struct.Struct(f"<{count}{_SCALARS[gguf_type]}")
    if count > KEPT_ITEMS:
        cur.skip(items.size)
        return None, count
    cur.keep(64 + 32 * count)
    return items.unpack(cur.take(items.size)), count


def _read_value(cur: Cursor, gguf_type: int) -> Value | None:
    """Reads one scalar or string. Returns None for a string that is too long to
    keep."""
    if gguf_type == STRING:
        n = cur.length(MAX_STRING_BYTES, "the string")
        if n >= KEPT_STRING_BYTES:
            cur.skip(n)
            return None
        cur.keep(64 + n)
        return cur.take(n).decode("utf-8", "replace")
    if gguf_type not in _SCALARS:
        cur.fail(f"value type {gguf_type} does not exist", cur.pos - 4)
    item = struct.Struct(f"<{_SCALARS[gguf_type]}")
    value: bool | int | float = item.unpack(cur.take(item.size))[0]
    return value


def _read_key_values(cur: Cursor, n_kv: int) -> tuple[dict[str, Value], dict[str, int]]:
    metadata = dict[str, Value]()
    arrays = dict[str, int]()
    keys = set[str]()
    for i in range(n_kv):
        cur.what = f"key-value {i} of {n_kv}"
        start = cur.pos
        raw = cur.take(cur.length(MAX_KEY_BYTES, "the key"))
        if not raw:
            cur.fail("the key is empty", start)
        cur.keep(160 + 2 * len(raw))
        key = raw.decode("utf-8", "backslashreplace")
        cur.what = f"key {_short(key)}"
        if key in keys:
            cur.fail("the key is there twice", start)
        keys.add(key)
        if (value_type := cur.u32()) == ARRAY:
            value, arrays[key] = _read_array(cur)
        else:
            value = _read_value(cur, value_type)
        if value is not None:
            metadata[key] = value
    return metadata, arrays


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _read_header(cur: Cursor) -> tuple[int, int]:
    """Returns (number of tensors, number of key-values). Raises ModelFormatError for
    wrong magic bytes, for a version that cannot be read, and for a count that is too
    large."""
    magic = cur.take(4)
    if magic != MAGIC:
        cur.fail(
            f"a GGUF file starts with 'GGUF', but this one with {str(magic)[1:]}",
            0,
            "give a .gguf model file",
        )
    version = cur.u32()
    if version & 0xFFFF == 0 and version:
        rule = f"version {version:#x} looks like a big-endian file, but only little-endian files can be run"
        cur.fail(rule, 4, "convert the model to a little-endian file")
    if version not in (2, 3):
        cur.fail(
            f"the GGUF version must be 2 or 3, but is {version}",
            4,
            "convert the model again",
        )
    n_tensors = cur.u64()
    n_kv = cur.u64()
    for n, cap, least, what, at in (
        (n_tensors, MAX_TENSORS, 33, "tensors", 8),
        (n_kv, MAX_KV, 14, "key-values", 16),
    ):
        if n > cap:
            cur.fail(f"{n} {what} are too many: at most {cap} are allowed", at)
        if n * least > cur.size:
            cur.fail(f"{n} {what} do not fit in a file of {cur.size} bytes", at)
    return n_tensors, n_kv


def _alignment(cur: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", 32)
    cur.what = "key 'general.alignment'"
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not 8 <= value <= MAX_ALIGNMENT
        or value & (value - 1)
    ):
        cur.fail(
            f"the alignment must be a power of two from 8 to {MAX_ALIGNMENT}, but is {_short(str(value))}"
        )
    return value


def _read_tensor(cur: Cursor, start: int) -> TensorInfo:
    """Reads the entry of one tensor, which begins at `start`. The offset in the result
    is relative to the start of the data section."""
    raw = cur.take(cur.length(MAX_NAME_BYTES, "the tensor's name"))
    name = raw.decode("utf-8", "backslashreplace")
    cur.what = f"tensor {_short(name)}"
    if not raw or b"\0" in raw:
        cur.fail("the name is empty or has a zero byte", start)
    n_dims = cur.u32()
    if not 1 <= n_dims <= 4:
        cur.fail(
            f"a tensor must have 1 to 4 dimensions, but this one has {n_dims}",
            cur.pos - 4,
        )
    shape = tuple(cur.u64() for _ in range(n_dims))
    ggml_type = cur.u32()
    if ggml_type not in GGML_TYPES:
        rule = f"this moegguf does not know the tensor type {ggml_type}"
        cur.fail(
            rule,
            cur.pos - 4,
            "install a newer moegguf, which may know it, or fetch the file again",
        )
    type_name, block, block_bytes = GGML_TYPES[ggml_type]
    if shape[0] % block:
        cur.fail(
            f"the row length of {type_name} must be a multiple of {block}, but is {shape[0]}",
            start,
        )
    n_elements = math.prod(shape)
    n_bytes = n_elements // block * block_bytes
    if 0 in shape or max(n_elements, n_bytes) >= 1 << 63:
        cur.fail(f"the shape {shape} of {type_name} has a zero or is too large", start)
    return TensorInfo(name, ggml_type, shape, cur.u64(), n_bytes)


def _read_tensors(
    cur: Cursor, n_tensors: int, alignment: int
) -> tuple[int, tuple[TensorInfo, ...]]:
    """Returns the offset of the data section, and all tensors. Raises ModelFormatError
    if two tensors have the same name. Also raises it unless the tensors' data is inside
    the file, without gaps except for alignment."""
    entries = dict[str, tuple[int, TensorInfo]]()
    for i in range(n_tensors):
        cur.what = f"tensor {i}"
        start = cur.pos
        t = _read_tensor(cur, start)
        if t.name in entries:
            cur.fail("there are two tensors of this name", start)
        entries[t.name] = start, t
    data_offset = end = -(-cur.pos // alignment) * alignment
    tensors = list[TensorInfo]()
    for start, t in entries.values():
        cur.what = f"tensor {_short(t.name)}"
        offset = data_offset + t.offset
        if offset + t.n_bytes > cur.size:
            rule = f"its data ({t.n_bytes} bytes from {offset}) goes past the end of the file at {cur.size}"
            cur.fail(rule, start)
        if offset != end:
            rule = f"its data offset must be {end - data_offset}, right after the data before it, but is {t.offset}"
            cur.fail(rule, start)
        end += -(-t.n_bytes // alignment) * alignment
        tensors.append(replace(t, offset=offset))
    return data_offset, tuple(tensors)


def _open(path: StrPath) -> BinaryIO:
    """Opens the file for reading. Does not wait for a writer if the file is a FIFO.
    Raises OSError, or ValueError for a zero byte in the path."""
    return open(
        path,
        "rb",
        CHUNK_BYTES,
        opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK),
    )


def is_other_kind(path: StrPath) -> bool:
    """Returns True if the file at `path` can be read but does not begin with "GGUF".
    Also returns True for a pipe without data."""
    try:
        with _open(path) as file:
            return file.read(len(MAGIC)) != MAGIC
    except (OSError, ValueError):
        return False


def read_gguf(path: StrPath) -> GgufFile:
    """Returns the checked header of the GGUF file at `path`.

    Raises ModelNotFoundError when the file cannot be opened or is not a regular file,
    ModelFormatError for the first rule that it breaks, and ExpertIOError when the disk
    fails. Limits its own memory use, whatever sizes the file claims. The 64 headers
    used last are cached: their files are read again only when they have changed.
    """
    return _read_version(Path(path), FileVersion.now(Path(path)))


@functools.lru_cache(maxsize=64)
def _read_version(path: Path, _version: FileVersion | None) -> GgufFile:
    try:
        file = _open(path)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = (
            "does not exist; check the path"
            if missing
            else f"cannot be opened ({error})"
        )
        raise ModelNotFoundError(f"model file {str(path)!r} {why}.") from error
    with file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise ModelNotFoundError(
                f"{str(path)!r} is not a regular file; give the path of a .gguf file."
            )
        cur = Cursor(file, info.st_size, path.name)
        try:
            n_tensors, n_kv = _read_header(cur)
            metadata, arrays = _read_key_values(cur, n_kv)
            alignment = _alignment(cur, metadata)
            data_offset, tensors = _read_tensors(cur, n_tensors, alignment)
        except OSError as error:
            raise ExpertIOError(
                f"{path.name}: reading at offset {cur.pos} failed ({error.strerror}); check the disk."
            ) from error
    # The padding after the header may be missing in a file without tensors.
    shard = Shard.of(path, info, header_bytes=min(data_offset, info.st_size))
    return GgufFile(shard, metadata, arrays, tensors)
