"""The index of names made here: one small JSON file, replaced atomically under a lock between processes.

A name adds to files that lie elsewhere, at a location: "hub:" and a path in the Hugging Face cache, "sets:" and a path
in our folder of sets, "demo:", or an absolute path. A damaged index is renamed with a warning, and what can still be
read of it is kept. Models in the caches are found without it.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from moegguf.atomic_write import write_atomically
from moegguf.errors import MoeggufError, PullError
from moegguf.models.blobs import sets_folder
from moegguf.models.entry import ModelEntry, model_digest, size_of, weights_digest
from moegguf.models.names import parse_name
from moegguf.models.recipe import check_overrides, check_text
from moegguf.models.sources import DEMO_FILE, demo_path, hub_cache
from moegguf.settings import data_folder

VERSION = 1
MAX_INDEX_BYTES = 64 << 20
_BESIDE = ("mmproj", "adapter", "draft")  # a file each, or None


def _location_of(path: Path) -> str:
    if path in (demo_path(), Path(DEMO_FILE)):
        return "demo:"
    for prefix, root in (("hub", hub_cache()), ("sets", sets_folder())):
        if path.is_relative_to(root):
            return f"{prefix}:{path.relative_to(root).as_posix()}"
    return str(path.absolute())


def _path_at(location: str) -> Path:
    """The path of a location, where the file may be missing. Raises ValueError for one outside its folder."""
    prefix, _, rest = location.partition(":")
    if prefix == "demo":
        return demo_path() or Path(DEMO_FILE)
    if prefix in ("hub", "sets") and ".." not in PurePosixPath(rest).parts and not rest.startswith("/"):
        return (hub_cache() if prefix == "hub" else sets_folder()) / rest
    if os.path.isabs(location):
        return Path(location)
    raise ValueError("location")


def updated(entry: ModelEntry) -> ModelEntry:
    """An entry of the index with the sizes and digests of its files now, and in `missing` those no longer there."""
    there = [path for path in entry.all_files if path.is_file()]
    needed = (*entry.files, *filter(None, (entry.adapter,)))
    missing = tuple(path for path in needed if path not in there)
    files_digest = entry.files_digest
    named_by_digest = all(_location_of(path).startswith(("hub:", "sets:")) for path in needed)
    if not missing and not (named_by_digest and files_digest):  # a file at a path may be another one than when named
        with suppress(OSError):  # not readable
            files_digest = weights_digest(entry.files, entry.adapter)
    return replace(
        entry,
        size_bytes=size_of(there),
        digest=entry.digest if files_digest == entry.files_digest else model_digest(files_digest, entry),
        mmproj=entry.mmproj if entry.mmproj in there else None,
        draft=entry.draft if entry.draft in there else None,
        files_digest=files_digest,
        missing=missing,
    )


@dataclass(frozen=True)
class Contents:
    """All of an index. `entries`: as stored, see `updated`. `hidden`: keys of removed names of the Hugging Face cache
    whose files entries still use."""

    entries: tuple[ModelEntry, ...] = ()
    hidden: frozenset[str] = frozenset()

    def with_entry(self, entry: ModelEntry) -> Contents:
        """A copy with `entry` in place of the one of the same name."""
        return replace(self, entries=(*self.without(entry.name.lower()).entries, entry))

    def without(self, key: str) -> Contents:
        """A copy without the entry with this key."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.name.lower() != key))

    def files(self) -> set[Path]:
        """The files of all entries."""
        return {path for entry in self.entries for path in entry.all_files}


class Index:
    """The file `models.json` in `folder`. Safe to use from many threads and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "models.json"

    def read(self) -> Contents:
        """The contents now; empty when there is no file. A damaged file is repaired, not an error."""
        contents, is_intact = self._load()
        if not is_intact:
            with suppress(OSError, PullError):  # a folder that cannot be written stays as it is
                self.change(lambda found: found)
        return contents

    def change(self, edit: Callable[[Contents], Contents], after: Callable[[Contents], None] | None = None) -> Contents:
        """Writes what `edit` makes of the contents; nothing when it raises. Then calls `after` with the new contents.

        Both run under the lock and must not use the index. Raises PullError when the disk fails.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "models.lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                contents, is_intact = self._load()
                changed = edit(contents)
                if not is_intact:
                    damaged = self.path.with_name(f"models.json.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
                    os.replace(self.path, damaged)
                    kept = "the index of models was damaged; what could be read is kept, the rest is in"
                    warnings.warn(f"{kept} {damaged}.", stacklevel=2)
                if changed != contents or not is_intact:
                    write_atomically(self.path, _to_json(changed))
                if after:
                    after(changed)
                return changed
        except OSError as error:
            if isinstance(error, MoeggufError):
                raise
            raise PullError(f"the index {str(self.path)!r} cannot be written ({error.strerror or error}).") from error

    def _load(self) -> tuple[Contents, bool]:
        try:
            info = self.path.stat()
        except OSError:
            return Contents(), True
        return _load(self.path, info.st_mtime_ns, info.st_ino, info.st_size, (hub_cache(), data_folder()))


@lru_cache(maxsize=4)
def _load(path: Path, _mtime_ns: int, _inode: int, size_bytes: int, _folders: object) -> tuple[Contents, bool]:
    """(what could be read, whether that is all); read again only when the file or a folder of locations has changed."""
    if size_bytes > MAX_INDEX_BYTES:
        return Contents(), False
    try:
        data = json.loads(path.read_bytes())
        listed, hidden = list(data["models"]), frozenset(map(str, data["hidden"]))
        is_intact = data["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Contents(), False
    entries: dict[str, ModelEntry] = {}
    for values in listed:
        try:
            entry = _entry(values)
            entries[entry.name.lower()] = entry
        except (KeyError, TypeError, ValueError, AttributeError):
            is_intact = False
    return Contents(tuple(entries.values()), hidden), is_intact


def _entry(values: dict[str, Any]) -> ModelEntry:
    """The entry in one item of the file. Raises KeyError, TypeError, ValueError or AttributeError for a bad one."""
    beside: dict[str, Any] = {name: _path_at(text) for name in _BESIDE if (text := check_text(name, values.get(name)))}
    modified = datetime.fromisoformat(values["modified"])
    return ModelEntry(
        name=parse_name(values["name"]).canonical,
        source="own",
        files=(_path_at(values["files"][0]), *map(_path_at, values["files"][1:])),
        size_bytes=0,
        digest=str(values["digest"]),
        modified=modified if modified.tzinfo else modified.replace(tzinfo=UTC),
        **beside,
        parent=str(values.get("parent", "")),
        files_digest=str(values.get("files_digest", "")),
        **check_overrides(values),
    )


def _to_json(contents: Contents) -> bytes:
    models = [
        entry.overrides
        | {"name": entry.name, "files": list(map(_location_of, entry.files)), "digest": entry.digest}
        | {"modified": entry.modified.isoformat()}
        | {name: _location_of(path) if (path := getattr(entry, name)) else None for name in _BESIDE}
        | {"parent": entry.parent, "files_digest": entry.files_digest}
        for entry in contents.entries
    ]
    data = {"version": VERSION, "models": models, "hidden": sorted(contents.hidden)}
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()
