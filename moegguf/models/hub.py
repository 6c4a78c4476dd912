"""Fetches from the Hub: a repository's list of files, the headers of a model, and whole
files.

Downloads are verified. Interrupted downloads of files of up to PLAIN_LIMIT_BYTES are
resumed. These files get their names only when all files have been fetched. Errors of
the Hub become moegguf's errors.

A file that can be resumed grows as `blobs/<etag>.incomplete` in the Hugging Face cache
and is continued after an interruption, even by another process. A file of full size is
reread to compute its digest. If the digest is right, the blob gets its name. The locks
are huggingface_hub's, so two programs that use them never fetch the same file at the
same time. In the cache, the file's name is a link in the commit's snapshot to the blob,
as huggingface_hub makes it. For a download to any other folder, the cache is inside
that folder, and the files are hard links to the blobs.

huggingface_hub 2.4's own `hf_hub_download` does less. It writes to a file with a random
name, deletes that file after a failure or an interruption, and no later call continues
the file. Over HTTP it does not check digests, and fails after a 5xx status or a reset
connection. Within one call, its `http_get` continues a file, but drops the bytes after
the last full 10 MiB, and waits as long as the Retry-After header says.

Importing this module is slow, because it imports huggingface_hub: import it only when
something is fetched. Addresses and folders come from sources.py on each call, because
huggingface_hub reads their environment variables only once. Access tokens come from
huggingface_hub.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi, get_token, hf_hub_download
from huggingface_hub import errors as hf
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    tqdm,
)

from moegguf.atomic_write import write_atomically
from moegguf.errors import ModelFormatError, ModelNotFoundError, MoeggufError, PullError
from moegguf.gguf.reader import MAGIC, read_gguf
from moegguf.models.entry import ModelEntry
from moegguf.models.names import parse_name
from moegguf.models.own_store import check_space, disk_errors, sync_folder
from moegguf.models.selection import select_files
from moegguf.models.sources import file_entry, hub_cache, hub_endpoint, repo_folder
from moegguf.package import __version__
from moegguf.quantities import format_bytes
from moegguf.regular_file import open_regular
from moegguf.text import without_password

TRIES = 4
# Seconds before the next try after a failure; doubled for each further failure in a
# row.
WAIT_S = 1.0
MAX_WAIT_S = 30.0
TIMEOUT_S = 20.0  # a request fails after this many seconds without a byte
# A try that receives at least this much resets the count of failures.
PROGRESS_BYTES = 1 << 20
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
# Bytes fetched before the header is first read; a large vocabulary needs several times
# as many.
FIRST_BYTES = 2 << 20
MOST_BYTES = 128 << 20
# The Hub serves larger files only through its chunked storage (Xet).
PLAIN_LIMIT_BYTES = 50 * 10**9
MAX_PARALLEL_FILES = 4
POLL_S = 0.2  # seconds between two checks for an interruption, and between two reports

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
Result = TypeVar("Result")

OnBytes = Callable[[int], None]
"""A function that notes how many bytes of a file are in the cache. Raises Stopped if
the download was cancelled."""


class Stopped(Exception):  # noqa: N818 (a state asked for, not a fault)
    """The download was cancelled."""


@dataclass(frozen=True)
class HubFile:
    """A file in one commit of a repository."""

    repo: str
    commit: str
    path: str
    size_bytes: int
    etag: str  # SHA-256 of a large file, git hash of a small one
    folder: Path  # the repository's folder in a cache

    @property
    def is_large(self) -> bool:
        """Returns whether the Hub stores the file as a large file (LFS). Its `etag` is
        then a SHA-256."""
        return len(self.etag) == 64

    @property
    def blob(self) -> Path:
        """The complete file's path in the cache."""
        return self.folder / "blobs" / self.etag

    @property
    def partial(self) -> Path:
        """The incomplete file's path in the cache."""
        return self.folder / "blobs" / f"{self.etag}.incomplete"

    @property
    def is_cached(self) -> bool:
        """Returns whether the cache has the complete file, which is recognized by its
        size."""
        return self.blob.is_file() and self.blob.stat().st_size == self.size_bytes

    @property
    def received_bytes(self) -> int:
        """Returns how many bytes of the file are in the cache."""
        if self.is_cached:
            return self.size_bytes
        # The file is not there, or another process has just renamed it.
        with suppress(FileNotFoundError):
            return min(self.partial.stat().st_size, self.size_bytes)
        return 0

    @property
    def missing_bytes(self) -> int:
        """Returns how many bytes of the file are missing from the cache."""
        return self.size_bytes - self.received_bytes

    def is_at(self, path: Path) -> bool:
        """Returns whether the file at `path` has this file's digest. First flushes the
        file at `path` to disk (fsync). Raises OSError if the file cannot be read."""
        git = hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)
        digest = hashlib.sha256() if self.is_large else git
        with open_regular(path) as found:
            os.fsync(found.fileno())
            hashlib.file_digest(found, lambda: digest)
        return digest.hexdigest() == self.etag


