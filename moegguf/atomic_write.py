"""Atomic replacement of files: a reader sees the old contents or the new ones, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MODE = 0o644


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the file at `path` by `data`, flushed to disk.

    Raises OSError; the old file is then unchanged, and no temporary file remains.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, MODE)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
