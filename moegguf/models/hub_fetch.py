"""Downloads files of one commit together into the Hugging Face cache, resumed and verified, and gives them their names
only when all are there.

A file grows as `blobs/<etag>.incomplete` and is continued after an interruption, also by another process. Its digest is
computed while it is written; the blob gets its name when size and digest are right. Locks are huggingface_hub's, so two
programs do not fetch the same file at once. In a cache a name is a link in the commit's snapshot to the blob, as
huggingface_hub makes it; in any other folder the file itself is moved to its name.

huggingface_hub 2.4's own `hf_hub_download` does less: it writes to a file of a random name, which it deletes when it
fails or is interrupted and never continues; over HTTP it compares no digest, and a 5xx or a reset connection ends it.
Its `http_get` continues a file, but drops what came after the last full 10 MiB, and waits as long as Retry-After says.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, tqdm

from moegguf.atomic_write import write_atomically
from moegguf.errors import ModelFormatError, PullError
from moegguf.gguf.reader import MAGIC
from moegguf.models.blobs import check_space, free_bytes, sync_folder
from moegguf.models.hub_api import HubFile, Repository, Stopped, hub_errors, open_bytes, with_retries
from moegguf.models.sources import hub_endpoint
from moegguf.package import __version__
from moegguf.quantities import format_bytes

PLAIN_LIMIT_BYTES = 50 * 10**9  # the Hub serves larger files only through its chunked storage (Xet)
READ_BYTES = 1 << 20
MAX_PARALLEL_FILES = 4
WAIT_S = 0.2  # between two looks whether to stop or to go on, and two reports

OnBytes = Callable[[HubFile, int], None]
"""Called with a file and the number of its bytes that are on disk; from several threads."""


def fetch_files(
    files: Sequence[HubFile],
    what: str,
    on_bytes: OnBytes,
    stopped: threading.Event,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Downloads the blobs of all files, MAX_PARALLEL_FILES at a time. `what` starts the message of a full disk;
    `on_wait` is called on this thread meanwhile.

    Raises the first error (ModelNotFoundError, ModelFormatError, PullError), or Stopped; the other threads then end
    with their next bytes.
    """
    if files:
        check_space(files[0].folder, sum(file.missing_bytes for file in files), what)
    waiting, errors = iter(files), list[BaseException]()

    def fetch_waiting() -> None:
        try:
            for file in waiting:
                _fetch(file, partial(on_bytes, file), stopped)
                on_bytes(file, file.size_bytes)
        except BaseException as error:  # raised by the thread that waits
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
                thread.join(WAIT_S)
                on_wait()
    except BaseException:  # an interrupt
        stopped.set()
        raise
    if errors:
        raise errors[0]
    if stopped.is_set():
        raise Stopped


def _fetch(file: HubFile, on_bytes: Callable[[int], None], stopped: threading.Event) -> None:
    with hub_errors(file.repo, file.path):
        try:
            (_fetch_chunked if file.size_bytes > PLAIN_LIMIT_BYTES else _fetch_plain)(file, on_bytes, stopped)
        except OSError as error:
            if error.errno is None:  # not of the disk
                raise
            folder, reason = str(file.folder), error.strerror or error
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise PullError(f"{file.path} cannot be written to {folder!r} ({reason}); check the folder.") from error
            raise PullError(
                f"the disk of {folder!r} is full: {file.path} needs {format_bytes(file.missing_bytes)} more,"
                f" {format_bytes(free_bytes(file.folder))} are free; delete files and try again, received bytes are"
                " kept."
            ) from error


def _fetch_plain(file: HubFile, on_bytes: Callable[[int], None], stopped: threading.Event) -> None:
    """The whole file; a resumed file with a wrong digest is downloaded once more from the start."""
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file, on_bytes, stopped):
        if file.is_cached:
            return
        with open(file.partial, "a+b") as output:
            body = _Body(output, file, on_bytes, stopped)
            for _ in range(2 if body.n_bytes else 1):
                with_retries(body.receive, stopped, lambda: body.n_bytes)
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
        os.replace(file.partial, file.blob)
        sync_folder(file.blob.parent)


def _locked(file: HubFile, on_bytes: Callable[[int], None], stopped: threading.Event) -> ExitStack:
    """The file's lock in the cache, held; while another process has it, reports the bytes that process has."""
    path = file.folder.parent / ".locks" / file.folder.name / f"{file.etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    while True:
        try:
            stack.enter_context(WeakFileLock(path, timeout=WAIT_S))
            return stack
        except TimeoutError:
            if stopped.is_set():
                raise Stopped from None
            on_bytes(file.size_bytes - file.missing_bytes)


