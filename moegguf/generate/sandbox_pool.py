"""Processes that do what untrusted texts ask for (sandbox.py), within limits, and can be killed: chat templates are
rendered there, and grammars compiled.

A process is started by the first request and kept for the next; others only for requests at the same time, at most
MAX_PROCESSES, for which further ones wait. They end with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore
from typing import Any

from moegguf.child import child_command, child_environment

MAX_S = 2.0  # computing time for one request
MAX_PROCESSES = 3
COMMAND = child_command(f"{__package__}.sandbox")
Child = subprocess.Popen[bytes]


class LimitedError(Exception):
    """A request failed. `kind`: an error of the sandbox. `line`: of a template's source, 0 if unknown."""

    def __init__(self, kind: str, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.line = line


def reply_of(request: Mapping[str, Any]) -> str:
    """The text of a process's reply to a request (sandbox.py), where what JSON does not have is text. Raises
    LimitedError, also when a limit of time, memory or output is reached."""
    try:
        text = json.dumps(
            {**request, "seconds": MAX_S}, ensure_ascii=False,
            default=lambda value: dict(value) if isinstance(value, Mapping) else str(value),
        )  # fmt: skip
        line = text.encode("utf-8", "surrogatepass")
    except RecursionError as error:
        raise LimitedError("failed", "its variables nest too deep") from error
    except (TypeError, ValueError) as error:
        raise LimitedError("failed", f"its variables are not JSON: {error}") from error
    with _process() as process:
        reply = _reply(process, line)
    if "error" in reply:
        raise LimitedError(reply["error"], reply["message"], reply.get("line", 0))
    return str(reply["text"])


def start() -> None:
    """Starts the first process, so that the first template need not wait a tenth of a second for it."""
    with suppress(LimitedError), _process():
        pass


def _reply(process: Child, line: bytes) -> dict[str, Any]:
    """Raises LimitedError when the process ends instead."""
    assert process.stdin and process.stdout
    with suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    reply = process.stdout.readline()
    if not reply.endswith(b"\n"):
        code = process.wait()
        timed_out = code == -signal.SIGPROF
        reason = f"it takes more than {MAX_S:g} s" if timed_out else f"its process ended with code {code}"
        raise LimitedError("stopped", reason)
    found: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
    return found


@contextmanager
def _process() -> Iterator[Child]:
    """A running process, which an error ends: the next request would read this one's reply. Raises LimitedError."""
    with _running:
        process = None
        try:
            with suppress(IndexError):
                process = _idle.pop()
            if process is None or process.poll() is not None:
                process = _started()
            yield process
        except BaseException:  # also an interrupt
            if process is not None:
                _kill(process)
            raise
        _idle.append(process)


def _started() -> Child:
    pipe, environment = subprocess.PIPE, child_environment()
    try:  # the child has a group of its own: Ctrl-C in the terminal interrupts this process only
        return subprocess.Popen(
            COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, process_group=0
        )
    except OSError as error:
        raise LimitedError("failed", f"its process cannot be started ({error})") from error


def _kill(process: Child) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close() if pipe else None


@atexit.register
def close() -> None:
    """Kills the idle processes; the next request starts a new one."""
    with suppress(IndexError):
        while True:
            _kill(_idle.pop())


_idle: list[Child] = []  # processes that have no request now, the last used last
_running = BoundedSemaphore(MAX_PROCESSES)


def _forget_parents() -> None:
    global _running
    _idle.clear()
    _running = BoundedSemaphore(MAX_PROCESSES)


os.register_at_fork(after_in_child=_forget_parents)
