"""Identifies a trained model by its routers, so that traces and predictors are used with the right one; and a file by
its header.

Routers are small, and differ between trainings. They are rarely quantised, so the quantisations of one model usually
share a fingerprint, as they share their routing. Reads a few MB, never the experts.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import ExpertLayout, Shard

HEX_DIGITS = 32
_CHUNK_BYTES = 1 << 20
_N_SAMPLES, _SAMPLE_BYTES = 32, 1 << 12


def fingerprint(layout: ExpertLayout) -> str:
    """32 hex digits of a SHA-256 over architecture, sizes and the bytes of all routers, layer by layer.

    Raises ExpertIOError when the file cannot be read.
    """
    digest = hashlib.sha256()
    sizes = (layout.hparams.n_embd, layout.n_vocab, layout.n_layer, layout.n_expert, layout.n_expert_used)
    digest.update(repr((layout.arch, *sizes, [layer.il for layer in layout.layers])).encode())
    for router in layout.routers:
        tensor = router.tensor
        digest.update(repr((router.il, tensor.ggml_type, tensor.shape)).encode())
        _hash_bytes(digest, layout.shards[router.shard].path, tensor.offset, tensor.n_bytes, repr(tensor.name))
    return digest.hexdigest()[:HEX_DIGITS]


@functools.lru_cache(maxsize=16)
def header_digest(shards: tuple[Shard, ...]) -> str:
    """32 hex digits of a SHA-256 over the headers of all shards and their sizes: other vocabulary, shapes or types,
    another digest. Raises ExpertIOError when a file cannot be read.
    """
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(repr((shard.n_bytes, shard.header_bytes)).encode())
        _hash_bytes(digest, shard.path, 0, shard.header_bytes, "the header")
    return digest.hexdigest()[:HEX_DIGITS]


def sampled_digest(paths: tuple[Path, ...]) -> str:
    """32 hex digits of a SHA-256 over the sizes and times of files, and samples of their bytes: of other weights with
    the same header another digest. Raises ExpertIOError when a file cannot be read."""
    digest = hashlib.sha256()
    for path in paths:
        info = path.stat()
        digest.update(repr((info.st_size, info.st_mtime_ns)).encode())
        for i in range(_N_SAMPLES):
            begin = info.st_size * i // _N_SAMPLES
            _hash_bytes(digest, path, begin, min(_SAMPLE_BYTES, info.st_size - begin), "its bytes")
    return digest.hexdigest()[:HEX_DIGITS]


def _hash_bytes(digest: hashlib._Hash, path: Path, offset: int, n_left: int, what: str) -> None:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while n_left and (part := file.read(min(n_left, _CHUNK_BYTES))):
                digest.update(part)
                n_left -= len(part)
    except OSError as error:
        raise ExpertIOError(f"{path.name}: reading {what} failed ({error.strerror}).") from error
    if n_left:
        raise ExpertIOError(f"{path.name}: the file ends inside {what}; fetch it again.")
