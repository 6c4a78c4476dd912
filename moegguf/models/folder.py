"""Models in folders: the demo in the package, those in MOEGGUF_MODELS, and the only one of a folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from moegguf.errors import ModelNameError, ModelNotFoundError
from moegguf.gguf.shards import parse_shard_name, shards_of
from moegguf.models.entry import ModelEntry, Source, digest_of, modified_at, size_of
from moegguf.models.names import DEFAULT_TAG, parse_name
from moegguf.models.selection import is_model, projector_beside
from moegguf.package import package_folders
from moegguf.settings import models_folder

DEMO_NAME = "demo"
DEMO_FILE = "moegguf-demo-Q4_0.gguf"
MAX_NEIGHBOURS = 4096  # files of a folder among which a projector is looked for


def demo_path() -> Path | None:
    """The model that ships with the package; None when this installation has none."""
    paths = (folder / "demo" / DEMO_FILE for folder in package_folders())
    return next((path for path in paths if path.is_file()), None)


def demo_models(text: str | None = None) -> Iterator[ModelEntry]:
    """The model that ships with the package, where it is there; with `text`, if that names it. Raises
    ModelNotFoundError when `text` does and this installation has none."""
    if text is not None and text.lower() not in (DEMO_NAME, f"{DEMO_NAME}:{DEFAULT_TAG}"):
        return
    if path := demo_path():
        yield file_entry(path, "demo", f"{DEMO_NAME}:{DEFAULT_TAG}")
    elif text is not None:
        raise ModelNotFoundError(
            f"the demo model ({DEMO_FILE}) is not in this installation; install moegguf again, or name another model."
        )


def models_by_name() -> dict[str, Path]:
    """{name in lower case: file} of the models in MOEGGUF_MODELS and one level of folders below it."""
    folder = models_folder()
    if not folder.is_dir():
        return {}
    return _models_in([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")])


def folder_models(text: str | None = None) -> Iterator[ModelEntry]:
    """The models in MOEGGUF_MODELS whose file names can be names of models; with `text` the one that it names, with or
    without ".gguf", a shard's number and the tag `latest`.

    Raises ModelNameError and OSError for that one, when it has no name or cannot be read.
    """
    keys = None if text is None else {name_key(text), name_key(text.lower().removesuffix(f":{DEFAULT_TAG}"))}
    for key, path in models_by_name().items():
        known = {key, name_key(path.stem)}
        if keys is None or keys & (known | set(map(_as_name, known))):
            with suppress(*() if keys else (ModelNameError, OSError)):
                yield file_entry(path, "folder", parse_name(_as_name(path.stem[: len(key)])).canonical)


def file_name(path: Path) -> str:
    """The name of a model by that of its first file. Raises ModelNameError when that is none."""
    return parse_name(_as_name(parse_shard_name(path.stem).prefix)).canonical


def _as_name(text: str) -> str:
    """With dashes in place of characters that names may not have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)


def only_model(folder: Path) -> Path:
    """The model in `folder`. Raises ModelNotFoundError when there is none, or more than one."""
    files = list(_models_in(folder.glob("*.gguf")).values())
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelNotFoundError(f"the folder {str(folder)!r} has no GGUF file; give the path of one.")
    some = ", ".join(repr(file.name) for file in files[:3]) + (", ..." if len(files) > 3 else "")
    raise ModelNotFoundError(f"the folder {str(folder)!r} has {len(files)} models; give the path of one: {some}.")


def file_entry(path: Path, source: Source, name: str) -> ModelEntry:
    """The model whose first (or only) file is at `path`. Raises OSError when it cannot be read."""
    files = shards_of(path)
    names = [file.name for file in itertools.islice(path.parent.glob("*.gguf"), MAX_NEIGHBOURS)]
    found = projector_beside(path.name, names)
    mmproj = path.with_name(found) if found else None
    size_bytes = size_of((*files, mmproj) if mmproj else files)
    return ModelEntry(name, source, files, size_bytes, digest_of(files), modified_at(path), mmproj)


def name_key(name: str) -> str:
    """Equal for names in MOEGGUF_MODELS that mean the same file."""
    return name.lower().removesuffix(".gguf")


def _models_in(files: Iterable[Path]) -> dict[str, Path]:
    """{name in lower case: first file}; that of a split model has no shard number."""
    models: dict[str, Path] = {}
    for file in sorted(file for file in files if is_model(file.name) and file.is_file()):
        shard = parse_shard_name(file.stem)
        if shard.number == 1:
            models.setdefault(name_key(shard.prefix), file)
    return models
