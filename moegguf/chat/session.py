"""Prints an answer as it is generated: first the thinking (in grey on a terminal), then
the text. Ctrl-C cancels the answer. Also finds the images in typed messages."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.control import Control
from rich.segment import ControlType
from rich.style import Style

from moegguf.errors import MoeggufError, OptionError
from moegguf.generate.images import MAX_IMAGE_BYTES, read_image
from moegguf.generate.request import Delta, PromptProgress
from moegguf.terminal.keyboard import exit_now
from moegguf.terminal.messages import print_message
from moegguf.terminal.progress import prompt_text

if TYPE_CHECKING:
    from moegguf.chat.conversation import Conversation
    from moegguf.chat.model import Answer, ChatModel
    from moegguf.generate.request import AnswerSummary, Event

TAB_CELLS = 8
MIN_WIDTH = 4  # columns; a narrower terminal is treated as this wide

_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys(range(128, 160), "\ufffd") | {ord("\r"): "", 127: "␡"}


def visible(text: str) -> str:
    """Returns `text` with its control characters replaced by visible ones. Newlines and
    tabs are kept, and carriage returns are removed."""
    return text.translate(_PICTURES)


class Wrapper:
    """Breaks lines between words while a text is still being generated. `width` returns
    the terminal's width in columns; each call of `feed` calls `width` again.

    A word is printed as it arrives. If it becomes too long for its line, it is erased
    and reprinted on the next line. A word that fills the whole line is broken instead.
    Lines may break between any two wide (CJK) characters. The text must not contain
    colour codes, because their characters would be counted as columns.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._wrapped = False  # True if the last line break was inserted by this class
        self._word = ""  # the last word of the line, which may still grow

    def feed(self, text: str) -> str:
        """Returns the output for `text`: its characters, line breaks, and control codes
        that move the last word."""
        # The last column is not used: from there, moving the cursor back would be off
        # by one (pending wrap).
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
                return ""  # no space at the start of a line after an inserted break
        if self._column + cells > limit:
            n_moved = cell_len(self._word)
            if 0 < n_moved < self._column:
                back = Control(
                    (ControlType.CURSOR_BACKWARD, n_moved),
                    (ControlType.ERASE_IN_LINE, 0),
                )
                before, self._column = f"{back}\n{self._word}", n_moved
            else:  # there is no word to move, or the word fills the whole line
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
    """Prints deltas on stdout, as UTF-8 in any locale. On a terminal, replaces control
    characters in the model's output, and breaks lines between words unless `wrap` is
    False or TERM is "dumb". On any other output, adds neither line breaks nor
    colours."""

    def __init__(self, *, wrap: bool, hide_thinking: bool) -> None:
        self._terminal = sys.stdout.isatty()
        moves = self._terminal and os.environ.get("TERM") != "dumb"
        self._colour = moves and not os.environ.get("NO_COLOR")
        self._wrapper = (
            Wrapper(lambda: shutil.get_terminal_size(FALLBACK_SIZE).columns)
            if wrap and moves
            else None
        )
        self._hide = hide_thinking
        # Thinking printed since the thinking section began; "" while no section is
        # open.
        self._thinking = ""

    def show(self, delta: Delta) -> None:
        """Prints a delta immediately."""
        if delta.thinking and not self._hide:
            self._write(
                ("" if self._thinking else THINKING) + delta.thinking, grey=True
            )
            self._thinking += delta.thinking
        if delta.text:
            self.end(delta.text)

    def end(self, text: str = "\n") -> None:
        """Closes the thinking section if it is still open. Then prints `text`: a part
        of the answer, or its end."""
        if self._thinking:
            self._write(
                "\n" * (not self._thinking.endswith("\n")) + DONE_THINKING, grey=True
            )
            self._thinking = ""
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


# Seconds; if a cancelled answer takes longer, a message explains the wait.
CANCEL_TIMEOUT_S = 0.5