def read_repository(repo: str, cache: Path | None = None) -> dict[str, HubFile]:
    """Returns {path: file} for the newest commit of the branch `main` of "user/repo".
    Leaves out files without size or digest, and paths that lead out of the repository.
    `cache` is the cache's folder; None: the Hub's cache.

    Raises ModelNotFoundError or PullError.
    """
    api = HfApi(
        endpoint=hub_endpoint(), library_name="moegguf", library_version=__version__
    )
    with hub_errors(repo):
        info = with_retries(
            lambda: api.model_info(repo, files_metadata=True, timeout=TIMEOUT_S)
        )
    commit = str(info.sha or "")
    if not _COMMIT.fullmatch(commit):
        raise PullError(
            f"{_shown_endpoint()} sent no commit of {repo!r}; check HF_ENDPOINT if it is set, or try again later."
        )
    name = (
        info.id
        if isinstance(info.id, str) and info.id.lower() == repo.lower()
        else repo
    )
    folder = repo_folder(name, cache or hub_cache())
    files = dict[str, HubFile]()
    for sibling in info.siblings or []:
        path = str(sibling.rfilename)
        lfs = sibling.lfs or {}
        etag = str(lfs.get("sha256") or sibling.blob_id or "")
        size = lfs.get("size", sibling.size)
        parts = PurePosixPath(path).parts
        is_inside = parts and not (
            path.startswith("/") or ".." in parts or "\\" in path or "\0" in path
        )
        is_known = _ETAG.fullmatch(etag) and isinstance(size, int) and size >= 0
        if is_inside and is_known:
            files[path] = HubFile(name, commit, path, size, etag, folder)
    return files


