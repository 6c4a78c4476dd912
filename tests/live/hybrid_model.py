"""A random model with a recurrent state: LFM2's shape, short convolutions and attention in turn, with experts."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import ExpertGatingFuncType
from running import written

from tools.models.writer import add_tokenizer

N_EMBD, N_HEAD, N_HEAD_KV, N_HEAD_DIM, N_FF, N_EXPERT, N_VOCAB, L_CACHE = 128, 4, 2, 32, 64, 8, 1024, 3
KV_HEADS = [0, N_HEAD_KV, 0, N_HEAD_KV]  # of each layer; none: a convolution
N_DENSE = 1


def write_hybrid(path: Path) -> Path:
    """Writes it, in F32."""
    writer, random = GGUFWriter(path, "lfm2moe"), np.random.default_rng(0)
    writer.add_name("hybrid")
    writer.add_block_count(len(KV_HEADS))
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(2 * N_FF)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(2)
    writer.add_leading_dense_block_count(N_DENSE)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(N_VOCAB)
    writer.add_shortconv_l_cache(L_CACHE)
    add_tokenizer(writer, N_VOCAB)

    def add(name: str, *shape: int) -> None:
        is_norm = "norm" in name
        values = np.ones(shape) if is_norm else random.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", N_VOCAB, N_EMBD)
    add("token_embd_norm.weight", N_EMBD)
    for il, n_kv in enumerate(KV_HEADS):
        parts = {"attn_norm": (N_EMBD,), "ffn_norm": (N_EMBD,)}
        if n_kv:
            parts |= {"attn_q": (N_EMBD, N_EMBD), "attn_output": (N_EMBD, N_EMBD)}
            parts |= {"attn_k": (n_kv * N_HEAD_DIM, N_EMBD), "attn_v": (n_kv * N_HEAD_DIM, N_EMBD)}
            parts |= {"attn_q_norm": (N_HEAD_DIM,), "attn_k_norm": (N_HEAD_DIM,)}
        else:
            parts |= {"shortconv.conv": (N_EMBD, L_CACHE), "shortconv.in_proj": (3 * N_EMBD, N_EMBD)}
            parts |= {"shortconv.out_proj": (N_EMBD, N_EMBD)}
        if il < N_DENSE:
            parts |= {"ffn_gate": (2 * N_FF, N_EMBD), "ffn_up": (2 * N_FF, N_EMBD), "ffn_down": (N_EMBD, 2 * N_FF)}
        else:
            parts |= {f"ffn_{name}_exps": (N_EXPERT, N_FF, N_EMBD) for name in ("gate", "up")}
            parts |= {"ffn_down_exps": (N_EXPERT, N_EMBD, N_FF), "ffn_gate_inp": (N_EXPERT, N_EMBD)}
            add(f"blk.{il}.exp_probs_b.bias", N_EXPERT)
        for name, shape in parts.items():
            add(f"blk.{il}.{name}.weight", *shape)
    return written(writer, path)
