"""Texts that tests compare with files in `encodings/`. `MOEGGUF_RECORD=1 pytest ...` writes the files anew; read the
difference."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).with_name("encodings")


def check_recorded(name: str, text: str) -> None:
    """Fails unless the text is that of the file."""
    file = FOLDER / f"{name}.txt"
    if os.environ.get("MOEGGUF_RECORD"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
