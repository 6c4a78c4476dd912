"""A library that was compiled for another processor is refused before it ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegguf.errors import LibraryError
from moegguf.native import library
from moegguf.processor import Processor, read_processor


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries that need AVX2 and AVX-512, and a processor that has AVX2."""
    monkeypatch.setattr(library, "read_processor", lambda: Processor("Some CPU", frozenset({"avx2", "fma"})))
    (tmp_path / "CPU_FEATURES").write_text("avx2\navx512f\n")
    return tmp_path


def test_a_processor_that_lacks_instructions_is_a_library_error(folder: Path) -> None:
    with pytest.raises(LibraryError, match=r"this one \(Some CPU\) has no avx512f\. Install moegguf from source"):
        library.check_processor(folder)


def test_a_processor_that_has_them_passes_and_so_does_an_unknown_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "CPU_FEATURES").write_text("avx2\n")
    library.check_processor(folder)
    (folder / "CPU_FEATURES").write_text("")
    library.check_processor(folder)
    (folder / "CPU_FEATURES").write_text("avx512f\n")
    monkeypatch.setattr(library, "read_processor", lambda: read_processor(folder))  # no /proc/cpuinfo there
    library.check_processor(folder)
    (folder / "CPU_FEATURES").unlink()
    library.check_processor(folder)
