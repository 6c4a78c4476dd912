"""Processes of this package: they are started with the same Python, which finds what this one finds, and killed."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process


def child_command(module: str) -> tuple[str, ...]:
    """The command that runs `module`. Where Python is embedded and does not know its program, the first in PATH."""
    # -P: a folder named moegguf in the working directory does not shadow this package.
    return (sys.executable or "python3", "-P", "-m", module)


def child_environment(**more: str) -> dict[str, str]:
    """Returns the environment of this process with the folders of `sys.path`, also folders added later, and `more`."""
    path = os.pathsep.join(folder for folder in sys.path if folder and isinstance(folder, str))  # Python's form
    return {**os.environ, "PYTHONPATH": path, **more}


def kill_child(child: Process) -> None:
    """Kills a process, unless it has ended. Its own `kill` would first look for the exit code, which asyncio's watcher
    then misses: it logs "Unknown child process pid"."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
