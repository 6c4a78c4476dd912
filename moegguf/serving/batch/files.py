"""Files that clients have stored, and files of answers: a folder with the contents and what is known of each.

A file exists once its description does, which is written last and removed first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from moegguf.atomic_write import MODE, locked_temporary, remove_abandoned, write_atomically
from moegguf.errors import StorageError, UnknownIdError
from moegguf.quantities import format_bytes
from moegguf.serving.batch.answers import storage_error, write_all
from moegguf.serving.clients import current_owner, is_visible

DESCRIPTION_BYTES = 4096  # what a file takes besides its contents, so that empty ones are not free
UPLOAD = ".upload."
_ID = re.compile(r"file-[0-9a-z-]{1,64}")


@dataclass(frozen=True)
class StoredFile:
    """A file. Times in seconds since 1970; `expires_at` None: it stays until it is deleted. `owner`: who may have it
    (`is_visible`)."""

    id: str
    filename: str
    n_bytes: int
    purpose: str
    created_at: int
    expires_at: int | None = None
    owner: str = ""


class FileStore:
    """The files of a folder, which takes at most `max_bytes`. Used by one process and one event loop. To a request,
    those of other owners are not there."""

    def __init__(self, folder: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._now = now
        self._files: dict[str, StoredFile] = {}
        self._n_stored = 0  # bytes of files that are complete
        self._n_uploading = 0  # and of those that are not
        self._links: dict[Path, tuple[str, int]] = {}  # (whose contents, bytes) of links: see `link`
        self._charges: dict[Path, int] = {}  # bytes of files elsewhere: see `charge`

    def load(self) -> None:
        """Reads the folder, and removes what a killed process has left incomplete. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self._folder.glob(f"{UPLOAD}*"))
        self._files = {}
        for path in self._folder.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                file = StoredFile(**json.loads(path.read_bytes()))
                if file.id == path.stem and _ID.fullmatch(file.id) and self._contents(file.id).exists():
                    self._files[file.id] = file
        self._n_stored = sum(map(_taken, self._files.values()))
        for path in self._folder.glob("file-*.data"):
            if path.stem not in self._files:
                path.unlink(missing_ok=True)

    def all(self) -> list[StoredFile]:
        """The owner's files, oldest first. Those whose time is over are removed."""
        self._remove_expired()
        visible = (file for file in self._files.values() if is_visible(file.owner))
        return sorted(visible, key=lambda file: (file.created_at, file.id))

    def _remove_expired(self) -> None:
        for file in [file for file in self._files.values() if self._has_expired(file)]:
            with suppress(OSError):  # removed from the store all the same
                self._remove(file)

    def _has_expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self._now()

    def get(self, file_id: str) -> StoredFile:
        """A file. Raises UnknownIdError."""
        found = self._files.get(file_id)
        if found is None or not is_visible(found.owner) or self._has_expired(found):
            raise UnknownIdError(f"No such File object: {file_id:.80}")
        return found

    def path(self, file_id: str) -> Path:
        """Where a file's contents are. Raises UnknownIdError."""
        return self._contents(self.get(file_id).id)

    def delete(self, file_id: str) -> None:
        """Removes a file; who reads it still can, and its links stay. Raises UnknownIdError, OSError."""
        self._remove(self.get(file_id))

    def _remove(self, file: StoredFile) -> None:
        self._description(file.id).unlink(missing_ok=True)
        del self._files[file.id]
        self._n_stored -= _taken(file)
        self._contents(file.id).unlink(missing_ok=True)

    def link(self, file_id: str, path: Path) -> None:
        """Makes `path` the same file, or a copy of it where the file system has no links. Its contents count among what
        is stored until `unlink`, also when the file itself is deleted. Raises UnknownIdError, StorageError, OSError."""
        source, n_bytes = self.path(file_id), self.get(file_id).n_bytes
        try:
            os.link(source, path)
        except OSError:
            self._check_space(n_bytes)
            shutil.copyfile(source, path)
        self.note_link(file_id, path)

    def note_link(self, file_id: str, path: Path) -> None:
        """Counts what an earlier process has linked. Raises OSError."""
        status = path.stat()
        of = file_id if status.st_nlink > 1 else str(path)  # several links of a file take its bytes once
        self._links[path] = (of, status.st_size)

    def unlink(self, path: Path) -> None:
        """Removes a link, if there is one. Raises OSError."""
        path.unlink(missing_ok=True)
        self._links.pop(path, None)

    def charge(self, path: Path, n_bytes: int) -> None:
        """Counts a file that becomes so large among what is stored, until `drop_charge`. Raises StorageError above the
        limit; the file then counts as before."""
        self._check_space(n_bytes - self._charges.get(path, 0))
        self._charges[path] = n_bytes

    def note_charge(self, path: Path, n_bytes: int) -> None:
        """Counts a file that is so large already."""
        self._charges[path] = n_bytes

    def drop_charge(self, path: Path) -> None:
        """Counts a file no longer."""
        self._charges.pop(path, None)

    def new(self, file_id: str | None = None) -> NewFile:
        """A file to be written; with the id of one that exists, its replacement. Raises StorageError."""
        return NewFile(self, self._folder, file_id or f"file-{uuid.uuid4().hex[:24]}")

    def reserve(self, n_bytes: int) -> None:
        """Notes that a new file takes so many more bytes. Raises StorageError above the limit."""
        self._check_space(n_bytes)
        self._n_uploading += n_bytes

    def _check_space(self, n_bytes: int) -> None:
        if self._n_taken + n_bytes > self._max_bytes:
            self._remove_expired()
        taken = self._n_taken
        if taken + n_bytes > self._max_bytes:
            raise StorageError(
                f"stored files may take {format_bytes(self._max_bytes)} together (MOEGGUF_STORAGE_LIMIT), and"
                f" {format_bytes(taken)} are taken; delete files that are not needed."
            )

    @property
    def _n_taken(self) -> int:
        """Bytes of all files, of those that are deleted, but still linked, and of files elsewhere that count."""
        deleted = {of: n_bytes for of, n_bytes in self._links.values() if of not in self._files}
        return self._n_stored + self._n_uploading + sum(deleted.values()) + sum(self._charges.values())

    def give_back(self, n_bytes: int) -> None:
        """Notes that a new file's bytes are reserved no more."""
        self._n_uploading -= n_bytes

    def add(self, file: StoredFile, temporary: str) -> None:
        """Takes complete contents into the store. Raises OSError."""
        os.replace(temporary, self._contents(file.id))
        write_atomically(self._description(file.id), json.dumps(asdict(file)).encode())
        replaced = self._files.get(file.id)
        self._files[file.id] = file
        self._n_stored += _taken(file) - (_taken(replaced) if replaced else 0)

    @property
    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._now())

    def _contents(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.data"

    def _description(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"


def _taken(file: StoredFile) -> int:
    return file.n_bytes + DESCRIPTION_BYTES


class NewFile:
    """A file that is being written; `with` removes it unless `finish` was called."""

    def __init__(self, store: FileStore, folder: Path, file_id: str) -> None:
        self._store = store
        self._folder = folder
        self.id = file_id
        self.n_bytes = 0
        self._handle: int | None = None
        store.reserve(DESCRIPTION_BYTES)
        self._n_reserved = DESCRIPTION_BYTES
        try:
            self._handle, self._temporary = locked_temporary(folder, UPLOAD, "")
        except OSError as error:
            self.close()
            raise storage_error(folder, error) from None

    def write(self, data: bytes) -> None:
        """Adds bytes. Raises StorageError."""
        self._store.reserve(len(data))
        self._n_reserved += len(data)
        try:
            write_all(self._open, data)
        except OSError as error:
            raise storage_error(self._folder, error) from None
        self.n_bytes += len(data)

    def sync(self) -> None:
        """Waits until what was written is on the disk. From any thread. Raises StorageError."""
        try:
            os.fsync(self._open)
        except OSError as error:
            raise storage_error(self._folder, error) from None

    def finish(self, filename: str, purpose: str, expires_after_s: int | None = None) -> StoredFile:
        """Makes it one of the store's. Raises StorageError."""
        now = self._store.now
        expires_at = None if expires_after_s is None else now + expires_after_s
        file = StoredFile(self.id, filename, self.n_bytes, purpose, now, expires_at, current_owner.get())
        try:
            os.fsync(self._open)
            os.chmod(self._temporary, MODE)
            self._store.add(file, self._temporary)
        except OSError as error:
            raise storage_error(self._folder, error) from None
        return file

    @property
    def _open(self) -> int:
        assert self._handle is not None
        return self._handle

    def close(self) -> None:
        """Removes what is not finished. A second call does nothing."""
        self._store.give_back(self._n_reserved)
        self._n_reserved = 0
        handle, self._handle = self._handle, None
        if handle is not None:
            Path(self._temporary).unlink(missing_ok=True)  # no longer there when it was finished
            os.close(handle)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
