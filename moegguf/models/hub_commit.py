"""Downloads files of one commit together, and gives them their names only when all are there.

In a cache a name is a link in the commit's snapshot to the blob, as huggingface_hub makes it. In any other folder the
file itself is moved to its name, and a cache inside that folder keeps a link to it, by which the next call finds it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from moegguf.atomic_write import write_atomically
from moegguf.errors import PullError
from moegguf.models.blobs import check_space
from moegguf.models.hub_api import HubFile, Repository, Stopped
from moegguf.models.hub_fetch import fetch_file, is_copy, missing_bytes

MAX_PARALLEL_FILES = 4
WAIT_S = 0.2  # between two looks whether to stop, and two reports

OnBytes = Callable[[HubFile, int], None]
"""Called with a file and the number of its bytes that are on disk; from several threads."""


def fetch_files(
    files: Sequence[HubFile],
    what: str,
    on_bytes: OnBytes,
    stopped: threading.Event,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Downloads the blobs of all files, MAX_PARALLEL_FILES at a time. `what` starts the message of a full disk;
    `on_wait` is called on this thread meanwhile.

    Raises the first error, or Stopped; the other threads then end with their next bytes.
    """
    if files:
        check_space(files[0].folder, sum(map(missing_bytes, files)), what)
    waiting, errors = iter(files), list[BaseException]()

    def fetch_waiting() -> None:
        try:
            for file in waiting:
                fetch_file(file, partial(on_bytes, file), stopped)
        except BaseException as error:  # raised by the thread that waits
            errors.append(error)
            stopped.set()

    threads = [
        threading.Thread(target=fetch_waiting, name="pull file", daemon=True)
        for _ in range(min(MAX_PARALLEL_FILES, len(files)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not stopped.is_set():
                thread.join(WAIT_S)
                on_wait()
    except BaseException:  # an interrupt
        stopped.set()
        raise
    if errors:
        raise errors[0]
    if stopped.is_set():
        raise Stopped


def link_commit(repository: Repository, files: Sequence[HubFile]) -> Path:
    """Links the commit's paths to the blobs, then sets `main` to it; returns the snapshot. Raises PullError."""
    folder = repository.folder
    snapshot = folder / "snapshots" / repository.commit
    with _disk_errors(repository, folder):
        for file in files:
            _link(snapshot / file.path, file.blob)
        (folder / "refs").mkdir(exist_ok=True)
        # A temporary file in refs/ would be taken for a branch.
        write_atomically(folder / ".main", repository.commit.encode())
        os.replace(folder / ".main", folder / "refs" / "main")
    return snapshot


def find_missing(
    repository: Repository, files: Sequence[HubFile], folder: Path, stopped: threading.Event
) -> list[HubFile]:
    """Those of the files that `folder` does not have yet under their paths. Raises PullError."""
    missing = []
    with _disk_errors(repository, folder):
        for file in files:
            if file.blob.is_symlink() and (not file.blob.exists() or os.readlink(file.blob) != _back(file, folder)):
                file.blob.unlink()  # deleted since, or it had another name
            if not file.blob.is_symlink() and is_copy(folder / file.path, file, stopped):
                _link_back(file, folder)
            elif not file.blob.is_symlink():
                missing.append(file)
    return missing


def move_files(repository: Repository, files: Sequence[HubFile], folder: Path) -> None:
    """Moves the blobs to their paths in `folder`, and leaves links to them. Raises PullError."""
    with _disk_errors(repository, folder):
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.blob.is_symlink():  # the same content under two paths
                shutil.copyfile(file.blob, path)
            else:
                os.replace(file.blob, path)
                _link_back(file, folder)


def _back(file: HubFile, folder: Path) -> str:
    return os.path.relpath(folder / file.path, file.blob.parent)


def _link_back(file: HubFile, folder: Path) -> None:
    """Makes the blob a link to the file in `folder`, in place of those of the versions that were there before."""
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    for other in file.blob.parent.iterdir():
        if other.is_symlink() and os.readlink(other) == _back(file, folder):
            other.unlink()
    with suppress(OSError):  # a file system without symbolic links: the next call reads the file to check it
        file.blob.symlink_to(_back(file, folder))


@contextmanager
def _disk_errors(repository: Repository, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PullError(
            f"{repository.repo} was fetched, but cannot be linked in {str(folder)!r} ({error.strerror or error})."
        ) from error


def _link(link: Path, blob: Path) -> None:
    """Makes a relative link, as huggingface_hub does, unless it exists."""
    link.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, link.parent)
    if link.is_symlink() and os.readlink(link) == target:
        return
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(target)
    except FileExistsError:  # made by another process in the meantime
        pass
    except OSError:  # a file system without symbolic links
        os.link(blob, link)
