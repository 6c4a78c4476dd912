"""Opens files that must be regular files. Opening a named pipe could block forever,
waiting for another process to open it."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, own: bool = False) -> BufferedReader:
    """Opens a regular file for reading. With `own`, the file must belong to this user
    and must not be a symbolic link. Raises OSError for any other file, and if the file
    cannot be opened."""

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if own else 0))
        info = os.fstat(handle)
        if stat.S_ISREG(info.st_mode) and (not own or info.st_uid == os.geteuid()):
            return handle
        os.close(handle)
        raise OSError(
            errno.EPERM, f"it is not a regular file{' of this user' * own}", name
        )

    return open(path, "rb", opener=opener)


def read_regular(path: Path, *, own: bool = False) -> bytes:
    """Returns the contents of a regular file. `own` is as for `open_regular`. Raises
    OSError."""
    with open_regular(path, own=own) as file:
        return file.read()
