"""Replaces files atomically: a reader sees either the old contents or the new ones,
never partial contents.

On a file system with locks, a temporary file is locked while it is written. A temporary
file without a lock was left by a killed process, and `remove_abandoned` removes it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MODE = 0o644
OWNER_ONLY = 0o600
"""Mode of files that contain users' messages or models' answers: only the owner may
read and write them."""


DESCRIPTOR = re.compile(r"/dev/(stdin|stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")
"""Matches a path that stands for a file descriptor of this process. A shell passes such
a path for `>(command)`."""


def can_be_replaced(path: Path) -> bool:
    """Returns True if a new file can replace `path`: a regular file, a path that does
    not exist, or a symbolic link to one of these. Pipes, devices, folders and paths
    that match DESCRIPTOR cannot be replaced."""
    return (path.is_file() or not path.exists()) and not DESCRIPTOR.fullmatch(
        os.path.abspath(path)
    )


def make_private(path: Path) -> None:
    """Makes a file or folder inaccessible to its group and to other users. Leaves
    symbolic links unchanged. Raises OSError if the file is missing or its mode cannot
    be changed."""
    mode = path.lstat().st_mode
    if mode & 0o077 and not stat.S_ISLNK(mode):
        path.chmod(mode & 0o700)


def write_atomically(
    path: Path, data: bytes | Iterable[bytes], mode: int = MODE
) -> None:
    """Writes `data` (one bytes object, or several that are joined) to a temporary file,
    flushes this file to disk, and replaces `path` with it. Also removes temporary files
    that killed processes left for the same path.

    Raises OSError; the old file is then unchanged, and no temporary file remains.
    """
    remove_abandoned(path.parent.glob(f".{glob.escape(path.name)}.*"))
    handle, name = locked_temporary(path.parent, f".{path.name}.", "")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(name, mode)
            os.replace(name, path)
    except BaseException:  # also on an interrupt: no temporary file may remain
        Path(name).unlink(missing_ok=True)
        raise


def locked_temporary(folder: Path, prefix: str, suffix: str) -> tuple[int, str]:
    """Creates a temporary file in `folder` and returns (descriptor, path). On a file
    system with locks, the file is locked until the descriptor is closed. Raises
    OSError."""
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=folder)
        # `remove_abandoned` removes nothing if locks do not work.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process removed the file before it was locked


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Removes the temporary files in `paths` that no process has locked. Killed
    processes left these files behind. Leaves a file that it cannot open, lock or
    remove, without raising an error."""
    for path in paths:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)
