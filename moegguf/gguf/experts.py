"""Reads the layout of a MoE model's experts on disk: byte ranges, shapes and counts,
checked before llama.cpp runs.

An expert is (il, e): slice e of each stacked matrix of layer il. The layout lists the
stacked matrices. Slice e of a matrix is `expert_bytes` bytes at `offset + e *
expert_bytes` in shard `shard`. The layout of a model without experts has no layers.
Only headers are read, never weights.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from moegguf.errors import ExpertIOError, ModelFormatError
from moegguf.gguf.hparams import Hparams, read_hparams
from moegguf.gguf.reader import FileVersion, GgufFile, Shard, TensorInfo, Value
from moegguf.gguf.shards import read_shards, shards_of

Kind = Literal["gate", "up", "down", "gate_up"]
KINDS: tuple[Kind, ...] = ("gate", "up", "down", "gate_up")

_LAYER = re.compile(r"blk\.(\d{1,6})\.(.*)", re.DOTALL)
_EXPERTS: dict[str, Kind] = {f"ffn_{kind}_exps.weight": kind for kind in KINDS}
# Every multi-token-prediction head has this tensor.
HEADS_TENSOR = "nextn.eh_proj.weight"
# Architectures whose multi-token-prediction heads may draft, because moegguf's tests
# cover them. For these heads llama.cpp needs only a KV cache.
HEADS_ARCHS = (
    "glm4moe", "deepseek2", "qwen3next", "qwen35moe", "nemotron_h_moe", "bailingmoe3", "deepseek4",
)  # fmt: skip
# llama.cpp aborts the process if the heads of deepseek2 lack one of these tensors.
DEEPSEEK2_HEADS = ("attn_q_a.weight", "attn_k_b.weight")
# The store reads rows of the token embedding from the file (row_tables.cpp), and rows
# of ROW_TABLE if the model has one of the architectures in ROW_TABLE_ARCHS. For these
# architectures, llama.cpp marks ROW_TABLE as TENSOR_READ_LAZY.
EMBEDDING = "token_embd.weight"
ROW_TABLE = "per_layer_token_embd.weight"
ROW_TABLE_ARCHS = ("qwen4exp", "gemma4")
_SAMPLING: dict[str, tuple[str, type[int] | type[float]]] = {
    "temp": ("temperature", float), "top_k": ("top_k", int), "top_p": ("top_p", float), "min_p": ("min_p", float),
    "penalty_last_n": ("repeat_last_n", int), "penalty_repeat": ("repeat_penalty", float),
    "xtc_probability": ("xtc_probability", float), "xtc_threshold": ("xtc_threshold", float),
    "mirostat": ("mirostat", int), "mirostat_tau": ("mirostat_tau", float), "mirostat_eta": ("mirostat_eta", float),
}  # fmt: skip


@dataclass(frozen=True)
class ExpertMatrix:
    """A layer's expert matrices of one kind, stacked: shape (ne0, ne1, n_expert), where
    ne0 is a row's length."""

    il: int
    kind: Kind
    name: str
    ggml_type: int
    ne0: int
    ne1: int
    n_expert: int
    shard: int  # index into ExpertLayout.shards
    offset: int  # position of expert 0, in bytes from the start of the shard
    expert_bytes: int
    # bytes after each expert in a slot, which device kernels may read; the file does
    # not contain them
    padding_bytes: int = 0


