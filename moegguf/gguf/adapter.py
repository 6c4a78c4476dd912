"""Reads the header of a LoRA adapter (a GGUF file): its size, and its architecture.

llama.cpp reads the rest, and compares the shapes of its matrices with the model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import Shard, read_gguf


@dataclass(frozen=True)
class AdapterHeader:
    """Facts of an adapter. `n_bytes`: its matrices, which stay in memory beside the model."""

    shard: Shard
    n_bytes: int


def read_adapter(path: str | os.PathLike[str], arch: str | None = None) -> AdapterHeader:
    """The header of the adapter at `path`, for a model of the architecture `arch`.

    Raises ModelNotFoundError, ExpertIOError, and ModelFormatError for a damaged file, one that is no LoRA adapter, or
    one for another architecture.
    """
    file = read_gguf(path)
    kind, method, found = (file.metadata.get(key) for key in ("general.type", "adapter.type", "general.architecture"))
    if kind != "adapter" or method != "lora":
        raise ModelFormatError(
            f"{file.name} is not a LoRA adapter: general.type is {kind!r:.40} and adapter.type {method!r:.40}; give a"
            " file that llama.cpp's convert_lora_to_gguf.py has made."
        )
    if arch is not None and found != arch:
        raise ModelFormatError(
            f"{file.name} is an adapter for the architecture {found!r:.40}, but the model's is {arch!r}; give one that"
            " was trained on this model."
        )
    return AdapterHeader(file.shard, sum(tensor.n_bytes for tensor in file.tensors))
