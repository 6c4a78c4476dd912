"""Files that clients have uploaded, and files that batches have written. The contents
are in a folder, all other facts in a database.

Contents are kept in files because they may be large and are sent in parts. A file
exists if the database has an entry for it. The entry is added after the contents are
written, and removed before they are deleted.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from moegguf.atomic_write import OWNER_ONLY, write_atomically
from moegguf.errors import StorageError, UnknownIdError
from moegguf.quantities import format_bytes
from moegguf.serving.batch.answers import write_all
from moegguf.serving.batch.database import Database, storing
from moegguf.serving.clients import current_owner
from moegguf.text import without_surrogates

# Counted for each file and batch in addition to contents, so that empty files are not
# free.
DESCRIPTION_BYTES = 4096
VISIBLE = "owner IN ('', ?) AND (expires_at IS NULL OR expires_at > ?)"


@dataclass(frozen=True)
class StoredFile:
    """A stored file, as one row of the database. The contents are in the folder of the
    store."""

    id: str
    filename: str
    n_bytes: int
    purpose: str
    created_at: int  # seconds since 1970
    # Seconds since 1970; None: the file is kept until it is deleted.
    expires_at: int | None = None
    # The file is visible only to this owner's requests; "": to all requests.
    owner: str = ""


class FileStore:
    """The stored files in `folder`. `max_bytes` limits the files, their descriptions
    and the answers in the database together.

    Calls must come from one event loop, except calls of `put`. Requests see only files
    without an owner, and files of their own owner.
    """

    def __init__(
        self,
        folder: Path,
        database: Database,
        max_bytes: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Opens the store. Removes entries without contents. Removes contents that have
        no entry and that no unfinished batch needs. Raises OSError."""
        self._folder = folder
        self.database = database
        self._max_bytes = max_bytes
        self._now = now
        folder.mkdir(mode=0o700, exist_ok=True)
        for (file_id,) in database.execute("SELECT id FROM file"):
            if not self.contents(file_id).exists():
                database.execute("DELETE FROM file WHERE id = ?", file_id)
        needed = database.execute(
            "SELECT id FROM file UNION SELECT needs FROM batch WHERE needs IS NOT NULL"
        )
        for path in set(folder.iterdir()) - {
            self.contents(file_id) for (file_id,) in needed
        }:
            path.unlink(missing_ok=True)
        self.count_answers()

    def all(self) -> list[StoredFile]:
        """Removes expired files. Returns the files that the current request may see,
        oldest first. Raises StorageError."""
        self._remove_expired()
        return self._select("ORDER BY created_at, id")

    def _select(self, rest: str, *values: str) -> list[StoredFile]:
        query = f"SELECT * FROM file WHERE {VISIBLE} {rest}"
        rows = self.database.execute(query, current_owner.get(), self._now(), *values)
        return [StoredFile(*row) for row in rows]

    def get(self, file_id: str) -> StoredFile:
        """Returns the file with this id. Raises UnknownIdError if there is none, or it
        has expired, or the current request may not see it."""
        for file in self._select("AND id = ?", without_surrogates(file_id)):
            return file
        raise UnknownIdError(f"No such File object: {file_id:.80}")

    def contents(self, file_id: str) -> Path:
        """Returns the path at which the contents of a file with this id are stored.
        There need not be such a file."""
        return self._folder / f"{file_id}.data"

    def delete(self, file_id: str) -> None:
        """Removes a file. Batches that need its contents, and clients that are already
        reading it, can continue. Raises UnknownIdError or OSError."""
        self._remove(self.get(file_id).id)

    def _remove(self, file_id: str) -> None:
        self.database.execute("DELETE FROM file WHERE id = ?", file_id)
        self.remove_unused(file_id)

    def _remove_expired(self) -> None:
        for (file_id,) in self.database.execute(
            "SELECT id FROM file WHERE expires_at <= ?", self._now()
        ):
            # Contents that remain are removed when the store is next opened.
            with suppress(OSError):
                self._remove(file_id)

    def remove_unused(self, file_id: str) -> None:
        """Deletes the contents for a file id, unless the file has an entry or is needed
        by an unfinished batch. Raises OSError."""
        users = "SELECT id FROM file WHERE id = ?1 UNION SELECT id FROM batch WHERE needs = ?1"
        if not self.database.execute(users, file_id):
            self.contents(file_id).unlink(missing_ok=True)

    def new(self) -> NewFile:
        """Creates an empty file, to which the caller can write. Raises StorageError if
        there is no room left."""
        self.check_space(DESCRIPTION_BYTES)
        return NewFile(self, self.room() - DESCRIPTION_BYTES)

    def check_space(self, n_bytes: int) -> None:
        """Raises StorageError if `n_bytes` more would exceed the limit. First removes
        expired files if necessary."""
        if self.room() < n_bytes:
            self._remove_expired()
        if (room := self.room()) < n_bytes:
            raise StorageError(
                f"stored files may take {format_bytes(self._max_bytes)} together (MOEGGUF_STORAGE_LIMIT), and"
                f" {format_bytes(self._max_bytes - room)} are used, so {format_bytes(n_bytes)} more do not fit;"
                " delete files, or raise the limit."
            )

    @contextmanager
    def space(self, n_bytes: int) -> Iterator[None]:
        """Context manager whose body stores an answer of `n_bytes`. Raises StorageError
        if the answer would exceed the limit. Counts the bytes only if the body
        succeeds."""
        self.check_space(n_bytes)
        yield
        self._answer_bytes += n_bytes

    def count_answers(self) -> None:
        """Recounts the bytes of all answers in the database. Raises StorageError."""
        ((self._answer_bytes,),) = self.database.execute(
            "SELECT coalesce(sum(length(line)), 0) FROM answer"
        )

    def room(self) -> int:
        """Returns the number of bytes that can still be stored. The number is negative
        if the limit is exceeded."""
        counts = "SELECT (SELECT count(*) FROM file) + (SELECT count(*) FROM batch)"
        ((n_described,),) = self.database.execute(counts)
        taken = self._answer_bytes + n_described * DESCRIPTION_BYTES
        for path in self._folder.iterdir():
            with suppress(OSError):  # another thread may have removed the file
                taken += path.stat().st_size
        return self._max_bytes - taken

    def put(
        self,
        file_id: str,
        lines: Iterable[bytes],
        filename: str,
        purpose: str,
        expires_after_s: int | None,
    ) -> None:
        """Stores a file of `lines`, and replaces a file with the same id. Does not
        check the space limit. Any thread may call this method. Raises StorageError."""
        with storing(self._folder):
            write_atomically(self.contents(file_id), lines, OWNER_ONLY)
            self.add(file_id, filename, purpose, expires_after_s)

    def add(
        self, file_id: str, filename: str, purpose: str, expires_after_s: int | None
    ) -> StoredFile:
        """Adds a file to the database, after its contents have been written. Raises
        OSError."""
        now = int(self._now())
        n_bytes = self.contents(file_id).stat().st_size
        expires_at = None if expires_after_s is None else now + expires_after_s
        file = StoredFile(
            file_id,
            without_surrogates(filename),
            n_bytes,
            purpose,
            now,
            expires_at,
            current_owner.get(),
        )
        self.database.execute(
            "INSERT OR REPLACE INTO file VALUES (?, ?, ?, ?, ?, ?, ?)", *astuple(file)
        )
        return file


class NewFile:
    """A file that is being written. The end of the `with` block deletes it unless
    `finish` has added it to the store."""

    def __init__(self, store: FileStore, room_bytes: int) -> None:
        """Creates the file. A write that makes it larger than `room_bytes` checks the
        store's limit, which is slow. Raises StorageError."""
        self._store = store
        self._room_bytes = room_bytes
        self._n_bytes = 0
        self._id = f"file-{uuid.uuid4().hex[:24]}"
        self._path = store.contents(self._id)
        with storing(self._path):
            self._handle = os.open(
                self._path,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                OWNER_ONLY,
            )

    def write(self, data: bytes) -> None:
        """Appends bytes to the file. Raises StorageError."""
        self._n_bytes += len(data)
        if self._n_bytes > self._room_bytes:
            self._store.check_space(len(data) + DESCRIPTION_BYTES)
        with storing(self._path):
            write_all(self._handle, data)

    def finish(
        self, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> StoredFile:
        """Adds the file to the store. Raises StorageError."""
        with storing(self._path):
            os.fsync(self._handle)
            return self._store.add(self._id, filename, purpose, expires_after_s)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
        self._store.remove_unused(self._id)
