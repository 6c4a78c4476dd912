"""Lists the tensors of a model: llama.cpp's names, quantisation types, and standard
deviations of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as QType

from tools.models import gemma, hybrids
from tools.models.hybrids import Named
from tools.models.shapes import Shape

# The type of most matrices in each quantisation; _qtype_of_role and ROW_FALLBACK define
# the exceptions.
QUANTS = {
    "q4_0": QType.Q4_0,
    "q4_k_m": QType.Q4_K,
    "q5_k_m": QType.Q5_K,
    "q6_k": QType.Q6_K,
    "q8_0": QType.Q8_0,
    "iq4_xs": QType.IQ4_XS,
    "mxfp4": QType.MXFP4,
    "f16": QType.F16,
    "bf16": QType.BF16,
}
# Quantisations that use one type for all matrices that are not F32.
PURE = ("q4_0", "q8_0", "f16", "bf16")

# llama.cpp's tensor_type_fallback: types for rows whose length is not a multiple of 256
ROW_FALLBACK = {
    QType.Q4_K: QType.Q5_0, QType.Q5_K: QType.Q5_0, QType.Q6_K: QType.Q8_0, QType.IQ4_XS: QType.IQ4_NL,
}  # fmt: skip

# {role of a matrix: gain}; other roles have a gain of 1. Weights have a standard
# deviation of gain / sqrt(columns), except token embeddings, which usually have 1. The tokens
# of one text share much of attention's output, so the gain of `attn_output` sets how
# similar their routing is. With 0.7, tokens are routed almost independently. With 1.4,
# most tokens use the same few experts. With 0.9, LRU has a hit rate of 75 % with slots
# for 37 % of the experts. The gain of `output` sets how peaked the distribution of the
# next token is.
GAINS = {"attn_output": 0.9, "output": 3.0}

HEADS_INPUT = "nextn.eh_proj.weight"
# The norm after the last layer of LFM2. Its weights are smaller, because the token
# embeddings also serve as the output matrix, and their weights are larger than other
# output matrices'.
TIED_OUTPUT_NORM = "token_embd_norm.weight"

# Tensors that stay F32. llama-quantize does not quantise them either
# (tensor_allows_quantization in llama-quant.cpp), with two exceptions: HEADS_INPUT,
# which is near the identity, and the convolution of the n-gram table's reader.
STAY_F32_ENDS = (".bias", "_norm.weight", "ssm_a", "ssm_d", HEADS_INPUT)
STAY_F32_PARTS = (
    ".ffn_gate_inp.",
    "conv1d",
    "shortconv.conv.",
    "indexer.q_proj.",
    "indexer.k_proj.",
    "per_layer_model_proj.",
)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model. `shape` is in numpy's order, for example (experts, rows,
    columns).

    `std` is the standard deviation of the weights; F32 and I32 tensors do not use it
    and have 0. The first `n_zero_rows` rows of each matrix are zero.
    """

    name: str
    shape: tuple[int, ...]
    qtype: QType
    std: float
    n_zero_rows: int = 0

    @property
    def n_bytes(self) -> int:
        """Returns the tensor's size in bytes in the file, without padding."""
        block, block_bytes = GGML_QUANT_SIZES[self.qtype]
        return prod(self.shape) // block * block_bytes

    @property
    def row_bytes(self) -> int:
        """Returns the size of one matrix row in bytes."""
        return self.n_bytes // prod(self.shape[:-1])

    @property
    def n_chunks(self) -> int:
        """Returns the number of matrices in the tensor. Each matrix starts at a
        different place in the pool of random blocks."""
        return self.shape[0] if len(self.shape) == 3 else 1


def tensors(shape: Shape, quant: str) -> list[Tensor]:
    """Returns all tensors of a model without a locality, in the order of an unsplit
    file."""
    return [_tensor(name, dims, shape, quant) for name, dims in _names_and_dims(shape)]


