"""Which trained model a file holds, told by its routers: what traces and predictors are checked against.

Routers are small, and no two trainings give the same. They are rarely quantised, so the quantisations of one model
usually share a fingerprint, as they share their routing. Reads a few MB, never the experts.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from moegguf.errors import ExpertIOError
from moegguf.experts import ExpertLayout
from moegguf.gguf_file import TensorInfo
from moegguf.splits import read_shards

HEX_DIGITS = 32
_CHUNK_BYTES = 1 << 20
_ROUTER = re.compile(r"blk\.(\d{1,6})\.ffn_gate_inp\.weight")


def fingerprint(layout: ExpertLayout) -> str:
    """32 hex digits of a SHA-256 over architecture, sizes and the bytes of all routers, layer by layer.

    Raises ModelNotFoundError or ModelFormatError when the file has changed since the layout was read so that it no
    longer is a model, ExpertIOError when it cannot be read.
    """
    digest = hashlib.sha256()
    hparams = layout.hparams
    sizes = (hparams.n_embd, layout.n_vocab, layout.n_layer, layout.n_expert, layout.n_expert_used)
    digest.update(repr((layout.arch, *sizes, [layer.il for layer in layout.layers])).encode())
    for il, path, router in _routers(layout):
        digest.update(repr((il, router.ggml_type, router.shape)).encode())
        _hash_bytes(digest, path, router)
    return digest.hexdigest()[:HEX_DIGITS]


def _routers(layout: ExpertLayout) -> list[tuple[int, Path, TensorInfo]]:
    """(layer, shard, tensor) of each layer's router, in order."""
    found = [
        (int(match[1]), file.path, tensor)
        for file in read_shards(layout.shards[0].path)
        for tensor in file.tensors
        if (match := _ROUTER.fullmatch(tensor.name)) and int(match[1]) < layout.n_layer
    ]
    return sorted(found, key=lambda router: router[0])


def _hash_bytes(digest: hashlib._Hash, path: Path, tensor: TensorInfo) -> None:
    left = tensor.n_bytes
    try:
        with open(path, "rb") as file:
            file.seek(tensor.offset)
            while left:
                part = file.read(min(left, _CHUNK_BYTES))
                if not part:
                    raise ExpertIOError(f"{path.name}: the file ends inside {tensor.name!r}; fetch it again.")
                digest.update(part)
                left -= len(part)
    except OSError as error:
        if isinstance(error, ExpertIOError):
            raise
        raise ExpertIOError(f"{path.name}: reading {tensor.name!r} failed ({error.strerror}).") from error
