"""A sqlite3 database that one process has open, and the tables of stored files, batches
and their answers.

If the process is killed at any moment, a transaction is either complete or has no
effect. Only one process at a time can open a database. The lock is released when the
process exits, even if the process is killed.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moegguf.errors import BusyError, StorageError

# Statuses of batches that have ended.
FINAL = ("completed", "failed", "expired", "cancelled")
VERSION = 1
SCHEMA = (
    "CREATE TABLE file (id TEXT PRIMARY KEY, filename TEXT, n_bytes INTEGER, purpose TEXT, created_at INTEGER,"
    " expires_at INTEGER, owner TEXT)",
    # needs: id of the file of requests; NULL if the batch has ended. about: all fields
    # of the batch, as JSON.
    "CREATE TABLE batch (id TEXT PRIMARY KEY, created_ns INTEGER, needs TEXT, about TEXT)",
    # number: line number of the request. requests: fingerprint of the requests' file
    # and of the defaults for their bodies. line: the output line.
    "CREATE TABLE answer (batch TEXT, number INTEGER, requests TEXT, line BLOB, PRIMARY KEY (batch, number))",
    f"PRAGMA user_version = {VERSION}",
)
# A longer write-ahead log is truncated to this size once its changes are in the
# database.
MAX_LOG_BYTES = 4 << 20
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Context manager that converts OSErrors and errors of sqlite3 to StorageError. An
    error about another process's lock becomes BusyError."""
    try:
        yield
    except StorageError:
        raise
    except BlockingIOError:
        raise _in_use(path) from None
    except OSError as error:
        raise _not_written(path, error.strerror) from None
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_BUSY:
            raise _in_use(path) from None
        if code in DAMAGED:
            raise StorageError(
                f"{path} must be an intact database, but is damaged ({error}); restore a copy of it, or move it away"
                " to start over."
            ) from None
        raise _not_written(path, error) from None


def _in_use(path: Path) -> BusyError:
    return BusyError(
        f"another process is using {path}; if it is a server, use that server, otherwise try again when the process"
        " has ended."
    )


def _not_written(path: Path, why: object) -> StorageError:
    return StorageError(
        f"cannot write {path} ({why}); make room on the disk, or make its folder writable."
        " What was written before is kept."
    )


class Database:
    """A sqlite3 database that only this process can use. Any thread may call the
    methods."""

    def __init__(self, path: Path, mode: int, schema: Sequence[str] = SCHEMA) -> None:
        """Opens the database at `path`. If there is none, creates it with the file mode
        `mode` and the statements of `schema`. Raises BusyError while another process
        has it open, and StorageError for other errors."""
        self.path = path
        self._lock = threading.RLock()
        with storing(path):
            with suppress(FileExistsError):
                # sqlite3 gives its log the same mode.
                os.close(os.open(path, os.O_CREAT | os.O_EXCL, mode))
            # No timeout: another process holds its lock as long as it has the database
            # open, so waiting would be useless.
            self._connection = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            try:
                self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                if not path.stat().st_size:
                    # The file shrinks when rows are deleted.
                    self._connection.execute("PRAGMA auto_vacuum = FULL")
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
                with self.transaction():
                    self._make_tables(schema)
            except BaseException:
                self.close()
                raise

    def _make_tables(self, schema: Sequence[str]) -> None:
        if not self.path.exists():  # another process has just removed it
            raise _in_use(self.path)
        ((version,),) = self.execute("PRAGMA user_version")
        if version > VERSION:
            raise StorageError(
                f"{self.path} has version {version}, but this moegguf reads only versions up to {VERSION}; use a newer"
                " moegguf, or move the file elsewhere to start with an empty one."
            )
        for statement in schema if version == 0 else ():
            self.execute(statement)

    def execute(self, statement: str, *values: Any, flush: bool = True) -> list[Any]:
        """Executes a statement and returns its rows. Outside of `transaction`, the
        statement is a transaction of its own.

        Without `flush`, such a change survives if the process is killed, but may be
        lost in a power failure. Raises StorageError; the statement then has no effect.
        """
        with self._lock, storing(self.path):
            if not self._connection.in_transaction:
                self._connection.execute(
                    f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}"
                )
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager that commits all changes made inside it at its end, or none
        of them if an exception is raised. Other threads wait. Raises StorageError."""
        with self._lock, storing(self.path):
            self.execute("BEGIN IMMEDIATE")
            with self._connection:
                yield

    def close(self) -> None:
        """Closes the database, so that other processes can open it."""
        self._connection.close()

    def remove(self) -> None:
        """Deletes the database's files, then closes the database. The log is deleted
        first, so that another process's new database never picks up the old log."""
        for suffix in ("-wal", ""):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self.close()
