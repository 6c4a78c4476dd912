"""Child processes that render chat templates and compile grammars (sandbox.py), with
limits on time and memory. Templates and grammars are untrusted, so a process may be
killed.

The first request starts a process, which is kept for the next request. A simultaneous
request waits up to WAIT_S for a process, because most requests take less time than the
start of a process. Then it starts a further process, up to MAX_PROCESSES; any more
requests wait. The child processes exit with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Condition
from typing import Any

from moegguf.child import child_command, child_environment

MAX_S = 2.0  # seconds of CPU time for one request
MAX_PROCESSES = 3
# Seconds for which a request waits for a busy process before it starts another one.
WAIT_S = 0.2
COMMAND = child_command(f"{__package__}.sandbox")
Child = subprocess.Popen[bytes]


class LimitedError(Exception):
    """Raised if a request fails. `kind`: the kind of error, as listed in sandbox.py,
    such as "syntax". `line`: line in the template; 0 for errors without a line."""

    def __init__(self, kind: str, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.line = line


def reply_of(request: Mapping[str, Any]) -> str:
    """Sends a request to a child process and returns the text of the reply. Mappings
    are sent as objects, and other values that JSON cannot represent as strings. Raises
    LimitedError if the request fails or exceeds a limit on time, memory or output."""
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
    """Starts the first process in advance, so that the first request does not have to
    wait about a tenth of a second for the start."""
    with suppress(LimitedError), _process():
        pass


def _reply(process: Child, line: bytes) -> dict[str, Any]:
    """Sends a request line and returns the reply. Raises LimitedError if the process
    ends before it replies."""
    assert process.stdin and process.stdout
    with suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    reply = process.stdout.readline()
    if not reply.endswith(b"\n"):
        code = process.wait()
        timed_out = code == -signal.SIGPROF
        reason = (
            f"it takes more than {MAX_S:g} s"
            if timed_out
            else f"its process ended with code {code}"
        )
        raise LimitedError("stopped", reason)
    found: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
    return found


@contextmanager
def _process() -> Iterator[Child]:
    """Provides a child process for one request. An exception in the `with` block kills
    the process, because otherwise the next request could read the reply to this
    request. Raises LimitedError if no process can be started."""
    process = _take()
    try:
        if process is None or process.poll() is not None:
            process = _started()
        yield process
    except BaseException:  # also an interrupt
        if process is not None:
            _kill(process)
        _put(None)
        raise
    _put(process)


def _take() -> Child | None:
    """Returns an idle process. Waits up to WAIT_S if there is none, but another request
    uses a process. Waits longer if MAX_PROCESSES requests use a process. Returns None
    if the caller must start a process. The caller must call `_put` afterwards."""
    global _n_busy
    with _free:
        _free.wait_for(lambda: _idle or not _n_busy, WAIT_S)
        _free.wait_for(lambda: _n_busy < MAX_PROCESSES)
        _n_busy += 1
        return _idle.pop() if _idle else None


def _put(process: Child | None) -> None:
    """Makes the process of a finished request idle. None: the process was killed."""
    global _n_busy
    with _free:
        _n_busy -= 1
        if process is not None:
            _idle.append(process)
        _free.notify()


def _started() -> Child:
    pipe, environment = subprocess.PIPE, child_environment()
    try:  # the child's own process group protects it from Ctrl-C in the terminal
        return subprocess.Popen(
            COMMAND,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            env=environment,
            process_group=0,
        )
    except OSError as error:
        raise LimitedError(
            "failed", f"its process cannot be started ({error})"
        ) from error


def _kill(process: Child) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close() if pipe else None


@atexit.register
def close() -> None:
    """Kills the idle processes. The next request starts a new one."""
    with suppress(IndexError):
        while True:
            _kill(_idle.pop())


# Processes without a request; the most recently used one is last.
_idle: list[Child] = []
_n_busy = 0  # number of requests that use a process
# Guards `_idle` and `_n_busy`; notified when a request has finished.
_free = Condition()


def _forget_parents() -> None:
    global _free, _n_busy
    _idle.clear()
    _n_busy = 0
    _free = Condition()


os.register_at_fork(after_in_child=_forget_parents)
