"""A command on a pseudo-terminal, and the screen it draws.

Tests wait for output, not for a fixed time: `expect` waits for text, and `prompt` for
the chat's prompt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import pexpect
import pyte

TIMEOUT_S = 60.0
SCROLLBACK = 2000
ENTER = "\r"
PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"
PROMPT = ">>> Send a message"


def control(letter: str) -> str:
    """Returns the character that pressing Ctrl and `letter` sends."""
    return chr(ord(letter.upper()) - ord("@"))


class Terminal:
    """Runs `command` on a pseudo-terminal. Stops the command at the end of the `with`
    block."""

    def __init__(
        self,
        command: Sequence[str],
        environ: dict[str, str],
        *,
        columns: int = 80,
        rows: int = 24,
        term: str = "xterm",
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=SCROLLBACK, ratio=0.5)
        # Sends the replies of the terminal, such as the cursor position, to the
        # command.
        self.screen.write_process_input = self._reply
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        environ = {**environ, "TERM": term}
        self.child = pexpect.spawn(
            command[0],
            list(command[1:]),
            env=environ,
            dimensions=(rows, columns),
            timeout=TIMEOUT_S,
        )
        self.child.delaybeforesend = None

    def _reply(self, data: str) -> None:
        self.child.send(data)

    def send(self, keys: str) -> None:
        """Presses keys."""
        self.child.send(keys)

    def type(self, text: str) -> None:
        """Types text at the prompt, and waits until its last 20 characters are on the
        screen."""
        self.send(text)
        self.wait(
            lambda: (
                self._typed.endswith(text[-20:].rstrip())
                and not self.line.startswith(PROMPT)
            ),
            repr(text),
        )

    def enter(self, text: str) -> None:
        """Types a line and presses Enter."""
        self.type(text)
        self.send(ENTER)

    def ask(self, text: str) -> str:
        """Enters a line, and waits for the next prompt. Returns the lines from the
        entered line to that prompt."""
        before = len(self._all_lines())
        self.enter(text)
        self.prompt()
        return "\n".join(self._all_lines()[before - 1 :])

    def paste(self, text: str) -> None:
        """Pastes text as a terminal in bracketed-paste mode does."""
        self.send(f"{PASTE_BEGIN}{text}{PASTE_END}")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the command's process."""
        os.kill(self.child.pid, number)

    @property
    def text(self) -> str:
        """All lines of the terminal, with up to SCROLLBACK lines that have scrolled off
        the screen."""
        return "\n".join(self._all_lines())

    def _all_lines(self) -> list[str]:
        above = [
            "".join(line[x].data for x in range(self.screen.columns))
            for line in self.screen.history.top
        ]
        lines = [line.rstrip() for line in [*above, *self.screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def line(self) -> str:
        """The line of the screen with the cursor."""
        return self.screen.display[self.screen.cursor.y].rstrip()

    @property
    def _typed(self) -> str:
        """The text from the top of the screen to the cursor's line.

        A long input may end on the line above the cursor.
        """
        return "".join(self.screen.display[: self.screen.cursor.y + 1]).rstrip()

    def colour_of(self, text: str) -> str:
        """The colour of the first `text` on the screen: a name, "default" or
        hexadecimal digits."""
        for y, line in enumerate(self.screen.display):
            if (x := line.find(text)) >= 0:
                return str(self.screen.buffer[y][x].fg)
        raise AssertionError(f"{text!r} is not on the screen:\n{self.text}")

    def prompt(self) -> None:
        """Waits until the cursor's line shows the chat's empty prompt."""
        self.wait(lambda: self.line.startswith(PROMPT), "the prompt")

    def expect(self, text: str) -> None:
        """Waits until `text` is on the screen or above it. Line breaks do not
        matter."""
        joined = text.replace("\n", "")
        self.wait(lambda: joined in self.text.replace("\n", ""), repr(text))

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Reads output until `condition` is true. Fails after TIMEOUT_S, or when the
        command has exited."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            left = end - time.monotonic()
            if left <= 0 or not self._read(left):
                # The last output, which arrived as the command exited, may have made
                # the condition true.
                assert condition(), f"{what} did not appear:\n" + "\n".join(
                    self._all_lines()[-self.screen.lines :]
                )

    def _read(self, seconds: float) -> bool:
        try:
            data = self.child.read_nonblocking(65536, timeout=seconds)
        except (pexpect.EOF, pexpect.TIMEOUT):
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def exit_code(self) -> int:
        """Waits until the command has exited.

        Returns its exit code, or the negative number of the signal that killed it.
        """
        while self._read(TIMEOUT_S):
            pass
        self.child.wait() if self.child.isalive() else None
        self._close()
        return (
            -self.child.signalstatus
            if self.child.signalstatus
            else int(self.child.exitstatus)
        )

    def _close(self) -> None:
        """Closes the terminal, which sends SIGHUP to the command. Stops a command that
        is still running 0.1 seconds later."""
        process = self.child.ptyproc
        process.fileobj.close()
        end = time.monotonic() + process.delayafterclose
        while self.child.isalive() and time.monotonic() < end:
            time.sleep(0.002)
        process.delayafterclose = 0  # `close` would sleep even if the command has ended
        self.child.close(force=True)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._close()
        except pexpect.ExceptionPexpect:
            # Raised 0.1 seconds after SIGKILL, but a busy machine may need longer.
            os.waitpid(self.child.pid, 0)


def moegguf_command(*arguments: object) -> list[str]:
    """Returns the command line that runs `moegguf` with these arguments."""
    return [sys.executable, "-m", "moegguf", *map(str, arguments)]
