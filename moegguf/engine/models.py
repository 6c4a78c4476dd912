"""Names of models and the files behind them.

A model is named by a path (a GGUF file, the first shard of a split one, or a folder with one model), by `demo` (the
one that ships with the package), or by its file name in the folder MOEGGUF_MODELS. Knows names and folders; what is
in a file is up to experts.py.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import moegguf
from moegguf.config import read_environment
from moegguf.errors import ModelNotFoundError

DEMO_NAME = "demo"
DEMO_FILE = "moegguf-demo-Q4_0.gguf"

_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-\d{5}")


def find_model(name: str | os.PathLike[str]) -> Path:
    """The file to open for `name`: a path, `demo`, or a name in MOEGGUF_MODELS.

    Raises ModelNotFoundError, naming the nearest names that exist, when there is none.
    """
    text = os.fspath(name)
    if not text.strip():
        raise ModelNotFoundError(f"a model is a path or a name, but is {text!r}; try {DEMO_NAME!r}.")
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if text == DEMO_NAME:
        return _demo()
    known = models_by_name()
    if found := known.get(_key(text)):
        return found
    if path.is_dir():
        return _only_model(path)
    raise _not_found(text, known)


def models_by_name() -> dict[str, Path]:
    """{name: file} of what MOEGGUF_MODELS and one level of folders below it hold. Names are in lower case."""
    folder = read_environment().models
    if folder is None or not folder.is_dir():
        return {}
    return _models_in([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")])


def demo_path() -> Path | None:
    """The model that ships with the package; None when this installation is without it."""
    paths = (Path(part) / "demo" / DEMO_FILE for part in moegguf.__path__)
    return next((path for path in paths if path.is_file()), None)


def _demo() -> Path:
    path = demo_path()
    if path is None:
        raise ModelNotFoundError(
            f"the demo model is not in this installation ({DEMO_FILE} belongs in {Path(moegguf.__path__[0]) / 'demo'});"
            " install moegguf again, or give the path of a GGUF file."
        )
    return path


def _key(name: str) -> str:
    return name.lower().removesuffix(".gguf")


def _models_in(files: Iterable[Path]) -> dict[str, Path]:
    """{name: file}; a split model goes by its first shard, under its full name and the name without the number."""
    models: dict[str, Path] = {}
    for file in sorted(files):
        shard = _SHARD.fullmatch(file.stem)
        if shard and int(shard["number"]) != 1:
            continue
        if shard:
            models.setdefault(_key(shard["name"]), file)
        models.setdefault(_key(file.stem), file)
    return models


def _only_model(folder: Path) -> Path:
    files = sorted(set(_models_in(folder.glob("*.gguf")).values()))
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelNotFoundError(f"the folder {str(folder)!r} has no GGUF file; give the path of one.")
    some = ", ".join(repr(file.name) for file in files[:3]) + (", ..." if len(files) > 3 else "")
    raise ModelNotFoundError(f"the folder {str(folder)!r} has {len(files)} models; give the path of one: {some}.")


def _not_found(text: str, known: dict[str, Path]) -> ModelNotFoundError:
    path = Path(text).expanduser()
    if os.sep in text or text.lower().endswith(".gguf"):
        here = [file.name for file in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, here, n=1)
        if near:
            hint = f"did you mean {str(path.with_name(near[0]))!r}?"
        elif path.parent.is_dir():
            hint = "check the path."
        else:
            hint = f"there is no folder {str(path.parent)!r}; check the path."
        return ModelNotFoundError(f"there is no file {text!r}; {hint}")
    near = difflib.get_close_matches(_key(text), [*known, DEMO_NAME], n=3)
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    elif known:
        hint = f"MOEGGUF_MODELS has {', '.join(map(repr, sorted(known)[:5]))}; a path works too."
    else:
        hint = f"give the path of a GGUF file, {DEMO_NAME!r}, or a name in the folder MOEGGUF_MODELS."
    return ModelNotFoundError(f"there is no model named {text!r}; {hint}")
