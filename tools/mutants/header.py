"""Reads and writes a GGUF file as parts that can be changed one by one: key-values,
tensor infos, tensor bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

STRING = 8
ARRAY = 9
FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
ALIGNMENT = 32

Item = int | float | bytes


@dataclass(frozen=True)
class KeyValue:
    """One key with its value. `item_type` is the GGUF type of an array's items; None if
    the value is not an array."""

    key: str
    gguf_type: int
    value: Item | list[Item]
    item_type: int | None = None


@dataclass(frozen=True)
class TensorEntry:
    """One tensor with its bytes from the original file. `raw_type` is the number of its
    ggml type."""

    name: str
    shape: tuple[int, ...]
    raw_type: int
    data: bytes = field(repr=False)

    @property
    def n_bytes(self) -> int:
        """Returns the size in bytes of a tensor with this shape and type. An unknown
        type is treated as F32."""
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.raw_type)]
        except ValueError:
            block = 1
            block_bytes = 4
        n_elements = 1
        for ne in self.shape:
            n_elements *= ne
        return n_elements // block * block_bytes


@dataclass(frozen=True)
class Header:
    """All parts of a GGUF file: key-values, and tensors with their bytes."""

    pairs: tuple[KeyValue, ...]
    tensors: tuple[TensorEntry, ...]

    def with_pair(self, index: int, pair: KeyValue | None) -> Header:
        """Returns a copy in which `pair` replaces the key-value at `index`. If `pair`
        is None, the key-value is removed.

        An index after the last one appends `pair`.
        """
        return replace(
            self,
            pairs=self.pairs[:index]
            + ((pair,) if pair else ())
            + self.pairs[index + 1 :],
        )

    def with_tensor(self, index: int, tensor: TensorEntry | None) -> Header:
        """Returns a copy in which `tensor` replaces the tensor at `index`. If `tensor`
        is None, the old tensor is removed."""
        return replace(
            self,
            tensors=self.tensors[:index]
            + ((tensor,) if tensor else ())
            + self.tensors[index + 1 :],
        )


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, letter: str) -> int | float:
        value: int | float = struct.unpack_from("<" + letter, self.data, self.at)[0]
        self.at += struct.calcsize("<" + letter)
        return value

    def whole(self, letter: str) -> int:
        return int(self.number(letter))

    def string(self) -> bytes:
        n = self.whole("Q")
        self.at += n
        return self.data[self.at - n : self.at]

    def item(self, gguf_type: int) -> Item:
        return self.string() if gguf_type == STRING else self.number(FORMATS[gguf_type])

    def pair(self) -> KeyValue:
        key = self.string().decode()
        gguf_type = self.whole("I")
        if gguf_type != ARRAY:
            return KeyValue(key, gguf_type, self.item(gguf_type))
        item_type = self.whole("I")
        count = self.whole("Q")
        return KeyValue(
            key, ARRAY, [self.item(item_type) for _ in range(count)], item_type
        )


def read_header(path: Path) -> Header:
    """Returns the parts of a valid GGUF file with one shard."""
    reader = _Reader(path.read_bytes())
    reader.at = 8
    n_tensors = reader.whole("Q")
    n_pairs = reader.whole("Q")
    pairs = tuple(reader.pair() for _ in range(n_pairs))
    infos = []
    for _ in range(n_tensors):
        name = reader.string().decode()
        shape = tuple(reader.whole("Q") for _ in range(reader.whole("I")))
        infos.append((name, shape, reader.whole("I"), reader.whole("Q")))
    start = -(-reader.at // ALIGNMENT) * ALIGNMENT
    tensors = []
    for name, shape, raw_type, offset in infos:
        entry = TensorEntry(name, shape, raw_type, b"")
        data = reader.data[start + offset : start + offset + entry.n_bytes]
        tensors.append(replace(entry, data=data))
    return Header(pairs, tuple(tensors))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _item(gguf_type: int, value: Item) -> bytes:
    if isinstance(value, bytes):
        return _string(value)
    letter = FORMATS[gguf_type]
    if letter in "fd":
        return struct.pack("<" + letter, value)
    n_bytes = struct.calcsize("<" + letter)
    return (int(value) & ((1 << 8 * n_bytes) - 1)).to_bytes(n_bytes, "little")


def _pair(pair: KeyValue) -> bytes:
    start = _string(pair.key.encode()) + struct.pack("<I", pair.gguf_type)
    if isinstance(pair.value, list):
        assert pair.item_type is not None
        items = b"".join(_item(pair.item_type, value) for value in pair.value)
        return start + struct.pack("<IQ", pair.item_type, len(pair.value)) + items
    return start + _item(pair.gguf_type, pair.value)


def write_file(header: Header, path: Path) -> None:
    """Writes the parts as a GGUF file.

    The bytes of a tensor whose shape or type has changed are cut off, or repeated to
    fill the new size.
    """
    out = [
        b"GGUF",
        struct.pack("<IQQ", 3, len(header.tensors), len(header.pairs)),
        *map(_pair, header.pairs),
    ]
    offset = 0
    sizes = []
    for tensor in header.tensors:
        dims = b"".join(struct.pack("<Q", ne) for ne in tensor.shape)
        out += [
            _string(tensor.name.encode()),
            struct.pack("<I", len(tensor.shape)),
            dims,
        ]
        out.append(struct.pack("<IQ", tensor.raw_type, offset))
        sizes.append(tensor.n_bytes)
        offset += -(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file:
        file.write(b"".join(out))
        file.write(bytes(-file.tell() % ALIGNMENT))
        for tensor, size in zip(header.tensors, sizes, strict=True):
            data = tensor.data or b"\0"
            file.write(
                (data * (size // len(data) + 1) if size > len(data) else data)[:size]
            )
            file.write(bytes(-size % ALIGNMENT))
