"""Turns off the terminal's echo while a program reads keys, and terminates this process
if it cannot be interrupted.

Input typed during an answer is not echoed and stays in the terminal's queue for the
next prompt. In the default mode the input would appear in the answer, and Enter would
arrive as a line feed, which is Ctrl-J.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from moegguf.terminal.messages import EXIT_INTERRUPTED

IFLAG, LFLAG = 0, 3  # indices into the list that tcgetattr returns
# Exit code after a signal = 128 + number of the signal, as in shells.
SIGNAL_EXIT_BASE = 128

_saved_attributes: list[Any] | None = None


@contextmanager
def keyboard_echo_off() -> Iterator[None]:
    """Context manager that turns off echo, line buffering and the mapping of CR to LF.
    Ctrl-C and Ctrl-Z still work. The terminal's mode is restored at the end, even after
    SIGTERM and SIGHUP, which exit the program."""
    global _saved_attributes
    stdin = sys.stdin.fileno()
    _saved_attributes = termios.tcgetattr(stdin)
    attributes = list(_saved_attributes)
    attributes[IFLAG] &= ~termios.ICRNL
    attributes[LFLAG] &= ~(termios.ECHO | termios.ICANON)
    attributes[LFLAG] |= termios.NOFLSH  # Ctrl-C must not discard the input queue

    # Called again on SIGCONT, since shells set their own mode after Ctrl-Z.
    def apply(*_: Any) -> None:
        with suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSANOW, attributes)

    # Raises, so that `finally` restores the mode.
    def exit_on_signal(number: int, _frame: Any) -> NoReturn:
        raise SystemExit(SIGNAL_EXIT_BASE + number)

    handlers = (
        (signal.SIGCONT, apply),
        (signal.SIGTERM, exit_on_signal),
        (signal.SIGHUP, exit_on_signal),
    )
    previous = [
        (number, signal.signal(number, handler)) for number, handler in handlers
    ]
    apply()
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
        _restore()


def _restore() -> None:
    global _saved_attributes
    saved = _saved_attributes
    _saved_attributes = None
    if saved is not None:
        with suppress(termios.error, OSError, ValueError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, saved)


def exit_now() -> NoReturn:
    """Restores the terminal's mode and terminates the process immediately, with the
    exit code of Ctrl-C."""
    _restore()
    os._exit(EXIT_INTERRUPTED)
