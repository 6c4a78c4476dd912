"""Reads facts from the headers of a model's files: family, size, quantisation,
capabilities. Does not read weights."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from moegguf.errors import MoeggufError
from moegguf.gguf.chat_template import CHATML, capabilities_of
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.projector import ProjectorHeader, read_projector
from moegguf.gguf.reader import GGML_TYPES
from moegguf.models.entry import Details, ModelEntry, NamedModel
from moegguf.models.recipe import usable_parameters
from moegguf.quantities import human_number

# {general.file_type: name}, as in llama.h's llama_ftype
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip

POOLING_RANK = 4  # LLAMA_POOLING_TYPE_RANK
_INFILL_KEYS = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")


def details(entry: ModelEntry) -> Details:
    """Reads the facts about an entry from its files.

    Raises ModelNotFoundError, ModelFormatError or ExpertIOError, as `read_layout` does.
    """
    layout = read_layout(entry.path)
    metadata = layout.metadata
    template = entry.template or layout.chat_template
    tool_template = None if entry.template else layout.tool_template
    total, _ = parameters(layout)
    # Ollama's rules: a model with pooling computes embeddings, and any other model
    # completes text. Our rule: a model with pooling type RANK ranks texts.
    if (pooling := metadata.get(f"{layout.arch}.pooling_type")) is not None:
        capabilities = ["rerank" if pooling == POOLING_RANK else "embedding"]
    else:
        template = template or CHATML  # a conversation needs a template
        able = capabilities_of(template + (tool_template or ""))
        capabilities = [
            "completion",
            *(["vision"] if projector_of(entry) else []),
            *able,
        ]
        if "insert" not in capabilities and any(
            key in metadata for key in _INFILL_KEYS
        ):
            capabilities.append("insert")
    return Details(
        family=layout.arch,
        parameter_size=human_number(total),
        n_parameters=total,
        quantization=quantization(layout),
        n_ctx_train=layout.hparams.n_ctx_train,
        n_embd=layout.hparams.n_embd,
        n_expert=layout.n_expert,
        n_expert_used=layout.n_expert_used,
        capabilities=tuple(capabilities),
        template=template,
        tool_template=tool_template,
        metadata=metadata,
    )


def parameters_of(model: NamedModel) -> dict[str, Any]:
    """Returns the parameters that the model's name sets, and other sampling parameters
    that the model's files contain. If the files are unknown, missing or damaged,
    returns only the parameters that the name sets."""
    own = dict(model.parameters)
    if isinstance(model, ModelEntry) and not model.missing:
        with suppress(MoeggufError):
            return usable_parameters(read_layout(model.path).sampling) | own
    return own


def projector_of(entry: ModelEntry) -> ProjectorHeader | None:
    """Returns the header of an entry's projector. Returns None if there is no projector
    or if its header cannot be read: the model then accepts only text."""
    with suppress(OSError, MoeggufError):
        return read_projector(entry.mmproj) if entry.mmproj else None
    return None


def files_of(entry: ModelEntry) -> dict[str, str]:
    """Returns the files to load with a model, by keyword of `Llama`: projector,
    adapter, draft model. A projector that cannot be read is left out."""
    projector = projector_of(entry)
    beside = {
        "mmproj": projector and projector.path,
        "lora_path": entry.adapter,
        "draft": entry.draft,
    }
    return {name: str(path) for name, path in beside.items() if path}


def parameters(layout: ExpertLayout) -> tuple[int, int]:
    """Returns (number of all parameters, number of parameters that one token uses)."""
    blocks = {name: (n, n_bytes) for name, n, n_bytes in GGML_TYPES.values()}
    total = sum(
        size // blocks[name][1] * blocks[name][0]
        for name, (_, size) in layout.tensor_types.items()
    )
    idle = sum(
        matrix.ne0 * matrix.ne1 * (layer.n_expert - layer.n_expert_used)
        for layer in layout.layers
        for matrix in layer.matrices
    )
    return total, total - idle


def main_type(layout: ExpertLayout) -> str:
    """Returns the name of the tensor type with the most bytes."""
    return max(layout.tensor_types, key=lambda name: layout.tensor_types[name][1])


def quantization(layout: ExpertLayout) -> str:
    """Returns the name of the file type, such as "Q4_K_M". If the file does not state a
    known type, returns the main tensor type."""
    kind = layout.metadata.get("general.file_type")
    known = FILE_TYPES.get(kind) if isinstance(kind, int) else None
    return known or main_type(layout)
