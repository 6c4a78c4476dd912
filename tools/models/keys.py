"""Metadata keys of the hyperparameters that depend on the architecture, as llama.cpp
reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf.constants import ExpertGatingFuncType

from tools.models import hybrids
from tools.models.shapes import Shape


@dataclass(frozen=True)
class Wide:
    """Numbers that are stored as an array of unsigned 64-bit integers."""

    numbers: list[int]


Value = bool | int | float | Sequence[int] | Wide
Keys = dict[str, Value]

# llama.cpp's number for this gating function, which the gguf package may lack.
SQRT_SOFTPLUS = 4


def architecture_keys(shape: Shape) -> Keys:
    """Returns {metadata key: value}. The keys omit their prefix, the name of the
    architecture."""
    keys = _feed_forward(shape) | _attention(shape)
    if shape.ssm_d_inner:
        keys |= _state(shape)
    if shape.n_layer_nextn:
        keys["nextn_predict_layers"] = shape.n_layer_nextn
    return keys | _OWN.get(shape.arch, lambda _shape: {})(shape)


def _feed_forward(shape: Shape) -> Keys:
    n_ff = shape.n_ff or shape.n_ff_exp
    keys: Keys = {"feed_forward_length": n_ff}
    if shape.arch == "nemotron_h_moe":
        layers = range(shape.n_layer_all)
        keys["feed_forward_length"] = [
            n_ff if _has_experts_only(shape, il) else 0 for il in layers
        ]
    if shape.arch not in ("llama", "granitehybrid"):
        keys["expert_feed_forward_length"] = shape.n_ff_exp
    if shape.n_ff_shexp:
        keys["expert_shared_feed_forward_length"] = shape.n_ff_shexp
    if shape.n_layer_dense_lead:
        keys["leading_dense_block_count"] = shape.n_layer_dense_lead
    if shape.n_expert_shared:
        keys["expert_shared_count"] = shape.n_expert_shared
    return keys


def _has_experts_only(shape: Shape, il: int) -> bool:
    return shape.mixer(il) == "e" or il >= shape.n_layer


def _attention(shape: Shape) -> Keys:
    if shape.kv_lora_rank:
        return _mla(shape)
    n_head_kv: Value = shape.n_head_kv
    if shape.arch in ("nemotron_h_moe", "granitehybrid", "lfm2moe"):
        n_head_kv = _heads_of_attention(shape, shape.n_head_kv)
    return {
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": shape.n_embd_head,
        "attention.value_length": shape.n_embd_head,
        "rope.dimension_count": shape.n_rot or shape.n_embd_head,
    }


def _heads_of_attention(shape: Shape, n_head_kv: int) -> list[int]:
    """Returns the number of KV heads of each layer; 0 for a layer without attention."""
    return [
        n_head_kv if shape.mixer(il) == "a" else 0 for il in range(shape.n_layer_all)
    ]


def _mla(shape: Shape) -> Keys:
    """Returns the metadata keys of multi-head latent attention, whose cache in
    llama.cpp is one head of compressed size."""
    keys: Keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": shape.kv_lora_rank + shape.n_rot,
        "attention.value_length": shape.kv_lora_rank,
        "attention.key_length_mla": shape.n_embd_head,
        "attention.value_length_mla": shape.n_embd_out // shape.n_head,
        "rope.dimension_count": shape.n_rot,
        "attention.kv_lora_rank": shape.kv_lora_rank,
        "expert_weights_scale": 1.0,
    }
    if shape.arch != "deepseek2":
        keys["attention.head_count_kv"] = _heads_of_attention(shape, 1)
    if shape.arch != "kimi-linear":
        keys["attention.q_lora_rank"] = shape.n_lora_q
    return keys


def _state(shape: Shape) -> Keys:
    return {
        "ssm.conv_kernel": shape.ssm_d_conv,
        "ssm.inner_size": shape.ssm_d_inner,
        "ssm.state_size": shape.ssm_d_state,
        "ssm.time_step_rank": shape.ssm_dt_rank,
        "ssm.group_count": shape.ssm_n_group,
    }


def _sections(shape: Shape) -> Keys:
    """Returns the key with the numbers of dimension pairs that RoPE rotates by time,
    height and width.

    The numbers are 11, 11 and 10 in Qwen3.5. The fourth number is 0.
    """
    n_pair = (shape.n_rot or shape.n_embd_head) // 2
    width = n_pair * 5 // 16
    height = (n_pair - width) // 2
    return {"rope.dimension_sections": [n_pair - height - width, height, width, 0]}


def _qwen3vlmoe(shape: Shape) -> Keys:
    return {
        "rope.dimension_sections": [
            shape.n_embd_head // 4,
            shape.n_embd_head // 8,
            shape.n_embd_head // 8,
            0,
        ]
    }


def _qwen3next(shape: Shape) -> Keys:
    return {"full_attention_interval": shape.mixers.index("a") + 1}


def _qwen35moe(shape: Shape) -> Keys:
    return _sections(shape) | _qwen3next(shape)


def _qwen4exp(shape: Shape) -> Keys:
    heads = hybrids.table_heads(shape)
    offsets = np.cumsum([0, *heads])[:-1].tolist()
    return _qwen35moe(shape) | {
        "hyper_connection.count": shape.hc_mult,
        "hyper_connection.low_rank": shape.hc_low_rank,
        "attention.indexer.head_count": shape.indexer_n_head,
        "attention.indexer.key_length": shape.indexer_head_size,
        "attention.indexer.top_k": shape.indexer_top_k,
        "attention.compress_ratios": [
            hybrids.compress_ratio(shape, il) for il in range(shape.n_layer_all)
        ],
        "ple.layers": [hybrids.PLE_LAYER],
        "ple.ngram_size": hybrids.NGRAM_SIZE,
        "ple.heads_per_ngram": shape.ple_heads_per_ngram,
        "ple.conv_kernel": hybrids.PLE_CONV,
        "ple.eos_token_id": shape.n_vocab - 1,
        "ple.layer_multipliers": Wide([(1 << 44) + 7, (1 << 43) + 29, (1 << 42) + 15]),
        "ple.head_offsets": Wide(offsets),
        "ple.head_vocab_sizes": Wide(heads),
        "embedding_length_per_layer_input": shape.n_embd // len(heads),
    }


def _nemotron_h_moe(_shape: Shape) -> Keys:
    return {
        "attention.layer_norm_epsilon": 1e-5,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }


def _granitehybrid(_shape: Shape) -> Keys:
    """Returns the keys of Granite 4.0 H: its scales, and the key that turns off
    RoPE."""
    return {
        "rope.scaling.finetuned": False,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "attention.scale": 0.0078125,
        "logit_scale": 16.0,
    }


def _kimi_linear(shape: Shape) -> Keys:
    return {
        "ssm.conv_kernel": shape.ssm_d_conv,
        "kda.head_dim": shape.n_embd_head_kda,
        "expert_weights_scale": 2.446,
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID),
    }


def _bailingmoe3(shape: Shape) -> Keys:
    return _kimi_linear(shape) | {
        "kda.gate_lower_bound": -5.0,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }


def _lfm2moe(shape: Shape) -> Keys:
    return {
        "shortconv.l_cache": shape.ssm_d_conv,
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID),
    }


def _deepseek4(shape: Shape) -> Keys:
    return {
        "attention.q_lora_rank": shape.n_lora_q,
        "attention.sliding_window": shape.n_swa,
        "attention.indexer.head_count": shape.indexer_n_head,
        "attention.indexer.key_length": shape.indexer_head_size,
        "attention.indexer.top_k": shape.indexer_top_k,
        "attention.output_group_count": shape.o_n_group,
        "attention.output_lora_rank": shape.o_lora_rank,
        "attention.compress_rope_freq_base": 160000.0,
        "attention.compress_ratios": [
            hybrids.compress_ratio(shape, il) for il in range(shape.n_layer_all)
        ],
        "hyper_connection.count": shape.hc_mult,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": shape.n_layer_hash,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": SQRT_SOFTPLUS,
    }


def _gemma4(shape: Shape) -> Keys:
    layers = range(shape.n_layer)
    return {
        "attention.head_count_kv": [shape.head_kv(il) for il in layers],
        "attention.key_length_swa": shape.n_embd_head_swa,
        "attention.value_length_swa": shape.n_embd_head_swa,
        "attention.sliding_window": shape.n_swa,
        "attention.sliding_window_pattern": [shape.mixer(il) == "w" for il in layers],
        "attention.shared_kv_layers": shape.n_layer_shared_kv,
        "rope.dimension_count_swa": shape.n_embd_head_swa,
        "rope.freq_base_swa": 1e4,
        "embedding_length_per_layer_input": shape.n_embd_per_layer,
        "final_logit_softcapping": 30.0,
    }


def _glm4moe(_shape: Shape) -> Keys:
    return {"expert_weights_scale": 1.0, "expert_weights_norm": True}


_OWN = {
    "qwen3vlmoe": _qwen3vlmoe,
    "gpt-oss": lambda shape: {"attention.sliding_window": shape.n_swa},
    "gemma4": _gemma4,
    "glm4moe": _glm4moe,
    "qwen3next": _qwen3next,
    "qwen35moe": _qwen35moe,
    "qwen4exp": _qwen4exp,
    "nemotron_h_moe": _nemotron_h_moe,
    "granitehybrid": _granitehybrid,
    "kimi-linear": _kimi_linear,
    "bailingmoe3": _bailingmoe3,
    "lfm2moe": _lfm2moe,
    "deepseek4": _deepseek4,
}
