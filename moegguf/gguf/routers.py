"""Reads a model's routers (the tensors `ffn_gate_inp` and the routers' biases) as
float32 arrays, and the rule that `build_moe_ffn` (llama-graph.cpp) uses to choose
experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from moegguf.errors import ExpertIOError, ModelFormatError
from moegguf.gguf.experts import ExpertLayout, MoeLayer
from moegguf.gguf.reader import GgufFile, TensorInfo
from moegguf.gguf.shards import read_shards

Float32s = npt.NDArray[np.float32]


class Gating(IntEnum):
    """The function that turns a router's logits into probabilities. Names and values
    match llama.cpp's enum llama_expert_gating_func_type."""

    SOFTMAX = 1
    SIGMOID = 2
    # Experts are chosen by their logits; then softmax is applied to the chosen experts'
    # logits.
    SOFTMAX_WEIGHT = 3
    SQRT_SOFTPLUS = 4


# {architecture: function by which llama.cpp chooses experts, whatever the file says}.
# llama4 chooses by the logits, and their sigmoid has the same order.
FIXED_GATING = {
    "gpt-oss": Gating.SOFTMAX_WEIGHT,
    **dict.fromkeys(
        ("llama4", "grovemoe", "mimo2", "nemotron_h", "nemotron_h_moe"), Gating.SIGMOID
    ),
}
# Gating of these architectures if the file has no valid expert_gating_func. The default
# elsewhere is softmax, except for the deepseek2 model below.
DEFAULT_GATING = dict.fromkeys(
    (
        "afmoe",
        "cohere2moe",
        "glm-dsa",
        "glm4moe",
        "glm5-next",
        "hy_v3",
        "laguna",
        "step35",
    ),
    Gating.SIGMOID,
)
# Vocabulary size and possible numbers of layers of the one deepseek2 model (GLM 4.7
# Lite) that uses sigmoid although its file has no expert_gating_func.
GLM_VOCAB = 154880
GLM_LAYERS = (47, 48)


@dataclass(frozen=True)
class Router:
    """One layer's router."""

    n_expert_used: int
    matrix: Float32s  # (n_expert, n_embd)
    logit_bias: Float32s | None = None  # (n_expert,) added to the logits
    # (n_expert,) added to the probabilities when experts are chosen, but not when their
    # outputs are weighted
    choice_bias: Float32s | None = None


@dataclass(frozen=True)
class Routers:
    """The routers of a model. Layers in which the token's id alone determines the
    experts, such as the first layers of deepseek4, have no entry.

    If n_group > 1, the experts of a layer are divided into n_group groups. A token's
    experts are then chosen from the n_group_used groups that score best for the token.
    """

    gating: Gating
    routers: Mapping[int, Router]  # {il: router}
    n_group: int = 1
    n_group_used: int = 1


def read_routers(layout: ExpertLayout) -> Routers:
    """Reads the routers of the model with this layout.

    Raises ModelFormatError, for example when a router is missing, its shape does not
    fit the metadata, or it holds numbers that are not finite. Raises ExpertIOError when
    a weight cannot be read from disk.
    """
    tensors = {
        t.name: (file, t)
        for file in read_shards(layout.shards[0].path)
        for t in file.tensors
    }
    routers = {}
    for layer in layout.layers:
        if f"blk.{layer.il}.ffn_gate_tid2eid.weight" not in tensors:
            routers[layer.il] = _read_router(layout, layer, tensors)
    n_group = max(1, layout.number("expert_group_count", 1))
    # a file without groups of experts may have 0 as expert_group_used_count
    n_used = layout.number("expert_group_used_count", 1) if n_group > 1 else 1
    return Routers(read_gating(layout), routers, n_group, n_used)


def read_gating(layout: ExpertLayout) -> Gating:
    """Returns the gating function of the model."""
    if layout.arch in FIXED_GATING:
        return FIXED_GATING[layout.arch]
    found = layout.number("expert_gating_func")
    if found in list(Gating):
        return Gating(found)
    if (
        layout.arch == "deepseek2"
        and layout.n_layer in GLM_LAYERS
        and layout.n_vocab == GLM_VOCAB
    ):
        return Gating.SIGMOID
    return DEFAULT_GATING.get(layout.arch, Gating.SOFTMAX)


