"""Functions that poll until another thread or process has acted, instead of waiting a
fixed time."""

import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def until(condition: Callable[[], Result], seconds: float = 30.0) -> Result:
    """Calls `condition` until its result is true, and returns the result. Raises
    AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
    return found


def status_of(pid: int, seconds: float = 30.0) -> int:
    """Returns the exit status of a forked child (negative: a signal).

    Kills the child and raises AssertionError if it runs longer than `seconds`.
    """
    try:
        _, status = until(
            lambda: (ended := os.waitpid(pid, os.WNOHANG))[0] and ended, seconds
        )
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(status)
