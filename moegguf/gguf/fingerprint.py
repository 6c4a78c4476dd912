"""Computes digests that identify a trained model (by its routers), a file (by its
header), or a file on this disk with its current bytes.

A predictor that was trained on a model's routing is used for every file with the same
routers (`fingerprint`). Routers are small, and differ between training runs. They are
rarely quantised. So the quantisations of one model usually share a fingerprint, and
their routing is nearly the same. Saved contexts need the same weights, so they are used
only with the same file on this disk (`weights_digest`): a copy of the file has a
different digest. Of the weights, only the routers and at most 4 KiB of each tensor are
read.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.reader import Shard, read_gguf

HEX_DIGITS = 32
_CHUNK_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 12


def fingerprint(layout: ExpertLayout) -> str:
    """Returns 32 hex digits of a SHA-256 over the architecture, the model's sizes, and
    the types, shapes and bytes of all routers, layer by layer.

    Raises ExpertIOError when the file cannot be read.
    """
    digest = hashlib.sha256()
    sizes = (
        layout.hparams.n_embd,
        layout.n_vocab,
        layout.n_layer,
        layout.n_expert,
        layout.n_expert_used,
    )
    digest.update(
        repr((layout.arch, *sizes, [layer.il for layer in layout.layers])).encode()
    )
    for router in layout.routers:
        tensor = router.tensor
        digest.update(repr((router.il, tensor.ggml_type, tensor.shape)).encode())
        _hash_spans(
            digest,
            layout.shards[router.shard].path,
            [(tensor.offset, tensor.n_bytes)],
            repr(tensor.name),
        )
    return digest.hexdigest()[:HEX_DIGITS]


@functools.lru_cache(maxsize=16)
def header_digest(shards: tuple[Shard, ...]) -> str:
    """Returns 32 hex digits of a SHA-256 over the headers and sizes of all shards. A
    different vocabulary, shape or type results in a different digest. Raises
    ExpertIOError when a file cannot be read."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(repr((shard.n_bytes, shard.header_bytes)).encode())
        _hash_spans(digest, shard.path, [(0, shard.header_bytes)], "the header")
    return digest.hexdigest()[:HEX_DIGITS]


def weights_digest(shards: tuple[Shard, ...]) -> str:
    """Returns 32 hex digits of a SHA-256 over the inodes, sizes and times that the
    shards had when their headers were read. The digest also covers up to 4 KiB from the
    middle of each tensor. Raises ExpertIOError when reading fails.

    Every write changes a file's change time, except on file systems that do not record
    change times. On such file systems, the bytes from the tensors reveal a different
    training or quantisation, because it changes most tensors. A write that changes
    neither these bytes nor the file's size and modification time is not detected there.
    """
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(
            repr((shard.ino, shard.n_bytes, shard.mtime_ns, shard.ctime_ns)).encode()
        )
        sizes = [
            (tensor, min(tensor.n_bytes, _SAMPLE_BYTES))
            for tensor in read_gguf(shard.path).tensors
        ]
        spans = [
            (tensor.offset + (tensor.n_bytes - n_bytes) // 2, n_bytes)
            for tensor, n_bytes in sizes
        ]
        _hash_spans(digest, shard.path, spans, "its tensors")
    return digest.hexdigest()[:HEX_DIGITS]


def _hash_spans(
    digest: hashlib._Hash, path: Path, spans: Sequence[tuple[int, int]], what: str
) -> None:
    """Adds the bytes at each (offset, number of bytes) of `spans` to the digest. First
    announces all reads to the operating system, if it has posix_fadvise(), so the disk
    can perform them in parallel. Raises ExpertIOError if the file ends too early or
    cannot be read; the message calls these bytes `what`."""
    n_missing = 0
    try:
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                for offset, n_bytes in spans:
                    os.posix_fadvise(
                        file.fileno(), offset, n_bytes, os.POSIX_FADV_WILLNEED
                    )
            for offset, n_left in spans:
                file.seek(offset)
                while n_left and (part := file.read(min(n_left, _CHUNK_BYTES))):
                    digest.update(part)
                    n_left -= len(part)
                n_missing += n_left
    except OSError as error:
        raise ExpertIOError(
            f"{path.name}: reading {what} failed ({error.strerror}); check the disk."
        ) from error
    if n_missing:
        raise ExpertIOError(
            f"{path.name}: the file ends inside {what}; fetch it again."
        )