class _Body:
    """The bytes of one file received so far, on disk and in the digest: SHA-256 of large files, git's of small ones."""

    def __init__(
        self, output: BinaryIO, file: HubFile, on_bytes: Callable[[int], None], stopped: threading.Event
    ) -> None:
        self._file = file
        self._stopped = stopped
        self._output = output
        self._on_bytes = on_bytes
        git = hashlib.sha1(f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)
        self._empty = hashlib.sha256() if file.is_large else git
        self._digest, self.n_bytes = self._empty.copy(), 0
        output.seek(0)
        while chunk := output.read(READ_BYTES):
            self._count(chunk)
        if self.n_bytes > file.size_bytes:
            self.restart()

    def restart(self) -> None:
        """Discards what was received."""
        self._output.seek(0)
        self._output.truncate()
        self._digest, self.n_bytes = self._empty.copy(), 0

    def is_verified(self) -> bool:
        return self._digest.hexdigest() == self._file.etag

    def receive(self) -> None:
        """One request for the missing bytes, written as they arrive. Raises httpx2.ReadError for too few, PullError
        for another size."""
        if self.n_bytes == self._file.size_bytes:
            return
        try:
            with open_bytes(self._file, self.n_bytes) as response:
                if response.status_code == 206:
                    total = response.headers["Content-Range"].rpartition("/")[2]
                else:  # the whole file
                    total = response.headers.get("Content-Length", "")
                    self.restart()
                if total.isdigit() and int(total) != self._file.size_bytes:
                    raise self._wrong_size(total)
                for chunk in response.iter_raw():
                    self.write(chunk)
        except HfHubHTTPError as error:
            if error.response.status_code != 416 or not self.n_bytes:
                raise
            self.restart()  # the server does not continue the file
        if self.n_bytes != self._file.size_bytes:
            raise httpx2.ReadError("the connection was closed too early")

    def write(self, chunk: bytes) -> None:
        """Appends bytes. Raises PullError for too many, ModelFormatError for the start of another kind of file."""
        if self.n_bytes + len(chunk) > self._file.size_bytes:
            raise self._wrong_size("more")
        start, path = MAGIC[self.n_bytes :][: len(chunk)], self._file.path
        if path.lower().endswith(".gguf") and not chunk.startswith(start):
            raise ModelFormatError(
                f"{path} is not a GGUF file: it begins with {str(chunk[: len(start)])[1:]}; choose another repository,"
                " and check HF_ENDPOINT and proxies."
            )
        self._output.write(chunk)
        self._count(chunk)

    def _count(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.n_bytes += len(chunk)
        self._on_bytes(self.n_bytes)
        if self._stopped.is_set():
            raise Stopped

    def _wrong_size(self, sent: str) -> PullError:
        return PullError(
            f"{self._file.path} should have {self._file.size_bytes} bytes, but the server sends {sent}; try again, and"
            " check HF_ENDPOINT and proxies."
        )


def _fetch_chunked(file: HubFile, on_bytes: Callable[[int], None], stopped: threading.Event) -> None:
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


def link_commit(repository: Repository, files: Sequence[HubFile]) -> Path:
    """Links the commit's paths to the blobs, then sets `main` to it; returns the snapshot. Raises PullError."""
    folder = repository.folder
    snapshot = folder / "snapshots" / repository.commit
    with _naming(repository, folder):
        for file in files:  # relative links, as huggingface_hub makes them
            link = snapshot / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(file.blob, link.parent)
            if link.is_symlink() and os.readlink(link) == target:
                continue
            link.unlink(missing_ok=True)
            try:
                with suppress(FileExistsError):  # made by another process in the meantime
                    link.symlink_to(target)
            except OSError:  # a file system without symbolic links
                os.link(file.blob, link)
        (folder / "refs").mkdir(exist_ok=True)
        # A temporary file in refs/ would be taken for a branch.
        write_atomically(folder / ".main", repository.commit.encode())
        os.replace(folder / ".main", folder / "refs" / "main")
    return snapshot


def find_missing(
    repository: Repository, files: Sequence[HubFile], folder: Path, stopped: threading.Event
) -> list[HubFile]:
    """Those of the files that `folder` does not have yet under their paths: those of another size, or of another
    digest, which is noted when a file is put there or found to be the same. Raises PullError, Stopped."""
    missing = []
    with _naming(repository, folder):
        for file in files:
            path, is_there = folder / file.path, False
            if path.is_file() and path.stat().st_size == file.size_bytes:
                with suppress(OSError):
                    is_there = _note(file).read_text() == file.etag
                if not is_there:
                    with open(path, "rb") as found:
                        is_there = _Body(found, file, lambda _: None, stopped).is_verified()
            if is_there:
                _note(file).write_text(file.etag)
            else:
                missing.append(file)
    return missing


def move_files(repository: Repository, files: Sequence[HubFile], folder: Path) -> None:
    """Moves the blobs to their paths in `folder`. Raises PullError."""
    moved: dict[str, Path] = {}
    with _naming(repository, folder):
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            _note(file).unlink(missing_ok=True)
            if file.etag in moved:  # the same content under two paths
                shutil.copyfile(moved[file.etag], path)
            else:
                os.replace(file.blob, path)
            moved[file.etag] = path
            _note(file).write_text(file.etag)


def _note(file: HubFile) -> Path:
    """Where the digest of the file that was put into a folder is noted, in the cache there."""
    note = file.folder / "moved" / file.path
    note.parent.mkdir(parents=True, exist_ok=True)
    return note


@contextmanager
def _naming(repository: Repository, folder: Path) -> Iterator[None]:
    """Raises errors of the disk inside the `with` as PullError."""
    try:
        yield
    except OSError as error:
        raise PullError(
            f"{repository.repo} was fetched, but cannot be linked in {str(folder)!r} ({error.strerror or error})."
        ) from error
