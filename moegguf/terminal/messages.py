"""Messages on stderr and exit codes: one sentence per error, with the next step.

Exit codes: 1 failure, 2 usage error, 130 interrupted with Ctrl-C. MOEGGUF_DEBUG=1 shows
tracebacks.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import textwrap
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import typer

from moegguf.errors import MoeggufError
from moegguf.settings import shows_tracebacks

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
# The base class of usage errors, which typer does not export.
UsageError: Any = typer.BadParameter.__base__

_OF_PYDANTIC = {
    "Input should be": "it has to be", "less than or equal to": "at most", "greater than or equal to": "at least",
    "a valid integer, unable to parse string as an integer": "a whole number",
    "a valid number, unable to parse string as a number": "a number",
}  # fmt: skip
_ASCII_ONLY = "moegguf-ascii"  # name of the encoding error handler
# ASCII replacements for maps and tables.
_ASCII_LETTERS = dict(zip("·○░▒▓█▁▂▃▄▅▆▇–×", ".o-=x#___---=-x", strict=True))


def print_message(text: str) -> None:
    """Prints `text` on stderr. On a terminal, wraps long lines between words. If stderr
    is closed, does nothing."""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        if sys.stderr.isatty():
            text = "\n".join(map(_broken_line, text.split("\n")))
        print(text, file=sys.stderr, flush=True)


def _broken_line(line: str) -> str:
    """Returns `line`, with line breaks between words if it is wider than the
    terminal."""
    columns = os.get_terminal_size(sys.stderr.fileno()).columns
    if columns < len(line):
        return textwrap.fill(
            line, columns, break_long_words=False, break_on_hyphens=False
        )
    return line


def print_error(error: Exception, before: str = "") -> None:
    """Prints an error on stderr as one paragraph: "error: ", the text `before`, and the
    error's message."""
    print_message(f"error: {before}{' '.join(str(error).split())}")


def _replace_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed, so that no other
    file gets their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest free descriptor, which is `number`.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(
                sys,
                name,
                os.fdopen(
                    number, "w" if number else "r", encoding="utf-8", closefd=False
                ),
            )


def _ascii_letters(error: UnicodeError) -> tuple[str, int]:
    """Handles an encoding error: returns ASCII replacements for characters that the
    stream's encoding cannot represent, and "?" for characters without a replacement."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_ASCII_LETTERS.get(letter, "?") for letter in lacking), error.end


def run_with_exit_code(call: Callable[[], Any]) -> int:
    """Runs `call` and returns the exit code. If `call` fails, prints the error, except
    after Ctrl-C and for a closed pipe. With MOEGGUF_DEBUG=1, re-raises the error
    instead."""
    _replace_closed_streams()
    codecs.register_error(_ASCII_ONLY, _ascii_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=_ASCII_ONLY)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            result = call()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILURE
    except BaseException as error:  # includes Ctrl-C, which also has an exit code
        if shows_tracebacks():
            raise
        return _print_failure(error)


def _print_failure(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt | typer.Abort) or isinstance(
        error.__cause__, KeyboardInterrupt
    ):
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader of stdout has closed the pipe. Python's flush at exit must not
        # report this again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    text = " ".join(str(error).split())
    if isinstance(error, UsageError):
        text = (
            " ".join(error.format_message().split()).rstrip(".")
            or "a command is missing"
        )
        for theirs, ours in _OF_PYDANTIC.items():
            text = text.replace(theirs, ours)
        path = error.ctx.command_path if error.ctx else "moegguf"
        print_message(f"error: {text[0].lower()}{text[1:]}; see `{path} --help`.")
        return EXIT_USAGE
    if isinstance(error, MemoryError) and not isinstance(error, MoeggufError):
        text = "there is not enough memory; give a smaller --expert-cache or --ctx."
    elif not isinstance(error, MoeggufError):
        reason = f"unexpected {type(error).__name__}: {text or 'no reason given'}"
        text = f"{reason}; run again with MOEGGUF_DEBUG=1 for the traceback."
    print_message(f"error: {text}")
    return EXIT_FAILURE


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print_message(f"warning: {' '.join(str(message).split())}")
