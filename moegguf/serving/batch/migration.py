"""Moves files and batches into the database from a folder that an older version wrote.

Older versions had a JSON file for each stored file and each batch. For each unfinished
batch they had a folder with its requests and answers.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from moegguf.errors import BatchFileError
from moegguf.regular_file import read_regular
from moegguf.serving.batch.answers import take_old_journal
from moegguf.serving.batch.database import Database, storing
from moegguf.serving.batch.files import StoredFile

log = logging.getLogger(__name__)

# Folder inside the folder of batches, for files that cannot be moved into the database.
DAMAGED = "damaged"

Row = tuple[Any, ...]


def migrate(
    folder: Path, database: Database, batch_row: Callable[[dict[str, Any]], Row]
) -> None:
    """Moves all files and batches of an older version into the database. If the process
    is killed, the call can be repeated. Does nothing if the folder has no files of such
    a version.

    `batch_row` checks the JSON of a batch and converts it to a row of the database.
    Damaged files are moved to the folder DAMAGED, with a warning in the log. Raises
    BusyError while a server of an older version is using the folder, and
    StorageError for other errors of the disk or database.
    """
    lock = folder / ".lock"
    if not lock.exists():
        return
    files, damaged = folder / "files", list[Path]()
    with storing(folder), open(lock, "rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with database.transaction():
            for row in _rows(files, _file_row, damaged):
                database.execute(
                    "INSERT OR IGNORE INTO file VALUES (?, ?, ?, ?, ?, ?, ?)", *row
                )
            for row in _rows(folder, batch_row, damaged):
                database.execute(
                    "INSERT OR IGNORE INTO batch VALUES (?, ?, ?, ?)", *row
                )
        known = {batch_id for (batch_id,) in database.execute("SELECT id FROM batch")}
        damaged += (path for path in folder.glob("batch_*/") if path.name not in known)
        for batch_id in known:
            journal = folder / batch_id / "answers.jsonl"
            try:
                take_old_journal(database, batch_id, journal)
            except BatchFileError:  # the whole batch is answered again
                damaged.append(journal)
        for path in damaged:
            _set_aside(folder, path)
        for batch_id, needs in database.execute(
            "SELECT id, needs FROM batch WHERE needs IS NOT NULL"
        ):
            requests = folder / batch_id / "requests.jsonl"
            if requests.exists():
                os.replace(requests, files / f"{needs}.data")
        for path in (
            *folder.glob("batch_*/"),
            *folder.glob("batch_*.json"),
            *files.glob("*.json"),
        ):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        lock.unlink()


def _rows(
    folder: Path, to_row: Callable[[dict[str, Any]], Row], damaged: list[Path]
) -> Iterator[Row]:
    """Yields a row for each JSON file in the folder. Adds the paths of damaged files to
    `damaged`."""
    for path in folder.glob("*.json"):
        try:
            known = json.loads(read_regular(path))
            if known["id"] != path.stem:
                raise ValueError("it describes another file or batch")
            row = to_row(known)
        except (OSError, ValueError, TypeError, KeyError):
            damaged.append(path)
        else:
            yield row


def _set_aside(folder: Path, path: Path) -> None:
    """Moves a damaged file or folder, and the contents that a damaged file describes,
    to DAMAGED. Raises OSError."""
    for each in (path.with_suffix(".data"), path):
        if each.exists():
            target = folder / DAMAGED / each.relative_to(folder)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(each, target)
    log.warning(
        "%s of an older version is damaged and is not migrated; it is in %s.",
        path,
        folder / DAMAGED,
    )


def _file_row(known: dict[str, Any]) -> Row:
    return astuple(StoredFile(**known))
