"""Provides model paths that llama.cpp and its bindings can read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moegguf.gguf.reader import StrPath
from moegguf.gguf.shards import parse_shard_name, shard_path, shards_of


class FilePath(str):
    """A path whose `encode` returns the bytes `read_as`, which may differ from the
    characters of the string. llama-cpp-python calls `encode` on a path and passes the
    result to llama.cpp."""

    read_as: bytes

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Returns `read_as`, the path that llama.cpp opens. Ignores the arguments."""
        return self.read_as


@contextmanager
def readable(path: StrPath) -> Iterator[FilePath]:
    """Yields `path` as a FilePath that llama.cpp can read, even if the bytes of the
    path are not valid UTF-8. If the names of several shards are not in the lower case
    that llama.cpp expects, makes a temporary link to each shard. Then `read_as` is the
    path of the first link."""
    given = FilePath(os.fspath(path))
    given.read_as = os.fsencode(path)
    shards = shards_of(Path(path))
    prefix, _, count = parse_shard_name(shards[0].stem)
    names = [shard_path(prefix, number, count) for number in range(1, count + 1)]
    if count == 1 or [shard.name for shard in shards] == names:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="moegguf-shards-") as folder:
        for shard, name in zip(shards, names, strict=False):
            os.symlink(shard.absolute(), os.path.join(folder, name))
        given.read_as = os.fsencode(os.path.join(folder, names[0]))
        yield given
