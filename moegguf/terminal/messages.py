"""Everything said on stderr when something is wrong, in one place: one sentence, the next step, an exit code.

Exit codes: 1 a fault, 2 a mistake on the command line, 130 stopped with Ctrl-C. MOEGGUF_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer

from moegguf.errors import MoeggufError

FAULT, USAGE, STOPPED = 1, 2, 130
UsageError = typer.BadParameter.__base__ or typer.BadParameter  # typer does not export the class itself


def say(text: str) -> None:
    """One line on stderr, whatever becomes of stderr."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        print(text, file=sys.stderr, flush=True)


def _stand_in_for_closed_streams() -> None:
    """A file opened later must not become stdout or stderr, which libraries write to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


def guarded(call: Callable[[], Any]) -> int:
    """Runs `call`; returns the exit code, having said what went wrong."""
    _stand_in_for_closed_streams()
    try:
        with _warnings_as_lines():
            result = call()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAULT
    except BaseException as error:
        if os.environ.get("MOEGGUF_DEBUG", "") not in ("", "0"):
            raise
        return _report(error)


def _report(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        return STOPPED
    if isinstance(error, typer.BadParameter | UsageError):
        say(f"error: {_usage(error)}")
        return USAGE
    if isinstance(error, typer.Abort):
        return STOPPED
    if isinstance(error, BrokenPipeError):
        # The reader of our stdout has gone; the interpreter's last flush must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    if isinstance(error, MoeggufError):
        say(f"error: {_one_line(error)}")
        return FAULT
    if isinstance(error, MemoryError):
        say("error: there is not enough memory; give a smaller --expert-cache or --ctx.")
        return FAULT
    say(
        f"error: unexpected {type(error).__name__}: {_one_line(error) or 'no reason given'};"
        " run again with MOEGGUF_DEBUG=1 for the traceback."
    )
    return FAULT


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _usage(error: Any) -> str:
    """Typer's own words, and where to read more."""
    text = " ".join(error.format_message().split()).rstrip(".") or "a command is missing"
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "moegguf"
    return f"{text[0].lower()}{text[1:]}; see `{path} --help`."


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A Python warning as a line a person reads."""
    say(f"warning: {' '.join(str(message).split())}")


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        yield
