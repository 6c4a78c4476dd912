"""Tests digests of a model's files. A kept context belongs to one file on this disk
(`weights_digest`).

Learned files belong to every copy of the model (`fingerprint`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_builder import moe

from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.fingerprint import fingerprint, header_digest, weights_digest
from moegguf.gguf.reader import read_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return moe().write(tmp_path / "model.gguf")


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def set_back(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def rewrite(path: Path) -> None:
    before = path.stat()
    # Neither the fingerprint nor the header's digest reads the last byte.
    write(path, path.stat().st_size - 1, b"?")
    set_back(path, before)


def replace_file(path: Path) -> None:
    before, other = path.stat(), path.with_suffix(".other")
    shutil.copy2(path, other)
    other.rename(path)
    set_back(path, before)


def copy_beside(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".copy"))


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda path: None, True),
    "a copy beside it": (copy_beside, True),
    "a write that hides its time": (rewrite, False),
    "a copy in its place that has its times": (replace_file, False),
}


@pytest.mark.parametrize(("change", "is_same"), CHANGES.values(), ids=CHANGES)
def test_weights_digest_depends_on_the_file_and_fingerprint_only_on_content(
    path: Path, change: Callable[[Path], object], is_same: bool
) -> None:
    before = read_layout(path)
    digests = (
        weights_digest(before.shards),
        header_digest(before.shards),
        fingerprint(before),
    )
    change(path)
    after = read_layout(path)
    assert (weights_digest(after.shards) == digests[0]) == is_same
    assert (header_digest(after.shards), fingerprint(after)) == digests[1:]


def test_weights_digest_changes_with_any_tensor_although_times_and_inode_agree(
    path: Path,
) -> None:
    def digest(layout: ExpertLayout) -> str:
        return weights_digest(
            tuple(
                replace(shard, ino=1, mtime_ns=1, ctime_ns=1) for shard in layout.shards
            )
        )

    found, data = {digest(read_layout(path))}, path.read_bytes()
    tensors = read_gguf(path).tensors
    for tensor in tensors:
        write(
            path,
            tensor.offset,
            bytes(
                byte ^ 1
                for byte in data[tensor.offset : tensor.offset + tensor.n_bytes]
            ),
        )
        found.add(digest(read_layout(path)))
        path.write_bytes(data)
    assert len(found) == len(tensors) + 1


def test_header_digest_of_a_truncated_file_raises_expert_io_error(path: Path) -> None:
    layout = read_layout(path)
    os.truncate(path, layout.shards[0].header_bytes - 10)
    with pytest.raises(ExpertIOError, match="the file ends inside the header"):
        header_digest(layout.shards)
