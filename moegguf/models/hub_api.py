"""Asks the Hub for a repository's list of files and for bytes of one, with retries, and turns its errors into ours; and
for the headers of a model alone.

Imports huggingface_hub, which is slow: import this only when something is fetched. Addresses and folders come from
models/sources.py at each call, because huggingface_hub reads their environment variables only once; tokens are its own.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    OIDCError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from moegguf.errors import ModelFormatError, ModelNotFoundError, MoeggufError, PullError
from moegguf.gguf.reader import read_gguf
from moegguf.models.entry import ModelEntry
from moegguf.models.names import parse_name
from moegguf.models.selection import select_files
from moegguf.models.sources import file_entry, hub_cache, hub_endpoint, repo_folder
from moegguf.package import __version__
from moegguf.quantities import format_bytes

TRIES = 4
WAIT_S = 1.0  # before the second try; doubled before each further one
MAX_WAIT_S = 30.0
TIMEOUT_S = 20.0  # without a byte
PROGRESS_BYTES = 1 << 20  # a try that received this much resets the count of failures
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)

_HEX64, _HEX40 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
Result = TypeVar("Result")


class Stopped(Exception):  # noqa: N818 (a state asked for, not a fault)
    """The download was cancelled."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository's commit. `etag`: the SHA-256 of a large file, the git hash of a small one.

    `folder`: where a cache keeps the repository.
    """

    repo: str
    commit: str
    path: str
    size_bytes: int
    etag: str
    folder: Path

    @property
    def is_large(self) -> bool:
        """Whether the Hub stores it as a large file (LFS), so that `etag` is a SHA-256."""
        return len(self.etag) == 64

    @property
    def blob(self) -> Path:
        """Where the cache keeps the complete file."""
        return self.folder / "blobs" / self.etag

    @property
    def partial(self) -> Path:
        """Where the cache keeps what was received of an incomplete file."""
        return self.folder / "blobs" / f"{self.etag}.incomplete"

    @property
    def is_cached(self) -> bool:
        """Whether the cache has the complete file."""
        return self.blob.is_file() and self.blob.stat().st_size == self.size_bytes

    @property
    def missing_bytes(self) -> int:
        """How much of it the cache does not have."""
        n_bytes = self.partial.stat().st_size if self.partial.is_file() else 0
        return 0 if self.is_cached else max(0, self.size_bytes - n_bytes)


@dataclass(frozen=True)
class Repository:
    """One commit of a repository, with the files that can be fetched into its `folder` of a cache."""

    repo: str
    commit: str
    folder: Path
    files: dict[str, HubFile]


def read_repository(repo: str, stopped: threading.Event, cache: Path | None = None) -> Repository:
    """The newest commit of `main` of "user/repo"; `cache`: another one than the Hub's.

    Raises ModelNotFoundError, PullError, Stopped.
    """
    api = HfApi(endpoint=hub_endpoint(), library_name="moegguf", library_version=__version__)
    with hub_errors(repo):
        info = with_retries(lambda: api.model_info(repo, files_metadata=True, timeout=TIMEOUT_S), stopped)
    commit = str(info.sha or "")
    if not _HEX40.fullmatch(commit):
        raise PullError(f"{hub_endpoint()} sent no commit of {repo!r}; try again later.")
    name = info.id if isinstance(info.id, str) and info.id.lower() == repo.lower() else repo
    folder = repo_folder(name, cache or hub_cache())
    files = [file for sibling in info.siblings or [] if (file := _file(name, commit, folder, sibling))]
    return Repository(name, commit, folder, {file.path: file for file in files})


def _file(repo: str, commit: str, folder: Path, sibling: Any) -> HubFile | None:
    """None for a file without a size, a digest or a relative path inside the repository."""
    path, lfs = str(sibling.rfilename), sibling.lfs or {}
    etag = str(lfs.get("sha256") or sibling.blob_id or "")
    size = lfs.get("size", sibling.size)
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        return None
    if not (_HEX64.fullmatch(etag) or _HEX40.fullmatch(etag)) or not isinstance(size, int) or size < 0:
        return None
    return HubFile(repo, commit, path, size, etag, folder)


@contextmanager
def open_bytes(file: HubFile, begin: int, end: int | None = None) -> Iterator[httpx2.Response]:
    """A response with the file's bytes from `begin` on, up to `end` (status 206), or with all (200).

    Raises PullError for other bytes than were asked for, and the errors of httpx2 and huggingface_hub.
    """
    url = f"{hub_endpoint()}/{file.repo}/resolve/{file.commit}/{quote(file.path)}"
    headers = build_hf_headers(library_name="moegguf", library_version=__version__)
    headers["Accept-Encoding"] = "identity"
    if begin or end:
        headers["Range"] = f"bytes={begin}-{end - 1 if end else ''}"
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
        hf_raise_for_status(response)
        stated = response.headers.get("Content-Range", "")
        if response.status_code == 206 and not stated.startswith(f"bytes {begin}-"):
            raise PullError(
                f"{file.repo}/{file.path}: asked for the bytes from {begin} on, the hub sent {stated[:60]!r};"
                " try again, or check HF_ENDPOINT and what is between."
            )
        yield response


def with_retries(
    call: Callable[[], Result], stopped: threading.Event, received_bytes: Callable[[], int] = lambda: 0
) -> Result:
    """The result of `call`, repeated after transient errors until TRIES in a row received less than PROGRESS_BYTES.

    Raises the last error, or Stopped.
    """
    n_failures = 0
    while True:
        before = received_bytes()
        try:
            return call()
        except httpx2.HTTPError as error:
            n_failures = 0 if received_bytes() - before >= PROGRESS_BYTES else n_failures + 1
            wait_s = WAIT_S * 2.0 ** max(0, n_failures - 1)
            is_transient = isinstance(error, httpx2.TransportError)
            is_transient = is_transient and not isinstance(error, httpx2.UnsupportedProtocol)
            if isinstance(error, HfHubHTTPError):
                is_transient = error.response.status_code in TRANSIENT
                retry_after = error.response.headers.get("Retry-After", "")
                wait_s = max(wait_s, float(retry_after) if retry_after.isdigit() else 0.0)
            if n_failures == TRIES or not is_transient:
                raise
            if stopped.wait(min(wait_s, MAX_WAIT_S)):
                raise Stopped from None


@contextmanager
def hub_errors(repo: str, path: str = "") -> Iterator[None]:
    """Raises errors of the Hub, of the network and of huggingface_hub inside the `with` as ours."""
    try:
        yield
    except MoeggufError:
        raise
    except (httpx2.HTTPError, httpx2.InvalidURL, OIDCError, OSError, ValueError, RuntimeError) as error:
        raise _to_moegguf_error(error, repo, path) from error


def _to_moegguf_error(error: BaseException, repo: str, path: str) -> MoeggufError:
    """The error of the Hub or of the network as one of ours, with the next step."""
    what, page = f"{repo}/{path}" if path else repo, f"{hub_endpoint()}/{repo}"
    if isinstance(error, GatedRepoError):
        return PullError(
            f"{repo!r} is gated: accept its licence at {page} and set HF_TOKEN to a token of that account"
            f" ({_token_words()})."
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return ModelNotFoundError(f"there is no file {path!r} in {repo!r} on the hub; see {page}/tree/main.")
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"the repository {repo!r} has no commit yet, or this one was deleted; see {page}.")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return ModelNotFoundError(
            f"there is no repository {repo!r} at {hub_endpoint()}, or it is private: check the name; for a private one"
            f" set HF_TOKEN ({_token_words()})."
        )
    if isinstance(error, HfHubHTTPError) and (status := error.response.status_code) in (401, 403):
        return PullError(
            f"the hub denied access to {what!r} ({status}): accept the licence at {page}, if there is one, and set"
            f" HF_TOKEN to a token that may read it ({_token_words()})."
        )
    if isinstance(error, HfHubHTTPError):
        limit = f"the hub's rate limit is reached (429) at {what!r}; try again in some minutes, or set HF_TOKEN."
        later = f"the hub answered {status} for {what!r}; try again later, the download continues where it stopped."
        return PullError(limit if status == 429 else later)
    if isinstance(error, httpx2.TooManyRedirects):
        return PullError(f"{hub_endpoint()} redirects {what!r} in a loop; check HF_ENDPOINT and proxies.")
    if isinstance(error, OfflineModeIsEnabled):
        return PullError(f"{what!r} cannot be fetched: HF_HUB_OFFLINE was set when moegguf started; start it without.")
    reason = " ".join(str(error).split()) or type(error).__name__
    return PullError(
        f"fetching {what!r} from {hub_endpoint()} failed ({reason:.200}); check the network and try again, the download"
        " continues where it stopped."
    )


def _token_words() -> str:
    return "the token in HF_TOKEN" if get_token() else "no token is set: put one into HF_TOKEN"


FIRST_BYTES = 2 << 20  # of a header; a large vocabulary takes several times as much
MOST_BYTES = 128 << 20


@contextmanager
def remote_model(name: str) -> Iterator[ModelEntry]:
    """The model of a Hub name, with headers only, so that it can be described and planned before it is fetched; its
    files are gone afterwards. Each is a sparse file of its full size whose first bytes are the header: whatever reads
    headers reads it like a fetched model, but finds zeros in place of weights.

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
        # The zeros after the fetched bytes may be an error; one of the whole file is its own.
        with suppress(ModelFormatError) if end < file.size_bytes else nullcontext():
            if read_gguf(path).shard.header_bytes <= end:
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
        n_skipped = begin if response.status_code != 206 else 0
        for chunk in response.iter_raw():
            found += chunk
            if len(found) >= n_skipped + end - begin:
                return bytes(found[n_skipped : n_skipped + end - begin])
    n_bytes = max(0, len(found) - n_skipped)
    raise PullError(f"{file.repo}/{file.path}: the hub sent {n_bytes} of {end - begin} bytes; try again.")
