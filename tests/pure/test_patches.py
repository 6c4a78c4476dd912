"""The patches are listed, explained, and apply to the pristine source; applying twice is harmless."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import patches, vendor


def test_every_patch_is_listed_and_says_why_and_until_when() -> None:
    assert list(patches.problems_of_headers()) == []


def test_the_series_applies_without_fuzz_to_the_pinned_source() -> None:
    assert list(patches.problems_of_application()) == []


def test_preparing_twice_changes_nothing() -> None:
    tree = vendor.prepare()
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")}
    assert vendor.prepare() == tree
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")} == before


def test_an_orphan_a_missing_and_an_unexplained_patch_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "PATCHES", tmp_path)
    (tmp_path / "README.md").write_text("nothing")
    (tmp_path / "series").write_text("# heading\nmissing.patch\nbare.patch\n")
    (tmp_path / "orphan.patch").write_text("Subject: x\n")
    (tmp_path / "bare.patch").write_text("--- a/src/x.cpp\n+++ b/src/x.cpp\n")
    found = "\n".join(patches.problems_of_headers())
    assert "orphan.patch is not listed" in found
    assert "missing.patch, which does not exist" in found
    assert "bare.patch has no 'Until:'" in found
