"""Our own names: one small JSON file, written whole, and only while a lock between processes is held.

A record says what a name adds to files that lie elsewhere: in the Hugging Face cache, among our blobs, in the package,
or at a path. A damaged index is set aside with a warning, and what can still be read of it is kept; models in the
caches are found without it. Knows records, not where names are looked for.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from moegguf.atomic_write import write_atomically
from moegguf.errors import MoeggufError, PullError
from moegguf.models.names import parse_name
from moegguf.models.recipe import check_messages, check_parameters, check_text

VERSION = 1
MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Record:
    """One name of ours. `files`: "hub:path in the cache", "sets:path among ours", "demo:" or an absolute path."""

    name: str
    files: tuple[str, ...]
    digest: str
    modified: datetime
    mmproj: str | None = None
    system: str | None = None
    template: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    license: str | None = None
    parent: str = ""

    @property
    def key(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Contents:
    """All of an index. `hidden`: keys of names in the Hugging Face cache that were removed while names of ours still
    use their files."""

    records: tuple[Record, ...] = ()
    hidden: frozenset[str] = frozenset()

    def find(self, key: str) -> Record | None:
        return next((record for record in self.records if record.key == key), None)

    def having(self, record: Record) -> Contents:
        """With `record` in the place of one of the same name."""
        return replace(self, records=(*self.without(record.key).records, record))

    def without(self, key: str) -> Contents:
        return replace(self, records=tuple(record for record in self.records if record.key != key))


class Index:
    """The file `models.json` in `folder`. Safe to use from many threads and processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "models.json"

    def read(self) -> Contents:
        """What the index says now; empty when there is none. Raises nothing for damage: that is set aside."""
        try:
            info = self.path.stat()
        except OSError:
            return Contents()
        contents, sound = _load(self.path, info.st_mtime_ns, info.st_ino, info.st_size)
        if not sound:
            with suppress(OSError, PullError):  # a folder that cannot be written stays as it is
                self.change(lambda found: found)
        return contents

    def change(self, edit: Callable[[Contents], Contents], after: Callable[[Contents], None] | None = None) -> Contents:
        """Writes what `edit` makes of the contents; nothing when it raises. Then calls `after` with it, still alone.

        Neither may use the index. Raises PullError when the disk fails.
        """
        try:
            with self._locked():
                contents, sound = self._load_now()
                changed = edit(contents)
                if not sound:
                    self._set_aside()
                if changed != contents or not sound:
                    write_atomically(self.path, _written(changed))
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

    def _set_aside(self) -> None:
        aside = self.path.with_name(f"models.json.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
        os.replace(self.path, aside)
        warnings.warn(
            f"the index of models was damaged; what could be read is kept, the rest is in {aside}.", stacklevel=2
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
def _load(path: Path, _mtime_ns: int, _inode: int, size: int) -> tuple[Contents, bool]:
    """(what could be read, whether that is all). Read once as long as the file is the same."""
    if size > MAX_INDEX_BYTES:
        return Contents(), False
    try:
        data = json.loads(path.read_bytes())
        listed, hidden = data["models"], data["hidden"]
        sound = data["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Contents(), False
    records: dict[str, Record] = {}
    for values in listed if isinstance(listed, list) else []:
        try:
            record = _record(values)
            records[record.key] = record
        except (KeyError, TypeError, ValueError, AttributeError):
            sound = False
    keys = {key for key in hidden if isinstance(key, str)} if isinstance(hidden, list) else set()
    return Contents(tuple(records.values()), frozenset(keys)), sound and isinstance(listed, list)


def _record(values: dict[str, Any]) -> Record:
    """Raises ValueError or the like for anything that is not as it was written."""
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
        system=check_text("system", values.get("system")),
        template=check_text("template", values.get("template")),
        parameters=check_parameters(dict(values.get("parameters") or {}), quiet=True),
        messages=check_messages(list(values.get("messages") or ())),
        license=check_text("license", values.get("license")),
        parent=str(values.get("parent", "")),
    )


def _written(contents: Contents) -> bytes:
    models = [asdict(record) | {"modified": record.modified.isoformat()} for record in contents.records]
    data = {"version": VERSION, "models": models, "hidden": sorted(contents.hidden)}
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()
