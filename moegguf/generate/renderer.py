"""jinja2 in processes that can be killed: starts them, gives them templates, says why one ended.

A process is started by the first template and kept for the next; each template that is rendered at the same time has
one of its own. They end when this process does. What they do is in sandbox.py. Does not know messages or models.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_SECONDS = 2.0  # for compiling and rendering one template
MAX_TEXT = 16 << 20  # characters of a prompt
KEPT = 2  # processes that wait for a template

# -P: a folder named moegguf in the working directory is not this package.
COMMAND = (sys.executable, "-P", "-m", f"{__package__}.sandbox")


class RenderError(Exception):
    """A template could not be rendered. `kind`: one of sandbox.ERRORS. `line`: of its source, 0 if unknown."""

    def __init__(self, kind: str, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.line = line


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text that `template` writes with `variables`, which are JSON.

    Raises RenderError, also when a limit of time, memory or output is reached.
    """
    try:
        order = {"template": template, "variables": variables, "seconds": MAX_SECONDS, "characters": MAX_TEXT}
        line = json.dumps(order, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise RenderError("failed", f"what it is given is not JSON: {error}") from error
    process = _take()
    try:
        reply = process.request(line)
    except BaseException:  # an interrupt too: the reply would be read by the next template
        process.kill()
        raise
    if len(_waiting) < KEPT:
        _waiting.append(process)
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
                process_group=0,  # an interrupt from the terminal is for this process only
            )
        except OSError as error:
            raise RenderError("failed", f"no process can be started for it ({error})") from error

    def runs(self) -> bool:
        return self._child.poll() is None

    def request(self, line: bytes) -> dict[str, Any]:
        """The reply to an order. Raises RenderError when the process ends instead."""
        assert self._child.stdin and self._child.stdout
        with suppress(BrokenPipeError):
            self._child.stdin.write(line + b"\n")
            self._child.stdin.flush()
        reply = self._child.stdout.readline()
        if not reply.endswith(b"\n"):
            raise RenderError("stopped", _death_message(self._child.wait()))
        found: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
        return found

    def kill(self) -> None:
        """Ends it and waits until it is gone. Twice is harmless."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()


def _death_message(code: int) -> str:
    if code == -signal.SIGALRM:
        return f"it takes more than {MAX_SECONDS:g} s"
    return f"its process ended with code {code}"


_waiting: list[_Process] = []


def _take() -> _Process:
    while True:
        try:
            process = _waiting.pop()
        except IndexError:
            return _Process()
        if process.runs():
            return process
        process.kill()


@atexit.register
def close() -> None:
    """Ends the processes that wait for a template; the next template starts one again."""
    while _waiting:
        _waiting.pop().kill()


os.register_at_fork(after_in_child=_waiting.clear)  # a forked process starts its own
