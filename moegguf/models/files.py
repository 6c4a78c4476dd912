"""What is told about model files without opening them as models: a digest, a size, a time."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

SAMPLE_BYTES = 1 << 20


def digest_of(files: tuple[Path, ...]) -> str:
    """64 hex digits for files whose SHA-256 nobody has told us.

    Over each file's size, first and last MiB: the header, and weights that no two trainings share. Hashing all of a
    200 GB model would take minutes. Raises OSError.
    """
    digests = [_sample(str(path), *_identity(path)) for path in files]
    return digests[0] if len(digests) == 1 else digest_of_digests(digests)


def digest_of_digests(digests: list[str]) -> str:
    """One digest for a model of several files, in their order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def size_of(files: tuple[Path, ...], mmproj: Path | None = None) -> int:
    """Bytes of a model on disk. Raises OSError."""
    return sum(path.stat().st_size for path in (*files, *((mmproj,) if mmproj else ())))


def changed_at(path: Path) -> datetime:
    """When the file, or the link to it, was made. Raises OSError."""
    return datetime.fromtimestamp(path.lstat().st_mtime, UTC)


def _identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns


@lru_cache(maxsize=4096)
def _sample(path: str, size: int, _mtime_ns: int) -> str:
    """The digest of one file; asked for again only when the file has changed."""
    digest = hashlib.sha256(f"{size}\n".encode())
    with open(path, "rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        if size > SAMPLE_BYTES:
            file.seek(max(SAMPLE_BYTES, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
