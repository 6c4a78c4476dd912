"""Uploaded files by digest (blobs), named only once they are complete and verified, and the sets they form.

A set is a folder named by its digest, in which each file of a model has its own name: hard links to the blobs, so that
llama.cpp finds the shards of a split model beside each other. `blob_name` alone builds file names from digests, and
accepts nothing but `sha256:` and 64 hex digits.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from moegguf.atomic_write import locked_temporary, remove_abandoned
from moegguf.errors import ModelFormatError, ModelNameError, ModelNotFoundError, OptionError, PullError
from moegguf.gguf.experts import read_layout
from moegguf.models.entry import ModelEntry, combined_digest, size_of
from moegguf.models.selection import select_files
from moegguf.quantities import format_bytes
from moegguf.settings import data_folder

MARGIN_BYTES = 64 << 20  # left free on the disk
MAX_FILES = 1024
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+() -]{0,199}", re.ASCII)
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


def sets_folder() -> Path:
    """The folder of all sets."""
    return data_folder() / "sets"


class BlobStore:
    """The blobs in the data folder, and the sets of them."""

    def __init__(self) -> None:
        self.folder = data_folder() / "blobs"

    def path(self, digest: str) -> Path:
        """The file of a digest. Raises ModelNameError, ModelNotFoundError when it is missing."""
        if not self.has(digest):
            raise ModelNotFoundError(f"there is no blob {blob_name(digest)!r}; send it first.")
        return self.folder / blob_name(digest)

    def has(self, digest: str) -> bool:
        """Whether the blob is complete. Raises ModelNameError."""
        path = self.folder / blob_name(digest)
        return path.is_file() and not path.is_symlink()

    def writer(self, digest: str, size_bytes: int | None = None) -> BlobWriter:
        """A context manager that receives one blob. Raises PullError when `size_bytes` do not fit the disk."""
        return BlobWriter(self.folder, digest, size_bytes)

    def make_set(self, files: Mapping[str, str]) -> ModelEntry:
        """The model (without a name) in a set of {file name: digest of a blob}.

        Raises ModelNotFoundError for a missing blob, ModelFormatError for files that are not a model, OptionError for
        names that are not file names.
        """
        if len(files) > MAX_FILES:
            raise OptionError(f"a model has at most {MAX_FILES} files, but these are {len(files)}.")
        named = _named(files)
        selection = select_files(named, repo="the list of files")
        folder = self._folder_of(named)
        paths = tuple(folder / name for name in selection.files)
        try:
            read_layout(paths[0])
        except BaseException:  # also an interrupt: nothing half checked stays
            shutil.rmtree(folder, ignore_errors=True)
            raise
        digest = combined_digest([blob_name(named[name]).removeprefix("sha256-") for name in selection.files])
        mmproj = folder / selection.mmproj if selection.mmproj else None
        return ModelEntry("", "own", paths, size_of(paths), digest, datetime.now(UTC), mmproj)

    def make_adapter(self, files: Mapping[str, str]) -> Path:
        """The adapter in a set of one blob, as {file name: digest}. Raises as `make_set` does."""
        if len(files) != 1:
            raise OptionError(f"a model takes one adapter, but these are {len(files)}; merge them into one file.")
        ((name, blob),) = _named(files).items()
        return self._folder_of({name: blob}) / name

    def clean(self, used: Iterable[Path]) -> None:
        """Removes sets without a file among `used`, and the blobs that only those linked to."""
        kept = {path.parent for path in used}
        for folder in list(sets_folder().iterdir()) if sets_folder().is_dir() else []:
            if folder in kept:
                continue
            with suppress(OSError):
                inodes = {path.stat().st_ino for path in folder.iterdir()}
                shutil.rmtree(folder)
                for blob in self.folder.glob("sha256-*"):
                    info = blob.stat()
                    if info.st_ino in inodes and info.st_nlink == 1:
                        blob.unlink()

    def _folder_of(self, named: Mapping[str, str]) -> Path:
        """The folder of these blobs. Raises ModelNotFoundError, PullError."""
        sources = {name: self.path(blob) for name, blob in named.items()}
        listing = "\n".join(sorted(f"{name} {blob_name(blob)}" for name, blob in named.items()))
        digest = hashlib.sha256(listing.encode()).hexdigest()
        folder = sets_folder() / digest
        temporary = sets_folder() / f".{digest}.{os.getpid()}"  # then renamed: a set is complete or absent
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name, blob in sources.items():
                os.link(blob, temporary / name)
            if folder.exists():
                shutil.rmtree(temporary)
            else:
                os.replace(temporary, folder)
        except OSError as error:
            reason = error.strerror or error
            raise PullError(f"the files cannot be kept in {str(sets_folder())!r} ({reason}).") from error
        return folder


def _named(files: Mapping[str, str]) -> dict[str, str]:
    """The files with their ending. Raises OptionError for what is no name of a file."""
    for name in files:
        if not _FILE_NAME.fullmatch(name) or ".." in name:
            raise OptionError(f"{name!r:.60} is not the name of a file; give names such as 'model.gguf'.")
    return {name if name.lower().endswith(".gguf") else f"{name}.gguf": blob for name, blob in files.items()}


class BlobWriter:
    """Receives the bytes of one blob; without `commit` they are removed at the end of the `with`."""

    def __init__(self, folder: Path, digest: str, size_bytes: int | None) -> None:
        self._path = folder / blob_name(digest)
        check_space(folder, size_bytes or 0, f"the blob {self._path.name[:19]}")
        self._sha = hashlib.sha256()
        with _writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(folder.glob(".*.partial"))
            handle, name = locked_temporary(folder, ".", ".partial")
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
        with _writing(self._path):
            self._file.write(chunk)

    def commit(self) -> Path:
        """Verifies the bytes and names the blob. Raises ModelFormatError for another digest, PullError."""
        found = f"sha256-{self._sha.hexdigest()}"
        if found != self._path.name:
            raise ModelFormatError(
                f"the digest of the bytes is {found}, but {self._path.name} was announced; send again."
            )
        with _writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self._path)
            sync_folder(self._path.parent)
        return self._path


def sync_folder(folder: Path) -> None:
    """Writes the directory `folder` to disk, so that new names survive a power loss. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises errors of the disk inside the `with` as PullError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        step = "delete files and send it again" if full else "check the disk and send it again"
        reason = error.strerror or error
        raise PullError(f"{path.name[:19]} cannot be written to {str(path.parent)!r} ({reason}); {step}.") from error
