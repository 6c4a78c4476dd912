"""Finds and checks the shards of a model: one file, or NAME-00001-of-0000N.gguf and the
files numbered after it.

Upper and lower case may differ between the names of shards. Every error names the file.
Of the key-values, only `split.*` and `general.*` are compared between shards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from moegguf.errors import ModelFormatError, ModelNotFoundError
from moegguf.gguf.hparams import Keys
from moegguf.gguf.reader import GgufFile, Shard, StrPath, read_gguf

MAX_SHARDS = 1024
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL | re.IGNORECASE)


class ShardName(NamedTuple):
    """The parts of a shard's file name."""

    prefix: str  # path or name before the shard's number
    number: int = 1  # number of the shard, from 1
    n_shards: int = 1


def parse_shard_name(stem: str) -> ShardName:
    """Splits a shard's path or name, given without ".gguf", into its parts. The word
    "of" may be in upper or lower case. A name without shard numbers is treated as shard
    1 of 1."""
    match = _SHARD_NAME.fullmatch(stem)
    if match is None:
        return ShardName(stem)
    prefix, number, count = match.groups()
    return ShardName(prefix, int(number), int(count))


def shard_path(prefix: str, number: int, count: int, suffix: str = ".gguf") -> str:
    """Returns the path of shard `number` (from 1) of `count`. The file's name follows
    llama.cpp's rule for shards, but ends with `suffix`."""
    return f"{prefix}-{number:05d}-of-{count:05d}{suffix}"


def shards_of(path: Path) -> tuple[Path, ...]:
    """Returns `path`, and if this is the first of several shards, the other shards that
    exist in its folder, in order."""
    prefix, number, count = parse_shard_name(path.stem)
    if number != 1:
        return (path,)
    return (
        path,
        *(
            other
            for other in _others(path, prefix, min(count, MAX_SHARDS))
            if os.path.isfile(other)
        ),
    )


def mirror_paths(mirror: StrPath, shards: Sequence[Shard]) -> tuple[Path, ...]:
    """Returns the paths of copies of these shards, whether the copies exist or not.

    `mirror` is the copy of the first shard, or a folder in which the copies have the
    shards' own names. If the name of the first copy ends with -00001-of-N (N shards),
    the other copies are in the same folder, numbered in the same way. If it has any
    other name, the other copies in its folder have the shards' own names.
    """
    first = Path(mirror)
    names = [shard.path.name for shard in shards]
    if first.is_dir():
        return tuple(first / name for name in names)
    prefix, number, count = parse_shard_name(first.stem)
    if (number, count) == (1, len(shards)):
        return (first, *_others(first, prefix, count))
    return (first, *(first.with_name(name) for name in names[1:]))


def _others(first: Path, prefix: str, count: int) -> list[Path]:
    """Returns the paths of shards 2 to `count`, named like the first shard. If a file
    with this name does not exist, but one whose name differs only in upper and lower
    case does, returns the existing file's path."""
    paths = [
        first.with_name(shard_path(prefix, n, count, first.suffix))
        for n in range(2, count + 1)
    ]
    if all(path.exists() for path in paths):
        return paths
    known: dict[str, Path] = {}
    with suppress(OSError):
        known = {path.name.lower(): path for path in first.parent.iterdir()}
    return [
        path if path.exists() else known.get(path.name.lower(), path) for path in paths
    ]


def read_shards(path: StrPath) -> tuple[GgufFile, ...]:
    """Reads all shards of the model whose first (or only) file is at `path`, in order,
    and checks that they belong together.

    Raises ModelNotFoundError when a file is missing, and ExpertIOError when the disk
    fails. Raises ModelFormatError when a file is damaged, is not the shard that its
    name indicates, or belongs to another model.
    """
    path = Path(path)
    first = read_gguf(path)
    prefix, number, named = parse_shard_name(path.stem)
    if number != 1:
        opener = shard_path(prefix, 1, named, path.suffix)
        raise ModelFormatError(
            f"{path.name} is not the first shard of its model; open {opener!r} instead."
        )
    count = Keys("split", first).number("count", 1, 0, MAX_SHARDS) or 1
    if count != named:
        raise ModelFormatError(
            f"{first.name}: its model has {count} files according to the key 'split.count' (1 without this key), but"
            f" {named} according to its name; restore the shards' original names, or join them with"
            " llama-gguf-split --merge."
        )
    shards = (
        first,
        *(_read_member(first, other) for other in _others(path, prefix, count)),
    )
    for n, shard in enumerate(shards):
        if (
            count > 1
            and (found := Keys("split", shard).number("no", -1, -1, MAX_SHARDS)) != n
        ):
            if "split.no" not in shard.metadata:
                raise ModelFormatError(
                    f"shard {shard.name}: key 'split.no' is missing; fetch the shard again."
                )
            raise ModelFormatError(
                f"shard {shard.name}: key 'split.no' must be {n}, but is {found}; shards were swapped or renamed, so"
                " restore their original names."
            )
    return shards


def _read_member(first: GgufFile, path: Path) -> GgufFile:
    """Reads a shard after the first. Raises ModelNotFoundError if the file is missing.
    Raises ModelFormatError if the value of a shared key, such as `general.*`, differs
    from the value in `first`. llama.cpp checks that no tensor is missing."""
    if not path.exists():
        raise ModelNotFoundError(
            f"shard {path.name!r} is missing from the folder of {first.name!r}; fetch it as well."
        )
    shard = read_gguf(path)
    for key, value in shard.metadata.items():
        shared = key.startswith("general.") or key in (
            "split.count",
            "split.tensors.count",
        )
        expected = first.metadata.get(key, value)
        if shared and value != expected:
            raise ModelFormatError(
                f"shard {path.name}: key '{key}' is {value!s:.40}, but the first shard has {expected!s:.40};"
                " it comes from another model or quantisation, so fetch all shards of one model."
            )
    return shard
