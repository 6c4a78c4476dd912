"""Types and environment of `moegguf` as a separate process without a terminal."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]
TinyModel = Callable[..., Path]


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without variables that change results, and no server; the checkout is importable."""
    names = ("PATH", "HOME", "MOEGGUF_LIBRARY", "LANG", "XDG_DATA_HOME", "XDG_CACHE_HOME", "MOEGGUF_CONTEXT_STORE")
    inherited = {name: value for name, value in os.environ.items() if name in names}
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "MOEGGUF_HOST": "127.0.0.1:9"}
    return {**inherited, **own, **extra}
