"""docs/architecture.md names files that exist, and every package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWINGS = "\n".join(re.findall(r"```\n(.*?)```", TEXT, re.DOTALL))


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:moegguf|tests|patches)/[\w./]*)`", TEXT)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_file_in_the_drawings_exists_once() -> None:
    names = set(re.findall(r"\b[\w/]+\.(?:cpp|h|py)\b", DRAWINGS))
    assert len(names) > 5
    for name in names:
        assert len([path for path in (ROOT / "moegguf").rglob(Path(name).name) if path.match(name)]) == 1, name


def test_every_package_is_drawn() -> None:
    packages = {path.parent.name for path in (ROOT / "moegguf").glob("*/__init__.py")}
    assert {name for name in packages if not re.search(rf"\b{name}\b", DRAWINGS)} == set()


def test_it_stays_one_page() -> None:
    assert len(TEXT.splitlines()) <= 125
