"""Renders jinja2 templates in child processes (sandbox.py), which can be killed.

A process is started by the first template and kept for the next. Templates of other requests wait for it: most take
a millisecond, and starting a process a hundred. Behind a slow one another is started. They end with this process.
Does not know messages or models.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from moegguf.child import child_command, child_environment

MAX_S = 2.0  # for compiling and rendering one template
MAX_CHARACTERS = 16 << 20  # characters of a prompt
MAX_IDLE = 2  # processes kept for further templates
WAIT_S = 0.25  # for a process that others use, before one more is started: one in this time

COMMAND = child_command(f"{__package__}.sandbox")


class RenderError(Exception):
    """A template could not be rendered. `kind`: an error of the sandbox. `line`: of its source, 0 if unknown."""

    def __init__(self, kind: str, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.line = line


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of `template` rendered with `variables`, which are JSON.

    Raises RenderError, also when a limit of time, memory or output is reached.
    """
    try:
        request = {"template": template, "variables": variables, "seconds": MAX_S, "characters": MAX_CHARACTERS}
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise RenderError("failed", f"its variables are not JSON: {error}") from error
    process = _processes.take()
    try:
        reply = process.request(line)
    except BaseException:  # also an interrupt: the next template would read this reply
        _processes.end(process)
        raise
    _processes.give_back(process)
    if "error" in reply:
        raise RenderError(reply["error"], reply["message"], reply.get("line", 0))
    return str(reply["text"])


def start() -> None:
    """Starts the first process, so that the first template need not wait a tenth of a second for it."""
    with suppress(RenderError):
        _processes.give_back(_processes.take())


class _Process:
    def __init__(self) -> None:
        try:
            self._child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                process_group=0,  # Ctrl-C in the terminal interrupts this process only
            )
        except OSError as error:
            raise RenderError("failed", f"its process cannot be started ({error})") from error

    def is_running(self) -> bool:
        return self._child.poll() is None

    def request(self, line: bytes) -> dict[str, Any]:
        """The reply to a request. Raises RenderError when the process ends instead."""
        assert self._child.stdin and self._child.stdout
        with suppress(BrokenPipeError):
            self._child.stdin.write(line + b"\n")
            self._child.stdin.flush()
        reply = self._child.stdout.readline()
        if not reply.endswith(b"\n"):
            raise RenderError("stopped", _exit_message(self._child.wait()))
        found: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
        return found

    def kill(self) -> None:
        """Kills the process and waits for its end. Twice is harmless."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()


def _exit_message(code: int) -> str:
    if code == -signal.SIGALRM:
        return f"it takes more than {MAX_S:g} s"
    return f"its process ended with code {code}"


class _Processes:
    """Those that wait for a template, and how many others render one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a child process, which starts its own: these, and the lock's owner, are the parent's."""
        self._idle: list[_Process] = []
        self._n_busy = 0
        self._started_s = -math.inf  # the last one
        self._changed = threading.Condition()

    def take(self) -> _Process:
        """An idle one; a new one where none is, and none becomes so in WAIT_S. Raises RenderError."""
        with self._changed:
            arrived_s = time.monotonic()
            while self._n_busy and not self._idle:
                wait_s = max(arrived_s, self._started_s) + WAIT_S - time.monotonic()
                if wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            process = self._idle.pop() if self._idle else None
            self._started_s = self._started_s if process else time.monotonic()
            self._n_busy += 1
        try:
            if process is not None and process.is_running():
                return process
            if process is not None:
                process.kill()
            return _Process()
        except BaseException:  # also an interrupt: templates that wait would wait for this one
            self._end_use()
            raise

    def give_back(self, process: _Process) -> None:
        """After a template."""
        if not self._end_use(process):
            process.kill()

    def end(self, process: _Process) -> None:
        """Instead of `give_back` where it cannot take another template."""
        process.kill()
        self._end_use()

    def _end_use(self, process: _Process | None = None) -> bool:
        """Whether `process` is kept."""
        with self._changed:
            self._n_busy -= 1
            kept = process is not None and len(self._idle) < MAX_IDLE
            if process is not None and kept:
                self._idle.append(process)
            self._changed.notify()
            return kept

    def close(self) -> None:
        """Kills those that are idle."""
        with self._changed:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()


_processes = _Processes()


@atexit.register
def close() -> None:
    """Kills the idle processes; the next template starts a new one."""
    _processes.close()


os.register_at_fork(after_in_child=_processes.forget)
