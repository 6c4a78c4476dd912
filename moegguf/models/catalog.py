"""Finds, lists, copies, creates and removes the models of this machine by name.

The sources are searched in this order:
- paths of files (if allowed)
- entries passed to the catalog
- the demo
- the models folder (MOEGGUF_MODELS)
- our index
- the Hugging Face cache
- Ollama's stores
- paths of folders (if allowed)

If two models have the same name, the first one found is used. The only files ever
deleted are our own, and files in the Hugging Face cache that are no longer used by any
name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from moegguf.errors import ModelFormatError, ModelNotFoundError, OptionError, PullError
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.experts import read_layout
from moegguf.gguf.reader import is_other_kind
from moegguf.models import sources
from moegguf.models.entry import ModelEntry, weights_digest
from moegguf.models.names import (
    DEFAULT_TAG,
    HUB_HOST,
    Name,
    find_in_library,
    hub_hint,
    name_or_none,
    nearest_names,
    parse_name,
)
from moegguf.models.own_store import BlobStore, Index, updated
from moegguf.models.recipe import (
    Recipe,
    check_overrides,
    check_parameters,
    check_ranges,
    jinja_or_none,
    left_out,
    render,
)
from moegguf.models.selection import first_of
from moegguf.models.sources import demo_path
from moegguf.options import DRAFTS
from moegguf.settings import data_folder
from moegguf.text import without_password


class Catalog:
    """The models that are currently available. Each call rereads the sources, so that
    changes by other processes take effect. Any thread may call any method.

    paths: True accepts a path as a name, as on a command line, and error messages may
    then contain paths and commands. A server needs False, because otherwise its clients
    could open any file on the machine.

    given: additional models, which take precedence over all sources except paths.
    """

    def __init__(self, *, paths: bool = True, given: Sequence[ModelEntry] = ()) -> None:
        self.paths = paths
        self.given = given

    @property
    def index(self) -> Index:
        """The index of names in the data folder."""
        return Index(data_folder())

    @property
    def blobs(self) -> BlobStore:
        """The store of uploaded files in the data folder."""
        return BlobStore()

    def entries(self, prefix: str = "") -> list[ModelEntry]:
        """Returns the models whose names start with `prefix`, newest first. Ignores the
        case of letters. Leaves out models whose first file can be read but is not
        GGUF."""
        found: dict[str, ModelEntry] = {}
        for entry in self._models():
            found.setdefault(entry.name.lower(), entry)
        named = (
            entry for key, entry in found.items() if key.startswith(prefix.lower())
        )
        chosen = (entry for entry in named if not is_other_kind(entry.path))
        return sorted(
            chosen, key=lambda entry: (entry.modified, entry.name), reverse=True
        )

    def find(
        self, name: str | os.PathLike[str], *, even_missing: bool = False
    ) -> ModelEntry:
        """Returns the model with this name, or at this path if paths are allowed.

        Raises ModelNotFoundError if there is no such model; the error may suggest
        similar names. Also raises ModelNotFoundError if some of the model's files are
        missing, unless `even_missing` is True. Raises ModelNameError for an invalid
        name if paths are not allowed. Raises OSError if a file cannot be read.
        """
        text = os.fspath(name)
        if not text.strip():
            raise ModelNotFoundError(
                f"a model must be given by its name, but this is {text!r}; try {sources.DEMO_NAME!r}."
            )
        if (entry := next(self._models(text), None)) is None:
            # If paths are allowed, a text that is not a name is most likely a path that
            # does not exist.
            raise self._not_found(
                text, name_or_none(text) if self.paths else parse_name(text)
            )
        if not entry.missing or even_missing:
            return entry
        if not self.paths:
            raise ModelNotFoundError(
                f"the files that {entry.name} was created from no longer exist; create it again."
            )
        files = first_of([repr(str(path)) for path in entry.missing], 3)
        again = (
            f", fetch {entry.parent} again with `moegguf pull`"
            if entry.parent.startswith(f"{HUB_HOST}/")
            else ""
        )
        raise ModelNotFoundError(
            f"{entry.name} was created from {files}, which no longer exists: put it back{again}, or remove the name"
            f" with `moegguf rm {entry.name}`."
        )

    def modelfile(self, entry: ModelEntry) -> str:
        """Returns a Modelfile that recreates the model. For a model in our index, the
        FROM line has a name or path that remains valid when the entry's name is
        removed, unless the model's files were uploaded."""
        if entry.source in ("demo", "hub", "ollama"):
            return render(entry, entry.name)
        if entry.path == demo_path():
            return render(entry, f"{sources.DEMO_NAME}:{DEFAULT_TAG}")
        # If the Hugging Face cache has a name for the same files, use that name:
        # removing the entry does not affect it.
        cached = sources.cached_models(None, self.index.read().hidden)
        names = (each.name for each in cached if each.files == entry.files)
        return render(entry, next(names, str(entry.path)))

    def copy(self, source: str, destination: str) -> ModelEntry:
        """Makes `destination` another name for the files and overrides of `source`, and
        replaces any entry with that name in our index. The files are not copied.

        Raises ModelNotFoundError if there is no model `source`, and ModelNameError for
        an invalid name. Raises OptionError if a model outside our index and Ollama's
        stores has the name `destination`.
        """
        target = self._free_name(destination)
        entry = self.find(source)
        return self._save(lambda: entry, target)

    def create(self, name: str, recipe: Recipe) -> ModelEntry:
        """Saves the model that `recipe` describes in our index under `name`, and
        replaces any entry with that name.

        Raises ModelNotFoundError for a missing base, draft model or blob. Raises
        ModelFormatError for files that are not a model, or not an adapter for it.
        Raises OptionError for values that are not allowed, and if a model outside our
        index and Ollama's stores has this name. Warns about parts of the recipe that
        are left out.
        """
        target = self._free_name(name)
        if bool(recipe.from_) == bool(recipe.files):
            found = "both are" if recipe.files else "neither is"
            raise OptionError(
                f"a model is created from either `from` (a name) or `files`, but {found} given; give one."
            )
        guesses = {"draft": recipe.draft} if recipe.draft in DRAFTS else {}
        parameters = check_parameters({**recipe.parameters, **guesses})
        check_ranges(parameters)
        given = check_overrides(recipe.overrides | {"parameters": parameters})
        given["template"] = jinja_or_none(given["template"])
        for sentence in left_out(recipe):
            warnings.warn(sentence, stacklevel=2)
        if recipe.adapter and not self.paths:
            raise OptionError(
                f"a request must give an adapter as a blob (`adapters`), but gives the path {recipe.adapter!r:.80};"
                " send the file as a blob."
            )
        base = self.find(recipe.from_) if recipe.from_ else None
        if mirrors := parameters.get("mirror"):
            parameters["mirror"] = [
                str(Path(path).expanduser().absolute()) for path in mirrors
            ]
            if not self.paths and parameters["mirror"] != (
                base.parameters.get("mirror") if base else None
            ):
                raise OptionError(
                    f"a request may not change a model's mirrors, which are paths, but gives {mirrors[0]!r:.80}; start"
                    " the server with --mirror, or use `moegguf create` on the server's machine."
                )
        # `entries` would not list such a file.
        if base is not None and is_other_kind(base.path):
            raise ModelFormatError(
                f"{base.path if self.paths else base.name} is not a GGUF file; give a .gguf model file, or a"
                " model's name."
            )

        draft = self.find(recipe.draft).path if recipe.draft and not guesses else None

        def make() -> ModelEntry:
            entry = base or self.blobs.make_set(recipe.files)
            guessing = draft or (None if "draft" in parameters else entry.draft)
            changed = {
                name: value for name, value in given.items() if value not in (None, ())
            }
            changed["parameters"] = {**entry.parameters, **parameters}
            made = replace(entry, **changed, draft=guessing)
            if recipe.adapter or recipe.adapters:
                sent = (
                    self.blobs.make_adapter(recipe.adapters)
                    if recipe.adapters
                    else None
                )
                made = with_adapter(made, sent or recipe.adapter)
            return made

        return self._save(make, target)

    def remove(self, name: str) -> ModelEntry:
        """Removes the name, and returns the removed model. Also deletes uploaded files
        that are no longer used by any name, and files in the Hugging Face cache that
        only removed names use.

        Raises ModelNotFoundError if there is no such model, OptionError if the model is
        from a source that moegguf never changes, and PullError when a file cannot be
        deleted.
        """
        entry = self.find(name, even_missing=True)
        check_removable(entry)
        key = entry.name.lower()
        if entry.source == "own":
            with self.index.changed() as found:
                found.entries.pop(key, None)
            self._clean()
        else:
            with self.index.changed() as found:
                found.hidden.add(key)
            try:
                self._clean()
            except PullError:
                self.unhide(key)
                raise
        return entry

    def unhide(self, *names: str) -> None:
        """Makes removed names of the Hugging Face cache visible again, because their
        files were fetched again or could not be deleted."""
        keys = {name.lower() for name in names} & self.index.read().hidden
        if keys:
            with self.index.changed() as found:
                found.hidden -= keys

    def _models(self, text: str | None = None) -> Iterator[ModelEntry]:
        """Yields the models of all sources, one source after the other. With `text`,
        yields only models that `text` may refer to, the most likely one first."""
        path = text if self.paths else None
        if path is not None and (file := _existing(path, Path.is_file)):
            yield sources.file_entry(file, "path", str(file.absolute()))
        name = name_or_none(text or "")
        key = None if text is None else name.key if name else ""
        given = (
            entry
            for entry in self.given
            if text is None or entry.name.lower() in (key, text.lower())
        )
        yield from map(_as_now, given)
        yield from sources.demo_models(text)
        yield from sources.folder_models(text)
        contents = self.index.read()
        yield from (
            updated(entry)
            for known, entry in contents.entries.items()
            if key in (None, known)
        )
        yield from sources.cached_models(text, contents.hidden)
        yield from sources.ollama_models(text)
        # The sources above do not look up the library's short names.
        if text and (model := find_in_library(text)):
            yield from sources.cached_models(model.hub_name, contents.hidden)
        if path is not None and (folder := _existing(path, Path.is_dir)):
            file = sources.only_model(folder)
            yield sources.file_entry(file, "path", str(file.absolute()))

    def _save(self, make: Callable[[], ModelEntry], target: Name) -> ModelEntry:
        """Saves the result of `make` in our index under the name `target`. Calls `make`
        while it holds the index's lock."""
        self.index.read()  # repairs a damaged index even if `make` then fails
        with self.index.changed() as contents:
            entry = make()
            parent = "" if entry.source == "path" else entry.name
            now = datetime.now(UTC)
            name = target.canonical
            own = replace(entry, name=name, source="own", parent=parent, modified=now)
            contents.entries[name.lower()] = own
        self._clean()
        return updated(own)

    def _free_name(self, text: str) -> Name:
        """Parses a name and returns it. Raises ModelNameError for an invalid name, and
        OptionError if a model outside our index and Ollama's stores has this name."""
        name = parse_name(text)
        with suppress(ModelNotFoundError):
            entry = Catalog(paths=False).find(name.canonical)
            if entry.source not in ("own", "ollama"):
                raise OptionError(
                    f"the name {entry.name!r} is already in use by a model that was not created here, and cannot be"
                    " replaced; choose another."
                )
        return name

    def _clean(self) -> None:
        """Deletes sets of uploaded files that no name uses. Deletes from the Hugging
        Face cache the files of removed names that no other model uses."""
        with self.index.changed() as contents:
            self.blobs.clean(contents.files())
            used = {path.resolve() for path in contents.files()}
            hidden = []
            for entry in sources.cached_models() if contents.hidden else ():
                if entry.name.lower() in contents.hidden:
                    hidden.append(entry)
                else:
                    used |= {path.resolve() for path in entry.all_files}
            contents.hidden.clear()
            for entry in hidden:
                if used & {path.resolve() for path in entry.files}:
                    contents.hidden.add(entry.name.lower())
                else:
                    sources.delete_cached(entry, used)

    def _not_found(self, text: str, name: Name | None) -> ModelNotFoundError:
        ending = text.lower().endswith(".gguf")
        if name and name.is_hub and not (ending and self.paths and ":" not in text):
            fetch = f"; fetch it with `moegguf pull {name.canonical}`" * self.paths
            return ModelNotFoundError(
                f"{name.canonical} is not on this machine{fetch}."
            )
        if self.paths and (os.sep in text or ending):
            return ModelNotFoundError(
                f"there is no file {without_password(text)!r}; check the path."
            )
        if model := find_in_library(text):
            fetch = (
                f" Fetch it with `moegguf pull {model.name}` ({model.size_bytes / 1e9:.1f} GB)."
                * self.paths
            )
            return ModelNotFoundError(
                f"{text} is {model.hub_name}, which is not on this machine.{fetch}"
            )
        known = [
            sources.DEMO_NAME,
            *(entry.name.removesuffix(":latest") for entry in self.entries()),
        ]
        near = nearest_names(text, [*known, *map(str.lower, known)])
        guess = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
        here = (
            " `moegguf list` shows the models here, and `moegguf library` others; a path works, too."
            * self.paths
        )
        return ModelNotFoundError(
            f"there is no model named {text!r}{f'; {guess}' if near else '.'}{here}",
            f"{guess} {hub_hint(text)}".strip(),
        )


