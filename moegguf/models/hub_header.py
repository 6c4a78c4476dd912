"""Fetches only the headers of a model on Hugging Face, so that it can be described and planned before it is fetched.

Each file becomes a sparse file of its full size whose first bytes are the header, in a temporary folder: whatever reads
headers reads it like a fetched model, but finds zeros in place of weights.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path, PurePosixPath

from moegguf.errors import ModelFormatError, PullError
from moegguf.gguf.reader import read_gguf
from moegguf.models.entry import ModelEntry
from moegguf.models.folder import file_entry
from moegguf.models.hub_api import HubFile, hub_errors, open_bytes, read_repository, with_retries
from moegguf.models.names import parse_name
from moegguf.models.selection import select_files
from moegguf.quantities import format_bytes

FIRST_BYTES = 2 << 20  # of a header; a large vocabulary takes several times as much
MOST_BYTES = 128 << 20


@contextmanager
def remote_model(name: str) -> Iterator[ModelEntry]:
    """The model of a Hub name, with headers only; its files are gone afterwards.

    Raises ModelNotFoundError, ModelNameError, ModelFormatError, PullError.
    """
    parsed = parse_name(name)
    repository = read_repository(parsed.repo, threading.Event())
    selection = select_files(repository.files, parsed.tag, repo=repository.repo)
    with tempfile.TemporaryDirectory(prefix="moegguf-header-") as folder:
        for path in selection.paths:
            with suppress(ModelFormatError) if path == selection.mmproj else nullcontext():  # a damaged one is ignored
                _fetch_header(repository.files[path], Path(folder) / PurePosixPath(path).name)
        yield file_entry(Path(folder) / PurePosixPath(selection.files[0]).name, "hub", parsed.canonical)


def _fetch_header(file: HubFile, path: Path) -> None:
    """Fetches more of the file until its header is complete. Raises the reader's error for one that never is."""
    begin, end = 0, min(FIRST_BYTES, file.size_bytes)
    path.touch()
    while True:
        with hub_errors(file.repo, file.path):
            data = with_retries(partial(_read_range, file, begin, end), threading.Event())
        with open(path, "r+b") as output:
            output.seek(begin)
            output.write(data)
            output.truncate(file.size_bytes)
        with suppress(ModelFormatError):  # for the zeros after the fetched bytes
            if read_gguf(path).shard.header_bytes <= end:
                return
        if end == file.size_bytes:
            read_gguf(path)  # raises the error: nothing is missing
            return
        if end >= MOST_BYTES:
            raise PullError(
                f"{file.repo}/{file.path}: its header is not complete within {format_bytes(MOST_BYTES)}; it is"
                " damaged, or not a GGUF file."
            )
        begin, end = end, min(2 * end, file.size_bytes, MOST_BYTES)


def _read_range(file: HubFile, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` of the file; a server without ranges sends more, of which no more is read.

    Raises PullError for fewer bytes, or for others than were asked for.
    """
    found = bytearray()
    with open_bytes(file, begin, end) as response:
        skipped = begin if response.status_code != 206 else 0
        for chunk in response.iter_raw():
            found += chunk
            if len(found) >= skipped + end - begin:
                break
    data = bytes(found[skipped : skipped + end - begin])
    if len(data) < end - begin:
        raise PullError(f"{file.repo}/{file.path}: the hub sent {len(data)} of {end - begin} bytes; try again.")
    return data
