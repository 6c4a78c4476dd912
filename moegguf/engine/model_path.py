"""Makes paths of models that llama.cpp and its bindings can read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moegguf.gguf.shards import parse_shard_name, shard_path, shards_of


class FilePath(str):
    """A path whose `encode` returns the bytes `read_as`, whatever its text is. llama-cpp-python encodes paths in this
    way before llama.cpp reads them."""

    read_as: bytes

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Returns the bytes of the path that llama.cpp reads."""
        return self.read_as


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[FilePath]:
    """Yields `path` in a form that llama.cpp can read. The bytes of the path may be invalid UTF-8. If the shards' names
    are not in the lower case that llama.cpp expects, yields the path of a temporary link, and makes such links for all
    shards."""
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
