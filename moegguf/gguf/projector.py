"""Reads the header of a projector file (mmproj): the kind of projector, its size, and
the memory that it needs.

A projector turns an image into vectors of the text model's width. The file is a GGUF of
the architecture "clip". libmtmd does not check the file and may abort. A trial load in
a separate process (`moegguf/engine/trial.py`) detects this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moegguf.errors import ModelFormatError
from moegguf.gguf.hparams import Keys
from moegguf.gguf.reader import Shard, StrPath, read_gguf

MAX_SIDE_PIXELS = 1 << 13
MAX_DIMENSION = 1 << 17
DECODED_BYTES = 192 << 20  # maximum number of bytes needed while an image is decoded

# Kinds whose image tokens attend to each other, so that one pass must contain the whole
# image: {kind: maximum number of tokens of an image}. Zero: the number is computed from
# the header. libmtmd lists the kinds in mtmd_decode_use_non_causal().
ONE_PASS_TOKENS = {"gemma3": 0, "gemma4v": 1120, "gemma4uv": 1120, "deepseek4v": 384}

# Kinds with a fixed image size. Other kinds are assumed to accept images of up to
# DYNAMIC_PATCHES patches (4,096 tokens of 2 x 2 patches), or of the header's image size
# if that is larger.
FIXED_SIZE = {
    "mlp",
    "mlp_norm",
    "ldp",
    "ldpv2",
    "gemma3",
    "gemma3nv",
    "cogvlm",
    "janus_pro",
    "adapter",
    "yasa2",
}
DYNAMIC_PATCHES = 4096 * 4


@dataclass(frozen=True)
class ProjectorHeader:
    """Facts about a projector file."""

    shard: Shard
    kind: str
    weight_bytes: int  # bytes of the projector's tensors
    n_embd: int
    n_ff: int
    n_patches: int  # maximum number of patches in an image
    # Maximum number of image tokens that must be in the same pass; 0: images may be
    # split.
    one_pass_tokens: int

    @property
    def path(self) -> Path:
        """The path of the projector file."""
        return self.shard.path

    @property
    def work_bytes(self) -> int:
        """An upper bound on the bytes of the compute buffers: residual stream, queries,
        keys, values and the wider of attention and feed-forward, in float32."""
        return (
            4 * self.n_patches * (6 * self.n_embd + 2 * max(self.n_ff, 2 * self.n_embd))
        )

    @property
    def total_bytes(self) -> int:
        """The memory in bytes needed while an image is read: weights, compute buffers,
        and the decoded image at its largest."""
        return self.weight_bytes + self.work_bytes + DECODED_BYTES


def read_projector(path: StrPath) -> ProjectorHeader:
    """Reads the header of the projector at `path`.

    Raises ModelNotFoundError if the file cannot be opened, and ExpertIOError if reading
    it fails. Raises ModelFormatError for a damaged file, and for a file that is not a
    projector for images.
    """
    file = read_gguf(Path(path))
    arch = file.metadata.get("general.architecture")
    if arch != "clip":
        raise ModelFormatError(
            f"{file.name} is not a projector for images: its architecture is {arch!r:.40} instead of 'clip';"
            " give the mmproj file that belongs to the model."
        )
    if file.metadata.get("clip.has_vision_encoder") is not True:
        raise ModelFormatError(
            f"{file.name} is not a projector for images: key 'clip.has_vision_encoder' is not true; give the mmproj"
            " file of a vision model."
        )
    kind = file.metadata.get("clip.projector_type") or file.metadata.get(
        "clip.vision.projector_type"
    )
    if not isinstance(kind, str):
        raise ModelFormatError(
            f"{file.name}: key 'clip.projector_type' or 'clip.vision.projector_type' must be a text, but neither is"
            " one; fetch the file again."
        )
    keys = Keys("clip.vision", file)
    side, patch = (
        keys.number(name, None, 1, MAX_SIDE_PIXELS)
        for name in ("image_size", "patch_size")
    )
    n_patches = (side // patch) ** 2
    return ProjectorHeader(
        file.shard,
        kind,
        sum(tensor.n_bytes for tensor in file.tensors),
        keys.number("embedding_length", None, 1, MAX_DIMENSION),
        # 0 in old Qwen2-VL files.
        keys.number("feed_forward_length", None, 0, MAX_DIMENSION),
        n_patches if kind in FIXED_SIZE else max(n_patches, DYNAMIC_PATCHES),
        ONE_PASS_TOKENS[kind] or n_patches if kind in ONE_PASS_TOKENS else 0,
    )
