"""Selects the files of a model in a repository by tag, by llama.cpp's rules for `-hf
user/repo[:quant]`.

A tag is a quantisation ("q4_k_m"), the name of a file, or `latest`. This module works
only on paths and does not open files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from moegguf.errors import ModelNotFoundError
from moegguf.gguf.shards import MAX_SHARDS, ShardName, parse_shard_name, shard_path
from moegguf.models.names import DEFAULT_TAG, is_tag

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
MAX_LISTED = 40

_NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_QUANT = re.compile(
    r"(?:^|[.\-_])((?:UD-)?(?:I?Q\d[0-9A-Z_]*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))",
    re.IGNORECASE,
)
_LAST_WORD = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)


@dataclass(frozen=True)
class FileSelection:
    """The files of one model, as paths in the repository."""

    files: tuple[str, ...]  # the shards in order
    mmproj: str | None  # a projector for images

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the shards, then the path of the projector if there is one."""
        return (*self.files, self.mmproj) if self.mmproj else self.files


def select_files(
    paths: Iterable[str], tag: str = DEFAULT_TAG, *, repo: str = "the repository"
) -> FileSelection:
    """Returns the model among `paths` ("folder/name.gguf") that `tag` selects.

    `latest` selects Q4_K_M, else Q8_0, else the first path in sorted order. Raises
    ModelNotFoundError, with the names of up to MAX_LISTED models, if no file matches.
    Also raises ModelNotFoundError if a shard is missing.
    """
    known = sorted(paths)
    models = [path for path in known if is_model(path)]
    firsts = [path for path in models if shard_of(path).number == 1]
    if tag.lower() == DEFAULT_TAG:
        found = (_by_quant(firsts, quant) for quant in DEFAULT_QUANTS)
        first = next(filter(None, found), firsts[0] if firsts else None)
    else:
        first = _by_file_name(models, tag) or _by_quant(firsts, tag)
    if first is None:
        names = [_base(path) for path in firsts]
        if not names:
            raise ModelNotFoundError(
                f"{repo} has no GGUF file; look for a repository with GGUF files of this model."
            )
        some = first_of(names, MAX_LISTED)
        raise ModelNotFoundError(
            f"{repo} has no file for {tag!r}. Available GGUF files: {some}."
        )
    return FileSelection(_all_shards(first, models, repo), _projector(first, known))


def first_of(names: Sequence[str], most: int) -> str:
    """Returns the first `most` names, separated by commas. If there are more names, an
    ellipsis follows."""
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)


def without_incomplete(paths: Iterable[str]) -> list[str]:
    """Returns `paths`, sorted, without the files of models that lack a shard or have
    more than MAX_SHARDS shards."""
    known = sorted(paths)
    complete = set[str]()
    for path in known:
        if shard_of(path).number == 1:
            with suppress(ModelNotFoundError):
                complete.update(_all_shards(path, known, ""))
    return sorted(complete)


def models_in(paths: Iterable[str]) -> tuple[tuple[str, FileSelection], ...]:
    """Returns (tag, files) for each complete model in `paths`, except models that no
    tag selects. Given one of these tags and the files of the complete models,
    `select_files` selects the same files."""
    known = without_incomplete(paths)
    firsts = (path for path in known if is_model(path) and shard_of(path).number == 1)
    selections = (
        FileSelection(_all_shards(path, known, ""), _projector(path, known))
        for path in firsts
    )
    return tuple(
        (tag, selection)
        for selection in selections
        if (tag := _tag_of(selection, known))
    )


def projector_beside(model: str, names: Sequence[str]) -> str | None:
    """Returns the name of the projector for the model file `model`, or None. `names`
    are the files in the model's folder.

    If the folder has no other model, any projector fits. Otherwise the names of the
    model and the projector must be equal apart from case, shard numbers, quantisation,
    "mmproj", and separators at the ends.
    """
    others = [
        name
        for name in names
        if is_model(name) and shard_of(name).prefix != shard_of(model).prefix
    ]
    return _projector(
        model,
        [
            name
            for name in names
            if not others or _plain_name(name) == _plain_name(model)
        ],
    )