def model_size_bytes(shape: Shape, quant: str) -> int:
    """Returns the size of all tensors in bytes. Metadata adds a few MB for a large
    vocabulary.

    The first layer of a model with a locality (`tools.models.locality`) is slightly
    larger.
    """
    return sum(tensor.n_bytes for tensor in tensors(shape, quant))


def _tensor(name: str, dims: tuple[int, ...], shape: Shape, quant: str) -> Tensor:
    if name.endswith("tid2eid.weight"):
        return Tensor(name, dims, QType.I32, 0.0)
    if (
        len(dims) == 1
        or name.endswith(STAY_F32_ENDS)
        or any(part in name for part in STAY_F32_PARTS)
    ):
        return Tensor(name, dims, QType.F32, 0.0)
    role = name.split(".")[-2]
    std = GAINS.get(role, 1.0) / sqrt(dims[-1])
    # llama.cpp multiplies the embeddings of Gemma 4 by the square root of their length.
    if role.endswith("token_embd") and shape.arch != "gemma4":
        std = 1.0
    return Tensor(name, dims, _qtype(name, role, dims[-1], shape, quant), std)


def _qtype(name: str, role: str, n_columns: int, shape: Shape, quant: str) -> QType:
    """Returns the type of one matrix, by the rules of llama_tensor_get_type_impl
    (llama-quant.cpp).

    Raises ValueError if the length of a row is not a multiple of the block size, even
    with ROW_FALLBACK.
    """
    qtype = QUANTS[quant] if quant in PURE else _qtype_of_role(name, role, shape, quant)
    if n_columns % GGML_QUANT_SIZES[qtype][0]:
        qtype = ROW_FALLBACK.get(qtype, qtype)
    block = GGML_QUANT_SIZES[qtype][0]
    if n_columns % block:
        raise ValueError(
            f"{name}: {qtype.name} needs rows that are a multiple of {block}, but they have {n_columns}"
        )
    return qtype


def _qtype_of_role(name: str, role: str, shape: Shape, quant: str) -> QType:
    most = QUANTS[quant]
    eight_experts = shape.n_expert == 8
    if quant == "mxfp4":  # MXFP4_MOE: experts are MXFP4, all other matrices Q8_0
        return most if role.endswith("_exps") else QType.Q8_0
    if role == "output" or (role.endswith("token_embd") and is_tied(shape)):
        return QType.Q6_K
    if role in ("attn_k", "attn_v") and eight_experts:
        return QType.Q8_0
    if role == "attn_output" and eight_experts and quant != "q6_k":
        return QType.Q5_K
    if role == "attn_v" and quant == "iq4_xs":
        return QType.Q5_K if shape.n_head >= 4 * shape.n_head_kv else most
    if role.startswith("ffn_down") and quant == "iq4_xs":
        return QType.Q5_K if int(name.split(".")[1]) < shape.n_layer // 8 else most
    if role == "attn_v" or role.startswith("ffn_down"):
        return (
            QType.Q6_K
            if _use_more_bits(int(name.split(".")[1]), shape.n_layer)
            else most
        )
    return most


def _use_more_bits(il: int, n_layer: int) -> bool:
    return il < n_layer // 8 or il >= 7 * n_layer // 8 or (il - n_layer // 8) % 3 == 2


def _names_and_dims(shape: Shape) -> Named:
    yield "token_embd.weight", (shape.n_vocab, shape.n_embd)
    if shape.ple_vocab_base:
        yield from hybrids.table(shape)
    if shape.arch == "gemma4":
        yield from gemma.outer(shape)
    for il in range(shape.n_layer_all):
        for name, dims in _layer(shape, il):
            yield f"blk.{il}.{name}", dims
    if shape.arch == "lfm2moe":
        yield TIED_OUTPUT_NORM, (shape.n_embd,)
    elif shape.arch != "qwen4exp":
        yield "output_norm.weight", (shape.n_embd,)
    yield from hybrids.last_mixer(shape)
    if not is_tied(shape):
        yield "output.weight", (shape.n_vocab, shape.n_embd)


