"""Which files of a repository a tag means: llama.cpp's rules for `-hf user/repo[:quant]`, with split sets whole.

A tag is a quantisation ("q4_k_m"), or the name of a file. Works on paths alone: no network, no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from moegguf.errors import ModelNotFoundError
from moegguf.gguf.shards import MAX_SHARDS
from moegguf.models.names import DEFAULT_TAG, is_tag

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
MAX_LISTED = 40

_NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE | re.DOTALL)
_QUANT = re.compile(
    r"(?:^|[.\-_])((?:UD-)?(?:I?Q\d[0-9A-Z_]*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))", re.IGNORECASE
)
_LAST_WORD = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)


@dataclass(frozen=True)
class FileSelection:
    """The shards of a model, first one first, and its projector for images when there is one."""

    files: tuple[str, ...]
    mmproj: str | None


@dataclass(frozen=True)
class _Split:
    prefix: str
    number: int
    count: int


def choose(paths: Iterable[str], tag: str = DEFAULT_TAG, *, repo: str = "the repository") -> FileSelection:
    """The files that `tag` means among `paths` ("folder/name.gguf").

    `latest` takes Q4_K_M, else Q8_0, else the first model. Raises ModelNotFoundError, listing what there is, when no
    file fits, and when a shard of the set is missing.
    """
    known = sorted(paths)
    models = [path for path in known if is_model(path)]
    first = _first(models, tag)
    if first is None:
        raise ModelNotFoundError(_nothing(models, tag, repo))
    return FileSelection(_set_of(first, models, repo), _projector(first, known))


def complete(paths: Iterable[str]) -> list[str]:
    """`paths` without the shards of models that are not all there."""
    known = sorted(paths)
    there: dict[tuple[str, int], set[int]] = {}
    for split in map(_split, known):
        there.setdefault((split.prefix, split.count), set()).add(split.number)
    whole = {key for key, numbers in there.items() if key[1] <= MAX_SHARDS and numbers >= {*range(1, key[1] + 1)}}
    return [path for path in known if ((split := _split(path)).prefix, split.count) in whole]


def models_in(paths: Iterable[str]) -> tuple[tuple[str, FileSelection], ...]:
    """(tag, files) of every model among `paths` whose shards are all there; among those, `choose` of the tag gives the
    files."""
    return _models_in(tuple(complete(paths)))


@lru_cache(maxsize=1024)
def _models_in(known: tuple[str, ...]) -> tuple[tuple[str, FileSelection], ...]:
    """The same files are asked about again and again."""
    openers = (path for path in known if is_model(path) and _split(path).number == 1)
    choices = (FileSelection(_set_of(path, known, ""), _projector(path, known)) for path in openers)
    return tuple((tag, choice) for choice in choices if (tag := _tag_of(choice, known)))


def is_model(path: str) -> bool:
    """Whether the file is a model by its name, and no projector, importance matrix or draft."""
    name = _base(path).lower()
    return name.endswith(".gguf") and not any(word in name for word in _NOT_MODELS)


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    return path[:-5] if path.lower().endswith(".gguf") else path


def _split(path: str) -> _Split:
    match = _SHARD.fullmatch(_stem(path))
    if match is None:
        return _Split(_stem(path), 1, 1)
    return _Split(match["prefix"], int(match["number"]), int(match["count"]))


def _first(models: Sequence[str], tag: str) -> str | None:
    """The file to open, by the first rule that finds one."""
    openers = [path for path in models if _split(path).number == 1]
    if tag.lower() == DEFAULT_TAG:
        found = (_by_quant(openers, quant) for quant in DEFAULT_QUANTS)
        return next((path for path in found if path), openers[0] if openers else None)
    return _by_file_name(models, tag) or _by_quant(openers, tag)


def _by_file_name(models: Sequence[str], tag: str) -> str | None:
    wanted = tag.lower()
    for path in models:
        base = _base(path).lower()
        if wanted in (
            base,
            _stem(base),
            _base(_split(path).prefix).lower(),
            _base(_split(path).prefix).lower() + ".gguf",
        ):
            return path
    return None


def _by_quant(openers: Sequence[str], quant: str) -> str | None:
    """A whole word first ("Q4_XS" is not "IQ4_XS"), then as llama.cpp looks."""
    for start in (r"(?:^|[./_-])", ""):
        pattern = re.compile(start + re.escape(quant) + "[.-]", re.IGNORECASE)
        if found := next((path for path in openers if pattern.search(path)), None):
            return found
    return None


def _set_of(first: str, models: Sequence[str], repo: str) -> tuple[str, ...]:
    """All shards of the model that `first` belongs to."""
    split = _split(first)
    if split.count <= 1:
        return (first,)
    there = {}
    for path in models:
        other = _split(path)
        if (other.prefix, other.count) == (split.prefix, split.count):
            there[other.number] = path
    missing = [number for number in range(1, min(split.count, MAX_SHARDS) + 1) if number not in there]
    if missing or split.count > MAX_SHARDS:
        names = ", ".join(f"{_base(split.prefix)}-{n:05d}-of-{split.count:05d}.gguf" for n in missing[:3])
        raise ModelNotFoundError(
            f"{repo}: {len(missing)} of the {split.count} shards of {_base(split.prefix)!r} are missing"
            f" ({names}{', ...' if len(missing) > 3 else ''}); choose another quantisation."
        )
    return tuple(there[number] for number in range(1, split.count + 1))


def _bits(path: str) -> int:
    word = _LAST_WORD.search(_split(path).prefix)
    digits = re.search(r"\d+", word[1]) if word else None
    return int(digits[0][:4]) if digits else 0


def _projector(model: str, paths: Iterable[str]) -> str | None:
    """The one in the closest folder above the model, then of the closest bit width."""
    folder = model.split("/")[:-1]
    best: tuple[int, int, str] | None = None
    for path in paths:
        if not path.lower().endswith(".gguf") or "mmproj" not in _base(path).lower():
            continue
        own = path.split("/")[:-1]
        rank = (-len(own), abs(_bits(path) - _bits(model)), path)
        if folder[: len(own)] == own and (best is None or rank < best):
            best = rank
    return best[2] if best else None


def _tag_of(choice: FileSelection, paths: Sequence[str]) -> str | None:
    """The shortest tag that means these files among `paths`; None when their name can be no tag."""
    first = choice.files[0]
    name = _base(_split(first).prefix)
    quants = [match[1].upper() for match in _QUANT.finditer(_base(name)) if match.end() == len(name)]
    for tag in (*quants[-1:], name, _base(first), DEFAULT_TAG):
        if not is_tag(tag):
            continue
        try:
            if choose(paths, tag).files == choice.files:
                return tag
        except ModelNotFoundError:
            continue
    return None


def _nothing(models: Sequence[str], tag: str, repo: str) -> str:
    names = [_base(path) for path in models if _split(path).number == 1]
    if not names:
        return f"{repo} has no GGUF file; look for a repository with GGUF files of this model."
    some = ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
    return f"{repo} has no file for {tag!r}. Available GGUF files: {some}."