def print_answer(
    model: ChatModel,
    conversation: Conversation,
    end: str = "\n",
    exit_timeout_s: float | None = None,
) -> Answer:
    """Prints the answer to the last message, and returns it. Prints `end` after a
    complete answer, and a note if the context was too small. A MoeggufError is not
    raised, but stored in `Answer.error`.

    Ctrl-C cancels the answer. A second Ctrl-C terminates the process. The process also
    exits if the cancelled answer does not stop within CANCEL_TIMEOUT_S plus
    `exit_timeout_s` seconds (None: no limit).
    """
    spinner = model.spinner
    spinner.show("")
    printer = Printer(
        wrap=conversation.word_wrap, hide_thinking=conversation.hide_thinking
    )
    answer = model.begin_answer()

    def show(event: Event) -> None:
        answer.add(event)
        if isinstance(event, PromptProgress):
            spinner.show(
                prompt_text(event.n_tokens, event.n_cached, event.n_done, event.seconds)
            )
        elif isinstance(event, Delta):
            spinner.close()
            printer.show(event)

    try:
        try:
            with closing(model.connection.answer(conversation)) as events:
                for event in events:
                    show(event)
        except KeyboardInterrupt:
            answer.is_interrupted = True
            spinner.close()
            for event in _rest(model, exit_timeout_s):
                show(event)
    except MoeggufError as error:
        answer.error = error
    finally:
        spinner.close()
    if answer.error is None or answer.text or answer.thinking:
        printer.end("\n" if answer.error or answer.is_interrupted else end)
        _print_left_out(answer.summary)
    return answer


def _rest(model: ChatModel, exit_timeout_s: float | None) -> list[Event]:
    """Returns the last events of a cancelled answer.

    If the answer does not end within CANCEL_TIMEOUT_S seconds, prints a message and
    waits up to `exit_timeout_s` seconds more (None: no limit). Exits moegguf if this
    time also runs out, or on another Ctrl-C.
    """
    with suppress(KeyboardInterrupt):
        rest = model.connection.rest(CANCEL_TIMEOUT_S)
        if rest is None:
            print_message(
                "\nstopping after the current pass; Ctrl + c again ends moegguf"
            )
            rest = model.connection.rest(exit_timeout_s)
        if rest is not None:
            return rest
    exit_now()


def _print_left_out(summary: AnswerSummary) -> None:
    """Prints the number of messages and tokens that were cut from the prompt, and how
    often the context was full during the answer. Prints nothing for counts of 0."""
    counts = ((summary.cut_messages, "message"), (summary.cut_tokens, "token"))
    if parts := [f"{n:,} {word}{'s' * (n != 1)}" for n, word in counts if n]:
        print_message(f"prompt cut: {', '.join(parts)} left out")
    if n := summary.n_shifts:
        times = "" if n == 1 else f" {n} times"
        print_message(
            f"the context was full{times}: the model no longer knows the older half"
        )


_EXTENSION = r"\.(?:png|jpe?g|gif|webp|bmp)"
_START = r"(?:~|\.{1,2})?/"
_PATH = re.compile(
    rf"""(?P<quote>["'])(?P<quoted>{_START}[^"'\n]*?{_EXTENSION})(?P=quote)"""
    rf"|(?<!\S)(?P<bare>{_START}(?:\\.|[^\s\\])*?{_EXTENSION})(?![\w/])",
    re.IGNORECASE,
)


def extract_images(text: str) -> tuple[str, list[bytes]]:
    """Removes from `text` the paths of image files that were typed or dragged onto the
    terminal, and reads these files. Returns the remaining text and the contents of the
    files, and prints each file's name on stderr. Paths have the same form as in `ollama
    run`: a path begins with /, ./, ../ or ~/ and ends with a known extension. A path
    with spaces is in quotes, or its spaces are escaped. A path stays in the text if no
    such file exists.

    Raises OptionError for a file that cannot be read, or that is not a valid image.
    """
    images: list[bytes] = []

    def replaced(match: re.Match[str]) -> str:
        name, path = _file(match)
        if path is None:
            return match[0]
        try:
            with path.open("rb") as file:
                images.append(file.read(MAX_IMAGE_BYTES + 1))
            read_image(images[-1])
        except OSError as error:
            raise OptionError(
                f"the image '{path}' cannot be read ({error}); check the file."
            ) from None
        except OptionError as error:
            raise OptionError(f"'{path}': {error}") from None
        print_message(f"Added image '{name}'")
        return ""

    rest = _PATH.sub(replaced, text)
    return (rest.strip() if images else text), images


def begins_with_image(text: str) -> bool:
    """Returns True if the text begins with the path of an existing file that has an
    image extension."""
    match = _PATH.match(text.lstrip())
    return match is not None and _file(match)[1] is not None


def _file(match: re.Match[str]) -> tuple[str, Path | None]:
    """Returns the path in a match without quotes and escapes, as a string and as a
    Path. The Path is None if there is no such file."""
    name = match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])
    path = Path(name).expanduser()
    try:
        return name, path if path.is_file() else None
    except (OSError, ValueError):
        return name, None