def _read_router(
    layout: ExpertLayout,
    layer: MoeLayer,
    tensors: dict[str, tuple[GgufFile, TensorInfo]],
) -> Router:
    def read(name: str, *shape: int) -> Float32s | None:
        found = tensors.get(f"blk.{layer.il}.{name}")
        return None if found is None else _read_tensor(*found, shape)

    matrix = read("ffn_gate_inp.weight", layout.hparams.n_embd, layer.n_expert)
    if matrix is None:
        raise ModelFormatError(
            f"{layout.shards[0].path.name}: layer {layer.il} has experts, but no tensor"
            f" 'blk.{layer.il}.ffn_gate_inp.weight'; its routing cannot be predicted with routers, so choose"
            " another predictor."
        )
    if layout.arch == "gemma4":
        matrix = _for_expert_inputs(
            matrix,
            read("ffn_gate_inp.scale", layout.hparams.n_embd),
            read("pre_ffw_norm_2.weight", layout.hparams.n_embd),
        )
    return Router(
        layer.n_expert_used,
        matrix,
        read("ffn_gate_inp.bias", layer.n_expert),
        read("exp_probs_b.bias", layer.n_expert),
    )


def _for_expert_inputs(
    matrix: Float32s, scale: Float32s | None, norm: Float32s | None
) -> Float32s:
    """Returns Gemma 4's router for the input of the experts, which the store records
    as the router's input. Gemma 4 multiplies the same normalised values by `scale` /
    sqrt(n_embd) for the router, and by `norm` for the experts. Returns `matrix` if one
    of the two is missing. A column whose `norm` is 0 becomes 0."""
    if scale is None or norm is None:
        return matrix
    factors = np.zeros_like(scale)
    np.divide(scale, norm * np.float32(len(norm) ** 0.5), out=factors, where=norm != 0)
    return matrix * factors


def _read_tensor(
    file: GgufFile, tensor: TensorInfo, shape: tuple[int, ...]
) -> Float32s:
    """Returns the tensor as float32. The array's shape is `shape` reversed: GGUF lists
    the dimension with the shortest stride first, whereas numpy lists the dimension with
    the longest stride first."""
    if tensor.shape != shape:
        raise file.tensor_error(
            tensor, f"its shape must be {shape}, but is {tensor.shape}"
        )
    try:
        with open(file.shard.path, "rb") as stream:
            if not file.shard.is_as_read(stream.fileno()):
                raise ModelFormatError(
                    f"{file.name} changed while it was being read; open the model again."
                )
            stream.seek(tensor.offset)
            data = np.frombuffer(stream.read(tensor.n_bytes), np.uint8)
    except OSError as error:
        raise ExpertIOError(
            f"{file.name}: reading '{tensor.name}' failed ({error}); check the disk."
        ) from error
    if data.size != tensor.n_bytes:
        raise ModelFormatError(
            f"{file.name}: the file ends inside tensor '{tensor.name}'; fetch it again."
        )
    if numbers := {"F32": np.float32, "F16": np.float16}.get(tensor.type_name):
        values = data.view(numbers)
    else:
        # Dequantizes types that numpy lacks; a slow import.
        from gguf import GGMLQuantizationType, quants

        try:
            values = quants.dequantize(
                data.reshape(*shape[:0:-1], -1), GGMLQuantizationType(tensor.ggml_type)
            )
        except (ValueError, NotImplementedError) as error:
            raise file.tensor_error(
                tensor, f"type {tensor.type_name} cannot be read here ({error})"
            ) from error
    out = np.ascontiguousarray(values, np.float32).reshape(shape[::-1])
    if not np.isfinite(out).all():
        raise file.tensor_error(tensor, "it holds numbers that are not finite")
    return out
