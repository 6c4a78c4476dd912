"""The file behind a name, for those who need no more than that."""

from __future__ import annotations

import os
from pathlib import Path

from moegguf.models.catalog import Catalog
from moegguf.models.folder import demo_path, models_by_name

__all__ = ["demo_path", "find_model", "models_by_name"]


def find_model(name: str | os.PathLike[str]) -> Path:
    """The file to open for `name`: a path, a folder with one model, or a name as `Catalog.find` knows them.

    Raises ModelNotFoundError, naming the nearest names that exist, when there is none.
    """
    path = Path(name).expanduser() if os.fspath(name).strip() else None
    if path and path.is_file():
        return path
    return Catalog().find(name).path
