"""Reads a message of one or more lines from the keyboard, with the key bindings of
`ollama run` and a history of earlier messages and commands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from moegguf.atomic_write import OWNER_ONLY
from moegguf.settings import read_settings


class InputHistory(FileHistory):
    """prompt_toolkit's history file with mode 600, used only while `enabled`. If the
    file cannot be written, the history is switched off and the chat continues."""

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self.path = path
        self.enabled = enabled
        super().__init__(path)

    def load_history_strings(self) -> Iterable[str]:
        """Returns the entries of the file, the newest one first. Returns [] if the
        history is disabled or the file cannot be read."""
        try:
            return list(super().load_history_strings()) if self.enabled else []
        except OSError:
            return []

    def append_string(self, string: str) -> None:
        """Adds an entry. Does nothing if the history is disabled or the entry is
        blank."""
        if self.enabled and string.strip():
            super().append_string(string)

    def store_string(self, string: str) -> None:
        """Writes an entry to the file. If the file cannot be written, disables the
        history."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(OWNER_ONLY)
            self.path.chmod(OWNER_ONLY)
            super().store_string(string)
        except OSError:
            self.enabled = False


PROMPT, CONTINUATION = ">>> ", "... "
PLACEHOLDER = "Send a message (/? for help)"
QUOTES = '"""'
STYLE = Style.from_dict({"placeholder": "ansibrightblack"})

_QUOTED = re.compile(r'\s*(?P<before>/set\s+system\s+)?"""(?P<text>.*)', re.DOTALL)


def unquoted(text: str) -> str:
    """Returns a message, or the command `/set system`, without the triple quotes around
    its text. Any other text is returned unchanged."""
    quoted = _QUOTED.fullmatch(text)
    return (
        (quoted["before"] or "") + quoted["text"].rstrip().removesuffix(QUOTES)
        if quoted
        else text
    )


def is_quoted_message(text: str) -> bool:
    """Returns True if `text` begins with triple quotes. Such a message is never a
    command."""
    quoted = _QUOTED.fullmatch(text)
    return quoted is not None and not quoted["before"]


class Reader(PromptSession[str]):
    """Reads messages with `prompt` and adds them to the history."""

    def __init__(self, history: InputHistory, commands: Sequence[str] = ()) -> None:
        if editor := read_settings().editor:
            os.environ["VISUAL"] = editor  # prompt_toolkit prefers VISUAL to EDITOR
        keys, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)
        keys.add("enter", filter=typing)(_end_line)
        keys.add("c-j", filter=typing)(
            lambda event: event.current_buffer.insert_text("\n")
        )
        keys.add("c-g", filter=typing)(
            lambda event: event.current_buffer.open_in_editor()
        )
        super().__init__(
            PROMPT,
            multiline=True,
            history=history,
            placeholder=[("class:placeholder", PLACEHOLDER)],
            prompt_continuation=lambda _width, _line, wrap_count: (
                "" if wrap_count else CONTINUATION
            ),
            key_bindings=keys,
            enable_suspend=True,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            style=STYLE,
        )

    @property
    def unsent_text(self) -> str:
        """The text in the input line. After a KeyboardInterrupt, this is the text that
        was not sent."""
        return self.default_buffer.text


def _end_line(event: KeyPressEvent) -> None:
    """Handles the Enter key: begins a new line inside open triple quotes, and otherwise
    ends the message."""
    buffer = event.current_buffer
    quoted = _QUOTED.fullmatch(buffer.text)
    if quoted is not None and not quoted["text"].rstrip().endswith(QUOTES):
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()
