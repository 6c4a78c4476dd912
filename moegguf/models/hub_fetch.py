"""Downloads one file of a repository into the Hugging Face cache, resumed and verified.

A file grows as `blobs/<etag>.incomplete` and is continued after an interruption, also by another process. Its digest is
computed while it is written; the blob gets its name when size and digest are right. Locks are huggingface_hub's, so two
programs do not fetch the same file at once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx2
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status, tqdm

from moegguf.errors import ModelFormatError, MoeggufError, PullError
from moegguf.gguf.reader import MAGIC
from moegguf.models import hub_api
from moegguf.models.blobs import free_bytes, sync_folder
from moegguf.models.hub import hub_cache, hub_endpoint, hub_token, repo_folder
from moegguf.models.hub_api import HubFile, Stopped, is_transient, to_moegguf_error, wait_before_retry
from moegguf.package import __version__
from moegguf.quantities import format_bytes

PLAIN_LIMIT_BYTES = 50 * 10**9  # the Hub serves larger files only through its chunked storage (Xet)
READ_BYTES = 1 << 20
PROGRESS_BYTES = 1 << 20  # an attempt that received this much resets the count of failures
LOCK_WAIT_S = 0.2

OnBytes = Callable[[int], None]
"""Called with the number of bytes of the file that are on disk."""


def blob_path(repo: str, file: HubFile) -> Path:
    """The file's blob in the cache, whether it exists or not."""
    return repo_folder(repo) / "blobs" / file.etag


def is_cached(repo: str, file: HubFile) -> bool:
    """Whether the file's blob is complete."""
    path = blob_path(repo, file)
    return path.is_file() and path.stat().st_size == file.size_bytes


def missing_bytes(repo: str, file: HubFile) -> int:
    """Bytes that fetching the file would still write."""
    if is_cached(repo, file):
        return 0
    partial = _partial(blob_path(repo, file))
    return max(0, file.size_bytes - (partial.stat().st_size if partial.is_file() else 0))