def _plain_name(path: str) -> str:
    """Returns a file's name in lower case, without ".gguf", shard numbers,
    quantisation, "mmproj", and separators at the ends."""
    return (
        _QUANT.sub("", shard_of(path).prefix).lower().replace("mmproj", "").strip("-_.")
    )


def is_model(path: str) -> bool:
    """Returns True for the name of a .gguf file, unless the name contains a word for a
    projector, an importance matrix or a draft model."""
    name = _base(path).lower()
    return name.endswith(".gguf") and not any(word in name for word in _NOT_MODELS)


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    return path[:-5] if path.lower().endswith(".gguf") else path


def shard_of(path: str) -> ShardName:
    """Returns the parts of the path or name of a shard, which may end with ".gguf"."""
    return parse_shard_name(_stem(path))


def _by_file_name(models: Sequence[str], tag: str) -> str | None:
    """Returns the path of the file whose name is `tag`, or None. The tag may omit
    ".gguf" and shard numbers, and its case does not matter."""
    wanted = tag.lower().removesuffix(".gguf")
    names = (
        (path, _base(_stem(path)).lower(), _base(shard_of(path).prefix).lower())
        for path in models
    )
    return next((path for path, *known in names if wanted in known), None)


def _by_quant(firsts: Sequence[str], quant: str) -> str | None:
    """Returns the first path in which a dot or dash follows the quantisation, in upper
    or lower case; None if there is none. Searches for a whole word first ("Q4_XS" is
    not a whole word in "IQ4_XS"), then at any position, as llama.cpp does."""
    for start in (r"(?:^|[./_-])", ""):
        pattern = re.compile(start + re.escape(quant) + "[.-]", re.IGNORECASE)
        if found := next((path for path in firsts if pattern.search(path)), None):
            return found
    return None


def _all_shards(first: str, models: Sequence[str], repo: str) -> tuple[str, ...]:
    prefix, _, count = shard_of(first)
    if count <= 1:
        return (first,)
    shards = {
        shard.number: path
        for path in models
        if (shard := shard_of(path))[::2] == (prefix, count)
    }
    if count > MAX_SHARDS:
        raise ModelNotFoundError(
            f"{repo}: {_base(prefix)!r} may have at most {MAX_SHARDS} shards, but has {count}; choose another"
            " quantisation."
        )
    missing = [number for number in range(1, count + 1) if number not in shards]
    if missing:
        names = [shard_path(_base(prefix), number, count) for number in missing]
        raise ModelNotFoundError(
            f"{repo}: {len(missing)} of the {count} shards of {_base(prefix)!r} are missing"
            f" ({first_of(names, 3)}); choose another quantisation."
        )
    return tuple(shards[number] for number in range(1, count + 1))


def _bits(path: str) -> int:
    quant = _LAST_WORD.search(shard_of(path).prefix)
    digits = re.search(r"\d+", quant[1]) if quant else None
    return int(digits[0][:4]) if digits else 0


def _projector(model: str, paths: Iterable[str]) -> str | None:
    """Returns the path of a projector in the model's folder, or in the nearest folder
    above that has one; None if there is none. If there are several, returns the
    projector whose bit width is closest to the model's."""
    folder = model.split("/")[:-1]
    found = []
    for path in paths:
        *above, name = path.split("/")
        is_projector = name.lower().endswith(".gguf") and "mmproj" in name.lower()
        if is_projector and folder[: len(above)] == above:
            found.append((-len(above), abs(_bits(path) - _bits(model)), path))
    return min(found)[2] if found else None


def _tag_of(selection: FileSelection, paths: Sequence[str]) -> str | None:
    """Returns the first of these tags that selects the selection's files among `paths`:
    the quantisation, the name without shard numbers and ".gguf", the whole name,
    `latest`. Returns None if no tag does."""
    first = selection.files[0]
    name = _base(shard_of(first).prefix)
    quants = [
        match[1].upper()
        for match in _QUANT.finditer(_base(name))
        if match.end() == len(name)
    ]
    for tag in (*quants[-1:], name, _base(first), DEFAULT_TAG):
        with suppress(ModelNotFoundError):
            if is_tag(tag) and select_files(paths, tag).files == selection.files:
                return tag
    return None