@dataclass(frozen=True)
class MoeLayer:
    """A layer with experts."""

    il: int
    n_expert: int
    n_expert_used: int
    # Gate (if there is one), up, down; or down, gate_up: the order of KINDS.
    matrices: tuple[ExpertMatrix, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: one slice of each stacked matrix."""
        return sum(m.expert_bytes for m in self.matrices)


@dataclass(frozen=True)
class RouterTensor:
    """The tensor of a layer's router."""

    il: int
    shard: int
    tensor: TensorInfo


@dataclass(frozen=True)
class RowTable:
    """A table (token embeddings, or per-layer token embeddings) that stays in the file.
    A pass reads only the rows of its tokens. `offset`: position of the table's first
    byte in its shard."""

    name: str
    shard: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class ExpertLayout:
    """A model's files, layers and hyperparameters. Sizes are in bytes, as in the
    files."""

    arch: str
    shards: tuple[Shard, ...]
    n_layer: int
    layers: tuple[MoeLayer, ...]
    # Bytes of all tensors except the experts in `layers`, unused_bytes and row_tables.
    dense_bytes: int
    expert_bytes: int  # bytes of the experts in `layers`
    # Bytes of experts in multi-token-prediction layers; 0 if these layers are loaded.
    unused_bytes: int
    # Bytes of the embedding matrix if it is also the output matrix, else 0.
    tied_output_bytes: int
    n_vocab: int
    hparams: Hparams
    metadata: Mapping[str, Value]
    # {name of a type: (number of tensors, bytes)}.
    tensor_types: Mapping[str, tuple[int, int]]
    routers: tuple[RouterTensor, ...] = ()
    # {il: the layer's part of dense_bytes}, without the experts of
    # multi-token-prediction layers
    layer_dense_bytes: Mapping[int, int] = field(default_factory=dict)
    # 1 if the model ends with a multi-token-prediction layer that can draft, else 0.
    n_layer_nextn: int = 0
    # True: the multi-token-prediction layers are loaded, and their experts have no
    # slots (`with_heads`)
    loads_heads: bool = False
    has_long_rope: bool = False  # True: the file has rotary factors for long contexts
    # Tables that stay in the file and are read row by row.
    row_tables: tuple[RowTable, ...] = ()

    def check_unchanged(self) -> None:
        """Raises ExpertIOError if a shard's identity has changed since its header was
        read, for example because the file was written to or replaced. A deleted shard
        is not an error."""
        for shard in self.shards:
            if shard.is_changed():
                raise ExpertIOError(
                    f"{shard.path.name} was written to or replaced while it was being loaded; load the model again."
                )

    @property
    def is_moe(self) -> bool:
        """Returns whether any layer has experts."""
        return bool(self.layers)

    @property
    def n_bytes(self) -> int:
        """The size of all shards together in bytes."""
        return sum(shard.n_bytes for shard in self.shards)

    @property
    def n_expert(self) -> int:
        """The largest number of experts in any layer."""
        return max((layer.n_expert for layer in self.layers), default=0)

    @property
    def n_expert_used(self) -> int:
        """The largest number of experts that one token uses in any layer."""
        return max((layer.n_expert_used for layer in self.layers), default=0)

    @property
    def n_expert_total(self) -> int:
        """The number of experts in all layers together."""
        return sum(layer.n_expert for layer in self.layers)

    @property
    def token_cycle_bytes(self) -> int:
        """The size in bytes of the experts that one token uses, over all layers (the
        token cycle)."""
        return sum(layer.n_expert_used * layer.expert_bytes for layer in self.layers)

    @property
    def token_cycle_slots(self) -> int:
        """The number of experts that one token uses, over all layers."""
        return sum(layer.n_expert_used for layer in self.layers)

    @cached_property
    def matrices(self) -> tuple[ExpertMatrix, ...]:
        """The stacked matrices of all layers."""
        return tuple(m for layer in self.layers for m in layer.matrices)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of matrices that the experts have, in the order of KINDS. A pool
        has one block of memory (arena) for each kind."""
        present = {m.kind for m in self.matrices}
        return tuple(kind for kind in KINDS if kind in present)

    @property
    def row_table_bytes(self) -> int:
        """The total size, in bytes, of the tables that stay in the file and are read
        row by row."""
        return sum(table.n_bytes for table in self.row_tables)

    def only(self, layers: Iterable[int]) -> ExpertLayout:
        """Returns a layout in which only the experts of `layers` are treated as
        experts. The experts of all other layers are treated as dense weights."""
        wanted = set(layers)
        moved = Counter[int]()
        for layer in self.layers:
            if layer.il not in wanted:
                moved[layer.il] = layer.n_expert * layer.expert_bytes
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if layer.il in wanted),
            expert_bytes=self.expert_bytes - moved.total(),
            dense_bytes=self.dense_bytes + moved.total(),
            layer_dense_bytes=dict(moved + Counter(self.layer_dense_bytes)),
        )

    def number(self, name: str, default: int = 0) -> int:
        """Returns the metadata value `<arch>.<name>`, or its largest element if it is an
        array; `default` if the name is missing.

        Returns 0 for an empty array, and for a value that is not a whole number from 0
        to 2^24 - 1.
        """
        value: Value = self.metadata.get(f"{self.arch}.{name}", default)
        if isinstance(value, tuple):
            value = max(value, default=0)
        return value if isinstance(value, int) and 0 <= value < 1 << 24 else 0

    def without(self, layers: Collection[int]) -> ExpertLayout:
        """Returns a layout in which the experts of `layers` are treated as dense
        weights."""
        return self.only(layer.il for layer in self.layers if layer.il not in layers)

    def experts_in(self, layers: Collection[int]) -> int:
        """Returns the number of experts in these layers together."""
        return sum(layer.n_expert for layer in self.layers if layer.il in layers)

    def with_heads(self) -> ExpertLayout:
        """Returns a layout in which the multi-token-prediction layers are loaded. The
        experts of these layers are treated as dense weights, because a draft that waits
        for experts costs more than it saves."""
        return replace(
            self,
            dense_bytes=self.dense_bytes + self.unused_bytes,
            unused_bytes=0,
            loads_heads=True,
        )

    @property
    def chat_template(self) -> str | None:
        """The model's chat template (Jinja); None if the file has none. An empty
        template or the name "chatml" is treated as no template. If the file has only a
        template for conversations with tools, the value is that template."""
        value = self.metadata.get("tokenizer.chat_template")
        is_text = isinstance(value, str) and value not in ("", "chatml")
        return str(value) if is_text else self.tool_template

    @property
    def tool_template(self) -> str | None:
        """The file's separate chat template for conversations with tools; None if the
        file has none."""
        value = self.metadata.get("tokenizer.chat_template.tool_use")
        return value if isinstance(value, str) and value else None

    @property
    def sampling(self) -> dict[str, int | float]:
        """Returns the sampling parameters in the file (general.sampling.*, which
        llama.cpp also reads), under the names of `Sampling`'s fields. Leaves out values
        that are not finite numbers."""
        found = {}
        for key, (name, kind) in _SAMPLING.items():
            value = self.metadata.get(f"general.sampling.{key}")
            if isinstance(value, int | float) and math.isfinite(value):
                found[name] = kind(round(value, 6))
        return found

    @property
    def name(self) -> str:
        """The value of the key `general.name`; if it is missing or empty, the first
        file's name without suffix."""
        value = self.metadata.get("general.name")
        return value if isinstance(value, str) and value else self.shards[0].path.stem


def read_layout(
    path: str | os.PathLike[str], *, vocab_only: bool = False
) -> ExpertLayout:
    """Returns the layout of the model at `path`, which is the model's only file or its
    first shard. With `vocab_only`, the layout has no tensors, and the file need not
    have tensors.

    Raises ModelNotFoundError if a file is missing, and ExpertIOError if the disk fails.
    Raises ModelFormatError if a file breaks a rule; the message names the file and, if
    possible, the key or tensor. The 64 layouts that were used last are cached, and
    their files are read again only after a shard has changed.
    """
    return _layout(
        Path(path), tuple(map(FileVersion.now, shards_of(Path(path)))), vocab_only
    )


@lru_cache(maxsize=64)
def _layout(
    path: Path, _versions: tuple[FileVersion | None, ...], vocab_only: bool
) -> ExpertLayout:
    files = read_shards(path)
    label = files[0].name
    if not vocab_only and not any(file.tensors for file in files):
        raise ModelFormatError(
            f"{label}: it contains no tensors (a vocabulary file?); give a complete model."
        )
    hparams = read_hparams(files[0])
    matrices = list[ExpertMatrix]()
    routers = list[RouterTensor]()
    tensors = dict[str, TensorInfo]()
    types = defaultdict[str, list[int]](list)
    layer_dense_bytes = Counter[int]()
    row_tables = list[RowTable]()
    for shard, file in enumerate(files):
        for tensor in () if vocab_only else file.tensors:
            tensors[tensor.name] = tensor
            types[tensor.type_name].append(tensor.n_bytes)
            is_table = tensor.name == ROW_TABLE and hparams.arch in ROW_TABLE_ARCHS
            if is_table or tensor.name == EMBEDDING:
                row_tables.append(
                    RowTable(tensor.name, shard, tensor.offset, tensor.n_bytes)
                )
            if match := _LAYER.fullmatch(tensor.name):
                il = int(match[1])
                name = match[2]
                if name in _EXPERTS:
                    matrices.append(
                        _expert_matrix(file, shard, tensor, il, _EXPERTS[name], hparams)
                    )
                    continue
                layer_dense_bytes[il] += tensor.n_bytes
                if name == "ffn_gate_inp.weight" and il < hparams.n_layer:
                    routers.append(RouterTensor(il, shard, tensor))
    layers = tuple(_layers(matrices, hparams, files, tensors))
    expert_bytes = sum(layer.n_expert * layer.expert_bytes for layer in layers)
    unused_bytes = sum(
        m.n_expert * m.expert_bytes for m in matrices if m.il >= hparams.n_layer
    )
    table_bytes = sum(table.n_bytes for table in row_tables)
    metadata = files[0].metadata
    n_vocab = files[0].arrays.get("tokenizer.ggml.tokens", 0)
    tied_output_bytes = 0
    if embedding := tensors.get(EMBEDDING):
        n_vocab = max((n_vocab, *embedding.shape[1:2]))
        if "output.weight" not in tensors:
            tied_output_bytes = embedding.n_bytes
    needed = (HEADS_TENSOR, *(DEEPSEEK2_HEADS if hparams.arch == "deepseek2" else ()))
    can_draft = (
        hparams.arch in HEADS_ARCHS
        # Only one layer is checked, because llama.cpp runs only one
        # multi-token-prediction layer.
        and hparams.n_layer_all == hparams.n_layer + 1
        and all(f"blk.{hparams.n_layer}.{name}" in tensors for name in needed)
        # llama.cpp also aborts for heads with this scale.
        and not metadata.get("deepseek2.attention.temperature_scale")
        # If these lengths were equal, llama.cpp would divide by the width of an empty
        # cache, which is zero.
        and metadata.get("deepseek4.attention.indexer.key_length") != hparams.key_length
    )
    return ExpertLayout(
        arch=hparams.arch,
        shards=tuple(file.shard for file in files),
        n_layer=hparams.n_layer,
        layers=layers,
        dense_bytes=sum(tensor.n_bytes for tensor in tensors.values())
        - expert_bytes
        - unused_bytes
        - table_bytes,
        expert_bytes=expert_bytes,
        unused_bytes=unused_bytes,
        tied_output_bytes=tied_output_bytes,
        n_vocab=n_vocab,
        hparams=hparams,
        metadata=metadata,
        tensor_types={
            name: (len(sizes), sum(sizes)) for name, sizes in sorted(types.items())
        },
        routers=tuple(sorted(routers, key=lambda router: router.il)),
        layer_dense_bytes=dict(layer_dense_bytes),
        n_layer_nextn=int(can_draft),
        has_long_rope=any(
            name.endswith("rope_factors_long.weight") for name in tensors
        ),
        row_tables=tuple(row_tables),
    )


def _expert_matrix(
    file: GgufFile,
    shard: int,
    tensor: TensorInfo,
    il: int,
    kind: Kind,
    hparams: Hparams,
) -> ExpertMatrix:
    """Returns a layer's stacked matrices of one kind. Raises ModelFormatError if the
    layer's number is too high, or if the shape does not have 3 dimensions or the
    model's number of experts."""
    if il >= hparams.n_layer_all:
        raise file.tensor_error(
            tensor,
            f"layer {il} is beyond the model's layers, which are 0 to {hparams.n_layer_all - 1}",
        )
    if len(tensor.shape) != 3:
        raise file.tensor_error(
            tensor,
            f"experts must be stacked in 3 dimensions, but the shape is {tensor.shape}",
        )
    ne0, ne1, n_expert = tensor.shape
    if n_expert != hparams.n_expert:
        rule = f"holds {n_expert} experts, but '{hparams.arch}.expert_count' is {hparams.n_expert}"
        raise file.tensor_error(tensor, rule)
    return ExpertMatrix(
        il,
        kind,
        tensor.name,
        tensor.ggml_type,
        ne0,
        ne1,
        n_expert,
        shard,
        tensor.offset,
        tensor.n_bytes // n_expert,
    )


def _layers(
    matrices: Sequence[ExpertMatrix],
    hparams: Hparams,
    files: Sequence[GgufFile],
    tensors: Mapping[str, TensorInfo],
) -> Iterator[MoeLayer]:
    """Yields the layers with experts, without multi-token-prediction layers. Raises
    ModelFormatError if the matrices of a layer break a rule."""
    by_layer = defaultdict[int, dict[Kind, ExpertMatrix]](dict)
    for matrix in matrices:
        if matrix.il < hparams.n_layer:
            by_layer[matrix.il][matrix.kind] = matrix
    for il, kinds in sorted(by_layer.items()):
        first = next(iter(kinds.values()))
        if rule := _layer_fault(kinds, hparams.n_expert_used[il]):
            raise files[first.shard].tensor_error(
                tensors[first.name], f"layer {il} {rule}"
            )
        ordered = tuple(kinds[kind] for kind in KINDS if kind in kinds)
        yield MoeLayer(il, first.n_expert, hparams.n_expert_used[il], ordered)


def _layer_fault(kinds: Mapping[Kind, ExpertMatrix], n_expert_used: int) -> str | None:
    """Returns the rule that one layer's matrices break; None if they are valid."""
    if n_expert_used == 0:
        return "has experts, but a token uses 0 of them (expert_used_count)"
    gate, up, down, gate_up = (kinds.get(kind) for kind in KINDS)
    if down is None:
        return "has no ffn_down_exps.weight"
    if gate_up is not None:
        if gate is not None or up is not None:
            return "has both ffn_gate_up_exps and separate gate or up experts"
        if (gate_up.ne0, gate_up.ne1) != (down.ne1, 2 * down.ne0):
            return f"has gate_up experts of {gate_up.ne0}x{gate_up.ne1} that do not fit down's {down.ne0}x{down.ne1}"
        return None
    if up is None:
        return "has no ffn_up_exps.weight"
    if gate is not None and (gate.ne0, gate.ne1) != (up.ne0, up.ne1):
        return f"has gate experts of {gate.ne0}x{gate.ne1} but up experts of {up.ne0}x{up.ne1}"
    if (up.ne0, up.ne1) != (down.ne1, down.ne0):
        return f"has up experts of {up.ne0}x{up.ne1} that do not fit down's {down.ne0}x{down.ne1}"
    return None
