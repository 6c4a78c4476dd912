"""Compares texts with files in `recorded/`. `MOEGGUF_RECORD=1 pytest ...` rewrites
these files. Review the changes to the files afterwards.
"""

import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).with_name("recorded")


def check_recorded(name: str, text: str) -> None:
    """Asserts that the text equals the recorded file. With MOEGGUF_RECORD, writes the
    file first."""
    file = FOLDER / f"{name}.txt"
    if os.environ.get("MOEGGUF_RECORD"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def recorded_lines(name: str, begin: str) -> Iterator[str]:
    """Yields the lines of the file that start with `begin`.

    A test uses these lines as inputs. In the file, each input precedes its recorded
    outcome.
    """
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return (line for line in lines if line.startswith(begin))
