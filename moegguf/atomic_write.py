"""Writes files whole or not at all: a reader sees the old contents or the new ones, whatever happens in between."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MODE = 0o644


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` in the place of `path`.

    Raises OSError; the file that was there is then unchanged, and nothing is left beside it.
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
