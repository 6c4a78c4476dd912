"""`moegguf`, the command, for every test of this room."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commanding import Command, environment


@pytest.fixture(scope="session")
def moegguf() -> Command:
    """`moegguf("run", path, ..., stdin="", NAME="value")`: what the command wrote, and its exit code."""

    def call(*arguments: object, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moegguf.faces.cli", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env=environment(**extra),
            timeout=120,
        )

    return call
