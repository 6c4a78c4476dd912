"""Reads the header of a LoRA adapter (a GGUF file), checks its architecture and adds up
the sizes of its matrices.

llama.cpp reads the rest of the file, and compares the shapes of the adapter's matrices
with the model's.
"""

from __future__ import annotations

from dataclasses import dataclass

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import Shard, StrPath, read_gguf


@dataclass(frozen=True)
class AdapterHeader:
    """Facts about an adapter file."""

    shard: Shard
    # Bytes of the adapter's matrices, which stay in memory in addition to the model.
    n_bytes: int


def read_adapter(path: StrPath, arch: str | None = None) -> AdapterHeader:
    """Reads the header of the adapter at `path`. `arch` is the model's architecture;
    None: any.

    Raises ModelNotFoundError if the file cannot be opened, and ExpertIOError if reading
    it fails. Raises ModelFormatError for a damaged file, for a file that is not a LoRA
    adapter, and for another architecture.
    """
    file = read_gguf(path)
    kind, method, found = (
        file.metadata.get(key)
        for key in ("general.type", "adapter.type", "general.architecture")
    )
    if kind != "adapter" or method != "lora":
        raise ModelFormatError(
            f"{file.name} is not a LoRA adapter: general.type is {kind!r:.40} and adapter.type {method!r:.40}; give a"
            " file made by llama.cpp's convert_lora_to_gguf.py."
        )
    if arch is not None and found != arch:
        raise ModelFormatError(
            f"{file.name} is an adapter for the architecture {found!r:.40}, but the model's is {arch!r}; give one that"
            " was trained on this model."
        )
    return AdapterHeader(file.shard, sum(tensor.n_bytes for tensor in file.tensors))
