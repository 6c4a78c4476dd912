"""Writes the GGUF file of a random model, in one or several shards: metadata and tensor
data.

Most tensor data are streamed from the block pools. `Weights` generates the rest, such
as norms and routers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as QType
from gguf.constants import GGUFValueType, Keys, LlamaFileType

from moegguf.bench.rows import LOCALITY_KEY
from tools.models.blocks import BlockPools, Bytes, f32_weights, token_experts
from tools.models.keys import Value, Wide, architecture_keys
from tools.models.locality import find_locality
from tools.models.shapes import ROPE_FREQ_BASE, Shape
from tools.models.slow_routing import SlowRouting
from tools.models.tensors import Tensor, tensors
from tools.models.vocabulary import CHAT_TEMPLATE, build_vocabulary

ALIGNMENT = 32
# Free disk space that is required for vocabulary, merges and tensor infos: 151,936
# tokens take about 4 MB.
METADATA_BYTES = 16 << 20

FILE_TYPES = {
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k_m": LlamaFileType.MOSTLY_Q5_K_M,
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "iq4_xs": LlamaFileType.MOSTLY_IQ4_XS,
    "mxfp4": LlamaFileType.MOSTLY_MXFP4_MOE,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
}

Progress = Callable[[int, int], None]


def write_model(
    path: Path | str,
    shape: Shape,
    quant: str = "q4_0",
    *,
    seed: int = 0,
    locality: str | None = None,
    n_split: int = 1,
    split_max_bytes: int | None = None,
    name: str = "random",
    chat_template: str = CHAT_TEMPLATE,
    progress: Progress | None = None,
) -> list[Path]:
    """Writes a random model. Returns the paths of its files, first shard first.

    The weights depend only on shape, quant, seed and locality. `locality` is a key of
    LOCALITIES, and the routing then reuses experts as published for that model. With
    None, the routing depends only on random weights.

    `n_split` is the number of shards. Each tensor goes to the shard that is smallest so
    far, so that gate, up and down of a layer are usually in different files.
    `split_max_bytes` instead fills one shard after another, as llama-gguf-split does.

    `progress` is called after each tensor with two sizes in bytes: the tensor data
    written so far, and all tensor data. The files have temporary names until all are
    complete. Raises OSError if the disk is too full, OptionError for an unknown
    locality, and ValueError for other wrong options.
    """
    path = Path(path)
    plan = tensors(shape, quant)
    routing = None
    if locality is not None:
        routing = SlowRouting(shape, find_locality(locality), plan[0].qtype, seed)
        plan = [routing.plan(tensor) for tensor in plan]
    weights = Weights(BlockPools(plan, seed), routing, seed, shape.n_expert)
    total_bytes = sum(tensor.n_bytes for tensor in plan)
    _check_disk(path.parent, total_bytes)
    shards = _fill(plan, split_max_bytes) if split_max_bytes else _deal(plan, n_split)
    paths = _shard_paths(path, len(shards))
    partial = [file.with_name(file.name + ".part") for file in paths]
    done_bytes = 0

    def advance(n_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += n_bytes
        if progress:
            progress(done_bytes, total_bytes)

    with ExitStack() as undo:
        for no, (file, shard) in enumerate(zip(partial, shards, strict=True)):
            undo.callback(file.unlink, missing_ok=True)
            writer = GGUFWriter(file, shape.arch)
            if no == 0:
                _add_metadata(writer, shape, quant, name, locality)
                add_tokenizer(writer, shape.n_vocab, chat_template)
            if len(shards) > 1:
                _add_split(writer, no, len(shards), len(plan))
            _write_shard(writer, shard, weights, advance)
        for file, final in zip(partial, paths, strict=True):
            file.replace(final)
        undo.pop_all()
    return paths


def _check_disk(folder: Path, total_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    needed = total_bytes + METADATA_BYTES
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.2f} GB free, but the model needs {needed / 1e9:.2f} GB: "
            "choose another folder or fewer layers (--layers)"
        )


def _deal(plan: list[Tensor], n_split: int) -> list[list[Tensor]]:
    if not 1 <= n_split <= len(plan):
        raise ValueError(
            f"n_split has to be in 1..{len(plan)} (the number of tensors), but is {n_split}"
        )
    shards: list[list[Tensor]] = [[] for _ in range(n_split)]
    sizes = [0] * n_split
    for tensor in plan:
        smallest = sizes.index(min(sizes))
        shards[smallest].append(tensor)
        sizes[smallest] += tensor.n_bytes
    return shards


def _fill(plan: list[Tensor], max_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in plan:
        if shards[-1] and size + tensor.n_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.n_bytes
    return shards


def _shard_paths(path: Path, n_split: int) -> list[Path]:
    if n_split == 1:
        return [path]
    stem = path.name.removesuffix(".gguf")
    return [
        path.with_name(f"{stem}-{no:05d}-of-{n_split:05d}.gguf")
        for no in range(1, n_split + 1)
    ]


def write_sparse_model(path: Path, shape: Shape, quant: str) -> Path:
    """Writes a model file for tests of plans. The weights are a hole in the file, which
    occupies no disk space. Returns `path`."""
    plan = tensors(shape, quant)
    writer = GGUFWriter(path, shape.arch)
    _add_metadata(writer, shape, quant, "random", None)
    add_tokenizer(writer, shape.n_vocab)
    try:
        out = _write_header(writer, plan)
        out.truncate(out.tell() + sum(tensor.n_bytes + ALIGNMENT for tensor in plan))
    finally:
        writer.close()
    return path


def _write_header(writer: GGUFWriter, shard: list[Tensor]) -> BinaryIO:
    """Writes the header, metadata and tensor infos of a shard. Returns the open file,
    positioned after them."""
    for tensor in shard:
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),
            tensor.n_bytes,
            tensor.qtype,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    return writer.fout[0]


def _write_shard(
    writer: GGUFWriter,
    shard: list[Tensor],
    weights: Weights,
    advance: Callable[[int], None],
) -> None:
    try:
        out = _write_header(writer, shard)
        for tensor in shard:
            out.write(bytes(-out.tell() % ALIGNMENT))
            for piece in weights.pieces(tensor):
                out.write(piece)
            advance(tensor.n_bytes)
        out.write(bytes(-out.tell() % ALIGNMENT))
    finally:
        writer.close()


@dataclass(frozen=True)
class Weights:
    """Generates the bytes of each tensor.

    A tensor contains values for the locality, F32 values, a table of expert ids for
    each token, or blocks from the pools.
    """

    pools: BlockPools
    routing: SlowRouting | None
    seed: int
    n_expert: int

    def pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yields the bytes of a tensor, in the order of the file."""
        made = self.routing.weights(tensor) if self.routing else None
        if made is not None:
            yield made.data
        elif tensor.qtype == QType.F32:
            yield f32_weights(tensor, self.seed).data
        elif tensor.qtype == QType.I32:
            yield token_experts(tensor, self.n_expert, self.seed).data
        elif self.routing and tensor.name == "token_embd.weight":
            yield from _with_row_heads(
                self.pools.deltas(tensor), tensor.row_bytes, self.routing.row_head
            )
        else:
            yield from self.pools.deltas(tensor)


