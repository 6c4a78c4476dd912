"""The index of names made here: one small JSON file, replaced atomically under a lock between processes.

A record has what a name adds to files that lie elsewhere: in the Hugging Face cache, in a file set, in the package, or
at a path. A damaged index is renamed with a warning, and what can still be read of it is kept. Models in the caches are
found without it.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from moegguf.atomic_write import write_atomically
from moegguf.errors import MoeggufError, PullError
from moegguf.models.entry import Overrides
from moegguf.models.names import parse_name
from moegguf.models.recipe import check_overrides, check_text

VERSION = 1
MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Record(Overrides):
    """One name in the index. `files` and `mmproj` are locations (models/file_sets.py); `digest` and `files_digest` are
    those of `ModelEntry` when the name was made."""

    name: str
    files: tuple[str, ...]
    digest: str
    modified: datetime
    mmproj: str | None = None
    parent: str = ""
    files_digest: str = ""

    @property
    def key(self) -> str:
        """Equal for names that differ only by case."""
        return self.name.lower()


@dataclass(frozen=True)
class Contents:
    """All of an index. `hidden`: keys of removed names of the Hugging Face cache whose files records still use."""

    records: tuple[Record, ...] = ()
    hidden: frozenset[str] = frozenset()

    def find(self, key: str) -> Record | None:
        """The record with this key."""
        return next((record for record in self.records if record.key == key), None)

    def with_record(self, record: Record) -> Contents:
        """A copy with `record` in place of the one of the same name."""
        return replace(self, records=(*self.without(record.key).records, record))

    def without(self, key: str) -> Contents:
        """A copy without the record with this key."""
        return replace(self, records=tuple(record for record in self.records if record.key != key))


class Index:
    """The file `models.json` in `folder`. Safe to use from many threads and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "models.json"

    def read(self) -> Contents:
        """The contents now; empty when there is no file. A damaged file is repaired, not an error."""
        try:
            info = self.path.stat()
        except OSError:
            return Contents()
        contents, is_intact = _load(self.path, info.st_mtime_ns, info.st_ino, info.st_size)
        if not is_intact:
            with suppress(OSError, PullError):  # a folder that cannot be written stays as it is
                self.change(lambda found: found)
        return contents

    def change(self, edit: Callable[[Contents], Contents], after: Callable[[Contents], None] | None = None) -> Contents:
        """Writes what `edit` makes of the contents; nothing when it raises. Then calls `after` with the new contents.

        Both run under the lock and must not use the index. Raises PullError when the disk fails.
        """
        try:
            with self._locked():
                contents, is_intact = self._load_now()
                changed = edit(contents)
                if not is_intact:
                    self._rename_damaged()
                if changed != contents or not is_intact:
                    write_atomically(self.path, _to_json(changed))
                if after:
                    after(changed)
                return changed
        except OSError as error:
            if isinstance(error, MoeggufError):
                raise
            raise PullError(f"the index {str(self.path)!r} cannot be written ({error.strerror or error}).") from error

    def _load_now(self) -> tuple[Contents, bool]:
        if not self.path.exists():
            return Contents(), True
        info = self.path.stat()
        return _load(self.path, info.st_mtime_ns, info.st_ino, info.st_size)

    def _rename_damaged(self) -> None:
        damaged = self.path.with_name(f"models.json.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
        os.replace(self.path, damaged)
        warnings.warn(
            f"the index of models was damaged; what could be read is kept, the rest is in {damaged}.", stacklevel=2
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / "models.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


@lru_cache(maxsize=4)
def _load(path: Path, _mtime_ns: int, _inode: int, size_bytes: int) -> tuple[Contents, bool]:
    """(what could be read, whether that is all); read again only when the file has changed."""
    if size_bytes > MAX_INDEX_BYTES:
        return Contents(), False
    try:
        data = json.loads(path.read_bytes())
        listed, hidden = data["models"], data["hidden"]
        is_intact = data["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Contents(), False
    records: dict[str, Record] = {}
    for values in listed if isinstance(listed, list) else []:
        try:
            record = _record(values)
            records[record.key] = record
        except (KeyError, TypeError, ValueError, AttributeError):
            is_intact = False
    keys = {key for key in hidden if isinstance(key, str)} if isinstance(hidden, list) else set()
    return Contents(tuple(records.values()), frozenset(keys)), is_intact and isinstance(listed, list)


def _record(values: dict[str, Any]) -> Record:
    """The record in one item of the file. Raises KeyError, TypeError, ValueError or AttributeError for a bad one."""
    files = tuple(values["files"])
    if not files or not all(isinstance(file, str) for file in files):
        raise ValueError("files")
    modified = datetime.fromisoformat(values["modified"])
    return Record(
        name=parse_name(values["name"]).canonical,
        files=files,
        digest=str(values["digest"]),
        modified=modified if modified.tzinfo else modified.replace(tzinfo=UTC),
        mmproj=check_text("mmproj", values.get("mmproj")),
        parent=str(values.get("parent", "")),
        files_digest=str(values.get("files_digest", "")),
        **check_overrides(values),
    )


def _to_json(contents: Contents) -> bytes:
    models = [asdict(record) | {"modified": record.modified.isoformat()} for record in contents.records]
    data = {"version": VERSION, "models": models, "hidden": sorted(contents.hidden)}
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()
