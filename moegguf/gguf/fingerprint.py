"""Identifies a trained model by its routers, so that traces and predictors are used with the right one.

Routers are small, and differ between trainings. They are rarely quantised, so the quantisations of one model usually
share a fingerprint, as they share their routing. Reads a few MB, never the experts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import TensorInfo

HEX_DIGITS = 32
_CHUNK_BYTES = 1 << 20


def fingerprint(layout: ExpertLayout) -> str:
    """32 hex digits of a SHA-256 over architecture, sizes and the bytes of all routers, layer by layer.

    Raises ExpertIOError when the file cannot be read.
    """
    digest = hashlib.sha256()
    hparams = layout.hparams
    sizes = (hparams.n_embd, layout.n_vocab, layout.n_layer, layout.n_expert, layout.n_expert_used)
    digest.update(repr((layout.arch, *sizes, [layer.il for layer in layout.layers])).encode())
    for router in layout.routers:
        digest.update(repr((router.il, router.tensor.ggml_type, router.tensor.shape)).encode())
        _hash_bytes(digest, layout.shards[router.shard].path, router.tensor)
    return digest.hexdigest()[:HEX_DIGITS]


def _hash_bytes(digest: hashlib._Hash, path: Path, tensor: TensorInfo) -> None:
    n_left = tensor.n_bytes
    try:
        with open(path, "rb") as file:
            file.seek(tensor.offset)
            while n_left:
                part = file.read(min(n_left, _CHUNK_BYTES))
                if not part:
                    raise ExpertIOError(f"{path.name}: the file ends inside {tensor.name!r}; fetch it again.")
                digest.update(part)
                n_left -= len(part)
    except OSError as error:
        if isinstance(error, ExpertIOError):
            raise
        raise ExpertIOError(f"{path.name}: reading {tensor.name!r} failed ({error.strerror}).") from error
