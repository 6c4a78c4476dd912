"""Helpers for tests that pull a model: the files of a repository, and `fetch`, which
records progress reports."""

import os
import threading

from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry, PullStatus
from moegguf.models.pull import pull
from moegguf.models.sources import hub_cache

DATA = b"GGUF" + os.urandom((3 << 20) - 4)
NAME = "hf.co/User/Repo-GGUF:Q4_K_M"
FILES = {
    "README.md": b"hello",
    "x-Q4_K_M.gguf": DATA,
    "x-Q8_0.gguf": b"GGUF" + b"m" * 950,
    "mmproj-F16.gguf": b"GGUF" + b"m" * 95,
}


def fetch(
    name: str = "user/repo-gguf", cancelled: threading.Event | None = None
) -> tuple[ModelEntry, list[PullStatus]]:
    reports: list[PullStatus] = []
    return pull(name, Catalog(), reports.append, cancelled), reports


def stored() -> list[str]:
    """Returns the sorted names of all files in the Hugging Face cache, without lock
    files."""
    files = (
        path
        for path in hub_cache().rglob("*")
        if path.is_file() and ".locks" not in path.parts
    )
    return sorted(path.name for path in files)


def nothing_has_a_name() -> bool:
    return Catalog().entries("hf.co") == [] and not list(
        hub_cache().glob("*/snapshots/*/*")
    )