def is_tied(shape: Shape) -> bool:
    """Returns True if the token embeddings also serve as the output matrix."""
    return shape.arch in ("lfm2moe", "granitehybrid", "gemma4")


def _layer(shape: Shape, il: int) -> Named:
    if shape.arch == "gemma4":
        yield from gemma.layer(shape, il)
        return
    mixer = shape.mixer(il)
    is_head = il >= shape.n_layer
    if shape.hc_mult:
        yield from hybrids.streams(shape)
    if shape.arch != "qwen4exp":
        yield "attn_norm.weight", (shape.n_embd,)
    if mixer != "e":
        yield from _mixer(shape, il)
    if shape.ple_vocab_base and il == hybrids.PLE_LAYER:
        yield from hybrids.table_reader(shape)
    if shape.arch != "nemotron_h_moe":
        yield from _ffn(shape, il)
    elif mixer == "e":
        yield from _squared_ffn(shape)
    if is_head:
        yield from _heads(shape)
        if shape.arch == "nemotron_h_moe":
            yield "post_attention_norm.weight", (shape.n_embd,)
            yield from _squared_ffn(shape)


def _mixer(shape: Shape, il: int) -> Named:
    recurrent = {
        "qwen3next": hybrids.delta_net,
        "qwen35moe": hybrids.delta_net,
        "qwen4exp": hybrids.delta_net,
        "nemotron_h_moe": hybrids.mamba2,
        "granitehybrid": hybrids.mamba2,
        "kimi-linear": hybrids.delta_attention,
        "bailingmoe3": hybrids.delta_attention,
        "lfm2moe": hybrids.short_convolution,
    }
    if shape.mixer(il) == "r":
        yield from recurrent[shape.arch](shape)
    elif shape.arch in ("qwen3next", "qwen35moe", "qwen4exp"):
        yield from hybrids.gated_attention(shape)
    elif shape.kv_lora_rank:
        yield from _mla(shape)
    elif shape.arch == "deepseek4":
        yield from hybrids.compressed_attention(shape, il)
    else:
        yield from _attention(shape)
    if shape.arch == "qwen4exp" and shape.mixer(il) == "a":
        yield from hybrids.indexer(shape)


def _attention(shape: Shape) -> Named:
    n_q = shape.n_head * shape.n_embd_head
    n_kv = shape.n_head_kv * shape.n_embd_head
    for letter, rows in (("q", n_q), ("k", n_kv), ("v", n_kv)):
        yield f"attn_{letter}.weight", (rows, shape.n_embd)
        if shape.arch in ("qwen2moe", "gpt-oss"):
            yield f"attn_{letter}.bias", (rows,)
    if shape.arch in ("qwen3moe", "qwen3vlmoe", "lfm2moe"):
        yield "attn_q_norm.weight", (shape.n_embd_head,)
        yield "attn_k_norm.weight", (shape.n_embd_head,)
    yield "attn_output.weight", (shape.n_embd, n_q)
    if shape.arch == "gpt-oss":
        yield "attn_output.bias", (shape.n_embd,)
        yield "attn_sinks.weight", (shape.n_head,)


def _heads(shape: Shape) -> Named:
    """Yields the `nextn` tensors, which only layers for multi-token prediction have."""
    yield HEADS_INPUT, (shape.n_embd, 2 * shape.n_embd)
    is_bailing = shape.arch == "bailingmoe3"
    last = "layer_output_norm" if is_bailing else "nextn.shared_head_norm"
    for name in ("nextn.enorm", "nextn.hnorm", last):
        yield f"{name}.weight", (shape.n_embd,)


