"""Builds the commands and environments for child processes that run modules of this
package, and kills child processes. A child searches for modules in the same folders as
this process."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process


def child_command(module: str) -> tuple[str, ...]:
    """Returns the command that runs `module`. If Python is embedded and does not know
    the path of its executable, the command uses the first python3 in PATH."""
    # -P: so that a folder named moegguf in the working directory does not shadow this
    # package.
    return (sys.executable or "python3", "-P", "-m", module)


def child_environment(**more: str) -> dict[str, str]:
    """Returns the environment variables for a child: this process's variables, with
    PYTHONPATH set to the entries of `sys.path` that are not empty. The variables in
    `more` are added, or replace variables with the same names."""
    path = os.pathsep.join(
        folder for folder in sys.path if folder and isinstance(folder, str)
    )
    return {**os.environ, "PYTHONPATH": path, **more}


def kill_child(child: Process) -> None:
    """Kills a process, unless it has exited. Does not call `Process.kill`, because that
    may collect the exit code. asyncio's watcher would then miss the code and log
    "Unknown child process pid"."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
