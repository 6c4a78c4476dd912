"""Helpers for the catalog's tests. They fill a Hugging Face cache, upload files, and
list names and files."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from moegguf.models.catalog import Catalog
from moegguf.models.sources import hub_cache


def cache(repo: str, files: dict[str, bytes], commit: str = "a" * 40) -> Path:
    """Puts a repository's files into the Hugging Face cache as llama.cpp or
    huggingface_hub would. Returns the repository's folder."""
    folder = hub_cache() / f"models--{repo.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = folder / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return folder


def add_blob(
    catalog: Catalog,
    digest: str,
    chunks: Iterable[bytes],
    size_bytes: int | None = None,
) -> None:
    with catalog.blobs.writer(digest, size_bytes) as writer:
        for chunk in chunks:
            writer.write(chunk)
        writer.commit()


def send(catalog: Catalog, data: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    add_blob(
        catalog,
        digest,
        [data[at : at + 50_000] for at in range(0, len(data), 50_000)],
        len(data),
    )
    return digest


def names(prefix: str = "") -> list[str]:
    return [entry.name for entry in Catalog().entries(prefix)]


def files_of(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    )
