"""Names and dimensions of the tensors of Gemma 4, as the pinned llama.cpp loads them
(src/models/gemma4.cpp). The names of a layer's tensors omit the prefix "blk.N.".
Dimensions are in numpy's order.
"""

from __future__ import annotations

from tools.models.hybrids import TABLE, Named
from tools.models.shapes import Shape

ROPE_FACTORS = "rope_freqs.weight"


def outer(shape: Shape) -> Named:
    """Yields the tensors outside layers that other architectures lack: RoPE's factors,
    and the table of embeddings for each layer with its projection."""
    yield ROPE_FACTORS, (shape.n_embd_head // 2,)
    if shape.n_embd_per_layer:
        width = shape.n_embd_per_layer * shape.n_layer
        yield TABLE, (shape.n_vocab, width)
        yield "per_layer_model_proj.weight", (width, shape.n_embd)
        yield "per_layer_proj_norm.weight", (shape.n_embd_per_layer,)


def layer(shape: Shape, il: int) -> Named:
    """Yields the tensors of one layer."""
    yield from _attention(shape, il)
    for name in ("ffn_norm", "post_ffw_norm", "post_ffw_norm_1", "post_ffw_norm_2"):
        yield f"{name}.weight", (shape.n_embd,)
    yield "pre_ffw_norm_2.weight", (shape.n_embd,)
    yield "ffn_gate.weight", (shape.n_ff, shape.n_embd)
    yield "ffn_up.weight", (shape.n_ff, shape.n_embd)
    yield "ffn_down.weight", (shape.n_embd, shape.n_ff)
    yield "ffn_gate_inp.weight", (shape.n_expert, shape.n_embd)
    yield "ffn_gate_inp.scale", (shape.n_embd,)
    yield (
        "ffn_gate_up_exps.weight",
        (shape.n_expert, 2 * shape.n_ff_exp, shape.n_embd),
    )
    yield "ffn_down_exps.weight", (shape.n_expert, shape.n_embd, shape.n_ff_exp)
    yield "ffn_down_exps.scale", (shape.n_expert,)
    if shape.n_embd_per_layer:
        yield "inp_gate.weight", (shape.n_embd_per_layer, shape.n_embd)
        yield "proj.weight", (shape.n_embd, shape.n_embd_per_layer)
        yield "post_norm.weight", (shape.n_embd,)
    yield "layer_output_scale.weight", (1,)


def _attention(shape: Shape, il: int) -> Named:
    """Yields the attention tensors of a layer.

    Layers with full attention use their keys as values. The last layers use the keys
    and values of earlier layers.
    """
    head = shape.head(il)
    yield "attn_norm.weight", (shape.n_embd,)
    yield "attn_q.weight", (shape.n_head * head, shape.n_embd)
    yield "attn_q_norm.weight", (head,)
    if il < shape.n_layer - shape.n_layer_shared_kv:
        n_kv = shape.head_kv(il) * head
        yield "attn_k.weight", (n_kv, shape.n_embd)
        yield "attn_k_norm.weight", (head,)
        if shape.mixer(il) == "w":
            yield "attn_v.weight", (n_kv, shape.n_embd)
    yield "attn_output.weight", (shape.n_embd, shape.n_head * head)
    yield "post_attention_norm.weight", (shape.n_embd,)
