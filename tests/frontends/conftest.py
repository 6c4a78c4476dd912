"""`moegguf`, the command, and `server`, a running one, for the tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Command, environment
from servers import Server, serving


@pytest.fixture(scope="session")
def moegguf() -> Command:
    """`moegguf("run", path, ..., stdin="", NAME="value")`: what the command wrote, and its exit code."""

    def call(*arguments: object, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moegguf.cli.app", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env=environment(**extra),
            timeout=120,
        )

    return call


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Iterator[Server]:
    """`moegguf serve` with the demo and `tiny`, a random model; every test leaves its names as they were."""
    with serving(tmp_path_factory.mktemp("server"), models={"tiny": tiny("tiny-qwen2moe")}) as found:
        yield found
