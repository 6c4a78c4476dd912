"""Writes the converted network as a GGUF file of architecture `deepseek`
(DeepSeek-MoE's first release).

Among llama.cpp's architectures with a shared expert, only this one computes the rest of
a layer as Llama does. Its attention has no norms or biases, its shared expert has no
gate, and its rotary embedding pairs dimensions in Llama's order. It also multiplies the
router's softmax by `expert_weights_scale`. Tensors that were not converted are copied
byte by byte.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, LlamaFileType
from gguf.constants import GGMLQuantizationType as QType
from gguf.quants import quantize
from torch import Tensor

from recipes.demo.model import round_q4_0
from recipes.moefication.convert import Rounding, Split
from recipes.moefication.network import Mixture, Network, Shape

FILE_TYPES = {
    "q4_0": (QType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q8_0": (QType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "f32": (QType.F32, LlamaFileType.ALL_F32),
}
DENSE_FFN = (".ffn_gate.weight", ".ffn_up.weight", ".ffn_down.weight")


def write(
    path: Path, network: Network, split: Split, source: GGUFReader, quant: str
) -> None:
    """Writes the file. All experts have the type `quant`, and routers are F32. All
    other tensors are as in the source file."""
    writer = GGUFWriter(path, "deepseek")
    writer.add_name("SmolLM2-135M-Instruct as a mixture of experts")
    writer.add_description(
        "Experts clustered by co-activation from a dense model, by moegguf make_lab_model.py"
    )
    writer.add_license("apache-2.0")
    writer.add_file_type(FILE_TYPES[quant][1])
    writer.add_quantization_version(2)
    _add_shape(writer, network, split)
    _copy_tokenizer(writer, source)
    for tensor in source.tensors:
        if not tensor.name.endswith(DENSE_FFN):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for il, layer in enumerate(network.layers):
        assert isinstance(layer.ffn, Mixture)
        _add_mixture(writer, il, layer.ffn, FILE_TYPES[quant][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounding(quant: str) -> Rounding:
    """Returns the function that rounds matrices before fitting. For q4_0, this function
    rounds as the file does. For finer types, it returns a matrix unchanged."""
    return round_q4_0 if quant == "q4_0" else lambda weight: weight


def expert_bytes(shape: Shape, split: Split, quant: str) -> int:
    """Returns the size of one expert's three matrices in bytes."""
    n_values, n_bytes = GGML_QUANT_SIZES[FILE_TYPES[quant][0]]
    return 3 * shape.n_embd * split.n_ff_exp // n_values * n_bytes


def _add_shape(writer: GGUFWriter, network: Network, split: Split) -> None:
    shape = network.shape
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.n_embd_head)
    writer.add_rope_freq_base(shape.rope_freq_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_leading_dense_block_count(0)
    writer.add_expert_count(split.n_expert)
    writer.add_expert_used_count(split.n_expert_used)
    writer.add_expert_shared_count(split.n_expert_shared)
    writer.add_expert_feed_forward_length(split.n_ff_exp)
    writer.add_expert_weights_scale(float(split.n_expert))


def _copy_tokenizer(writer: GGUFWriter, source: GGUFReader) -> None:
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(
                name, field.contents(), field.types[0], sub_type=sub_type
            )


def _add_mixture(writer: GGUFWriter, il: int, layer: Mixture, qtype: QType) -> None:
    def add(name: str, weight: Tensor, qtype: QType) -> None:
        values = np.ascontiguousarray(weight.detach().numpy(), np.float32)
        data = values if qtype == QType.F32 else quantize(values, qtype)
        writer.add_tensor(f"blk.{il}.{name}.weight", data, raw_dtype=qtype)

    shared, size = layer.n_ff_shexp, layer.n_ff_exp
    down = layer.ffn.down
    add("ffn_gate_inp", layer.router, QType.F32)
    add("ffn_gate_exps", layer.ffn.gate[shared:].unflatten(0, (-1, size)), qtype)
    add("ffn_up_exps", layer.ffn.up[shared:].unflatten(0, (-1, size)), qtype)
    add(
        "ffn_down_exps",
        down[:, shared:].unflatten(1, (-1, size)).transpose(0, 1),
        qtype,
    )
    if shared:
        add("ffn_gate_shexp", layer.ffn.gate[:shared], qtype)
        add("ffn_up_shexp", layer.ffn.up[:shared], qtype)
        add("ffn_down_shexp", down[:, :shared], qtype)
