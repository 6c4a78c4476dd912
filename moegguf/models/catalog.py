"""Every model of this machine by name: the one place where names are looked up, listed, copied, made and removed.

Looked in, in this order: paths (only where paths are allowed), the demo, MOEGGUF_MODELS, our own names, the Hugging
Face cache, an Ollama store. Of two models of one name the first is meant. Only our own files and, when no name needs
them any more, those in the Hugging Face cache are ever removed.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moegguf.config import data_folder
from moegguf.errors import ModelNameError, ModelNotFoundError, MoeggufError, OptionError, PullError
from moegguf.models import own
from moegguf.models.blobs import BlobStore, BlobWriter
from moegguf.models.entry import Entry
from moegguf.models.folder import (
    DEMO_NAME,
    demo_entry,
    demo_path,
    file_entry,
    find_in_folder,
    folder_models,
    models_by_name,
    name_key,
    only_model,
)
from moegguf.models.hub import cached_models, find_cached
from moegguf.models.index import Contents, Index, Record
from moegguf.models.names import DEFAULT_TAG, OLLAMA_PREFIX, Name, parse_name
from moegguf.models.ollama_store import find_in_ollama, ollama_models
from moegguf.models.own import OwnFiles
from moegguf.models.recipe import Recipe, check_messages, check_parameters, check_text, jinja_or_none


class Catalog:
    """The models that can be used now. Looks anew at each call, so what other processes do is seen.

    `paths`: whether a path may stand for a model, as on a command line. A server must say no: its clients would open
    any file of the machine. Safe to use from many threads.
    """

    def __init__(self, *, paths: bool = True) -> None:
        self.paths = paths

    @property
    def index(self) -> Index:
        return Index(data_folder())

    @property
    def blobs(self) -> BlobStore:
        return BlobStore(data_folder() / "blobs")

    @property
    def own(self) -> OwnFiles:
        return OwnFiles(data_folder() / "sets", self.blobs)

    def entries(self, prefix: str = "") -> list[Entry]:
        """Models whose names start with `prefix` (in any case), newest first."""
        found: dict[str, Entry] = {}
        for entry in self._all():
            found.setdefault(entry.name.lower(), entry)
        chosen = (entry for key, entry in found.items() if key.startswith(prefix.lower()))
        return sorted(chosen, key=lambda entry: (entry.modified, entry.name), reverse=True)

    def find(self, name: str | os.PathLike[str]) -> Entry:
        """The model that `name` means.

        Raises ModelNotFoundError, naming the nearest names that exist, when there is none; ModelNameError where paths
        are not allowed and it can be no name.
        """
        text = os.fspath(name)
        if not text.strip():
            raise ModelNotFoundError(f"a model is a path or a name, but is {text!r}; try {DEMO_NAME!r}.")
        if self.paths and (path := _path_of(text)):
            return _entry_at(path)
        if text.lower() in (DEMO_NAME, f"{DEMO_NAME}:{DEFAULT_TAG}"):
            return demo_entry()
        if found := self._named(text):
            return found
        if self.paths and (folder := _folder_of(text)):
            return _entry_at(only_model(folder))
        raise self._not_found(text)

    def copy(self, source: str, destination: str) -> Entry:
        """Makes `destination` another name for the files of `source`; no byte of them is copied.

        Raises ModelNotFoundError, ModelNameError, and OptionError when the name belongs to a model that is not ours.
        """
        target, entry = self._free_name(destination), self.find(source)
        return self._keep(lambda: entry, target)

    def create(self, name: str, recipe: Recipe) -> Entry:
        """A name of ours for a model with what `recipe` adds; replaces one of ours that has the name.

        Raises ModelNotFoundError (base or blobs), ModelFormatError for files that are no model, OptionError for values
        that do not fit.
        """
        target = self._free_name(name)
        if bool(recipe.from_) == bool(recipe.files):
            raise OptionError("a model is made either from a name or from files; give one of `from` and `files`.")
        values: dict[str, Any] = {
            "system": check_text("system", recipe.system),
            "template": jinja_or_none(check_text("template", recipe.template)),
            "license": check_text("license", recipe.license),
            "messages": check_messages(recipe.messages) or None,
        }
        parameters = check_parameters(recipe.parameters)
        given = {key: value for key, value in values.items() if value is not None}
        base = self.find(recipe.from_) if recipe.from_ else None

        def make() -> Entry:
            entry = base or self.own.gather(recipe.files)
            return replace(entry, parameters={**entry.parameters, **parameters}, **given)

        return self._keep(make, target)

    def remove(self, name: str) -> Entry:
        """Takes the name away, and its files when no other name needs them; returns what it was.

        Raises ModelNotFoundError, OptionError for models that are not ours to remove, PullError when the disk refuses.
        """
        entry = self.find(name)
        key = entry.name.lower()
        if entry.source == "own":
            self.index.change(lambda found: found.without(key), after=self._clean)
        elif entry.source == "hub":
            try:
                self.index.change(lambda found: replace(found, hidden=found.hidden | {key}), after=self._clean)
            except PullError:
                self.show_again(key)
                raise
        else:
            raise OptionError(f"{entry.name!r} cannot be removed: {_KEEPERS[entry.source]}")
        self._show_what_is_gone()
        return entry

    def show_again(self, *names: str) -> None:
        """Names of the Hugging Face cache that were removed, and have been fetched again, are back."""
        keys = {name.lower() for name in names} & self.index.read().hidden
        if keys:
            self.index.change(lambda found: replace(found, hidden=found.hidden - keys))

    def has_blob(self, digest: str) -> bool:
        """Raises ModelNameError when that is no digest."""
        return self.blobs.has(digest)

    def blob_path(self, digest: str) -> Path:
        """Raises ModelNameError when that is no digest, ModelNotFoundError when it is not here."""
        return self.blobs.path(digest)

    def blob_writer(self, digest: str, size_bytes: int | None = None) -> BlobWriter:
        """For a blob that comes in pieces: `with` it, `write` them, `commit`."""
        return self.blobs.writer(digest, size_bytes)

    def add_blob(self, digest: str, chunks: Iterable[bytes], size_bytes: int | None = None) -> Path:
        """See `BlobStore.add`."""
        return self.blobs.add(digest, chunks, size_bytes)

    def _all(self) -> Iterator[Entry]:
        """All sources in the order in which names are looked up."""
        if demo_path():
            yield demo_entry()
        yield from folder_models()
        contents = self.index.read()
        yield from self._own_entries(contents)
        yield from (entry for entry in cached_models() if entry.name.lower() not in contents.hidden)
        yield from ollama_models()

    def _own_entries(self, contents: Contents) -> Iterator[Entry]:
        for record in contents.records:
            with suppress(OSError, MoeggufError):
                yield self.own.entry(record)

    def _named(self, text: str) -> Entry | None:
        if not text.lower().startswith(OLLAMA_PREFIX) and (found := find_in_folder(text)):
            return found
        try:
            name = parse_name(text)
        except ModelNameError:
            if self.paths:
                return None  # a path that leads nowhere, most likely
            raise
        contents = self.index.read()
        if record := contents.find(name.key):
            with suppress(OSError, MoeggufError):
                return self.own.entry(record)
        return find_cached(name, contents.hidden) or find_in_ollama(name)

    def _keep(self, make: Callable[[], Entry], target: Name) -> Entry:
        """Writes down what `make` gives under the name `target`, while nobody else changes anything of ours."""
        made: list[Record] = []

        def edit(contents: Contents) -> Contents:
            made.append(own.record_of(make(), target.canonical))
            return contents.having(made[0])

        self.index.read()  # what is damaged is set aside first
        self.index.change(edit, after=self._clean)
        return self.own.entry(made[0])

    def _free_name(self, text: str) -> Name:
        """A name that is not another source's. Raises ModelNameError, OptionError."""
        name = parse_name(text)
        with suppress(ModelNotFoundError):
            entry = Catalog(paths=False).find(name.canonical)
            if entry.source not in ("own", "ollama"):
                raise OptionError(f"the name {entry.name!r} belongs to a model already; choose another.")
        return name

    def _clean(self, contents: Contents) -> None:
        """Removes files of ours that no name uses, and from the Hugging Face cache what was removed by name."""
        self.own.clean(contents.records)
        hidden = [find_cached(parse_name(key)) for key in contents.hidden]
        if not any(hidden):
            return
        kept = own.used_files(contents.records)
        for entry in cached_models():
            if entry.name.lower() not in contents.hidden:
                kept |= {path.resolve() for path in (*entry.files, *((entry.mmproj,) if entry.mmproj else ()))}
        for gone in hidden:
            if gone and gone.name.lower() in contents.hidden and not kept & {path.resolve() for path in gone.files}:
                from moegguf.models.hub import delete_cached

                delete_cached(gone, kept)

    def _show_what_is_gone(self) -> None:
        """A name is hidden only as long as its files are here."""
        there = {entry.name.lower() for entry in cached_models()}
        self.show_again(*(self.index.read().hidden - there))

    def _not_found(self, text: str) -> ModelNotFoundError:
        ending = text.lower().endswith(".gguf")
        with suppress(ModelNameError):
            name = parse_name(text)
            if name.is_hub and not (ending and self.paths and ":" not in text):
                return ModelNotFoundError(
                    f"{name.canonical} is not on this machine; fetch it with `moegguf pull {name.canonical}`."
                )
        if self.paths and (os.sep in text or ending):
            return _no_path(text)
        known = [*models_by_name(), DEMO_NAME, *(entry.name.removesuffix(":latest") for entry in self.entries())]
        near = list(dict.fromkeys(difflib.get_close_matches(name_key(text).removesuffix(":latest"), known, n=3)))
        if near:
            hint = f"did you mean {' or '.join(map(repr, near))}?"
        elif folder := sorted(models_by_name()):
            hint = f"MOEGGUF_MODELS has {', '.join(map(repr, folder[:5]))}; a path works too."
        else:
            hint = f"give the path of a GGUF file, {DEMO_NAME!r}, or a name in the folder MOEGGUF_MODELS."
        return ModelNotFoundError(f"there is no model named {text!r}; {hint}")


