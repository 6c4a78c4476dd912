"""Renders jinja2 templates in child processes (sandbox.py), which can be killed.

A process is started by the first template and kept for the next; concurrent templates use one each. They end with this
process. Does not know messages or models.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from moegguf.child import child_command, child_environment

MAX_S = 2.0  # for compiling and rendering one template
MAX_CHARACTERS = 16 << 20  # characters of a prompt
MAX_IDLE = 2  # processes kept for further templates

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
    process = _take()
    try:
        reply = process.request(line)
    except BaseException:  # also an interrupt: the next template would read this reply
        process.kill()
        raise
    if len(_idle) < MAX_IDLE:
        _idle.append(process)
    else:
        process.kill()
    if "error" in reply:
        raise RenderError(reply["error"], reply["message"], reply.get("line", 0))
    return str(reply["text"])


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


_idle: list[_Process] = []


def _take() -> _Process:
    while True:
        try:
            process = _idle.pop()
        except IndexError:
            return _Process()
        if process.is_running():
            return process
        process.kill()


@atexit.register
def close() -> None:
    """Kills the idle processes; the next template starts a new one."""
    while _idle:
        _idle.pop().kill()


os.register_at_fork(after_in_child=_idle.clear)  # a child process starts its own
