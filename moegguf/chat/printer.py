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


def visible(text: str) -> str:
    """`text` with control characters replaced by Unicode's control pictures."""
    return "".join(_control_picture(char) for char in text)


def _control_picture(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or 32 <= code < 127 or code > 159:
        return char
    if char == "\r":
        return ""
    return chr(0x2400 + code) if code < 32 else "␡" if code == 127 else "\ufffd"


class Wrapper:
    """Breaks lines between words, in text that is still being generated. `width` returns the terminal's cells, and is
    called for every `feed`.

    A word is printed as it arrives; when it becomes too long for its line, the printed part is erased and printed again
    on the next line. Lines may break between any two wide (CJK) characters. Handles cells, not colours.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._limit = 0
        self._column = 0
        self._wrapped = False  # the last line break was inserted here
        self._printed = ""  # the part of the last word that earlier calls returned
        self._unprinted = ""  # and the rest of it

    def feed(self, text: str) -> str:
        """What to print for `text`: its characters, line breaks, and controls that move the last word."""
        # Not the last column: a cursor there (pending wrap) is one cell off when moved back.
        self._limit = max(MIN_WIDTH, self._width()) - 1
        out: list[str] = []
        for char in text:
            out.append(self._char(char))
        out.append(self._unprinted)
        self._printed, self._unprinted = self._printed + self._unprinted, ""
        return "".join(out)

    def _char(self, char: str) -> str:
        if char == "\n":
            done, self._column, self._wrapped = self._end_word(), 0, False
            return done + "\n"
        cells = self._cells(char)
        if char in " \t":
            return self._space(char, cells)
        if cells > 1:
            done = self._end_word() + (self._break() if self._column + cells > self._limit else "")
            self._column += cells
            return done + char
        done = self._move_word() if self._column + cells > self._limit else ""
        self._column += cells
        self._unprinted += char
        return done

    def _cells(self, char: str) -> int:
        return TAB_CELLS - self._column % TAB_CELLS if char == "\t" else cell_len(char)

    def _space(self, char: str, cells: int) -> str:
        done = self._end_word()
        if self._wrapped and not self._column:
            return done  # no space at the start of a wrapped line
        if self._column + cells > self._limit:
            return done + self._break()
        self._column += cells
        return done + char

    def _break(self) -> str:
        self._column, self._wrapped = 0, True
        return "\n"

    def _end_word(self) -> str:
        done, self._printed, self._unprinted = self._unprinted, "", ""
        return done

    def _move_word(self) -> str:
        """Moves the last word of a full line to the next one, unless the word fills the line."""
        shown, word = cell_len(self._printed), self._printed + self._unprinted
        if cell_len(word) >= self._column:
            return self._end_word() + self._break()
        back = str(Control((ControlType.CURSOR_BACKWARD, shown), (ControlType.ERASE_IN_LINE, 0))) if shown else ""
        self._printed, self._unprinted = "", word
        done, self._column = back + self._break(), cell_len(word)
        return done


THINKING, DONE_THINKING = "Thinking...\n", "...done thinking.\n\n"
GREY = Style(color="bright_black")
FALLBACK_WIDTH = 80


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
        self._wrapper = (
            Wrapper(lambda: shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns) if wrap and moves else None
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
