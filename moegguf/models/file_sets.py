"""The files behind names in our index: their locations as a record stores them, and sets of uploaded blobs.

A location is "hub:" and a path in the Hugging Face cache, "sets:" and a path in our folder of sets, "demo:", or an
absolute path. Uploaded files form a set: a folder named by their digest, in which each has its own name (hard links to
the blobs, so that llama.cpp finds the shards of a split model beside each other).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from moegguf.errors import ModelNotFoundError, OptionError, PullError
from moegguf.gguf.experts import read_layout
from moegguf.models.blobs import BlobStore, blob_name
from moegguf.models.entry import ModelEntry, combined_digest, digest_of, model_digest, size_of
from moegguf.models.folder import DEMO_FILE, DEMO_NAME, demo_path
from moegguf.models.hub import cached_name, hub_cache
from moegguf.models.index import Record
from moegguf.models.names import DEFAULT_TAG
from moegguf.models.selection import select_files
from moegguf.settings import data_folder

MAX_FILES = 1024
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+() -]{0,199}", re.ASCII)


def sets_folder() -> Path:
    """The folder of all sets."""
    return data_folder() / "sets"


def location_of(path: Path) -> str:
    """The location of a file, as a record stores it."""
    if path == demo_path():
        return "demo:"
    for prefix, root in (("hub", hub_cache()), ("sets", sets_folder())):
        if path.is_relative_to(root):
            return f"{prefix}:{path.relative_to(root).as_posix()}"
    return str(path.absolute())


def path_at(location: str) -> Path:
    """The path of a location, where the file may be missing. Raises ModelNotFoundError for one outside its folder."""
    prefix, _, rest = location.partition(":")
    if prefix == "demo":
        return demo_path() or Path(DEMO_FILE)
    if prefix in ("hub", "sets") and ".." not in PurePosixPath(rest).parts and not rest.startswith("/"):
        return (hub_cache() if prefix == "hub" else sets_folder()) / rest
    if os.path.isabs(location):
        return Path(location)
    raise ModelNotFoundError(f"the index has {location!r:.200}, which is not the location of a file.")


def record_of(entry: ModelEntry, name: str) -> Record:
    """What the index stores of `entry` under a new name."""
    return Record(
        name=name,
        files=tuple(location_of(path) for path in entry.files),
        digest=entry.digest,
        modified=datetime.now(UTC),
        mmproj=location_of(entry.mmproj) if entry.mmproj else None,
        parent="" if entry.source == "path" else entry.name,
        files_digest=entry.weights,
        **entry.overrides,
    )


def entry_of(record: Record) -> ModelEntry:
    """The model behind a record; its `missing` has those of its files that are no longer there.

    Raises ModelNotFoundError for a location outside its folder.
    """
    files = tuple(path_at(location) for location in record.files)
    mmproj = path_at(record.mmproj) if record.mmproj else None
    there = [path for path in (*files, mmproj) if path is not None and path.is_file()]
    missing = tuple(path for path in files if path not in there)
    files_digest, digest = _digests(record, files if not missing else ())
    return ModelEntry(
        name=record.name,
        source="own",
        files=files,
        size_bytes=size_of(there),
        digest=digest,
        modified=record.modified,
        mmproj=mmproj if mmproj in there else None,
        parent=record.parent,
        files_digest=files_digest,
        missing=missing,
        **record.overrides,
    )


def _digests(record: Record, files: tuple[Path, ...]) -> tuple[str, str]:
    """(digest of the files, digest of the model) now: a file at a path may be another one than when it was named."""
    named_by_digest = all(location.startswith(("hub:", "sets:")) for location in record.files)
    if not files or (named_by_digest and record.files_digest):
        return record.files_digest, record.digest
    try:
        files_digest = digest_of(files)
    except OSError:  # not readable
        files_digest = record.files_digest
    if files_digest == record.files_digest:
        return files_digest, record.digest
    return files_digest, model_digest(files_digest, record)


def origin(entry: ModelEntry, hidden: Collection[str] = ()) -> str:
    """What FROM takes to make a model of the same files: a name that stays when the entry's is removed, else a path.

    `hidden`: keys of names of the Hugging Face cache that were removed.
    """
    if entry.source in ("demo", "hub", "ollama"):
        return entry.name
    location = location_of(entry.path)
    if location == "demo:":
        return f"{DEMO_NAME}:{DEFAULT_TAG}"
    name = cached_name(entry.files, hidden) if location.startswith("hub:") else None
    return name or str(entry.path)


def used_files(records: Iterable[Record]) -> set[Path]:
    """The files of all records, with every link followed."""
    found = set()
    for location in (location for record in records for location in (*record.files, record.mmproj or "")):
        with suppress(OSError):  # a missing one, or none
            found.add(path_at(location).resolve(strict=True))
    return found


class FileSets:
    """The sets of uploaded files, hard links to the blobs in `blobs`."""

    def __init__(self, blobs: BlobStore) -> None:
        self.folder = sets_folder()
        self.blobs = blobs

    def make(self, files: Mapping[str, str]) -> ModelEntry:
        """The model (without a name) in a set of {file name: digest of a blob}.

        Raises ModelNotFoundError for a missing blob, ModelFormatError for files that are not a model, OptionError for
        names that are not file names.
        """
        if len(files) > MAX_FILES:
            raise OptionError(f"a model has at most {MAX_FILES} files, but these are {len(files)}.")
        for name in files:
            if not _FILE_NAME.fullmatch(name) or ".." in name:
                raise OptionError(f"{name!r:.60} is not the name of a file; give names such as 'model.gguf'.")
        named = {name if name.lower().endswith(".gguf") else f"{name}.gguf": blob for name, blob in files.items()}
        sources = {name: self.blobs.path(blob) for name, blob in named.items()}
        selection = select_files(named, repo="the list of files")
        listing = "\n".join(sorted(f"{name} {blob_name(blob)}" for name, blob in named.items()))
        try:
            folder = self._link(sources, hashlib.sha256(listing.encode()).hexdigest())
        except OSError as error:
            raise PullError(f"the files cannot be kept in {str(self.folder)!r} ({error.strerror or error}).") from error
        paths = tuple(folder / name for name in selection.files)
        try:
            read_layout(paths[0])
        except BaseException:  # also an interrupt: nothing half checked stays
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return ModelEntry(
            name="",
            source="own",
            files=paths,
            size_bytes=size_of(paths),
            digest=combined_digest([blob_name(named[name]).removeprefix("sha256-") for name in selection.files]),
            modified=datetime.now(UTC),
            mmproj=folder / selection.mmproj if selection.mmproj else None,
        )

    def clean(self, records: Iterable[Record]) -> None:
        """Removes sets that no record uses, and the blobs that only those linked to."""
        used = {location.removeprefix("sets:").split("/")[0] for record in records for location in record.files}
        for folder in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            if folder.name in used:
                continue
            with suppress(OSError):
                inodes = {path.stat().st_ino for path in folder.iterdir()}
                shutil.rmtree(folder)
                self._remove_blobs(inodes)

    def _link(self, sources: Mapping[str, Path], digest: str) -> Path:
        """The folder of the set: filled under a temporary name and renamed, so that it is complete or absent."""
        folder = self.folder / digest
        temporary = self.folder / f".{digest}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, blob in sources.items():
            os.link(blob, temporary / name)
        if folder.exists():
            shutil.rmtree(temporary)
        else:
            os.replace(temporary, folder)
        return folder

    def _remove_blobs(self, inodes: set[int]) -> None:
        """Removes the blobs among `inodes` that no other set links to."""
        for blob in self.blobs.folder.glob("sha256-*"):
            info = blob.stat()
            if info.st_ino in inodes and info.st_nlink == 1:
                blob.unlink()
