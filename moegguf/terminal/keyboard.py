"""Terminal mode between prompts, and the end of a process that cannot be interrupted.

Input typed during an answer is not echoed and stays in the terminal's queue for the next prompt. In the default mode it
would be echoed into the answer, and Enter would arrive as a line feed, which is Ctrl-J.
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

IFLAG, LFLAG = 0, 3  # indices into tcgetattr's list
SIGNAL_EXIT_BASE = 128  # exit code of a signal = this + its number, as in shells

_saved_attributes: list[Any] | None = None


@contextmanager
def keyboard_echo_off() -> Iterator[None]:
    """No echo, no line buffering, no CR-to-LF mapping; signals from keys still work. Undone at the end, also on SIGTERM
    and SIGHUP."""
    global _saved_attributes
    stdin = sys.stdin.fileno()
    _saved_attributes = termios.tcgetattr(stdin)
    attributes = list(_saved_attributes)
    attributes[IFLAG] &= ~termios.ICRNL
    attributes[LFLAG] &= ~(termios.ECHO | termios.ICANON)
    attributes[LFLAG] |= termios.NOFLSH  # Ctrl-C must not discard the input queue

    def apply(*_: Any) -> None:  # again on SIGCONT: after Ctrl-Z shells set their own mode
        with suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSANOW, attributes)

    def exit_on_signal(number: int, _frame: Any) -> NoReturn:  # unwinds the stack, which restores the terminal
        raise SystemExit(SIGNAL_EXIT_BASE + number)

    handlers = ((signal.SIGCONT, apply), (signal.SIGTERM, exit_on_signal), (signal.SIGHUP, exit_on_signal))
    previous = [(number, signal.signal(number, handler)) for number, handler in handlers]
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
    """Ends the process as Ctrl-C does, without waiting for anything."""
    _restore()
    os._exit(EXIT_INTERRUPTED)
