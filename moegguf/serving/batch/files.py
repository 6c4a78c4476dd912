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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from moegguf.atomic_write import OWNER_ONLY, locked_temporary, remove_abandoned, write_atomically
from moegguf.errors import StorageError, UnknownIdError
from moegguf.quantities import format_bytes
from moegguf.regular_file import read_regular
from moegguf.serving.batch.answers import storing, write_all
from moegguf.serving.clients import current_owner, is_visible

DESCRIPTION_BYTES = 4096  # what a description takes of a disk, so that empty files are not free
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
    """The files in `folder`/files. All that is in `folder` may take `max_bytes`, what belongs to batches, too. Used by
    one process and one event loop. To a request, files of other owners are not there."""

    def __init__(self, folder: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        self._all = folder
        self._folder = folder / "files"
        self._max_bytes = max_bytes
        self._now = now
        self._files: dict[str, StoredFile] = {}

    def load(self) -> None:
        """Reads the folder, and removes what a killed process has left incomplete. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_abandoned(self._folder.glob(f"{UPLOAD}*"))
        self._files = {}
        for path in self._folder.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                file = StoredFile(**json.loads(read_regular(path)))
                if file.id == path.stem and _ID.fullmatch(file.id) and self.contents(file.id).exists():
                    self._files[file.id] = file
        for path in self._folder.glob("file-*.data"):
            if path.stem not in self._files:
                path.unlink(missing_ok=True)

    def all(self) -> list[StoredFile]:
        """The owner's files, oldest first. Those whose time is over are removed."""
        self._remove_expired()
        visible = (file for file in self._files.values() if is_visible(file.owner))
        return sorted(visible, key=lambda file: (file.created_at, file.id))

    def _remove_expired(self) -> None:
        for file in filter(self._has_expired, list(self._files.values())):
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
        return self.contents(self.get(file_id).id)

    def delete(self, file_id: str) -> None:
        """Removes a file; who reads it still can, and its links stay. Raises UnknownIdError, OSError."""
        self._remove(self.get(file_id))

    def _remove(self, file: StoredFile) -> None:
        self._description(file.id).unlink(missing_ok=True)
        del self._files[file.id]
        self.contents(file.id).unlink(missing_ok=True)

    def link(self, file_id: str, path: Path) -> None:
        """Makes `path` the same file, or a copy of it where the file system has no links; it stays when the file is
        deleted. Raises UnknownIdError, StorageError, OSError."""
        source = self.path(file_id)
        try:
            os.link(source, path)
        except OSError:
            self.check_space(self.get(file_id).n_bytes)
            path.touch(OWNER_ONLY)
            shutil.copyfile(source, path)

    def new(self) -> NewFile:
        """A file to be written while there is room. Raises StorageError."""
        self.check_space(DESCRIPTION_BYTES)
        return NewFile(self, self._folder)

    def check_space(self, n_bytes: int) -> None:
        """Raises StorageError where so many bytes more would be above the limit."""
        if self.room() < n_bytes:
            self._remove_expired()
        if (room := self.room()) < n_bytes:
            raise StorageError(
                f"stored files may take {format_bytes(self._max_bytes)} together (MOEGGUF_STORAGE_LIMIT), and"
                f" {format_bytes(self._max_bytes - room)} are taken; delete files that are not needed."
            )

    def room(self) -> int:
        """Bytes up to the limit. Several links of a file take its bytes once."""
        sizes = {}
        for folder, _, names in os.walk(self._all):
            for name in names:
                with suppress(OSError):  # it has just been removed
                    status = os.stat(os.path.join(folder, name))
                    sizes[status.st_ino] = DESCRIPTION_BYTES if name.endswith(".json") else status.st_size
        return self._max_bytes - sum(sizes.values())

    def put(
        self, file_id: str, lines: Iterable[bytes], filename: str, purpose: str, expires_after_s: int | None
    ) -> None:
        """Stores a file with this id, in place of the one that has it; it may take more than there is room for. From
        any thread. Raises StorageError."""
        with storing(self._folder):
            write_atomically(self.contents(file_id), lines, OWNER_ONLY)
            self.add(file_id, filename, purpose, expires_after_s)

    def add(self, file_id: str, filename: str, purpose: str, expires_after_s: int | None) -> StoredFile:
        """Takes a file whose contents are complete into the store. Raises OSError."""
        now, n_bytes = int(self._now()), self.contents(file_id).stat().st_size
        expires_at = None if expires_after_s is None else now + expires_after_s
        file = StoredFile(file_id, filename, n_bytes, purpose, now, expires_at, current_owner.get())
        write_atomically(self._description(file_id), json.dumps(asdict(file)).encode(), OWNER_ONLY)
        self._files[file_id] = file
        return file

    def contents(self, file_id: str) -> Path:
        """Where the contents of a file with this id belong."""
        return self._folder / f"{file_id}.data"

    def _description(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"


class NewFile:
    """A file that is being written; `with` removes it unless `finish` was called."""

    def __init__(self, store: FileStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._n_bytes = 0
        self._room_bytes = store.room() - DESCRIPTION_BYTES  # now: to look for more at each write takes too long
        with storing(folder):
            self._handle, self._temporary = locked_temporary(folder, UPLOAD, "")

    def write(self, data: bytes) -> None:
        """Adds bytes. Raises StorageError."""
        self._n_bytes += len(data)
        if self._n_bytes > self._room_bytes:
            self._store.check_space(len(data) + DESCRIPTION_BYTES)
        with storing(self._folder):
            write_all(self._handle, data)

    def finish(self, filename: str, purpose: str, expires_after_s: int | None = None) -> StoredFile:
        """Makes it one of the store's. Raises StorageError."""
        with storing(self._folder):
            os.fsync(self._handle)
            file_id = f"file-{uuid.uuid4().hex[:24]}"
            os.replace(self._temporary, self._store.contents(file_id))
            return self._store.add(file_id, filename, purpose, expires_after_s)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        Path(self._temporary).unlink(missing_ok=True)  # no longer there when it was finished
        os.close(self._handle)
