"""Fetches only the headers of a model on Hugging Face, so that it can be described and planned before it is fetched.

Each file becomes a sparse file of its full size whose first bytes are the header, in a temporary folder: whatever reads
headers reads it like a fetched model, but finds zeros in place of weights.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from moegguf.errors import ModelFormatError, PullError
from moegguf.gguf.reader import read_gguf
from moegguf.models import hub_api
from moegguf.models.entry import ModelEntry
from moegguf.models.folder import file_entry
from moegguf.models.hub import hub_endpoint, hub_token
from moegguf.models.hub_api import HubFile, Repository, read_repository, with_retries
from moegguf.models.names import parse_name
from moegguf.models.selection import select_files
from moegguf.package import __version__
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
            with suppress(ModelFormatError) if path == selection.mmproj else nullcontext():  # as of a fetched model
                _fetch_header(repository, repository.files[path], Path(folder) / PurePosixPath(path).name)
        yield file_entry(Path(folder) / PurePosixPath(selection.files[0]).name, "hub", parsed.canonical)


def _fetch_header(repository: Repository, file: HubFile, path: Path) -> None:
    """Fetches more of the file until its header is complete. Raises the reader's error for one that never is."""
    begin, end = 0, min(FIRST_BYTES, file.size_bytes)
    path.touch()
    while True:
        _fetch_range(repository, file, path, begin, end)
        with suppress(ModelFormatError):  # of the zeros after what was fetched
            if read_gguf(path).data_offset <= end:
                return
        if end == file.size_bytes:
            read_gguf(path)  # raises the error: nothing is missing
            return
        if end >= MOST_BYTES:
            raise PullError(
                f"{repository.repo}/{file.path}: its header is not complete within {format_bytes(MOST_BYTES)}; it is"
                " damaged, or not a GGUF file."
            )
        begin, end = end, min(2 * end, file.size_bytes, MOST_BYTES)


def _fetch_range(repository: Repository, file: HubFile, path: Path, begin: int, end: int) -> None:
    """Writes bytes `begin` to `end` of the file to `path`, which then has the file's size."""
    data = with_retries(lambda: _read_range(repository, file, begin, end), repository.repo, threading.Event())
    with open(path, "r+b") as output:
        output.seek(begin)
        output.write(data)
        output.truncate(file.size_bytes)


def _read_range(repository: Repository, file: HubFile, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` of the file; a server without ranges sends more, of which no more is read.

    Raises PullError for fewer bytes, or for others than were asked for.
    """
    url = f"{hub_endpoint()}/{repository.repo}/resolve/{repository.commit}/{quote(file.path)}"
    headers = build_hf_headers(token=hub_token() or False, library_name="moegguf", library_version=__version__)
    headers |= {"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
    found = bytearray()
    with get_session().stream(
        "GET", url, headers=headers, timeout=hub_api.TIMEOUT_S, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        skipped = begin if response.status_code != 206 else 0
        stated = response.headers.get("content-range", "")
        if response.status_code == 206 and not stated.startswith(f"bytes {begin}-"):
            raise PullError(
                f"{repository.repo}/{file.path}: asked for the bytes from {begin} on, the hub sent {stated[:60]!r};"
                " try again, or check HF_ENDPOINT and what is between."
            )
        for chunk in response.iter_raw():
            found += chunk
            if len(found) >= skipped + end - begin:
                break
    data = bytes(found[skipped : skipped + end - begin])
    if len(data) < end - begin:
        raise PullError(f"{repository.repo}/{file.path}: the hub sent {len(data)} of {end - begin} bytes; try again.")
    return data
