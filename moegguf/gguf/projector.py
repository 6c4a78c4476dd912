"""Reads the header of a projector file (mmproj): the kind of vision model, its size, and its memory.

A projector turns an image into rows of the text model's width. The file is a GGUF of the architecture "clip"; libmtmd,
which reads it, trusts it: what it aborts on ends a trial load (`moegguf/engine/trial.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moegguf.errors import ModelFormatError
from moegguf.gguf.hparams import Keys
from moegguf.gguf.reader import Shard, read_gguf

MAX_SIDE_PIXELS = 1 << 13
MAX_DIMENSION = 1 << 17
DECODED_BYTES = 192 << 20  # while an image is decoded, at most

# Kinds whose image tokens see each other, so that an image has to be read in one pass: {kind: tokens at most}. Zero:
# from the header. libmtmd decides this in mtmd_decode_use_non_causal().
ONE_PASS_TOKENS = {"gemma3": 0, "gemma4v": 1120, "gemma4uv": 1120, "deepseek4v": 384}

# Kinds with a fixed image size; the others take up to DYNAMIC_PATCHES, 4,096 tokens of 2 x 2 patches.
FIXED_SIZE = {"mlp", "mlp_norm", "ldp", "ldpv2", "gemma3", "gemma3nv", "cogvlm", "janus_pro", "adapter", "yasa2"}
DYNAMIC_PATCHES = 4096 * 4


@dataclass(frozen=True)
class ProjectorHeader:
    """Facts of a projector file. `weight_bytes`: its tensors. `work_bytes`: an upper bound of its compute buffers."""

    shard: Shard
    kind: str
    weight_bytes: int
    n_embd: int
    n_ff: int
    n_patches: int
    one_pass_tokens: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.shard.path

    @property
    def work_bytes(self) -> int:
        """Residual stream, queries, keys, values and the wider of attention and feed-forward, in float32."""
        return 4 * self.n_patches * (6 * self.n_embd + 2 * max(self.n_ff, 2 * self.n_embd))

    @property
    def total_bytes(self) -> int:
        """Memory while an image is read, the image itself at its largest included."""
        return self.weight_bytes + self.work_bytes + DECODED_BYTES


def read_projector(path: str | os.PathLike[str]) -> ProjectorHeader:
    """The header of the projector at `path`.

    Raises ModelNotFoundError, ExpertIOError, and ModelFormatError for a damaged file or one that is no projector for
    images.
    """
    file = read_gguf(Path(path))
    arch = file.metadata.get("general.architecture")
    if arch != "clip":
        raise ModelFormatError(
            f"{file.name} is not a projector for images: its architecture is {arch!r} instead of 'clip';"
            " give the mmproj file that belongs to the model."
        )
    if file.metadata.get("clip.has_vision_encoder") is not True:
        raise ModelFormatError(f"{file.name} is a projector, but not for images; give another mmproj file.")
    kind = file.metadata.get("clip.projector_type") or file.metadata.get("clip.vision.projector_type")
    if not isinstance(kind, str):
        raise ModelFormatError(f"{file.name} does not say which kind of projector it is; fetch it again.")
    keys = Keys("clip.vision", file)
    side, patch = (keys.number(name, None, 1, MAX_SIDE_PIXELS) for name in ("image_size", "patch_size"))
    n_patches = (side // patch) ** 2
    return ProjectorHeader(
        file.shard,
        kind,
        sum(tensor.n_bytes for tensor in file.tensors),
        keys.number("embedding_length", None, 1, MAX_DIMENSION),
        keys.number("feed_forward_length", None, 0, MAX_DIMENSION),  # old files of Qwen2-VL do not know it
        n_patches if kind in FIXED_SIZE else max(n_patches, DYNAMIC_PATCHES),
        ONE_PASS_TOKENS[kind] or n_patches if kind in ONE_PASS_TOKENS else 0,
    )
