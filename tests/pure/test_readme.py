"""The README's commands exist and its Python compiles: docs change with the code or this fails."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
GROUPS = ("trace",)  # commands that have commands of their own


def blocks(language: str) -> list[str]:
    return [text for name, text in re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL) if name == language]


def commands(prefix: str) -> list[list[str]]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    inline = re.findall(rf"`({re.escape(prefix)}[^`]*)`", README)
    return [shlex.split(line) for line in [*lines, *inline] if line.startswith(prefix)]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {word for line in targets for word in line.split()}
    named = [words for words in commands("make") if len(words) > 1]
    assert named
    assert {words[1] for words in named} <= known


@pytest.mark.parametrize("words", commands("moegguf "), ids=lambda words: " ".join(words[1:3]))
def test_every_moegguf_command_and_option_exists(words: list[str]) -> None:
    command = words[1:3] if words[1] in GROUPS else words[1:2]
    shown = subprocess.run(
        [sys.executable, "-m", "moegguf.cli.app", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert shown.returncode == 0, shown.stderr
    for word in words[2:]:
        if word.startswith("-"):
            assert re.search(rf"(^|[\s,│]){re.escape(word)}\b", shown.stdout, re.MULTILINE), f"{word} in {words}"


def test_python_examples_compile_and_import_what_exists() -> None:
    assert blocks("python")
    for block in blocks("python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "moegguf":
                import moegguf

                assert {alias.name for alias in node.names} <= set(moegguf.__all__)


def test_every_path_in_the_map_of_packages_exists() -> None:
    tree = next(block for block in blocks("") if "moegguf/native/" in block)
    paths = [line.split()[0] for line in tree.splitlines() if line.strip()]
    assert all(list(ROOT.glob(path.rstrip("/"))) for path in paths), paths


def test_no_figure_is_promised_that_is_not_there() -> None:
    assert not re.search(r"\b(TODO|TABLE|TBD)\b", README)