@contextmanager
def open_bytes(file: HubFile, begin: int) -> Iterator[httpx2.Response]:
    """Opens a response with the file's bytes from `begin` on (status 206), or with all
    bytes (200).

    Raises PullError if the server sends bytes from another position. Also raises the
    errors of httpx2 and huggingface_hub.
    """
    url = f"{hub_endpoint()}/{file.repo}/resolve/{file.commit}/{quote(file.path)}"
    headers = build_hf_headers(library_name="moegguf", library_version=__version__)
    headers["Accept-Encoding"] = "identity"
    if begin:
        headers["Range"] = f"bytes={begin}-"
    with get_session().stream(
        "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        stated = response.headers.get("Content-Range", "")
        if response.status_code == 206 and not stated.startswith(f"bytes {begin}-"):
            raise PullError(
                f"{file.repo}/{file.path}: the hub was asked for bytes from {begin} on, but sent {stated[:60]!r};"
                " try again, and check HF_ENDPOINT and proxies."
            )
        yield response


def with_retries(
    call: Callable[[], Result], received_bytes: Callable[[], int] = lambda: 0
) -> Result:
    """Returns the result of `call`. Repeats the call after transient errors, until
    TRIES calls in a row have failed and received less than PROGRESS_BYTES each. Then
    raises the last error. Raises other errors immediately."""
    n_failures = 0
    while True:
        before = received_bytes()
        try:
            return call()
        except httpx2.HTTPError as error:
            n_failures = (
                0 if received_bytes() - before >= PROGRESS_BYTES else n_failures + 1
            )
            wait_s = WAIT_S * 2.0 ** max(0, n_failures - 1)
            is_transient = isinstance(error, httpx2.TransportError)
            is_transient = is_transient and not isinstance(
                error, httpx2.UnsupportedProtocol
            )
            if isinstance(error, hf.HfHubHTTPError):
                is_transient = error.response.status_code in TRANSIENT
                retry_after = error.response.headers.get("Retry-After", "")
                wait_s = max(
                    wait_s, float(retry_after) if retry_after.isdigit() else 0.0
                )
            if n_failures == TRIES or not is_transient:
                raise
            time.sleep(min(wait_s, MAX_WAIT_S))


@contextmanager
def hub_errors(repo: str, path: str = "") -> Iterator[None]:
    """Converts Hub, network and huggingface_hub errors in the `with` block into
    moegguf's errors."""
    try:
        yield
    except MoeggufError:
        raise
    except (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        hf.OIDCError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        raise _to_moegguf_error(error, repo, path) from error


def _shown_endpoint() -> str:
    return without_password(hub_endpoint())


def _to_moegguf_error(error: BaseException, repo: str, path: str) -> MoeggufError:
    """Returns moegguf's error for a Hub or network error, with the next step for the
    user."""
    what = f"{repo}/{path}" if path else repo
    page = f"{_shown_endpoint()}/{repo}"
    token = (
        "a token is set, but does not allow this" if get_token() else "no token is set"
    )
    status = error.response.status_code if isinstance(error, hf.HfHubHTTPError) else 0
    if isinstance(error, hf.RemoteEntryNotFoundError):
        return ModelNotFoundError(
            f"there is no file {path!r} in {repo!r} on the hub; see {page}/tree/main."
        )
    is_gated = isinstance(error, hf.GatedRepoError)
    is_missing = isinstance(error, hf.RepositoryNotFoundError)
    if is_gated or (status in (401, 403) and not is_missing):
        denied = "is gated" if is_gated else f"may not be read ({status})"
        return PullError(
            f"{what!r} {denied}: accept its licence at {page}, if there is one, and set HF_TOKEN to a token of that"
            f" account ({token})."
        )
    if is_missing or isinstance(error, hf.RevisionNotFoundError | hf.HFValidationError):
        return ModelNotFoundError(
            f"there is no repository {repo!r} with a commit at {_shown_endpoint()}, or it is private: check the name;"
            f" for a private one set HF_TOKEN ({token})."
        )
    if status:
        why = (
            "the hub's rate limit is reached (429)"
            if status == 429
            else f"the hub answered {status}"
        )
        return PullError(
            f"{why} for {what!r}; try again later: the download continues where it stopped."
        )
    text = str(error).replace(hub_endpoint(), _shown_endpoint())
    reason = " ".join(text.split()) or type(error).__name__
    return PullError(
        f"fetching {what!r} from {_shown_endpoint()} failed ({reason:.200}); check the network, HF_ENDPOINT and"
        " proxies, and try again: the download continues where it stopped."
    )


@contextmanager
def remote_model(name: str) -> Iterator[ModelEntry]:
    """Provides a headers-only copy of the model with this Hub name, so that the model
    can be described and planned before it is fetched.

    Each file of the copy is a sparse file of full size that begins with the header.
    Code that reads headers can treat the copy like a fetched model, but weights that
    were not fetched are zeros. The files are deleted at the end of the `with` block.

    Raises ModelNotFoundError, ModelNameError, ModelFormatError or PullError.
    """
    parsed = parse_name(name)
    files = read_repository(parsed.repo)
    selection = select_files(files, parsed.tag, repo=parsed.repo)
    with tempfile.TemporaryDirectory(prefix="moegguf-header-") as folder:
        for path in selection.paths:
            # Ignores a bad projector.
            with (
                suppress(ModelFormatError)
                if path == selection.mmproj
                else nullcontext()
            ):
                _fetch_header(files[path], Path(folder) / PurePosixPath(path).name)
        yield file_entry(
            Path(folder) / PurePosixPath(selection.files[0]).name,
            "hub",
            parsed.canonical,
        )


def _fetch_header(file: HubFile, path: Path) -> None:
    """Fetches the file's first bytes into `path` until the header is complete. `path`
    then has the file's full size, with zeros at the end. Raises the reader's error if
    the whole file has no complete header, and PullError if the header is not complete
    within MOST_BYTES or the fetch fails."""

    def receive() -> None:
        n_bytes = 0
        enough = min(FIRST_BYTES, file.size_bytes)
        with open(path, "wb") as output, open_bytes(file, 0) as response:
            for chunk in response.iter_raw():
                output.write(chunk)
                n_bytes += len(chunk)
                if n_bytes < enough:
                    continue
                output.flush()
                os.truncate(path, max(n_bytes, file.size_bytes))
                # An error may come from the zeros after the fetched bytes, so it is
                # raised only if the whole file has been fetched.
                with (
                    suppress(ModelFormatError)
                    if n_bytes < file.size_bytes
                    else nullcontext()
                ):
                    if read_gguf(path).shard.header_bytes <= n_bytes:
                        return
                if n_bytes >= MOST_BYTES:
                    raise PullError(
                        f"{file.repo}/{file.path}: its header is not complete within {format_bytes(MOST_BYTES)}; it is"
                        " damaged, or not a GGUF file; choose another file."
                    )
                enough = min(2 * n_bytes, file.size_bytes)
        raise httpx2.ReadError("the connection was closed too early")

    with hub_errors(file.repo, file.path):
        with_retries(receive)


def fetch_files(
    files: Sequence[HubFile],
    what: str,
    stopped: threading.Event,
    report: Callable[[dict[HubFile, int]], None],
) -> None:
    """Downloads the blobs of all files, MAX_PARALLEL_FILES at a time. Calls `report`
    periodically, and when all files are complete, with {file: number of bytes on disk}
    for the files begun so far. Messages name the download by `what`.

    Raises the first error (ModelNotFoundError, ModelFormatError, PullError), and
    PullError if `stopped` is set. The threads then stop when they receive their next
    bytes.
    """
    if files:
        check_space(files[0].folder, sum(file.missing_bytes for file in files), what)
    waiting = iter(files)
    received = dict[HubFile, int]()
    errors = list[BaseException]()

    def note_bytes(file: HubFile, n_bytes: int) -> None:
        if stopped.is_set():
            raise Stopped
        received[file] = n_bytes

    def fetch_waiting() -> None:
        try:
            for file in waiting:
                _fetch(file, partial(note_bytes, file))
                received[file] = file.size_bytes
        except Stopped:
            return
        except BaseException as error:  # the caller's thread raises the error
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
                thread.join(POLL_S)
                report(dict(received))
    except BaseException:  # Ctrl-C, for example
        stopped.set()
        raise
    if errors:
        raise errors[0]
    if stopped.is_set():
        raise PullError(
            f"fetching {what} was stopped; received bytes are kept, unless a file is larger than 50 GB: pull again to"
            " continue."
        )
    report(received)


def _fetch(file: HubFile, on_bytes: OnBytes) -> None:
    what = f"{file.path} ({format_bytes(file.missing_bytes)} are missing)"
    with (
        hub_errors(file.repo, file.path),
        disk_errors(f"{what} cannot be written to {str(file.folder)!r}"),
    ):
        (_fetch_chunked if file.size_bytes > PLAIN_LIMIT_BYTES else _fetch_plain)(
            file, on_bytes
        )


def _fetch_plain(file: HubFile, on_bytes: OnBytes) -> None:
    """Fetches the whole file into the cache. If a resumed file has the wrong digest,
    fetches it again from the start."""
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file, on_bytes):
        if file.is_cached:
            return
        for _ in range(2 if file.received_bytes else 1):
            with_retries(lambda: _receive(file, on_bytes), lambda: file.received_bytes)
            if file.is_at(file.partial):
                break
            file.partial.unlink()
        else:
            raise PullError(
                f"{file.repo}/{file.path} arrived with a different digest than the hub states ({file.etag[:12]}...); it"
                " was deleted: try again."
            )
        os.replace(file.partial, file.blob)
        sync_folder(file.blob.parent)


def _locked(file: HubFile, on_bytes: OnBytes) -> ExitStack:
    """Acquires the file's lock in the cache and returns it. While another thread or
    process holds the lock, reports the bytes that are in the cache so far."""
    path = file.folder.parent / ".locks" / file.folder.name / f"{file.etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    while True:
        try:
            stack.enter_context(WeakFileLock(path, timeout=POLL_S))
            return stack
        except TimeoutError:
            on_bytes(file.received_bytes)


def _receive(file: HubFile, on_bytes: OnBytes) -> None:
    """Fetches the missing bytes, if any, in one request, and writes them as they
    arrive. Raises httpx2.ReadError if too few bytes arrive, and PullError if the size
    differs from `file`. Raises ModelFormatError if a .gguf file does not begin with
    GGUF's magic bytes."""
    n_bytes = file.received_bytes
    with open(file.partial, "a+b") as output:
        output.truncate(n_bytes)
        if n_bytes == file.size_bytes:
            return
        try:
            with open_bytes(file, n_bytes) as response:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                if response.status_code != 206:  # the server sends the whole file
                    n_bytes = 0
                    total = response.headers.get("Content-Length", "")
                    output.truncate(0)
                if total.isdigit() and int(total) != file.size_bytes:
                    raise _wrong_size(file, total)
                for chunk in response.iter_raw():
                    _check_chunk(file, n_bytes, chunk)
                    output.write(chunk)
                    n_bytes += len(chunk)
                    on_bytes(n_bytes)
        except hf.HfHubHTTPError as error:
            if error.response.status_code != 416 or not n_bytes:
                raise
            output.truncate(0)  # the server cannot continue the file
    if n_bytes != file.size_bytes:
        raise httpx2.ReadError("the connection was closed too early")


def _check_chunk(file: HubFile, begin: int, chunk: bytes) -> None:
    """Raises PullError if the chunk exceeds the file's size, and ModelFormatError if a
    .gguf file does not begin with GGUF's magic bytes."""
    if begin + len(chunk) > file.size_bytes:
        raise _wrong_size(file, "more")
    start = chunk[: len(MAGIC)]
    if (
        begin == 0
        and file.path.lower().endswith(".gguf")
        and not MAGIC.startswith(start)
    ):
        raise ModelFormatError(
            f"{file.path} is not a GGUF file: it begins with {str(start)[1:]}; choose another repository, and check"
            " HF_ENDPOINT and proxies."
        )


def _wrong_size(file: HubFile, sent: str) -> PullError:
    return PullError(
        f"{file.path} should have {file.size_bytes} bytes, but the server sends {sent}; try again, and check"
        " HF_ENDPOINT and proxies."
    )


def _fetch_chunked(file: HubFile, on_bytes: OnBytes) -> None:
    """Fetches a file through huggingface_hub and its chunked storage, which verifies
    every chunk but does not resume a file."""

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            on_bytes(min(int(self.n + (n or 0)), file.size_bytes))
            return super().update(n)

    hf_hub_download(
        file.repo, file.path, revision=file.commit, cache_dir=file.folder.parent, endpoint=hub_endpoint(),
        tqdm_class=Bar, library_name="moegguf", library_version=__version__,
    )  # fmt: skip


def link_commit(files: Sequence[HubFile]) -> Path:
    """Links the commit's paths to the blobs, then sets `main` to the commit. Returns
    the snapshot's folder. Raises PullError if the disk fails."""
    folder = files[0].folder
    commit = files[0].commit
    snapshot = folder / "snapshots" / commit
    with disk_errors(f"what was fetched cannot be linked in {str(folder)!r}"):
        for file in files:
            link = snapshot / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            # A correct link is kept, because another process may have just made it.
            if os.path.lexists(link) and not (
                link.exists() and link.samefile(file.blob)
            ):
                link.unlink(missing_ok=True)
            # Another process has created it in the meantime.
            with suppress(FileExistsError):
                try:  # a relative link, like huggingface_hub's own links
                    link.symlink_to(os.path.relpath(file.blob, link.parent))
                except PermissionError:  # a file system without symbolic links
                    os.link(file.blob, link)
        (folder / "refs").mkdir(exist_ok=True)
        # A temporary file in refs/ would look like a branch.
        write_atomically(folder / ".main", commit.encode())
        # Another thread or process has already moved it to refs/main.
        with suppress(FileNotFoundError):
            os.replace(folder / ".main", folder / "refs" / "main")
    return snapshot


def find_missing(files: Sequence[HubFile], folder: Path) -> list[HubFile]:
    """Returns the files that are missing from `folder`. A path is considered present if
    it is a link to the complete file in the cache. If the cache lacks the file, a path
    with the right size and digest is considered present, and is linked into the cache.
    Raises PullError if the disk fails."""

    def is_there(file: HubFile) -> bool:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            return False
        if file.is_cached or not file.is_at(path):
            return file.is_cached and path.samefile(file.blob)
        file.blob.parent.mkdir(parents=True, exist_ok=True)
        # A file system without hard links: the next call recomputes the digest.
        with suppress(OSError):
            os.link(path, file.blob)
        return True

    with disk_errors(f"{str(folder)!r} cannot be used"):
        return [file for file in files if not is_there(file)]


def link_files(files: Sequence[HubFile], folder: Path) -> None:
    """Links the blobs, which are in a cache below `folder`, to their paths in `folder`.
    Deletes blobs that are no longer used by any path. Raises PullError if the disk
    fails."""
    with disk_errors(f"what was fetched cannot be linked in {str(folder)!r}"):
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                os.link(file.blob, path)
            except PermissionError:  # a file system without hard links
                os.replace(file.blob, path)
        for blob in files[0].blob.parent.iterdir() if files else ():
            if blob.stat().st_nlink == 1 and blob.suffix != ".incomplete":
                blob.unlink()
