"""Prints an answer on stdout as it is generated: its thinking, in grey on a terminal, then its text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from rich.color import ColorSystem
from rich.style import Style

from moegguf.chat.wrap import Wrapper, visible
from moegguf.generate.request import Delta

THINKING, DONE_THINKING = "Thinking...\n", "...done thinking.\n\n"
GREY = Style(color="bright_black")
FALLBACK_WIDTH = 80


def supports_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether stdout is a terminal with colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def terminal_width() -> int:
    """Width of the terminal now, in cells."""
    return shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns


class Printer:
    """Prints deltas; collects them in `text` and `thinking`.

    On a terminal, a model's control characters are replaced, and lines are broken between words unless `wrap` is False.
    Anything else gets the text unchanged, as UTF-8, whatever the locale.
    """

    def __init__(self, *, wrap: bool = True, hide_thinking: bool = False) -> None:
        self.text = ""
        self.thinking = ""
        self._terminal = sys.stdout.isatty()
        self._colour = supports_colour()
        self._wrapper = (
            Wrapper(terminal_width) if wrap and self._terminal and os.environ.get("TERM") != "dumb" else None
        )
        self._hide = hide_thinking
        self._is_thinking = False

    def show(self, delta: Delta) -> None:
        """Prints a delta at once."""
        if delta.thinking:
            self._write_thinking(delta.thinking)
        if delta.text:
            self._end_thinking()
            self.text += delta.text
            self._write(delta.text)

    def end(self, text: str = "\n") -> None:
        """Ends the answer with `text`, and its thinking first if that is unfinished."""
        self._end_thinking()
        self._write(text)

    def _write_thinking(self, text: str) -> None:
        self.thinking += text
        if self._hide:
            return
        if not self._is_thinking:
            self._is_thinking = True
            self._write(THINKING, grey=True)
        self._write(text, grey=True)

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            gap = "" if self.thinking.endswith("\n") else "\n"
            self._write(gap + DONE_THINKING, grey=True)

    def _write(self, text: str, *, grey: bool = False) -> None:
        if self._terminal:
            text = visible(text)
        if self._wrapper:
            text = self._wrapper.feed(text)
        if grey and self._colour:
            text = GREY.render(text, color_system=ColorSystem.STANDARD)
        out = sys.stdout.buffer
        out.write(text.encode("utf-8", errors="replace"))
        out.flush()
