"""The version of moegguf, and the folders in which it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.2.0"


def package_folders() -> list[Path]:
    """Returns the package's folders. An editable install has two: the sources, and the
    files built from them."""
    return [Path(folder) for folder in sys.modules[__package__].__path__]
