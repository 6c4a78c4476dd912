"""Stores objects of OpenAI's Responses API. Each response has the messages of its turn
and the id of the previous response.

A response is removed when it is older than the age limit, or when newer responses need
its space. When a later response continues a conversation, the age of the responses
before it is reset to 0. Only one process at a time can open the database. Any thread
may call any method.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moegguf.atomic_write import OWNER_ONLY
from moegguf.errors import MoeggufError, OptionError, UnknownIdError
from moegguf.generate.images import text_of
from moegguf.generate.request import Message
from moegguf.serving.batch.database import Database, storing
from moegguf.serving.clients import current_owner, is_visible

log = logging.getLogger(__name__)

DATABASE = "responses.db"
SCHEMA = (
    # messages: messages of the turn, as JSON. about: the response object, as JSON.
    # n_bytes: size of both in bytes.
    "CREATE TABLE response (id TEXT PRIMARY KEY, owner TEXT, previous TEXT, expires_at REAL, n_bytes INTEGER,"
    " messages BLOB, about BLOB)",
    "CREATE INDEX response_expires_at ON response (expires_at)",
    "PRAGMA user_version = 1",
)
RENEW = (
    "WITH RECURSIVE turn (id) AS (VALUES (?) UNION SELECT previous FROM response JOIN turn USING (id))"
    " UPDATE response SET expires_at = ? WHERE id IN turn"
)
DROP_OLDEST = "DELETE FROM response WHERE id = (SELECT id FROM response ORDER BY expires_at, rowid LIMIT 1)"
MAX_BYTES = 1 << 30  # limit on the total `n_bytes` of all responses
# Limit on the size of one conversation's messages, as JSON.
MAX_HISTORY_BYTES = 32 << 20


class ResponseStore:
    """The responses in a folder, which are kept for `age_s` seconds. If `age_s` is 0,
    callers must store nothing (`stores`)."""

    def __init__(
        self, folder: Path, age_s: float, now: Callable[[], float] = time.time
    ) -> None:
        self._path = folder / DATABASE
        self._age_s = age_s
        self._now = now
        self._lock = threading.Lock()
        self._database: Database | None = None

    @property
    def stores(self) -> bool:
        """True if callers should store responses."""
        return self._age_s > 0

    def start(self) -> None:
        """Opens the database, if there is one, and removes responses that are too old.
        A failure is only logged."""
        if not self._path.exists():
            return
        try:
            self._open()
        except (MoeggufError, OSError) as error:
            log.warning("responses are not stored: %s", error)

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def add(
        self, about: dict[str, Any], previous: str | None, messages: Sequence[Message]
    ) -> None:
        """Stores a response of the current owner with the messages of its turn. Then
        removes the oldest responses until all together have at most MAX_BYTES. Raises
        BusyError or StorageError."""
        expires_at = self._now() + self._age_s
        parts = [
            json.dumps(part, ensure_ascii=False).encode() for part in (messages, about)
        ]
        n_bytes = sum(map(len, parts))
        row = (about["id"], current_owner.get(), previous, expires_at, n_bytes, *parts)
        database = self._open()
        with database.transaction():
            database.execute("INSERT INTO response VALUES (?, ?, ?, ?, ?, ?, ?)", *row)
            database.execute(RENEW, about["id"], expires_at)
            while (
                database.execute("SELECT total(n_bytes) FROM response")[0][0]
                > MAX_BYTES
            ):
                database.execute(DROP_OLDEST)

    def get(self, response_id: str) -> dict[str, Any]:
        """Returns the response object with this id. Raises UnknownIdError if there is
        none that the current request may see. Also raises BusyError or StorageError."""
        _, _, about = self._row(response_id)
        found: dict[str, Any] = json.loads(about)
        return found

    def delete(self, response_id: str) -> None:
        """Removes a response. Afterwards no conversation that contains this response
        can be continued. Raises the errors of `get`."""
        self._row(response_id)
        self._open().execute("DELETE FROM response WHERE id = ?", response_id)

    def history(self, response_id: str) -> list[Message]:
        """Returns all messages of a conversation up to a response, including its own
        turn. Raises the errors of `get` for each turn, and OptionError if the messages
        are too large."""
        turns = list[list[Message]]()
        n_bytes = 0
        turn: str | None = response_id
        while turn is not None:
            turn, messages, _ = self._row(turn)
            n_bytes += len(messages)
            if n_bytes > MAX_HISTORY_BYTES:
                raise OptionError(
                    f"previous_response_id: the conversation is larger than {MAX_HISTORY_BYTES >> 20} MiB; begin a new"
                    " one."
                )
            turns.append(json.loads(messages))
        return [
            message
            for messages_of_turn in reversed(turns)
            for message in messages_of_turn
        ]

    def turns(self) -> list[str]:
        """Returns the text of each stored turn of requests without an API key, in the
        order in which they were stored. Raises BusyError or StorageError."""
        if not self._path.exists():
            return []
        rows = self._open().execute(
            "SELECT messages FROM response WHERE owner = '' ORDER BY rowid"
        )
        return [
            "\n\n".join(text_of(message["content"]) for message in json.loads(messages))
            for (messages,) in rows
        ]

    def _row(self, response_id: str) -> tuple[str | None, bytes, bytes]:
        """Returns (id of the previous response, messages, response object). Raises the
        errors of `get`."""
        rows = []
        if self._path.exists():
            query = "SELECT owner, previous, messages, about FROM response WHERE id = ?"
            rows = self._open().execute(query, response_id)
        if not rows or not is_visible(rows[0][0]):
            raise UnknownIdError(f"Response with id '{response_id:.80}' not found.")
        _, previous, messages, about = rows[0]
        return previous, messages, about

    def _open(self) -> Database:
        """Opens the database if needed, removes responses that are too old, and returns
        the database. Raises BusyError or StorageError."""
        with self._lock:
            if self._database is None:
                with storing(self._path):
                    self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._database = Database(self._path, OWNER_ONLY, SCHEMA)
            database = self._database
        database.execute(
            "DELETE FROM response WHERE expires_at <= ?", self._now(), flush=False
        )
        return database
