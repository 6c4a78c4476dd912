"""Writes random image projectors (mmproj): a small vision transformer, and the matrices
that map to a text model.

libmtmd treats the kinds in PROJECTORS differently. "mlp" (LLaVA) produces a fixed
number of tokens per image, with causal attention. "gemma3" pools patches, and all
tokens of an image attend to each other. "qwen2vl_merger" produces a number of tokens
that depends on the image's size, with M-RoPE positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

PROJECTORS = ("mlp", "gemma3", "qwen2vl_merger")
N_EMBD, N_HEAD, N_FF, N_LAYER = 32, 2, 64, 2
PATCH_SIZE = 8
IMAGE_SIZE = 64
MERGE = 2  # MERGE x MERGE patches become one token, in gemma3 and qwen2vl_merger

Dims = tuple[int, ...]


def write_projector(
    path: Path | str, kind: str, n_embd_text: int, *, seed: int = 0
) -> Path:
    """Writes a random projector for a text model of width `n_embd_text`. Returns the
    path of the file.

    Raises ValueError if `kind` is not in PROJECTORS.
    """
    if kind not in PROJECTORS:
        raise ValueError(
            f"a projector is one of {', '.join(PROJECTORS)}, but is {kind!r}"
        )
    writer = GGUFWriter(path, "clip")
    random = np.random.default_rng(seed)
    _add_metadata(writer, kind, n_embd_text)
    for name, dims in _names_and_dims(kind, n_embd_text):
        writer.add_tensor(name, _weights(name, dims, random))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_metadata(writer: GGUFWriter, kind: str, n_embd_text: int) -> None:
    writer.add_name(f"random {kind}")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(kind)
    writer.add_vision_projection_dim(n_embd_text)
    writer.add_vision_embedding_length(N_EMBD)
    writer.add_vision_head_count(N_HEAD)
    writer.add_vision_feed_forward_length(N_FF)
    writer.add_vision_block_count(N_LAYER)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_patch_size(PATCH_SIZE)
    writer.add_vision_image_size(IMAGE_SIZE)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_use_gelu(True)
    if kind == "gemma3":
        writer.add_vision_projector_scale_factor(MERGE)


def _names_and_dims(kind: str, n_embd_text: int) -> Iterator[tuple[str, Dims]]:
    yield "v.patch_embd.weight", (N_EMBD, 3, PATCH_SIZE, PATCH_SIZE)
    # Each of two video frames has a matrix; an image is used as both frames.
    if kind == "qwen2vl_merger":
        yield "v.patch_embd.weight.1", (N_EMBD, 3, PATCH_SIZE, PATCH_SIZE)
    else:
        yield "v.position_embd.weight", ((IMAGE_SIZE // PATCH_SIZE) ** 2, N_EMBD)
    for il in range(N_LAYER):
        for name, rows, columns in (
            ("attn_q", N_EMBD, N_EMBD), ("attn_k", N_EMBD, N_EMBD), ("attn_v", N_EMBD, N_EMBD),
            ("attn_out", N_EMBD, N_EMBD), ("ffn_up", N_FF, N_EMBD), ("ffn_down", N_EMBD, N_FF),
        ):  # fmt: skip
            yield from _linear(f"v.blk.{il}.{name}", rows, columns)
        yield from _norm(f"v.blk.{il}.ln1")
        yield from _norm(f"v.blk.{il}.ln2")
    yield from _norm("v.post_ln")
    if kind == "gemma3":
        yield "mm.input_projection.weight", (N_EMBD, n_embd_text)
        yield "mm.soft_emb_norm.weight", (N_EMBD,)
        return
    n_merged = N_EMBD * MERGE * MERGE if kind == "qwen2vl_merger" else N_EMBD
    yield from _linear("mm.0", n_merged, n_merged)
    yield from _linear("mm.2", n_embd_text, n_merged)


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Dims]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str) -> Iterator[tuple[str, Dims]]:
    yield f"{name}.weight", (N_EMBD,)
    yield f"{name}.bias", (N_EMBD,)


def _weights(name: str, dims: Dims, random: np.random.Generator) -> np.ndarray:
    """Returns random weights: norms near one, small biases, matrices with standard
    deviation gain / sqrt(columns).

    The gain is 3 for the patch embedding and the matrices that map to the text model,
    else 1.
    """
    if len(dims) == 1:
        centre = 0.0 if name.endswith("bias") else 1.0
        return (centre + 0.1 * random.standard_normal(dims)).astype(np.float32)
    columns = int(np.prod(dims[1:]))
    gain = 3.0 if name.startswith(("mm.", "v.patch_embd")) else 1.0
    return (gain / sqrt(columns) * random.standard_normal(dims)).astype(np.float32)
