"""Writes a trained model as a GGUF file: first in F32, then quantised by llama.cpp."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from moegguf.native import library
from recipes.demo.model import DemoModel, Shape
from recipes.demo.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    PRE_TOKENIZER,
    SPECIALS,
    special_id,
)

DESCRIPTION = (
    "A very small Mixture-of-Experts model that ships with moegguf, so that its cache can be seen at work. "
    "Trained from scratch on freely licensed system texts and on questions and answers about moegguf."
)
LICENCE = "mit"
LAYER_NAMES = {
    "attn_norm.weight": "attn_norm.weight",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.q_bias": "attn_q.bias",
    "attn.k_bias": "attn_k.bias",
    "attn.v_bias": "attn_v.bias",
    "attn.out": "attn_output.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "moe.router": "ffn_gate_inp.weight",
    "moe.gate_exps": "ffn_gate_exps.weight",
    "moe.up_exps": "ffn_up_exps.weight",
    "moe.down_exps": "ffn_down_exps.weight",
    "moe.gate_shexp": "ffn_gate_shexp.weight",
    "moe.up_shexp": "ffn_up_shexp.weight",
    "moe.down_shexp": "ffn_down_shexp.weight",
    "moe.router_shexp": "ffn_gate_inp_shexp.weight",
}
TOP_NAMES = {
    "token_embd": "token_embd.weight",
    "output_norm.weight": "output_norm.weight",
    "output": "output.weight",
}


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a parameter: layers.3.moe.router becomes
    blk.3.ffn_gate_inp.weight."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, il, rest = name.split(".", 2)
    return f"blk.{il}.{LAYER_NAMES[rest]}"


def add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Adds the hyperparameters that llama.cpp reads for qwen2moe to the metadata."""
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff_exp)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_freq_base(shape.rope_freq_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_expert_used)
    writer.add_expert_feed_forward_length(shape.n_ff_exp)
    writer.add_expert_shared_feed_forward_length(shape.n_ff_shexp)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Adds the vocabulary, merges, special tokens and chat template to the metadata."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL
            for t in tokens
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(special_id(tokenizer, IM_END))
    writer.add_bos_token_id(special_id(tokenizer, END_OF_TEXT))
    writer.add_pad_token_id(special_id(tokenizer, END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_f32(
    path: Path, model: DemoModel, tokenizer: Tokenizer, name: str = "moegguf demo"
) -> None:
    """Writes the trained model as an F32 GGUF file, without rounding. `name` is the
    model's name in the file."""
    writer = gguf.GGUFWriter(path, "qwen2moe")
    writer.add_name(name)
    writer.add_description(DESCRIPTION)
    writer.add_license(LICENCE)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    # Greedy by default, because a model this small makes more mistakes if tokens are
    # sampled
    writer.add_sampling_temp(0.0)
    add_shape(writer, model.shape)
    add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        writer.add_tensor(
            gguf_name(name), weight.to(torch.float32).numpy().astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, target: Path) -> None:
    """Quantises a file with llama.cpp: the embedding and the output matrix in Q8_0, the
    other matrices in Q4_0. Routers, norms and biases stay F32. Raises RuntimeError."""
    llama_cpp = library.llama_cpp()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.token_embedding_type = params.output_tensor_type = llama_cpp.GGML_TYPE_Q8_0
    if (
        llama_cpp.llama_model_quantize(
            str(source).encode(), str(target).encode(), params
        )
        != 0
    ):
        raise RuntimeError(f"llama.cpp could not quantise {source}")
