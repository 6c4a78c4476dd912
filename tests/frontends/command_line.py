"""The command line as a user has it: a process of its own, its two streams apart, no terminal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]
TinyModel = Callable[..., Path]


def environment(**extra: str) -> dict[str, str]:
    """The caller's, without what would change an answer; the checkout is importable."""
    names = ("PATH", "HOME", "MOEGGUF_LIBRARY", "LANG", "XDG_DATA_HOME")
    kept = {name: value for name, value in os.environ.items() if name in names}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **extra}