_REMOVAL_HINTS = {
    "demo": "it ships with moegguf.",
    "folder": "it is a file in the folder MOEGGUF_MODELS; delete the file.",
    "path": "it is a path; delete the file.",
    "ollama": "it is in Ollama's store; remove it with `ollama rm`.",
}


def check_removable(entry: ModelEntry) -> None:
    """Raises OptionError if the model is from a source that moegguf never changes."""
    if hint := _REMOVAL_HINTS.get(entry.source):
        raise OptionError(f"{entry.name!r} cannot be removed: {hint}")


def _as_now(entry: ModelEntry) -> ModelEntry:
    """Returns the entry unchanged if its files are unchanged or missing, else with
    their current sizes and digest."""
    now = updated(entry)
    return entry if now.missing or now.weights == entry.weights else now


def with_adapter(entry: ModelEntry, path: str | Path) -> ModelEntry:
    """Returns the model with the LoRA adapter at `path` added. Raises ModelFormatError
    for a file that is not an adapter for models of this architecture, and
    ModelNotFoundError if the file is missing."""
    adapter = Path(path).expanduser().absolute()
    read_adapter(adapter, read_layout(entry.path).arch)
    return replace(entry, adapter=adapter, weights=weights_digest(entry.files, adapter))


def _existing(text: str, is_kind: Callable[[Path], bool]) -> Path | None:
    # The text may be too long, have a zero byte, or begin with ~ and the name of an
    # unknown user.
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(text).expanduser()
        return path if is_kind(path) else None
    return None


def find_model(name: str | os.PathLike[str]) -> Path:
    """Returns the file to open for `name`: a path, a folder with one model, or a name
    (see `Catalog.find`).

    Raises ModelNotFoundError if there is no such model; the error may suggest similar
    names.
    """
    return _existing(os.fspath(name), Path.is_file) or Catalog().find(name).path
