"""Names and dimensions of the tensors specific to hybrid models and DeepSeek V4. The
tensors belong to recurrent layers, special attention, n-gram tables and
hyper-connections. Names and dimensions match the tensors that the pinned llama.cpp
loads (src/models/*.cpp). The names of a layer's tensors omit the prefix "blk.N.".
Dimensions are in numpy's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from tools.models.shapes import Shape

Named = Iterator[tuple[str, tuple[int, ...]]]

NGRAM_SIZE = 3
# Index of the layer that adds rows of the n-gram table to the residual streams.
PLE_LAYER = 1
PLE_CONV = 4
TABLE = "per_layer_token_embd.weight"
ROW_MULTIPLE = 128  # the number of rows of the n-gram table is a multiple of this


def delta_net(shape: Shape) -> Named:
    """Yields the tensors of a gated delta net, the recurrent layer of Qwen3-Next and
    later."""
    key_width = shape.ssm_n_group * shape.ssm_d_state
    conv_width = 2 * key_width + shape.ssm_d_inner
    yield "attn_qkv.weight", (conv_width, shape.n_embd)
    yield "attn_gate.weight", (shape.ssm_d_inner, shape.n_embd)
    yield "ssm_conv1d.weight", (conv_width, shape.ssm_d_conv)
    yield "ssm_dt.bias", (shape.ssm_dt_rank,)
    yield "ssm_a", (shape.ssm_dt_rank,)
    if shape.arch == "qwen3next":
        yield "ssm_ba.weight", (2 * shape.ssm_dt_rank, shape.n_embd)
    else:
        yield "ssm_beta.weight", (shape.ssm_dt_rank, shape.n_embd)
        yield "ssm_alpha.weight", (shape.ssm_dt_rank, shape.n_embd)
    yield "ssm_norm.weight", (shape.ssm_d_inner // shape.ssm_dt_rank,)
    yield "ssm_out.weight", (shape.n_embd, shape.ssm_d_inner)


def gated_attention(shape: Shape) -> Named:
    """Yields the attention tensors of Qwen3-Next and later. Their query matrix also
    computes a gate."""
    n_q = shape.n_head * shape.n_embd_head
    n_kv = shape.n_head_kv * shape.n_embd_head
    yield "attn_q.weight", (2 * n_q, shape.n_embd)
    yield "attn_k.weight", (n_kv, shape.n_embd)
    yield "attn_v.weight", (n_kv, shape.n_embd)
    yield "attn_q_norm.weight", (shape.n_embd_head,)
    yield "attn_k_norm.weight", (shape.n_embd_head,)
    yield "attn_output.weight", (shape.n_embd, n_q)


def indexer(shape: Shape) -> Named:
    """Yields the tensors of qwen4exp's indexer, which chooses the tokens that sparse
    attention reads."""
    yield (
        "indexer.q_proj.weight",
        (shape.indexer_n_head * shape.indexer_head_size, shape.n_embd),
    )
    yield "indexer.k_proj.weight", (shape.indexer_head_size, shape.n_embd)
    yield "indexer.q_norm.weight", (shape.indexer_head_size,)
    yield "indexer.k_norm.weight", (shape.indexer_head_size,)


def mamba2(shape: Shape) -> Named:
    """Yields the tensors of the Mamba 2 mixer in Nemotron-H and Granite 4."""
    conv_width = shape.ssm_d_inner + 2 * shape.ssm_n_group * shape.ssm_d_state
    yield (
        "ssm_in.weight",
        (conv_width + shape.ssm_d_inner + shape.ssm_dt_rank, shape.n_embd),
    )
    yield "ssm_conv1d.weight", (conv_width, shape.ssm_d_conv)
    yield "ssm_conv1d.bias", (conv_width,)
    yield "ssm_dt.bias", (shape.ssm_dt_rank,)
    yield "ssm_a", (shape.ssm_dt_rank, 1)
    yield "ssm_d", (shape.ssm_dt_rank, 1)
    yield "ssm_norm.weight", (shape.ssm_n_group, shape.ssm_d_inner // shape.ssm_n_group)
    yield "ssm_out.weight", (shape.n_embd, shape.ssm_d_inner)


def delta_attention(shape: Shape) -> Named:
    """Yields the tensors of Kimi's delta attention, which has a gate for each channel
    of the recurrent state. In Kimi Linear, two small matrices compute the gates."""
    head = shape.n_embd_head_kda
    width = head * shape.n_head
    for letter in "qkv":
        yield f"attn_{letter}.weight", (width, shape.n_embd)
        yield f"ssm_conv1d_{letter}.weight", (width, 1, shape.ssm_d_conv)
    rank = head if shape.arch == "kimi-linear" else width
    for letter in "fg":
        yield f"ssm_{letter}_a.weight", (rank, shape.n_embd)
        if rank < width:
            yield f"ssm_{letter}_b.weight", (width, rank)
    yield "ssm_beta.weight", (shape.n_head, shape.n_embd)
    yield "ssm_a", (shape.n_head, 1)
    yield "ssm_dt.bias", (width,)
    yield "ssm_norm.weight", (head,)
    yield "attn_output.weight", (shape.n_embd, width)


def short_convolution(shape: Shape) -> Named:
    """Yields the tensors of the gated short convolution of LFM2."""
    yield "shortconv.conv.weight", (shape.n_embd, shape.ssm_d_conv)
    yield "shortconv.in_proj.weight", (3 * shape.n_embd, shape.n_embd)
    yield "shortconv.out_proj.weight", (shape.n_embd, shape.n_embd)


def compress_ratio(shape: Shape, il: int) -> int:
    """Returns the number of tokens that share one compressed key in a layer; 0 if the
    layer does not compress keys."""
    if shape.arch == "qwen4exp":
        return 4 if shape.mixer(il) == "a" else 0
    if il < 2 or il >= shape.n_layer:
        return 0
    return 4 if il % 2 == 0 else 128


def compressed_attention(shape: Shape, il: int) -> Named:
    """Yields the tensors of one layer's attention in DeepSeek V4. Layers compress keys
    at different ratios."""
    n_q = shape.n_head * shape.n_embd_head
    yield "attn_sinks.weight", (shape.n_head,)
    yield "attn_q_a.weight", (shape.n_lora_q, shape.n_embd)
    yield "attn_q_a_norm.weight", (shape.n_lora_q,)
    yield "attn_q_b.weight", (n_q, shape.n_lora_q)
    yield "attn_kv.weight", (shape.n_embd_head, shape.n_embd)
    yield "attn_kv_a_norm.weight", (shape.n_embd_head,)
    yield (
        "attn_output_a.weight",
        (shape.o_n_group * shape.o_lora_rank, n_q // shape.o_n_group),
    )
    yield "attn_output_b.weight", (shape.n_embd, shape.o_n_group * shape.o_lora_rank)
    ratio = compress_ratio(shape, il)
    if ratio:
        yield from _compressor(
            "attn_compressor", shape.n_embd, shape.n_embd_head, ratio
        )
    if ratio == 4:
        yield "indexer.proj.weight", (shape.indexer_n_head, shape.n_embd)
        yield (
            "indexer.attn_q_b.weight",
            (shape.indexer_n_head * shape.indexer_head_size, shape.n_lora_q),
        )
        yield from _compressor(
            "indexer_compressor", shape.n_embd, shape.indexer_head_size, ratio
        )


def _compressor(name: str, n_embd: int, head: int, ratio: int) -> Named:
    width = 2 * head if ratio == 4 else head
    yield f"{name}_kv.weight", (width, n_embd)
    yield f"{name}_gate.weight", (width, n_embd)
    yield f"{name}_ape.weight", (ratio, width)
    yield f"{name}_norm.weight", (head,)


def streams(shape: Shape) -> Named:
    """Yields the tensors of a layer's hyper-connections, which mix residual streams
    before attention and experts."""
    width = shape.hc_mult * shape.n_embd
    n_mixed = (2 + shape.hc_mult) * shape.hc_mult
    for part in ("hc_attn", "hc_ffn"):
        if shape.arch == "deepseek4":
            yield f"{part}_fn.weight", (n_mixed, width)
            yield f"{part}_base.weight", (n_mixed,)
            yield f"{part}_scale.weight", (3,)
        else:
            yield from _low_rank_mixer(part, shape)
            yield f"{part}_inject.weight", (shape.hc_mult, width)


def _low_rank_mixer(name: str, shape: Shape) -> Named:
    width = shape.hc_mult * shape.n_embd
    yield f"{name}_norm.weight", (width,)
    yield f"{name}_down.weight", (shape.hc_low_rank, width)
    yield f"{name}_up.weight", (width, shape.hc_low_rank)


def last_mixer(shape: Shape) -> Named:
    """Yields the tensors that combine the residual streams after the last layer, if the
    architecture has several streams."""
    if shape.arch == "deepseek4":
        yield "output_hc_fn.weight", (shape.hc_mult, shape.hc_mult * shape.n_embd)
        yield "output_hc_base.weight", (shape.hc_mult,)
        yield "output_hc_scale.weight", (1,)
    elif shape.arch == "qwen4exp":
        yield from _low_rank_mixer("output_hc", shape)


def table(shape: Shape) -> Named:
    """Yields the n-gram table. Each hash function of the most recent tokens has its own
    rows in the table."""
    heads = table_heads(shape)
    n_rows = -(-sum(heads) // ROW_MULTIPLE) * ROW_MULTIPLE
    yield TABLE, (n_rows, shape.n_embd // len(heads))


def table_heads(shape: Shape) -> list[int]:
    """Returns the number of rows in the n-gram table for each hash function:
    consecutive primes above `ple_vocab_base`.

    The table is padded to a multiple of ROW_MULTIPLE rows.
    """
    found: list[int] = []
    candidate = shape.ple_vocab_base
    while len(found) < (NGRAM_SIZE - 1) * shape.ple_heads_per_ngram:
        candidate += 1
        if all(candidate % divisor for divisor in range(2, isqrt(candidate) + 1)):
            found.append(candidate)
    return found


def table_reader(shape: Shape) -> Named:
    """Yields the tensors of a layer that reads rows of the n-gram table."""
    width = shape.hc_mult * shape.n_embd
    yield "ple_key.weight", (width, shape.n_embd)
    yield "ple_value.weight", (shape.n_embd, shape.n_embd)
    for name in ("key", "query", "conv"):
        yield f"ple_norm_{name}.weight", (width,)
    yield "ple_conv1d.weight", (width, PLE_CONV)
