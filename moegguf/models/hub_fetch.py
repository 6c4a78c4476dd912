"""Downloads one file of a repository into the Hugging Face cache, resumed and verified.

A file grows as `blobs/<etag>.incomplete` and is continued after an interruption, also by another process. Its digest is
computed while it is written; the blob gets its name when size and digest are right. Locks are huggingface_hub's, so two
programs do not fetch the same file at once.

huggingface_hub 2.4's own `hf_hub_download` does less: it writes to a file of a random name, which it deletes when it
fails or is interrupted and never continues; over HTTP it compares no digest, and a 5xx or a reset connection ends it.
Its `http_get` continues a file, but drops what came after the last full 10 MiB, and waits as long as Retry-After says.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, tqdm

from moegguf.errors import ModelFormatError, PullError
from moegguf.gguf.reader import MAGIC
from moegguf.models.blobs import free_bytes, sync_folder
from moegguf.models.hub import hub_endpoint
from moegguf.models.hub_api import HubFile, Stopped, hub_errors, open_bytes, with_retries
from moegguf.package import __version__
from moegguf.quantities import format_bytes

PLAIN_LIMIT_BYTES = 50 * 10**9  # the Hub serves larger files only through its chunked storage (Xet)
READ_BYTES = 1 << 20
LOCK_WAIT_S = 0.2

OnBytes = Callable[[int], None]
"""Called with the number of bytes of the file that are on disk."""


def missing_bytes(file: HubFile) -> int:
    """Bytes that fetching the file would still write."""
    return 0 if _is_cached(file) else max(0, file.size_bytes - _partial_bytes(file))


def fetch_file(file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
    """Downloads the file's blob into the cache. Raises ModelNotFoundError, ModelFormatError, PullError, Stopped."""
    with hub_errors(file.repo, file.path):
        try:
            fetch = _fetch_chunked if file.size_bytes > PLAIN_LIMIT_BYTES else _fetch_plain
            fetch(file, on_bytes, stopped)
        except OSError as error:
            if error.errno is None:  # not of the disk
                raise
            raise _disk_error(file, error) from error
    on_bytes(file.size_bytes)


def is_copy(path: Path, file: HubFile, stopped: threading.Event) -> bool:
    """Whether the file at `path` has the file's size and digest; reads all of it. Raises OSError, Stopped."""
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with open(path, "rb") as found:
        return _Body(found, file, lambda _: None, stopped).is_verified()


def _partial(file: HubFile) -> Path:
    return file.blob.with_name(f"{file.etag}.incomplete")


def _partial_bytes(file: HubFile) -> int:
    return _partial(file).stat().st_size if _partial(file).is_file() else 0


def _is_cached(file: HubFile) -> bool:
    return file.blob.is_file() and file.blob.stat().st_size == file.size_bytes