def fetch_file(repo: str, commit: str, file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
    """Downloads the file's blob into the cache. Raises ModelNotFoundError, ModelFormatError, PullError, Stopped."""
    if file.size_bytes > PLAIN_LIMIT_BYTES:
        return _fetch_chunked(repo, commit, file, on_bytes, stopped)
    blob = blob_path(repo, file)
    try:
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _locked(repo, file, on_bytes, stopped):
            if not is_cached(repo, file):
                _download(f"{hub_endpoint()}/{repo}/resolve/{commit}/{quote(file.path)}", repo, file, on_bytes, stopped)
    except OSError as error:
        if isinstance(error, MoeggufError):
            raise
        raise _disk_error(repo, file, error) from error
    on_bytes(file.size_bytes)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


@contextmanager
def _locked(repo: str, file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> Iterator[None]:
    """Holds the file's lock in the cache; while another process has it, reports the bytes that process has."""
    path = hub_cache() / ".locks" / repo_folder(repo).name / f"{file.etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(blob_path(repo, file))
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(WeakFileLock(path, timeout=LOCK_WAIT_S))
                break
            except TimeoutError:
                if stopped.is_set():
                    raise Stopped from None
                on_bytes(partial.stat().st_size if partial.exists() else 0)
        yield


def _download(url: str, repo: str, file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
    """The whole file; a resumed file with a wrong digest is downloaded once more from the start."""
    blob = blob_path(repo, file)
    partial = _partial(blob)
    for may_restart in (True, False):
        resumed = partial.exists() and partial.stat().st_size > 0
        with open(partial, "a+b") as output:
            try:
                body = _Body(output, file, on_bytes, stopped)
                _receive(url, repo, body)
            except ModelFormatError:
                partial.unlink()
                raise
            if body.is_verified():
                output.flush()
                os.fsync(output.fileno())
                break
        partial.unlink()
        if not (may_restart and resumed):
            raise PullError(
                f"{repo}/{file.path} arrived with another digest than the hub states ({file.etag[:12]}...); it is"
                " deleted, try again."
            )
    os.replace(partial, blob)
    sync_folder(blob.parent)


def _receive(url: str, repo: str, body: _Body) -> None:
    """Requests until the body is complete. Raises PullError after `hub_api.TRIES` attempts without progress."""
    n_failures = 0
    while not body.complete:
        before = body.n_bytes
        try:
            _request(url, body)
            if body.complete:
                return
            failure: Exception = PullError(f"{repo}/{body.file.path}: the connection was closed too early")
        except (httpx2.HTTPError, HfHubHTTPError, OfflineModeIsEnabled, httpx2.InvalidURL) as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code == 416 and body.n_bytes:
                body.restart()
            elif not is_transient(error):
                raise to_moegguf_error(error, repo, body.file.path) from error
            failure = error
        n_failures = 0 if body.n_bytes - before >= PROGRESS_BYTES else n_failures + 1
        if n_failures >= hub_api.TRIES:
            raise to_moegguf_error(failure, repo, body.file.path) from failure
        wait_before_retry(failure, max(0, n_failures - 1), body.stopped)


def _request(url: str, body: _Body) -> None:
    """One request for the missing bytes, written as they arrive."""
    headers = build_hf_headers(token=hub_token() or False, library_name="moegguf", library_version=__version__)
    headers["Accept-Encoding"] = "identity"
    if body.n_bytes:
        headers["Range"] = f"bytes={body.n_bytes}-"
    timeout = hub_api.TIMEOUT_S
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        hf_raise_for_status(response)
        body.check_start(response)
        for chunk in response.iter_raw():
            body.write(chunk)


class _Body:
    """The bytes of one file received so far, on disk and in the digest."""

    def __init__(self, output: BinaryIO, file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
        self.file = file
        self.stopped = stopped
        self._output = output
        self._on_bytes = on_bytes
        self.n_bytes = 0
        self._start = b""
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
        return self.complete and self._digest.hexdigest() == self.file.etag

    def restart(self) -> None:
        """Discards what was received."""
        self._output.seek(0)
        self._output.truncate()
        self.n_bytes, self._start, self._digest = 0, b"", self._new_digest()

    def check_start(self, response: httpx2.Response) -> None:
        """Raises PullError for a response that does not continue the file, or has another total size."""
        if response.status_code != 206:
            if self.n_bytes:
                self.restart()  # the server does not support ranges
            total, start = response.headers.get("Content-Length"), 0
        else:
            span, _, total = response.headers.get("Content-Range", "").rpartition("/")
            first = span.removeprefix("bytes ").partition("-")[0]
            start = int(first) if first.isdigit() else -1
        if start != self.n_bytes:
            raise PullError(
                f"{self.file.path}: the server sends from byte {start}, not from {self.n_bytes}; try again."
            )
        if total and total.isdigit() and int(total) != self.file.size_bytes:
            raise self._wrong_size(total)

    def write(self, chunk: bytes) -> None:
        if self.n_bytes + len(chunk) > self.file.size_bytes:
            raise self._wrong_size("more")
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
        self._check_kind(chunk)
        self._on_bytes(self.n_bytes)
        if self.stopped.is_set():
            raise Stopped

    def _check_kind(self, chunk: bytes) -> None:
        """Raises ModelFormatError as soon as the file is seen to be something else than its name says."""
        n_missing = len(MAGIC) - len(self._start)
        if n_missing and self.file.path.lower().endswith(".gguf"):
            self._start += chunk[:n_missing]
            if not MAGIC.startswith(self._start):
                raise ModelFormatError(
                    f"{self.file.path} is not a GGUF file: it begins with {str(self._start)[1:]}; choose another"
                    " repository, and check HF_ENDPOINT and proxies."
                )

    def _new_digest(self) -> hashlib._Hash:
        """SHA-256 of large files, git's hash of small ones."""
        if self.file.is_large:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.file.size_bytes}\0".encode(), usedforsecurity=False)


def _fetch_chunked(repo: str, commit: str, file: HubFile, on_bytes: OnBytes, stopped: threading.Event) -> None:
    """Through huggingface_hub and its chunked storage, which verifies every chunk and does not resume a file."""

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            if stopped.is_set():
                raise Stopped
            on_bytes(min(int(self.n + (n or 0)), file.size_bytes))
            return super().update(n)

    try:
        hf_hub_download(
            repo, file.path, revision=commit, cache_dir=hub_cache(), endpoint=hub_endpoint(),
            token=hub_token() or False, tqdm_class=Bar, library_name="moegguf", library_version=__version__,
        )  # fmt: skip
    except (httpx2.HTTPError, HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise to_moegguf_error(error, repo, file.path) from error
    on_bytes(file.size_bytes)


def _disk_error(repo: str, file: HubFile, error: OSError) -> PullError:
    folder = repo_folder(repo)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PullError(
            f"the disk of {str(folder)!r} is full: {file.path} needs {format_bytes(missing_bytes(repo, file))} more,"
            f" {format_bytes(free_bytes(folder))} are free; delete files and try again, received bytes are kept."
        )
    return PullError(f"{file.path} cannot be written to {str(folder)!r} ({error.strerror or error}); check the folder.")
