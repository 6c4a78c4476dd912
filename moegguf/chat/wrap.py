"""Line breaks between words, in text that is still being written.

A word is shown as it comes; when it turns out to be too long for its line, what is shown of it is taken back and
written on the next one. Wide (CJK) characters may be separated anywhere. Knows cells, not colours.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from rich.control import Control
from rich.segment import ControlType

TAB_CELLS = 8
LEAST_WIDTH = 4  # one wide character and some more: narrower terminals are taken for this wide


def visible(text: str) -> str:
    """`text` without what would command the terminal: control characters become their pictures."""
    return "".join(_picture(char) for char in text)


def _picture(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or 32 <= code < 127 or code > 159:
        return char
    if char == "\r":
        return ""
    return chr(0x2400 + code) if code < 32 else "␡" if code == 127 else "\ufffd"


class Wrapper:
    """Feed it text, write what it returns. `width`: cells of the terminal now, looked up for every piece."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._limit = 0
        self._column = 0
        self._broken = False  # the last line break was ours
        self._shown = ""  # of the last word: what an earlier call has returned
        self._fresh = ""  # and what this call will

    def feed(self, text: str) -> str:
        """`text` with the line breaks it needs at this place."""
        # Never the last column: a cursor that waits there is a cell off when it is moved back.
        self._limit = max(LEAST_WIDTH, self._width()) - 1
        out: list[str] = []
        for char in text:
            out.append(self._char(char))
        out.append(self._fresh)
        self._shown, self._fresh = self._shown + self._fresh, ""
        return "".join(out)

    def _char(self, char: str) -> str:
        if char == "\n":
            done, self._column, self._broken = self._end_word(), 0, False
            return done + "\n"
        cells = self._cells(char)
        if char in " \t":
            return self._space(char, cells)
        if cells > 1:
            done = self._end_word() + self._newline_before(cells)
            self._column += cells
            return done + char
        done = self._move_word() if self._column + cells > self._limit else ""
        self._column += cells
        self._fresh += char
        return done

    def _cells(self, char: str) -> int:
        return TAB_CELLS - self._column % TAB_CELLS if char == "\t" else cell_len(char)

    def _space(self, char: str, cells: int) -> str:
        done = self._end_word()
        if self._broken and not self._column:
            return done  # one that would begin a line that was broken before it
        if self._column + cells > self._limit:
            return done + self._break()
        self._column += cells
        return done + char

    def _newline_before(self, cells: int) -> str:
        return "" if self._column + cells <= self._limit else self._break()

    def _break(self) -> str:
        self._column, self._broken = 0, True
        return "\n"

    def _end_word(self) -> str:
        done, self._shown, self._fresh = self._fresh, "", ""
        return done

    def _move_word(self) -> str:
        """The line is full: its last word begins the next one, unless it is as long as the line."""
        shown, word = cell_len(self._shown), self._shown + self._fresh
        if cell_len(word) >= self._column:
            return self._end_word() + self._break()
        back = str(Control((ControlType.CURSOR_BACKWARD, shown), (ControlType.ERASE_IN_LINE, 0))) if shown else ""
        self._shown, self._fresh = "", word
        done, self._column = back + self._break(), cell_len(word)
        return done
