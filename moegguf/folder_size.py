"""Measures the size of a folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def folder_size(folder: Path) -> int:
    """Returns the total size, in bytes, of the files below a folder. Skips subfolders
    that this user may not list. Returns 0 if the folder does not exist.

    Counts a file with several hard links once. Counts a symbolic link itself, not its
    target.
    """
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may have just deleted the file
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
