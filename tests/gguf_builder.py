"""Writes GGUF files for tests: valid files, and files whose header breaks a rule.

`Gguf` collects key-values and tensors, and `build()` returns the bytes of the file. A
test can set counts, offsets and encoded key-values itself, so that a file breaks
exactly one rule. The gguf package is not used, because it can only write valid files.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i",
    F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q", F64: "<d",
}  # fmt: skip
BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    8: (32, 34),
    12: (256, 144),
    14: (256, 210),
}

F32_T, F16_T, Q4_0_T, Q8_0_T, Q4_K_T, Q6_K_T = 0, 1, 2, 8, 12, 14


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def scalar(gguf_type: int, value: int | float | str | bytes) -> bytes:
    """Returns the encoded bytes of one value, without its type. Text is always encoded
    as a GGUF string."""
    if isinstance(value, str | bytes):
        return string(value)
    return struct.pack(_FORMATS[gguf_type], value)


def pad(data: bytes, alignment: int) -> bytes:
    return data + b"\0" * (-len(data) % alignment)


@dataclass
class Tensor:
    """One tensor of a file. `offset`, `n_bytes` and `n_dims` are computed if they are
    None."""

    name: str | bytes
    shape: tuple[int, ...]
    ggml_type: int = F32_T
    offset: int | None = None
    n_bytes: int | None = None
    n_dims: int | None = None

    def size(self) -> int:
        if self.n_bytes is not None:
            return self.n_bytes
        block, block_bytes = BLOCKS.get(self.ggml_type, (1, 1))
        n = 1
        for ne in self.shape:
            n *= ne
        return n // block * block_bytes


@dataclass
class Gguf:
    """A GGUF file under construction. `kv` holds encoded key-values, and `tensors` the
    tensors in order.

    If `n_kv` or `n_tensors` is None, the header contains the real number.
    """

    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    n_kv: int | None = None
    n_tensors: int | None = None
    kv: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    fill: int = 0x11

    def add(
        self, key: str | bytes, gguf_type: int, value: int | float | str | bytes
    ) -> Gguf:
        self.kv.append(string(key) + u32(gguf_type) + scalar(gguf_type, value))
        return self

    def add_array(
        self, key: str, gguf_type: int, values: list[int] | list[float] | list[str]
    ) -> Gguf:
        items = b"".join(scalar(gguf_type, value) for value in values)
        self.kv.append(
            string(key) + u32(ARR) + u32(gguf_type) + u64(len(values)) + items
        )
        return self

    def tensor(
        self, name: str | bytes, *shape: int, ggml_type: int = F32_T, **raw: int
    ) -> Gguf:
        self.tensors.append(Tensor(name, shape, ggml_type, **raw))
        return self

    def header(self) -> bytes:
        """Returns all bytes before the data section, without padding."""
        parts = [self.magic, u32(self.version)]
        parts.append(
            u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        )
        parts.append(u64(len(self.kv) if self.n_kv is None else self.n_kv))
        parts += self.kv
        offset = 0
        for t in self.tensors:
            dims = b"".join(u64(ne) for ne in t.shape)
            at = offset if t.offset is None else t.offset
            parts += [
                string(t.name),
                u32(len(t.shape) if t.n_dims is None else t.n_dims),
                dims,
            ]
            parts += [u32(t.ggml_type), u64(at)]
            offset += t.size() + -t.size() % self.alignment
        return b"".join(parts)

    def build(self) -> bytes:
        out = bytearray(pad(self.header(), self.alignment))
        for t in self.tensors:
            out += pad(bytes([self.fill]) * t.size(), self.alignment)
        return bytes(out)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def moe(
    arch: str = "qwen2moe",
    n_layer: int = 2,
    n_expert: int = 4,
    n_used: int = 2,
    n_embd: int = 64,
    n_ff: int = 32,
    *,
    n_head: int = 4,
    vocab: int = 16,
    types: tuple[int, int, int] = (Q4_0_T, Q4_0_T, Q4_0_T),
    fused: bool = False,
    split: tuple[int, int, int] | None = None,
    il_range: range | None = None,
    skip_kv: tuple[str, ...] = (),
) -> Gguf:
    """Returns a small MoE file for moegguf's own reader. llama.cpp would need more keys
    and tensors.

    `types` are the ggml types of gate, up and down. Keys in `skip_kv` are left out.

    If `split` is (index of the shard, number of shards, tensors in all shards), the
    file is one shard. Its layers are `il_range`, or all layers if that is None. Only
    shard 0 contains the model's keys.
    """
    g = Gguf()
    numbers = {
        "block_count": n_layer,
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "expert_count": n_expert,
        "expert_used_count": n_used,
    }
    first = split is None or split[0] == 0
    if first:
        g.add("general.architecture", STR, arch).add("general.name", STR, "tiny")
        for key, value in numbers.items():
            if key not in skip_kv:
                g.add(f"{arch}.{key}", U32, value)
        g.add_array("tokenizer.ggml.tokens", STR, [f"t{i}" for i in range(vocab)])
        if "tokenizer.chat_template" not in skip_kv:
            g.add("tokenizer.chat_template", STR, "{{ messages }}")
    if split:
        g.add("split.no", U16, split[0]).add("split.count", U16, split[1]).add(
            "split.tensors.count", I32, split[2]
        )
    if first:
        g.tensor("token_embd.weight", n_embd, vocab).tensor(
            "output.weight", n_embd, vocab
        )
    gate, up, down = types
    for il in il_range if il_range is not None else range(n_layer):
        g.tensor(f"blk.{il}.attn_norm.weight", n_embd)
        if fused:
            g.tensor(
                f"blk.{il}.ffn_gate_up_exps.weight",
                n_embd,
                2 * n_ff,
                n_expert,
                ggml_type=gate,
            )
        else:
            g.tensor(
                f"blk.{il}.ffn_gate_exps.weight", n_embd, n_ff, n_expert, ggml_type=gate
            )
            g.tensor(
                f"blk.{il}.ffn_up_exps.weight", n_embd, n_ff, n_expert, ggml_type=up
            )
        g.tensor(
            f"blk.{il}.ffn_down_exps.weight", n_ff, n_embd, n_expert, ggml_type=down
        )
    return g
