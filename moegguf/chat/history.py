"""What was typed in chats, kept for the next one in a file that only its owner can read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory

from moegguf.settings import data_folder

MAX_ENTRIES = 100
OWNER_ONLY = 0o600


def history_path() -> Path:
    """The file, in our own folder."""
    return data_folder() / "history"


class InputHistory(FileHistory):
    """prompt_toolkit's history file, of mode 600 and with the newest MAX_ENTRIES; `on` False neither reads nor writes.

    A file that cannot be read or written costs the history, never the chat.
    """

    def __init__(self, path: Path, *, on: bool = True) -> None:
        self.path = path
        self.on = on
        super().__init__(path)

    def load_history_strings(self) -> Iterable[str]:
        """Newest first."""
        if not self.on:
            return []
        try:
            entries = list(super().load_history_strings())
            if len(entries) > MAX_ENTRIES:
                self._keep(entries[:MAX_ENTRIES])
        except OSError:
            return []
        return entries[:MAX_ENTRIES]

    def _keep(self, entries: list[str]) -> None:
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self._open_private(beside)
            kept = FileHistory(beside)
            for entry in reversed(entries):
                kept.store_string(entry)
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)

    def append_string(self, string: str) -> None:
        if self.on and string.strip():
            super().append_string(string)

    def store_string(self, string: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open_private(self.path)
            super().store_string(string)
        except OSError:
            self.on = False

    @staticmethod
    def _open_private(path: Path) -> None:
        """Creates the file, or takes it away from others."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
        try:
            os.fchmod(handle, OWNER_ONLY)
        finally:
            os.close(handle)
