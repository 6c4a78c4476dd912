"""Stores the index of names made here, and uploaded files, in our data folder.

The index is one small JSON file, replaced atomically under a lock that all processes
share. An entry has the locations of its files. A location is "hub:" and a path in the
Hugging Face cache, "sets:" and a path in our folder of sets, "demo:", or an absolute
path. A damaged index is renamed with a warning, and its readable entries are kept.
Models in the caches are found without the index.

Uploaded files (blobs) are named by digest only once they are complete and verified. A
set of blobs is a folder whose name is a digest of the files' names and contents. It has
a hard link to each blob under the file's own name, so that llama.cpp finds all shards
of a split model in one folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from moegguf.atomic_write import locked_temporary, remove_abandoned, write_atomically
from moegguf.errors import (
    ModelFormatError,
    ModelNotFoundError,
    MoeggufError,
    OptionError,
    PullError,
)
from moegguf.gguf.experts import read_layout
from moegguf.models.entry import (
    ModelEntry,
    blob_name,
    combined_digest,
    size_of,
    weights_digest,
)
from moegguf.models.names import parse_name
from moegguf.models.recipe import check_overrides
from moegguf.models.selection import select_files
from moegguf.models.sources import DEMO_FILE, demo_path, hub_cache
from moegguf.quantities import format_bytes
from moegguf.regular_file import read_regular
from moegguf.settings import data_folder

VERSION = 1
_BESIDE = ("mmproj", "adapter", "draft")  # fields of an entry with one file or None
MARGIN_BYTES = 64 << 20  # bytes that are left free on the disk
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+() -]{0,199}", re.ASCII)


def _location_of(path: Path) -> str:
    if path in (demo_path(), Path(DEMO_FILE)):
        return "demo:"
    for prefix, root in (("hub", hub_cache()), ("sets", sets_folder())):
        if path.is_relative_to(root):
            return f"{prefix}:{path.relative_to(root).as_posix()}"
    return str(path.absolute())


def _path_at(location: str) -> Path:
    """Returns the path of a location; the file may be missing. Raises ValueError for a
    location that leads out of its folder, and for a relative path."""
    prefix, _, rest = location.partition(":")
    if prefix == "demo":
        return demo_path() or Path(DEMO_FILE)
    if (
        prefix in ("hub", "sets")
        and ".." not in PurePosixPath(rest).parts
        and not rest.startswith("/")
    ):
        return (hub_cache() if prefix == "hub" else sets_folder()) / rest
    if os.path.isabs(location):
        return Path(location)
    raise ValueError("location")


def updated(entry: ModelEntry) -> ModelEntry:
    """Returns an entry with the current size and digest of its files. `missing` lists
    the shards that no longer exist, and the adapter if it no longer exists. A projector
    or draft model that no longer exists becomes None. The digest is recomputed only if
    nothing is missing and a file is outside the Hugging Face cache and our folder of
    sets."""
    there = {
        path: path.stat().st_size for path in entry.all_files if os.path.isfile(path)
    }
    needed = (*entry.files, *filter(None, (entry.adapter,)))
    missing = tuple(path for path in needed if path not in there)
    weights = entry.weights
    named_by_digest = all(
        _location_of(path).startswith(("hub:", "sets:")) for path in needed
    )
    # A file that is neither in the Hugging Face cache nor in our folder of sets may have
    # been replaced.
    if not missing and not named_by_digest:
        with suppress(OSError):  # a file cannot be read: the old digest is kept
            weights = weights_digest(entry.files, entry.adapter)
    return replace(
        entry,
        size_bytes=sum(there.values()),
        weights=weights,
        mmproj=entry.mmproj if entry.mmproj in there else None,
        draft=entry.draft if entry.draft in there else None,
        missing=missing,
    )


@dataclass
class Contents:
    """The contents of an index."""

    # {name in lower case: entry as stored}.
    entries: dict[str, ModelEntry] = field(default_factory=dict)
    # removed Hugging Face names, in lower case, whose files are kept for other names
    hidden: set[str] = field(default_factory=set)
    is_intact: bool = True  # False: a part of the file could not be read

    def files(self) -> set[Path]:
        """Returns the files of all entries."""
        return {path for entry in self.entries.values() for path in entry.all_files}


class Index:
    """The file `models.json` in `folder`. Many threads and processes may use it at
    once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "models.json"

    def read(self) -> Contents:
        """Returns the current contents, which are empty if there is no file. Repairs a
        damaged file if the folder can be written to. Does not raise errors."""
        contents = self._load()
        if not contents.is_intact:
            # A damaged file in a read-only folder stays there.
            with suppress(OSError, PullError), self.changed():
                pass
        return contents

    @contextmanager
    def changed(self) -> Iterator[Contents]:
        """Provides the contents, which may be changed inside the `with` block, under
        the index's lock. At the end of the block, the contents are written if they have
        changed or the file was damaged, unless the block raises. Raises PullError when
        the disk fails."""
        with disk_errors(f"the index {str(self.path)!r} cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "models.lock", "a+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                contents = self._load()
                before = _to_json(contents)
                yield contents
                if not contents.is_intact:
                    damaged = self.path.with_name(
                        f"models.json.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
                    )
                    os.replace(self.path, damaged)
                    kept = "the index of models was damaged; what could be read is kept, the rest is in"
                    warnings.warn(f"{kept} {damaged}.", stacklevel=2)
                if not contents.is_intact or _to_json(contents) != before:
                    write_atomically(self.path, _to_json(contents))

    def _load(self) -> Contents:
        """Reads the index, and leaves out invalid entries. Returns no entries if the
        file does not exist, cannot be read or is not a JSON object, or if `models` is
        missing or cannot be iterated over."""
        contents = Contents()
        try:
            data = json.loads(read_regular(self.path))
            listed = list(data["models"])
        except FileNotFoundError:
            return contents
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return Contents(is_intact=False)
        hidden = data.get("hidden")
        contents.is_intact = data.get("version") == VERSION and isinstance(hidden, list)
        contents.hidden = set(map(str, hidden)) if isinstance(hidden, list) else set()
        for values in listed:
            try:
                entry = _entry(values)
                contents.entries[entry.name.lower()] = entry
            except (KeyError, TypeError, ValueError, AttributeError):
                contents.is_intact = False
        return contents


def _entry(values: dict[str, Any]) -> ModelEntry:
    """Returns the entry in one item of the file. Raises KeyError, TypeError, ValueError
    or AttributeError for a bad item."""
    beside: dict[str, Any] = {
        name: _path_at(location) for name in _BESIDE if (location := values.get(name))
    }
    modified = datetime.fromisoformat(values["modified"])
    return ModelEntry(
        name=parse_name(values["name"]).canonical,
        source="own",
        files=(_path_at(values["files"][0]), *map(_path_at, values["files"][1:])),
        size_bytes=0,
        weights=str(values["weights"]),
        modified=modified if modified.tzinfo else modified.replace(tzinfo=UTC),
        **beside,
        parent=str(values.get("parent", "")),
        **check_overrides(values),
    )


def _to_json(contents: Contents) -> bytes:
    models = [
        {
            **entry.overrides,
            "name": entry.name,
            "files": list(map(_location_of, entry.files)),
            "weights": entry.weights,
            "modified": entry.modified.isoformat(),
            "parent": entry.parent,
            **{
                name: _location_of(path) if (path := getattr(entry, name)) else None
                for name in _BESIDE
            },
        }
        for entry in contents.entries.values()
    ]
    data = {"version": VERSION, "models": models, "hidden": sorted(contents.hidden)}
    return (json.dumps(data, indent=1) + "\n").encode()


def free_bytes(folder: Path) -> int:
    """Returns the number of free bytes on the disk that holds `folder`. The folder may
    not exist yet."""
    existing = next(
        path for path in (folder, *folder.absolute().parents) if path.exists()
    )
    return shutil.disk_usage(existing).free


def check_space(folder: Path, n_bytes: int, what: str) -> None:
    """Raises PullError if less than MARGIN_BYTES would be free after `n_bytes` are
    written. The message starts with `what`. Does nothing if `n_bytes` is 0."""
    free = free_bytes(folder)
    if n_bytes and n_bytes + MARGIN_BYTES > free:
        raise PullError(
            f"{what} needs {format_bytes(n_bytes)} (and {format_bytes(MARGIN_BYTES)} to spare), but the disk of"
            f" {str(folder)!r} has {format_bytes(free)} free; delete files, or choose a smaller quantisation."
        )


def sets_folder() -> Path:
    """Returns the folder that holds all sets of blobs."""
    return data_folder() / "sets"


class BlobStore:
    """The uploaded files (blobs) in the data folder, and the sets built from them."""

    def __init__(self) -> None:
        self.folder = data_folder() / "blobs"

    def path(self, digest: str) -> Path:
        """Returns the path of a blob. Raises ModelNameError for a text that is not a
        digest, and ModelNotFoundError for a missing blob."""
        if not self.has(digest):
            raise ModelNotFoundError(
                f"there is no blob {blob_name(digest)!r}; send it first."
            )
        return self.folder / blob_name(digest)

    def has(self, digest: str) -> bool:
        """Returns whether the blob exists, which means that it is complete. Raises
        ModelNameError for a text that is not a digest."""
        path = self.folder / blob_name(digest)
        return path.is_file() and not path.is_symlink()

    def writer(self, digest: str, size_bytes: int | None = None) -> BlobWriter:
        """Returns a context manager that receives one blob. Raises ModelNameError, and
        PullError if `size_bytes` do not fit on the disk (None: unknown, not
        checked)."""
        return BlobWriter(self.folder, digest, size_bytes)

    def make_set(self, files: Mapping[str, str]) -> ModelEntry:
        """Creates a set from {file name: digest of a blob}. Returns the model in the
        set, without a name.

        Raises ModelNotFoundError for a missing blob or shard, ModelFormatError for
        files that are not a model, and OptionError for names that are not file names.
        """
        named = _named(files)
        selection = select_files(named, repo="the list of files")
        folder, is_new = self._folder_of(named)
        paths = tuple(folder / name for name in selection.files)
        try:
            read_layout(paths[0])
        except BaseException:  # even after Ctrl-C, no unchecked set remains
            if is_new:  # names may use an older set
                shutil.rmtree(folder, ignore_errors=True)
            raise
        digest = combined_digest(
            [blob_name(named[name]).removeprefix("sha256-") for name in selection.files]
        )
        mmproj = folder / selection.mmproj if selection.mmproj else None
        return ModelEntry(
            "", "own", paths, size_of(paths), digest, datetime.now(UTC), mmproj
        )

    def make_adapter(self, files: Mapping[str, str]) -> Path:
        """Creates a set of one blob, an adapter given as {file name: digest}. Returns
        the adapter's path. Raises OptionError unless there is one file with a valid
        name, and ModelNotFoundError for a missing blob."""
        if len(files) != 1:
            raise OptionError(
                f"a model's adapter must be one file, but {len(files)} are given; give one file."
            )
        ((name, blob),) = _named(files).items()
        return self._folder_of({name: blob})[0] / name

    def clean(self, used: Iterable[Path]) -> None:
        """Removes sets without a file in `used`, and blobs that were linked only in
        these sets. Leaves anything that cannot be removed."""
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

    def _folder_of(self, named: Mapping[str, str]) -> tuple[Path, bool]:
        """Returns the folder of the set with these blobs, and True if this call created
        the folder. Raises ModelNotFoundError or PullError."""
        sources = {name: self.path(blob) for name, blob in named.items()}
        listing = "\n".join(
            sorted(f"{name} {blob_name(blob)}" for name, blob in named.items())
        )
        digest = hashlib.sha256(listing.encode()).hexdigest()
        folder = sets_folder() / digest
        # A new link would change the ctime, so the file would seem changed.
        if folder.exists():
            return folder, False
        # Renamed at the end, so a set is complete or absent.
        temporary = sets_folder() / f".{digest}.{os.getpid()}"
        with disk_errors(f"the files cannot be kept in {str(sets_folder())!r}"):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name, blob in sources.items():
                os.link(blob, temporary / name)
            if folder.exists():
                shutil.rmtree(temporary)
            else:
                os.replace(temporary, folder)
        return folder, True


def _named(files: Mapping[str, str]) -> dict[str, str]:
    """Returns {file name: digest} with ".gguf" added to names that lack it. Raises
    OptionError for a text that is not a file name."""
    for name in files:
        if not _FILE_NAME.fullmatch(name) or ".." in name:
            raise OptionError(
                f"a file's name must have 1 to 200 letters, digits, spaces and ._+()-, with a letter, digit or _ first"
                f" and no '..', but one is {name!r:.60}; give names such as 'model.gguf'."
            )
    return {
        name if name.lower().endswith(".gguf") else f"{name}.gguf": blob
        for name, blob in files.items()
    }


class BlobWriter(AbstractContextManager["BlobWriter"]):
    """Receives the bytes of one blob. Without `commit` the bytes are deleted at the end
    of the `with` block."""

    def __init__(self, folder: Path, digest: str, size_bytes: int | None) -> None:
        self._path = folder / blob_name(digest)
        check_space(folder, size_bytes or 0, f"the blob {self._path.name[:19]}")
        self._sha = hashlib.sha256()
        self._failed = f"{self._path.name[:19]} cannot be written to {str(folder)!r}"
        with disk_errors(self._failed):
            folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(folder.glob(".*.partial"))
            handle, name = locked_temporary(folder, ".", ".partial")
        self._partial = Path(name)
        self._file = os.fdopen(handle, "wb")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # close fails again if the disk is full
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Appends bytes. Raises PullError if the disk fails or would have less than
        MARGIN_BYTES free."""
        check_space(self._path.parent, len(chunk), f"a part of {self._path.name[:19]}")
        self._sha.update(chunk)
        with disk_errors(self._failed):
            self._file.write(chunk)

    def commit(self) -> Path:
        """Verifies the bytes and gives the blob its name. Raises ModelFormatError if
        the bytes do not have the announced digest, and PullError if the disk fails."""
        found = f"sha256-{self._sha.hexdigest()}"
        if found != self._path.name:
            raise ModelFormatError(
                f"the digest of the bytes is {found}, but {self._path.name} was announced; send the file again."
            )
        with disk_errors(self._failed):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self._path)
            sync_folder(self._path.parent)
        return self._path


def sync_folder(folder: Path) -> None:
    """Flushes the directory `folder` to disk, so that new names survive a power loss.
    Raises OSError if the disk fails."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def disk_errors(failed: str) -> Iterator[None]:
    """Converts disk errors in the `with` block into PullError, with a message that
    starts with `failed`."""
    try:
        yield
    except OSError as error:
        # Not raised by the file system.
        if isinstance(error, MoeggufError) or error.errno is None:
            raise
        raise PullError(
            f"{failed} ({error.strerror}); make room on the disk, or make the folder writable, or check the disk, and"
            " try again."
        ) from error