_KEEPERS = {
    "demo": "it ships with moegguf.",
    "folder": "it is a file in the folder MOEGGUF_MODELS; delete the file.",
    "path": "it is a file of yours; delete the file.",
    "ollama": "Ollama keeps it; remove it with `ollama rm`.",
}


def _path_of(text: str) -> Path | None:
    """The file that `text` is the path of."""
    with suppress(OSError, ValueError, RuntimeError):  # too long, a zero byte, no such user
        path = Path(text).expanduser()
        return path if path.is_file() else None
    return None


def _folder_of(text: str) -> Path | None:
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(text).expanduser()
        return path if path.is_dir() else None
    return None


def _entry_at(path: Path) -> Entry:
    """A file named by its path; the path is its name."""
    return file_entry(path, "path", str(path.absolute()))


def _no_path(text: str) -> ModelNotFoundError:
    path = Path(text).expanduser()
    here = [file.name for file in itertools.islice(path.parent.glob("*.gguf"), 1000)] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, here, n=1)
    if near:
        hint = f"did you mean {str(path.with_name(near[0]))!r}?"
    elif path.parent.is_dir():
        hint = "check the path."
    else:
        hint = f"there is no folder {str(path.parent)!r}; check the path."
    return ModelNotFoundError(f"there is no file {text!r}; {hint}")


__all__ = ["demo_path", "find_model", "models_by_name"]


def find_model(name: str | os.PathLike[str]) -> Path:
    """The file to open for `name`: a path, a folder with one model, or a name as `Catalog.find` knows them.

    Raises ModelNotFoundError, naming the nearest names that exist, when there is none.
    """
    path = Path(name).expanduser() if os.fspath(name).strip() else None
    if path and path.is_file():
        return path
    return Catalog().find(name).path
