"""Uploaded files by digest (blobs), named only once they are complete and verified.

`blob_name` alone builds file names from digests, and accepts nothing but `sha256:` and 64 hex digits.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from moegguf.atomic_write import locked_temporary, remove_abandoned
from moegguf.errors import ModelFormatError, ModelNameError, ModelNotFoundError, PullError
from moegguf.quantities import format_bytes

MARGIN_BYTES = 64 << 20  # left free on the disk
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})", re.ASCII)


def blob_name(digest: str) -> str:
    """The file name of a digest: "sha256-<hex>". Raises ModelNameError for anything else than a digest."""
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ModelNameError(f'a digest is "sha256:" and 64 hexadecimal digits, but this is {digest!r:.80}.')
    return f"sha256-{match[1].lower()}"


def free_bytes(folder: Path) -> int:
    """Bytes free on the disk of `folder`, which need not exist."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_space(folder: Path, n_bytes: int, what: str) -> None:
    """Raises PullError when writing `n_bytes` would leave less than MARGIN_BYTES free. `what` starts the message."""
    free = free_bytes(folder)
    if n_bytes and n_bytes + MARGIN_BYTES > free:
        raise PullError(
            f"{what} needs {format_bytes(n_bytes)} (and {format_bytes(MARGIN_BYTES)} to spare), but the disk of"
            f" {str(folder)!r} has {format_bytes(free)} free; delete files, or choose a smaller quantisation."
        )


class BlobStore:
    """The blobs in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """The file of a digest. Raises ModelNameError, ModelNotFoundError when it is missing."""
        path = self.folder / blob_name(digest)
        if not path.is_file() or path.is_symlink():
            raise ModelNotFoundError(f"there is no blob {blob_name(digest)!r}; send it first.")
        return path

    def has(self, digest: str) -> bool:
        """Whether the blob is complete. Raises ModelNameError."""
        path = self.folder / blob_name(digest)
        return path.is_file() and not path.is_symlink()

    def writer(self, digest: str, size_bytes: int | None = None) -> BlobWriter:
        """A context manager that receives one blob. Raises PullError when `size_bytes` do not fit the disk."""
        return BlobWriter(self.folder, digest, size_bytes)


class BlobWriter:
    """Receives the bytes of one blob; without `commit` they are removed at the end of the `with`."""

    def __init__(self, folder: Path, digest: str, size_bytes: int | None) -> None:
        self._path = folder / blob_name(digest)
        check_space(folder, size_bytes or 0, f"the blob {self._path.name[:19]}")
        self._sha = hashlib.sha256()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(folder.glob(".*.partial"))
            handle, name = locked_temporary(folder, ".", ".partial")
        except OSError as error:
            raise _disk_error(self._path, error) from error
        self._partial = Path(name)
        self._file = os.fdopen(handle, "wb")

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(OSError):  # a full disk fails again at close
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Appends bytes. Raises PullError when the disk fails, or would have less than MARGIN_BYTES left."""
        check_space(self._path.parent, len(chunk), f"a part of {self._path.name[:19]}")
        self._sha.update(chunk)
        try:
            self._file.write(chunk)
        except OSError as error:
            raise _disk_error(self._path, error) from error

    def commit(self) -> Path:
        """Verifies the bytes and names the blob. Raises ModelFormatError for another digest, PullError."""
        found = f"sha256-{self._sha.hexdigest()}"
        if found != self._path.name:
            raise ModelFormatError(
                f"the digest of the bytes is {found}, but {self._path.name} was announced; send again."
            )
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise _disk_error(self._path, error) from error
        return self._path


def sync_folder(folder: Path) -> None:
    """Writes the directory `folder` to disk, so that new names survive a power loss. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_error(path: Path, error: OSError) -> PullError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    step = "delete files and send it again" if full else "check the disk and send it again"
    return PullError(f"{path.name[:19]} cannot be written to {str(path.parent)!r} ({error.strerror or error}); {step}.")