def _locked(file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> ExitStack:
    """The file's lock in the cache, held; while another process has it, reports the bytes that process has."""
    path = file.folder.parent / ".locks" / file.folder.name / f"{file.etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    while True:
        try:
            stack.enter_context(WeakFileLock(path, timeout=LOCK_WAIT_S))
            return stack
        except TimeoutError:
            if stopped.is_set():
                raise Stopped from None
            on_bytes(_partial_bytes(file))


def _fetch_plain(file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
    """The whole file; a resumed file with a wrong digest is downloaded once more from the start."""
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file, on_bytes, stopped):
        if _is_cached(file):
            return
        with open(_partial(file), "a+b") as output:
            body = _Body(output, file, on_bytes, stopped)
            for _ in range(2 if body.n_bytes else 1):
                with_retries(lambda: _request(body), stopped, lambda: body.n_bytes)
                if body.is_verified():
                    break
                body.restart()
            else:
                raise PullError(
                    f"{file.repo}/{file.path} arrived with another digest than the hub states ({file.etag[:12]}...);"
                    " it is deleted, try again."
                )
            output.flush()
            os.fsync(output.fileno())
        os.replace(_partial(file), file.blob)
        sync_folder(file.blob.parent)


def _request(body: _Body) -> None:
    """One request for the missing bytes, written as they arrive. Raises httpx2.ReadError for too few."""
    if body.complete:
        return
    try:
        with open_bytes(body.file, body.n_bytes) as response:
            body.start(response)
            for chunk in response.iter_raw():
                body.write(chunk)
    except HfHubHTTPError as error:
        if error.response.status_code != 416 or not body.n_bytes:
            raise
        body.restart()  # the server does not continue the file
    if not body.complete:
        raise httpx2.ReadError("the connection was closed too early")


class _Body:
    """The bytes of one file received so far, on disk and in the digest."""

    def __init__(self, output: BinaryIO, file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
        self.file = file
        self._stopped = stopped
        self._output = output
        self._on_bytes = on_bytes
        self.n_bytes = 0
        self._digest = self._new_digest()
        output.seek(0)
        while chunk := output.read(READ_BYTES):
            self._count(chunk)
        if self.n_bytes > file.size_bytes:
            self.restart()

    @property
    def complete(self) -> bool:
        return self.n_bytes == self.file.size_bytes

    def is_verified(self) -> bool:
        return self._digest.hexdigest() == self.file.etag

    def restart(self) -> None:
        """Discards what was received."""
        self._output.seek(0)
        self._output.truncate()
        self.n_bytes, self._digest = 0, self._new_digest()

    def start(self, response: httpx2.Response) -> None:
        """Discards what is there if the response has the whole file. Raises PullError for another total size."""
        if response.status_code == 206:
            total = response.headers["Content-Range"].rpartition("/")[2]
        else:
            total = response.headers.get("Content-Length", "")
            self.restart()
        if total.isdigit() and int(total) != self.file.size_bytes:
            raise self._wrong_size(total)

    def write(self, chunk: bytes) -> None:
        """Appends bytes. Raises PullError for too many, ModelFormatError for the start of another kind of file."""
        if self.n_bytes + len(chunk) > self.file.size_bytes:
            raise self._wrong_size("more")
        start = MAGIC[self.n_bytes :][: len(chunk)]
        if self.file.path.lower().endswith(".gguf") and not chunk.startswith(start):
            raise ModelFormatError(
                f"{self.file.path} is not a GGUF file: it begins with {str(chunk[: len(start)])[1:]}; choose another"
                " repository, and check HF_ENDPOINT and proxies."
            )
        self._output.write(chunk)
        self._count(chunk)

    def _wrong_size(self, sent: str) -> PullError:
        return PullError(
            f"{self.file.path} should have {self.file.size_bytes} bytes, but the server sends {sent}; try again, and"
            " check HF_ENDPOINT and proxies."
        )

    def _count(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.n_bytes += len(chunk)
        self._on_bytes(self.n_bytes)
        if self._stopped.is_set():
            raise Stopped

    def _new_digest(self) -> hashlib._Hash:
        """SHA-256 of large files, git's hash of small ones."""
        if self.file.is_large:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.file.size_bytes}\0".encode(), usedforsecurity=False)


def _fetch_chunked(file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
    """Through huggingface_hub and its chunked storage, which verifies every chunk and does not resume a file."""

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            if stopped.is_set():
                raise Stopped
            on_bytes(min(int(self.n + (n or 0)), file.size_bytes))
            return super().update(n)

    hf_hub_download(
        file.repo, file.path, revision=file.commit, cache_dir=file.folder.parent, endpoint=hub_endpoint(),
        tqdm_class=Bar, library_name="moegguf", library_version=__version__,
    )  # fmt: skip


def _disk_error(file: HubFile, error: OSError) -> PullError:
    folder = file.folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PullError(
            f"the disk of {str(folder)!r} is full: {file.path} needs {format_bytes(missing_bytes(file))} more,"
            f" {format_bytes(free_bytes(folder))} are free; delete files and try again, received bytes are kept."
        )
    return PullError(f"{file.path} cannot be written to {str(folder)!r} ({error.strerror or error}); check the folder.")
