"""The version of moegguf, and the folders that it is installed in."""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"


def package_folders() -> list[Path]:
    """The folders of the package: one, or in an editable install the sources and what was built from them."""
    return [Path(folder) for folder in sys.modules[__package__].__path__]
