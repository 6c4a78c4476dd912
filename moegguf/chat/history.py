"""Input history of the chat, in a file that only its owner can read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory

MAX_ENTRIES = 100
OWNER_ONLY = 0o600


class InputHistory(FileHistory):
    """prompt_toolkit's history file with mode 600 and the newest MAX_ENTRIES; used only while `enabled`.

    A file that cannot be read or written disables the history; the chat goes on.
    """

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self.path = path
        self.enabled = enabled
        super().__init__(path)

    def load_history_strings(self) -> Iterable[str]:
        """Newest first."""
        if not self.enabled:
            return []
        try:
            entries = list(super().load_history_strings())
            if len(entries) > MAX_ENTRIES:
                self._rewrite(entries[:MAX_ENTRIES])
        except OSError:
            return []
        return entries[:MAX_ENTRIES]

    def _rewrite(self, entries: list[str]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self._open_private(temporary)
            file = FileHistory(temporary)
            for entry in reversed(entries):
                file.store_string(entry)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def append_string(self, string: str) -> None:
        """Adds an entry, unless disabled or blank."""
        if self.enabled and string.strip():
            super().append_string(string)

    def store_string(self, string: str) -> None:
        """Writes an entry to the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open_private(self.path)
            super().store_string(string)
        except OSError:
            self.enabled = False

    @staticmethod
    def _open_private(path: Path) -> None:
        """Creates the file; makes an existing one readable by its owner only."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
        try:
            os.fchmod(handle, OWNER_ONLY)
        finally:
            os.close(handle)
