"""The keyboard while nobody reads it, and Ctrl-C while the model writes.

What is typed during an answer is not shown and waits for the next prompt: in the terminal's usual mode it would be
written into the answer, and Enter would arrive as a line feed, which is Ctrl-J.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from moegguf.terminal.messages import STOPPED

IFLAG, LFLAG = 0, 3  # places in what tcgetattr returns
SIGNALLED = 128  # added to a signal's number, it is the exit code that shells know

_before: list[Any] | None = None  # the terminal as it was


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """No echo, no lines, Enter as it is; Ctrl-C and Ctrl-Z work. Undone at the end, also by SIGTERM and SIGHUP."""
    global _before
    stdin = sys.stdin.fileno()
    _before = termios.tcgetattr(stdin)
    quiet = _quiet(_before)

    def again(*_: Any) -> None:  # after Ctrl-Z: shells put their own mode in place
        with suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSANOW, quiet)

    wanted = ((signal.SIGCONT, again), (signal.SIGTERM, _leave), (signal.SIGHUP, _leave))
    handlers = [(number, signal.signal(number, handler)) for number, handler in wanted]
    again()
    try:
        yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
        _restore()


def _quiet(attributes: list[Any]) -> list[Any]:
    quiet = list(attributes)
    quiet[IFLAG] &= ~termios.ICRNL
    quiet[LFLAG] &= ~(termios.ECHO | termios.ICANON)
    quiet[LFLAG] |= termios.NOFLSH  # Ctrl-C stops the answer, not what was typed meanwhile
    return quiet


def _restore() -> None:
    global _before
    before, _before = _before, None
    if before is not None:
        with suppress(termios.error, OSError, ValueError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)


def _leave(number: int, _frame: Any) -> NoReturn:
    """Unwinds, so that the terminal is as it was."""
    raise SystemExit(SIGNALLED + number)


def leave_now() -> NoReturn:
    """Ends the process although the model still computes."""
    _restore()
    os._exit(STOPPED)


class Interrupts:
    """How often Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def stopping(stop: Callable[[], object], patience_s: float | None = None) -> Iterator[Interrupts]:
    """Ctrl-C calls `stop`, on a thread of its own; once more, it ends the process.

    With `patience_s` the process ends by itself so long after the first.
    """
    interrupts = Interrupts()
    end = threading.Event()

    def end_late() -> None:
        if not end.wait(patience_s):
            leave_now()

    def interrupt(*_: Any) -> None:
        interrupts.count += 1
        if interrupts.count > 1:
            leave_now()
        # The interrupted code may hold the very lock that `stop` needs.
        threading.Thread(target=stop, name="moegguf-stop", daemon=True).start()
        if patience_s is not None:
            threading.Thread(target=end_late, name="moegguf-patience", daemon=True).start()

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        end.set()
        signal.signal(signal.SIGINT, handler)
