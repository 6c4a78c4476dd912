"""Records a terminal session as an SVG image. Needs the packages that `moegguf[test]`
installs.

    python -m tools.terminal_session docs/session.svg

The program types STEPS in a shell in a temporary folder, and draws the terminal's last
screen.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS = 96
LINES = 36
TIMEOUT_S = 120
SETTLED_S = 2
NOBODY = "127.0.0.1:1"  # an address at which no server is listening
SHELL = "$ "
CHAT = ">>> "
STEPS = (
    (SHELL, "moegguf run demo --expert-cache 97%"),
    (CHAT, "What does moegguf do?"),
    (CHAT, "Who are you?"),
    # Generates the last answer again; its experts are still in memory.
    (CHAT, "/regen"),
    (CHAT, "/experts"),
    (CHAT, "/bye"),
)
# Links to fonts on a server; they are removed.
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def record() -> pyte.Screen:
    """Runs STEPS in a shell and returns the terminal's screen after the last command.
    Raises TimeoutError."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as home:
        kept = {
            "PATH": os.environ["PATH"],
            "LC_ALL": "C.UTF-8",
            "TERM": "xterm-256color",
            "PS1": SHELL,
        }
        own = dict.fromkeys(("HOME", "MOEGGUF_HOME", "XDG_CACHE_HOME"), home)
        shell: Any = pexpect.spawn(
            "bash", ["--norc", "--noprofile"], env=kept | own | {"MOEGGUF_HOST": NOBODY}, cwd=home,
            dimensions=(LINES, COLUMNS),
        )  # fmt: skip
        screen.write_process_input = shell.send  # type: ignore[method-assign]  # pyte's hook: replies to the program

        def wait_for(prompt: str) -> None:
            """Waits until the cursor is after the prompt and output has stopped. Raises
            TimeoutError."""
            end_s = time.monotonic() + TIMEOUT_S
            while time.monotonic() < end_s:
                try:
                    stream.feed(shell.read_nonblocking(1 << 16, SETTLED_S))
                except pexpect.TIMEOUT:
                    line = screen.display[screen.cursor.y]
                    if line.startswith(prompt) and screen.cursor.x == len(prompt):
                        return
            raise TimeoutError(f"no {prompt!r} on:\n" + "\n".join(screen.display))

        for prompt, words in STEPS:
            wait_for(prompt)
            shell.send(words + "\r")
        wait_for(SHELL)
        shell.close(force=True)
    return screen


def drawn(screen: pyte.Screen) -> str:
    """Returns the screen as SVG, without trailing lines that are empty or contain only
    the shell's prompt."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False
    )
    last = max(
        row
        for row, line in enumerate(screen.display)
        if line.strip() not in ("", SHELL.strip())
    )
    for row in range(last + 1):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        line = Text()
        for style, run in itertools.groupby(cells, _style):
            line.append("".join(each.data for each in run), style)
        line.rstrip()
        console.print(line)
    return FONTS.sub("", console.export_svg(title="moegguf"))


def _style(cell: Any) -> Style:
    colour = (
        None
        if cell.fg == "default"
        else _NAMES.get(cell.fg, cell.fg if cell.fg.isalpha() else f"#{cell.fg}")
    )
    return Style(color=colour, bold=cell.bold)


_NAMES = {"brown": "yellow", "brightbrown": "bright_yellow"}
_NAMES |= {
    f"bright{name}": f"bright_{name}"
    for name in "black red green blue magenta cyan white".split()
}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(drawn(record()), encoding="utf-8")