def _mla(shape: Shape) -> Named:
    n_nope = shape.n_embd_head - shape.n_rot
    n_q = shape.n_head * shape.n_embd_head
    if shape.n_lora_q:
        yield "attn_q_a.weight", (shape.n_lora_q, shape.n_embd)
        yield "attn_q_a_norm.weight", (shape.n_lora_q,)
        yield "attn_q_b.weight", (n_q, shape.n_lora_q)
    else:
        yield "attn_q.weight", (n_q, shape.n_embd)
    yield "attn_kv_a_mqa.weight", (shape.kv_lora_rank + shape.n_rot, shape.n_embd)
    yield "attn_kv_a_norm.weight", (shape.kv_lora_rank,)
    yield "attn_k_b.weight", (shape.n_head, shape.kv_lora_rank, n_nope)
    yield (
        "attn_v_b.weight",
        (shape.n_head, shape.n_embd_out // shape.n_head, shape.kv_lora_rank),
    )
    yield "attn_output.weight", (shape.n_embd, shape.n_embd_out)
    if shape.arch == "bailingmoe3":
        yield "attn_gate.weight", (shape.n_head, shape.n_embd)


def _ffn(shape: Shape, il: int) -> Named:
    if shape.arch != "qwen4exp":
        norm = (
            "post_attention_norm"
            if shape.arch in ("gpt-oss", "glm4moe", "qwen3next", "qwen35moe")
            else "ffn_norm"
        )
        yield f"{norm}.weight", (shape.n_embd,)
    if il < shape.n_layer_dense_lead:
        yield from _gate_up_down("", (), shape.n_ff, shape.n_embd)
        return
    yield "ffn_gate_inp.weight", (shape.n_expert, shape.n_embd)
    yield from _gate_up_down("_exps", (shape.n_expert,), shape.n_ff_exp, shape.n_embd)
    if shape.n_ff_shared:
        yield from _gate_up_down("_shexp", (), shape.n_ff_shared, shape.n_embd)
    if il < shape.n_layer_hash:
        yield "ffn_gate_tid2eid.weight", (shape.n_vocab, shape.n_expert_used)
    elif shape.arch in (
        "glm4moe",
        "lfm2moe",
        "kimi-linear",
        "bailingmoe3",
        "deepseek4",
    ):
        yield "exp_probs_b.bias", (shape.n_expert,)
    if shape.arch in ("qwen2moe", "qwen3next", "qwen35moe", "qwen4exp"):
        yield "ffn_gate_inp_shexp.weight", (shape.n_embd,)
    if shape.arch == "gpt-oss":
        yield "ffn_gate_inp.bias", (shape.n_expert,)
        for matrix, rows in (
            ("gate", shape.n_ff_exp),
            ("up", shape.n_ff_exp),
            ("down", shape.n_embd),
        ):
            yield f"ffn_{matrix}_exps.bias", (shape.n_expert, rows)


def _squared_ffn(shape: Shape) -> Named:
    """Yields the router, the experts and the shared expert of a layer whose activation
    is a squared ReLU.

    The experts have no gate matrices.
    """
    yield "ffn_gate_inp.weight", (shape.n_expert, shape.n_embd)
    yield "exp_probs_b.bias", (shape.n_expert,)
    yield "ffn_up_exps.weight", (shape.n_expert, shape.n_ff_exp, shape.n_embd)
    yield "ffn_down_exps.weight", (shape.n_expert, shape.n_embd, shape.n_ff_exp)
    yield "ffn_up_shexp.weight", (shape.n_ff_shexp, shape.n_embd)
    yield "ffn_down_shexp.weight", (shape.n_embd, shape.n_ff_shexp)


def _gate_up_down(suffix: str, lead: tuple[int, ...], n_ff: int, n_embd: int) -> Named:
    yield f"ffn_gate{suffix}.weight", (*lead, n_ff, n_embd)
    yield f"ffn_up{suffix}.weight", (*lead, n_ff, n_embd)
    yield f"ffn_down{suffix}.weight", (*lead, n_embd, n_ff)
