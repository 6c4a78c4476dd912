"""Renders jinja2 templates in child processes (sandbox.py), which can be killed.

A process is started by the first template and kept for the next; others only for templates of requests at the same
time, at most MAX_PROCESSES, for which further ones wait. They end with this process. Does not know messages or models.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, LifoQueue
from typing import Any

from moegguf.child import child_command, child_environment

MAX_S = 2.0  # for compiling and rendering one template
MAX_CHARACTERS = 16 << 20  # characters of a prompt
MAX_PROCESSES = 3

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
    with _process() as process:
        reply = process.request(line)
    if "error" in reply:
        raise RenderError(reply["error"], reply["message"], reply.get("line", 0))
    return str(reply["text"])


def start() -> None:
    """Starts the first process, so that the first template need not wait a tenth of a second for it."""
    with suppress(RenderError), _process():
        pass


class _Process:
    def __init__(self) -> None:
        try:
            self.child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                process_group=0,  # Ctrl-C in the terminal interrupts this process only
            )
        except OSError as error:
            raise RenderError("failed", f"its process cannot be started ({error})") from error

    def request(self, line: bytes) -> dict[str, Any]:
        """The reply to a request. Raises RenderError when the process ends instead."""
        assert self.child.stdin and self.child.stdout
        with suppress(BrokenPipeError):
            self.child.stdin.write(line + b"\n")
            self.child.stdin.flush()
        reply = self.child.stdout.readline()
        if not reply.endswith(b"\n"):
            code = self.child.wait()
            timed_out = code == -signal.SIGALRM
            reason = f"it takes more than {MAX_S:g} s" if timed_out else f"its process ended with code {code}"
            raise RenderError("stopped", reason)
        found: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
        return found

    def kill(self) -> None:
        """Kills the process and waits for its end. Twice is harmless."""
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()


_pool: LifoQueue[_Process | None]
"""The processes that render no template now, the last used first; None: one that can be started."""


def _fill_pool() -> None:
    """Also in a child process: these are the parent's."""
    global _pool
    _pool = LifoQueue()
    for _ in range(MAX_PROCESSES):
        _pool.put(None)


@contextmanager
def _process() -> Iterator[_Process]:
    """A running process, which an error ends: the next template would read this one's reply. Raises RenderError."""
    process = _pool.get()
    try:
        if process is None or process.child.poll() is not None:
            process = _Process()
        yield process
    except BaseException:  # also an interrupt
        if process is not None:
            process.kill()
        _pool.put(None)
        raise
    _pool.put(process)


@atexit.register
def close() -> None:
    """Kills the idle processes; the next template starts a new one."""
    idle = list[_Process | None]()
    with suppress(Empty):
        while True:
            idle.append(_pool.get_nowait())
    for process in idle:
        if process is not None:
            process.kill()
        _pool.put(None)


_fill_pool()
os.register_at_fork(after_in_child=_fill_pool)
