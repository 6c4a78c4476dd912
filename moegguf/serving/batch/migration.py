"""Moves files and batches from a folder of an older version into the database.

Older versions had a JSON file for each stored file and each batch. For each unfinished batch they had a folder with its
requests and answers.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from moegguf.errors import BatchFileError
from moegguf.regular_file import read_regular
from moegguf.serving.batch.answers import take_old_journal
from moegguf.serving.batch.database import Database, storing
from moegguf.serving.batch.files import StoredFile

Row = tuple[Any, ...]


def migrate(folder: Path, database: Database, batch_row: Callable[[dict[str, Any]], Row]) -> None:
    """Moves all files and batches of an older version into the database. The call can be repeated after a kill. Does
    nothing if the folder has no files of such a version.

    `batch_row` checks the JSON of a batch and makes a row of the database. Damaged JSON files are deleted. Raises
    BlockingIOError while a server of an older version uses the folder, StorageError.
    """
    lock = folder / ".lock"
    if not lock.exists():
        return
    files = folder / "files"
    with storing(folder), open(lock, "rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for journal in folder.glob("batch_*/answers.jsonl"):
            with suppress(BatchFileError):  # if the stored answers are damaged, the whole batch is answered again
                take_old_journal(database, journal.parent.name, journal)
        with database.transaction():
            for row in _rows(files, _file_row):
                database.execute("INSERT OR IGNORE INTO file VALUES (?, ?, ?, ?, ?, ?, ?)", *row)
            for row in _rows(folder, batch_row):
                database.execute("INSERT OR IGNORE INTO batch VALUES (?, ?, ?, ?)", *row)
        for batch_id, needs in database.execute("SELECT id, needs FROM batch WHERE needs IS NOT NULL"):
            requests = folder / batch_id / "requests.jsonl"
            if requests.exists():
                os.replace(requests, files / f"{needs}.data")
        for path in (*folder.glob("batch_*/"), *folder.glob("batch_*.json"), *files.glob("*.json")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        lock.unlink()


def _rows(folder: Path, to_row: Callable[[dict[str, Any]], Row]) -> Iterator[Row]:
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            known = json.loads(read_regular(path))
            if known["id"] == path.stem:
                yield to_row(known)


def _file_row(known: dict[str, Any]) -> Row:
    return astuple(StoredFile(**known))