def _with_row_heads(
    pieces: Iterator[memoryview], row_bytes: int, head: Bytes
) -> Iterator[memoryview]:
    """Yields the bytes of the rows, with the first bytes of each row replaced by
    `head`."""
    rest = b""
    for piece in pieces:
        data = bytearray(rest + piece)
        rest = bytes(data[len(data) // row_bytes * row_bytes :])
        rows = np.frombuffer(data, np.uint8, len(data) - len(rest)).reshape(
            -1, row_bytes
        )
        rows[:, : len(head)] = head
        yield rows.data


def _add_split(writer: GGUFWriter, no: int, n_split: int, n_tensors: int) -> None:
    writer.add_uint16(Keys.Split.LLM_KV_SPLIT_NO, no)
    writer.add_uint16(Keys.Split.LLM_KV_SPLIT_COUNT, n_split)
    writer.add_int32(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, n_tensors)


def _add_metadata(
    writer: GGUFWriter, shape: Shape, quant: str, name: str, locality: str | None
) -> None:
    writer.add_name(name)
    writer.add_description("random weights, written by moegguf tools/make_model.py")
    if locality is not None:
        writer.add_string(LOCALITY_KEY, locality)
    writer.add_file_type(FILE_TYPES[quant])
    writer.add_quantization_version(2)
    writer.add_custom_alignment(ALIGNMENT)
    writer.add_block_count(shape.n_layer_all)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_head_count(shape.n_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(ROPE_FREQ_BASE)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_expert_used)
    for key, value in architecture_keys(shape).items():
        _add_key(writer, f"{shape.arch}.{key}", value)


def _add_key(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, Wide):
        writer.add_key_value(
            key, value.numbers, GGUFValueType.ARRAY, GGUFValueType.UINT64
        )
    else:
        writer.add_array(key, value)


def add_tokenizer(
    writer: GGUFWriter, n_vocab: int, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Adds the vocabulary, the special tokens and the chat template to the metadata."""
    vocabulary = build_vocabulary(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_eos_token_id(vocabulary.id_of("<|im_end|>"))
    writer.add_pad_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template)
