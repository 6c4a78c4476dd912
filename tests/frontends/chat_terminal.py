"""Starts chats in a terminal for tests, with the demo model or with the scripted worker
of fake_worker.py."""

import sys
from pathlib import Path
from typing import Any

from servers import environment
from terminal import Terminal, moegguf_command

ECHO = Path(__file__).parents[1] / "fake_worker.py"
QUESTION = "What does moegguf do?"
ANSWER = "moegguf runs Mixture-of-Experts models that are too big for your memory."
SMALL = ("--temperature", 0, "-t", 1, "-c", 512, "--expert-cache", "50%")


def demo_chat(
    home: Path, *arguments: object, size: tuple[int, int] = (80, 24), **environ: str
) -> Terminal:
    """Returns a terminal that runs a chat with the demo model. The chat's history is in
    `home`."""
    command = moegguf_command("run", "demo", *SMALL, *arguments)
    return _terminal(command, home, size, environ)


def echo_chat(
    home: Path,
    *arguments: object,
    size: tuple[int, int] = (80, 24),
    term: str = "xterm",
    **environ: str,
) -> Terminal:
    """Returns a terminal that runs a chat with the scripted worker of `fake_worker.py`,
    which echoes most messages."""
    command = [
        sys.executable,
        str(ECHO),
        "run",
        "demo",
        *map(str, (*SMALL, *arguments)),
    ]
    return _terminal(command, home, size, environ, term)


def _terminal(
    command: list[str],
    home: Path,
    size: tuple[int, int],
    environ: dict[str, Any],
    term: str = "xterm",
) -> Terminal:
    names = {"MOEGGUF_HOME": str(home), "OMP_NUM_THREADS": "1", **environ}
    return Terminal(
        command, environment(**names), columns=size[0], rows=size[1], term=term
    )
