"""Writes random F32 models of hybrid architectures for which tools/make_model.py has no
preset.

Tensor names and dimensions match the tensors that the pinned llama.cpp loads
(src/models/*.cpp). Dimensions are in numpy's order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from gguf.constants import ExpertGatingFuncType, GGMLQuantizationType
from running import written

from tools.models.blocks import f32_weights
from tools.models.tensors import Tensor
from tools.models.writer import add_tokenizer

N_EMBD, N_HEAD, HEAD_DIM, N_FF, N_EXPERT, N_VOCAB, D_CONV = 128, 4, 32, 64, 8, 1024, 4
WIDTH = N_HEAD * HEAD_DIM
KV_RANK, Q_RANK, MLA_HEAD, N_ROT = 64, 48, 48, 16
LAYERS = "rara"  # kinds of the four layers: r is recurrent, a uses attention
SIGMOID = int(ExpertGatingFuncType.SIGMOID)

Dims = dict[str, tuple[int, ...]]
Keys = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """An architecture's own keys and tensors. `write_hybrid` adds the keys and tensors
    that all SHAPES have.

    Names of tensors in layers omit the prefix `blk.N.`. `outer` contains the tensors
    outside layers.
    """

    keys: Keys
    recurrent: Dims
    attention: Dims
    rest: Dims  # tensors that every layer has, regardless of its kind
    outer: Dims


def experts(n_in: int = N_EMBD, n_shared: int = 0, has_bias: bool = True) -> Dims:
    """Returns the tensors of a layer's feed-forward part: norm, router, experts, and
    one shared expert.

    The shared expert is as wide as `n_shared` experts; if that is 0, it is left out.
    `has_bias`: True if the choice of experts has a bias.
    """
    dims: Dims = {
        "ffn_norm.weight": (N_EMBD,),
        "ffn_gate_inp.weight": (N_EXPERT, N_EMBD),
    }
    if has_bias:
        dims["exp_probs_b.bias"] = (N_EXPERT,)
    for name in ("gate", "up"):
        dims[f"ffn_{name}_exps.weight"] = (N_EXPERT, N_FF, n_in)
        if n_shared:
            dims[f"ffn_{name}_shexp.weight"] = (n_shared * N_FF, N_EMBD)
    dims["ffn_down_exps.weight"] = (N_EXPERT, n_in, N_FF)
    if n_shared:
        dims["ffn_down_shexp.weight"] = (N_EMBD, n_shared * N_FF)
    return dims


def simple_attention() -> Dims:
    """Returns the tensors of grouped-query attention with two key/value heads."""
    dims = {f"attn_{name}.weight": (2 * HEAD_DIM, N_EMBD) for name in "kv"}
    return {
        "attn_q.weight": (WIDTH, N_EMBD),
        "attn_output.weight": (N_EMBD, WIDTH),
    } | dims


def latent_attention(n_rot: int) -> Dims:
    """Returns the tensors of multi-head latent attention with low-rank queries. n_rot:
    rotated dimensions of a head."""
    return {
        "attn_q_a.weight": (Q_RANK, N_EMBD),
        "attn_q_a_norm.weight": (Q_RANK,),
        "attn_q_b.weight": (N_HEAD * MLA_HEAD, Q_RANK),
        "attn_kv_a_mqa.weight": (KV_RANK + n_rot, N_EMBD),
        "attn_kv_a_norm.weight": (KV_RANK,),
        "attn_k_b.weight": (N_HEAD, KV_RANK, MLA_HEAD - n_rot),
        "attn_v_b.weight": (N_HEAD, HEAD_DIM, KV_RANK),
        "attn_output.weight": (N_EMBD, WIDTH),
    }


def delta_attention(gates: Dims) -> Dims:
    """Returns the tensors of Kimi's delta attention, including `gates`, the tensors
    that differ between architectures."""
    dims = {f"attn_{name}.weight": (WIDTH, N_EMBD) for name in "qkv"}
    dims |= {f"ssm_conv1d_{name}.weight": (WIDTH, 1, D_CONV) for name in "qkv"}
    dims |= {
        "ssm_beta.weight": (N_HEAD, N_EMBD),
        "ssm_dt.bias": (WIDTH,),
        "ssm_norm.weight": (HEAD_DIM,),
    }
    return dims | {"attn_output.weight": (N_EMBD, WIDTH)} | gates


def delta_keys(n_rot: int, **keys: Any) -> Keys:
    """Returns the keys that all SHAPES with delta attention and latent attention have,
    extended with `keys`."""
    return {
        "attention.head_count_kv": [int(kind == "a") for kind in LAYERS],
        "attention.key_length": KV_RANK + n_rot,
        "attention.value_length": KV_RANK,
        "attention.key_length_mla": MLA_HEAD,
        "attention.value_length_mla": HEAD_DIM,
        "attention.kv_lora_rank": KV_RANK,
        "attention.q_lora_rank": Q_RANK,
        "rope.dimension_count": n_rot,
        "ssm.conv_kernel": D_CONV,
        "kda.head_dim": HEAD_DIM,
        "expert_shared_count": 1,
        "leading_dense_block_count": 0,
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
    } | keys


def jamba() -> Shape:
    d_inner, d_state, dt_rank = 2 * N_EMBD, 16, 8
    mamba: Dims = {
        "ssm_in.weight": (2 * d_inner, N_EMBD),
        "ssm_conv1d.weight": (d_inner, D_CONV),
        "ssm_conv1d.bias": (d_inner,),
        "ssm_x.weight": (dt_rank + 2 * d_state, d_inner),
        "ssm_dt_norm.weight": (dt_rank,),
        "ssm_dt.weight": (d_inner, dt_rank),
        "ssm_dt.bias": (d_inner,),
        "ssm_b_norm.weight": (d_state,),
        "ssm_c_norm.weight": (d_state,),
        "ssm_a": (d_inner, d_state),
        "ssm_d": (d_inner,),
        "ssm_out.weight": (N_EMBD, d_inner),
    }
    keys: Keys = {
        "attention.head_count_kv": [2 * (kind == "a") for kind in LAYERS],
        "ssm.conv_kernel": D_CONV,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": dt_rank,
    }
    return Shape(keys, mamba, simple_attention(), experts(has_bias=False), {})


def minimax_01() -> Shape:
    lightning: Dims = {
        "attn_norm_2.weight": (WIDTH,),
        "attn_qkv.weight": (3 * WIDTH, N_EMBD),
        "attn_gate.weight": (WIDTH, N_EMBD),
        "attn_output.weight": (N_EMBD, WIDTH),
    }
    keys: Keys = {
        "attention.head_count_kv": 2,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM // 2,
        "attention.recurrent_layers": [kind == "r" for kind in LAYERS],
        "residual_scale": 3.5,
    }
    return Shape(keys, lightning, simple_attention(), experts(has_bias=False), {})


def kimi_k3() -> Shape:
    latent = 64
    gates: Dims = {
        "ssm_a": (N_HEAD,),
        "ssm_f_a.weight": (HEAD_DIM, N_EMBD),
        "ssm_f_b.weight": (WIDTH, HEAD_DIM),
        "ssm_g.weight": (WIDTH, N_EMBD),
    }
    rest: Dims = experts(latent, n_shared=1) | {
        "ffn_routed_down.weight": (latent, N_EMBD),
        "ffn_routed_up.weight": (N_EMBD, latent),
        "ffn_routed_norm.weight": (latent,),
        "attn_res_score.weight": (N_EMBD,),
        "ffn_res_score.weight": (N_EMBD,),
    }
    keys = delta_keys(N_ROT) | {
        "expert_latent_length": latent,
        "attn_res.block_size": 2,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 4.0,
    }
    attention = latent_attention(N_ROT) | {"attn_gate.weight": (WIDTH, N_EMBD)}
    return Shape(
        keys,
        delta_attention(gates),
        attention,
        rest,
        {"output_res_score.weight": (N_EMBD,)},
    )


def glm5_next() -> Shape:
    n_streams, pool, indexer_heads, indexer_size = 4, 4, 2, 32
    n_mixed = (2 + n_streams) * n_streams
    gates: Dims = {"ssm_a": (N_HEAD,)}
    for name in "fg":
        gates |= {
            f"ssm_{name}_a.weight": (HEAD_DIM, N_EMBD),
            f"ssm_{name}_b.weight": (WIDTH, HEAD_DIM),
        }
    attention = latent_attention(0) | {
        "indexer.k_norm.weight": (indexer_size,),
        "indexer.k_norm.bias": (indexer_size,),
        "indexer.proj.weight": (indexer_heads, N_EMBD),
        "indexer.attn_k.weight": (indexer_size, N_EMBD),
        "indexer.attn_q_b.weight": (indexer_heads * indexer_size, Q_RANK),
        "indexer_compressor_gate.weight": (indexer_size, N_EMBD),
        "indexer_compressor_ape.weight": (pool, indexer_size),
    }
    rest = experts(n_shared=1)
    for part in ("hc_attn", "hc_ffn"):
        rest |= {
            f"{part}_fn.weight": (n_mixed, n_streams * N_EMBD),
            f"{part}_base.weight": (n_mixed,),
            f"{part}_scale.weight": (3,),
        }
    keys = delta_keys(0) | {
        "attention.indexer.head_count": indexer_heads,
        "attention.indexer.key_length": indexer_size,
        "attention.indexer.top_k": 16,
        "attention.indexer.kpool": pool,
        "attention.indexer.kpool_select_tail": True,
        "hyper_connection.count": n_streams,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
    }
    return Shape(keys, delta_attention(gates), attention, rest, {})


SHAPES: dict[str, Callable[[], Shape]] = {
    "jamba": jamba,
    "minimax-01": minimax_01,
    "kimi-k3": kimi_k3,
    "glm5-next": glm5_next,
}


def write_hybrid(path: Path, arch: str) -> Path:
    """Writes a random model of the architecture `arch`, a key of SHAPES. Returns its
    path."""
    shape = SHAPES[arch]()
    writer = GGUFWriter(path, arch)
    writer.add_name("hybrid")
    writer.add_block_count(len(LAYERS))
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(2)
    writer.add_vocab_size(N_VOCAB)
    for key, value in shape.keys.items():
        add_key(writer, f"{arch}.{key}", value)
    add_tokenizer(writer, N_VOCAB)
    outer: Dims = {
        "token_embd.weight": (N_VOCAB, N_EMBD),
        "output.weight": (N_VOCAB, N_EMBD),
    }
    add_tensors(writer, outer | {"output_norm.weight": (N_EMBD,)} | shape.outer)
    for il, kind in enumerate(LAYERS):
        parts = shape.recurrent if kind == "r" else shape.attention
        layer: Dims = {"attn_norm.weight": (N_EMBD,)} | parts | shape.rest
        add_tensors(writer, {f"blk.{il}.{name}": dims for name, dims in layer.items()})
    return written(writer, path)


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    """Adds a key whose GGUF type depends on the value's Python type: an array, bool,
    uint32 or float32."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def add_tensors(writer: GGUFWriter, dims: Dims) -> None:
    """Adds F32 tensors with random values suited to their names, such as norms near
    one."""
    for name, shape in dims.items():
        writer.add_tensor(
            name,
            f32_weights(Tensor(name, shape, GGMLQuantizationType.F32, 0.0), seed=0),
        )
