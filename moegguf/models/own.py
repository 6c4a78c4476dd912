"""The files behind names of our own: how a record says where they lie, and files that were sent to us as blobs.

A record's file is "hub:" and a path in the Hugging Face cache, "sets:" and a path in our folder of sets, "demo:", or an
absolute path. Files sent as blobs stand in a set: a folder named by their digest, in which each has its own name (hard
links to the blobs, so that the shards of a split model find each other).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from moegguf.config import data_folder
from moegguf.errors import ModelNotFoundError, OptionError, PullError
from moegguf.gguf.experts import read_layout
from moegguf.models.blobs import BlobStore, blob_name
from moegguf.models.entry import Entry
from moegguf.models.files import digest_of_digests, size_of
from moegguf.models.folder import demo_path
from moegguf.models.hub import hub_cache
from moegguf.models.index import Record
from moegguf.models.selection import choose

MAX_FILES = 1024
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+() -]{0,199}", re.ASCII)


def token(path: Path) -> str:
    """How a record writes down where a file lies."""
    if path == demo_path():
        return "demo:"
    for word, root in (("hub", hub_cache()), ("sets", data_folder() / "sets")):
        if path.is_relative_to(root):
            return f"{word}:{path.relative_to(root).as_posix()}"
    return str(path.absolute())


def resolve(text: str) -> Path:
    """The file that a record means. Raises ModelNotFoundError when it has gone, or leads out of its folder."""
    word, _, rest = text.partition(":")
    path: Path | None = None
    if word == "demo":
        path = demo_path()
    elif word in ("hub", "sets") and ".." not in PurePosixPath(rest).parts and not rest.startswith("/"):
        path = (hub_cache() if word == "hub" else data_folder() / "sets") / rest
    elif os.path.isabs(text):
        path = Path(text)
    if path is None or not path.is_file():
        raise ModelNotFoundError(f"the file {text!r} is no longer there.")
    return path


def record_of(entry: Entry, name: str) -> Record:
    """What the index keeps of `entry` under a new name."""
    return Record(
        name=name,
        files=tuple(token(path) for path in entry.files),
        digest=entry.digest,
        modified=datetime.now(UTC),
        mmproj=token(entry.mmproj) if entry.mmproj else None,
        system=entry.system,
        template=entry.template,
        parameters=entry.parameters,
        messages=entry.messages,
        license=entry.license,
        parent="" if entry.source == "path" else entry.name,
    )


def used_files(records: Iterable[Record]) -> set[Path]:
    """The files that records stand for, with every link followed."""
    found = set()
    for text in (text for record in records for text in (*record.files, record.mmproj or "")):
        with suppress(OSError):
            found.add(resolve(text).resolve())
    return found


class OwnFiles:
    """Sets in `folder`, made of the blobs in `blobs`."""

    def __init__(self, folder: Path, blobs: BlobStore) -> None:
        self.folder = folder
        self.blobs = blobs

    def entry(self, record: Record) -> Entry:
        """Raises ModelNotFoundError, OSError when its files have gone."""
        files = tuple(resolve(file) for file in record.files)
        mmproj = resolve(record.mmproj) if record.mmproj else None
        return Entry(
            name=record.name,
            source="own",
            files=files,
            size_bytes=size_of(files, mmproj),
            digest=record.digest,
            modified=record.modified,
            mmproj=mmproj,
            system=record.system,
            template=record.template,
            parameters=record.parameters,
            messages=record.messages,
            license=record.license,
            parent=record.parent,
        )

    def gather(self, files: Mapping[str, str]) -> Entry:
        """A set of {file name: digest of a blob}, checked to be a model.

        Raises ModelNotFoundError for a blob that is not here, ModelFormatError for files that are no model, OptionError
        for names that are no file names.
        """
        if len(files) > MAX_FILES:
            raise OptionError(f"a model has at most {MAX_FILES} files, but these are {len(files)}.")
        for name in files:
            if not _FILE_NAME.fullmatch(name) or ".." in name:
                raise OptionError(f"{name!r:.60} is not the name of a file; give names such as 'model.gguf'.")
        named = {name if name.lower().endswith(".gguf") else f"{name}.gguf": blob for name, blob in files.items()}
        sources = {name: self.blobs.path(blob) for name, blob in named.items()}
        choice = choose(named, repo="the list of files")
        digests = [blob_name(named[name])[7:] for name in choice.files]
        try:
            folder = self._link(sources, digest_of_digests(sorted(f"{n} {blob_name(b)}" for n, b in named.items())))
        except OSError as error:
            raise PullError(f"the files cannot be kept in {str(self.folder)!r} ({error.strerror or error}).") from error
        paths = tuple(folder / name for name in choice.files)
        try:
            read_layout(paths[0])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Entry(
            name="",
            source="own",
            files=paths,
            size_bytes=size_of(paths),
            digest=digests[0] if len(digests) == 1 else digest_of_digests(digests),
            modified=datetime.now(UTC),
            mmproj=folder / choice.mmproj if choice.mmproj else None,
        )

    def clean(self, records: Iterable[Record]) -> None:
        """Removes sets that no record uses, and blobs that stood in those alone."""
        used = {file.removeprefix("sets:").split("/")[0] for record in records for file in record.files}
        for folder in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            if folder.name in used:
                continue
            with suppress(OSError):
                inodes = {path.stat().st_ino for path in folder.iterdir()}
                shutil.rmtree(folder)
                self._drop(inodes)

    def _link(self, sources: Mapping[str, Path], digest: str) -> Path:
        """The folder of the set; made beside its place, so that it is there whole or not at all."""
        place = self.folder / digest
        making = self.folder / f".{digest}.{os.getpid()}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        for name, blob in sources.items():
            os.link(blob, making / name)
        if place.exists():
            shutil.rmtree(making)
        else:
            os.replace(making, place)
        return place

    def _drop(self, inodes: set[int]) -> None:
        """Removes the blobs among `inodes` that no other set links to."""
        for blob in self.blobs.folder.glob("sha256-*"):
            info = blob.stat()
            if info.st_ino in inodes and info.st_nlink == 1:
                blob.unlink()
