"""Prints an answer on stdout as it is generated: its thinking, in grey on a terminal, then its text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.control import Control
from rich.segment import ControlType
from rich.style import Style

from moegguf.generate.request import Delta

TAB_CELLS = 8
MIN_WIDTH = 4  # cells; narrower terminals are treated as this wide

_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys(range(128, 160), "\ufffd") | {ord("\r"): "", 127: "␡"}


def visible(text: str) -> str:
    """`text` with control characters replaced by Unicode's control pictures."""
    return text.translate(_PICTURES)


class Wrapper:
    """Breaks lines between words, in text that is still being generated. `width` returns the terminal's cells, and is
    called for every `feed`.

    A word is printed as it arrives; when it becomes too long for its line, it is erased and printed again on the next
    line. Lines may break between any two wide (CJK) characters. Handles cells, not colours.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._wrapped = False  # the last line break was inserted here
        self._word = ""  # the last one, which may go on

    def feed(self, text: str) -> str:
        """What to print for `text`: its characters, line breaks, and controls that move the last word."""
        # Not the last column: a cursor there (pending wrap) is one cell off when moved back.
        limit = max(MIN_WIDTH, self._width()) - 1
        return "".join(self._char(char, limit) for char in text)

    def _char(self, char: str, limit: int) -> str:
        if char == "\n":
            self._column, self._wrapped, self._word = 0, False, ""
            return char
        cells = TAB_CELLS - self._column % TAB_CELLS if char == "\t" else cell_len(char)
        is_space, before = char in " \t", ""
        if is_space or cells > 1:
            self._word = ""
            if is_space and self._wrapped and not self._column:
                return ""  # no space at the start of a wrapped line
        if self._column + cells > limit:
            n_moved = cell_len(self._word)
            if 0 < n_moved < self._column:
                back = Control((ControlType.CURSOR_BACKWARD, n_moved), (ControlType.ERASE_IN_LINE, 0))
                before, self._column = f"{back}\n{self._word}", n_moved
            else:  # no word, or one that fills the line
                before, self._column, self._word = "\n", 0, ""
            self._wrapped = True
            if is_space:
                return before
        self._column += cells
        if not is_space and cells < 2:
            self._word += char
        return before + char


THINKING, DONE_THINKING = "Thinking...\n", "...done thinking.\n\n"
GREY = Style(color="bright_black")
FALLBACK_SIZE = (80, 24)


class Printer:
    """Prints deltas; collects them in `text` and `thinking`. On a terminal, a model's control characters are replaced,
    and lines are broken between words unless `wrap` is False. Anything else gets the text unchanged, as UTF-8, whatever
    the locale."""

    def __init__(self, *, wrap: bool = True, hide_thinking: bool = False) -> None:
        self.text = ""
        self.thinking = ""
        self._terminal = sys.stdout.isatty()
        moves = self._terminal and os.environ.get("TERM") != "dumb"
        self._colour = moves and not os.environ.get("NO_COLOR")
        self._wrapper = Wrapper(lambda: shutil.get_terminal_size(FALLBACK_SIZE).columns) if wrap and moves else None
        self._hide = hide_thinking
        self._is_thinking = False

    def show(self, delta: Delta) -> None:
        """Prints a delta at once."""
        if delta.thinking:
            self.thinking += delta.thinking
            if not self._hide:
                self._write(("" if self._is_thinking else THINKING) + delta.thinking, grey=True)
                self._is_thinking = True
        if delta.text:
            self.text += delta.text
            self.end(delta.text)

    def end(self, text: str = "\n") -> None:
        """Prints `text`, such as the end of the answer, after the end of its thinking if that is unfinished."""
        if self._is_thinking:
            self._is_thinking = False
            self._write("\n" * (not self.thinking.endswith("\n")) + DONE_THINKING, grey=True)
        self._write(text)

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
