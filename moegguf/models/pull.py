"""Fetches models of Hugging Face by name, telling each step in Ollama's words.

All files of a model come before any of them is named; then the commit's links are made, and `main` moves last. So at
every moment a name means the old files or the new ones. Those who ask for one name at a time share one download; it
ends when the last of them has gone.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moegguf.atomic_write import write_atomically
from moegguf.errors import ModelNotFoundError, MoeggufError, PullError
from moegguf.models.blobs import check_space
from moegguf.models.catalog import Catalog
from moegguf.models.entry import Entry, PullStatus
from moegguf.models.hub import Snapshot, find_cached, hub_cache, hub_endpoint, hub_offline, repo_folder
from moegguf.models.names import DEFAULT_TAG, Name, parse_name
from moegguf.models.selection import FileSelection, choose, models_in

if TYPE_CHECKING:
    from moegguf.models.hub_api import HubFile, Repository

N_AT_ONCE = 4  # files
REPORT_S = 0.2

Report = Callable[[PullStatus], None]


def pull(name: str, catalog: Catalog, report: Report, cancelled: threading.Event | None = None) -> Entry:
    """Fetches what the hub has under `name`, unless it is here already; returns the model.

    `report` is called on this thread, some times a second. Raises ModelNameError, ModelNotFoundError (no such
    repository or file), PullError (everything else, also when `cancelled` is set; what arrived is kept).
    """
    parsed = parse_name(name)
    if not parsed.is_hub:
        raise ModelNotFoundError(
            f"{parsed.canonical!r} cannot be pulled: models come from Hugging Face; write hf.co/user/repository, or"
            " hf.co/user/repository:Q4_K_M for one quantisation."
        )
    if hub_offline():
        entry = _offline(parsed)
        report(PullStatus("success"))
    else:
        with _joined(parsed) as download:
            entry = _follow(download, report, cancelled)
    catalog.show_again(entry.name)
    return entry


def _offline(name: Name) -> Entry:
    if found := find_cached(name):
        return found
    raise PullError(
        f"{name.canonical} is not in {str(hub_cache())!r}, and HF_HUB_OFFLINE is set; unset it to fetch the model."
    )


def _follow(download: _Download, report: Report, cancelled: threading.Event | None) -> Entry:
    """Tells what happens until it is over."""
    n_steps = 0
    told: dict[str, int | None] = {}
    while True:
        over = download.over.wait(REPORT_S if n_steps else 0.02)
        for step in itertools.islice(list(download.steps), n_steps, None):
            n_steps += 1
            if step.file:  # a file's progress is told up to the next step
                told.setdefault(step.file, None)
            else:
                _tell_files(download, told, report)
            report(step)
        _tell_files(download, told, report)
        if over and n_steps == len(download.steps):
            return download.result()
        if cancelled is not None and cancelled.is_set():
            raise PullError(
                f"fetching {download.name.canonical} was stopped; what arrived is kept, pull again to go on."
            )


def _tell_files(download: _Download, told: dict[str, int | None], report: Report) -> None:
    for step in list(download.steps):
        if step.file in told and (n := download.n_bytes.get(step.file)) not in (None, told[step.file]):
            told[step.file] = n
            report(PullStatus(step.status, step.digest, step.file, step.total_bytes, n))


_running: dict[tuple[str, str, Path], _Download] = {}
_guard = threading.Lock()


@contextmanager
def _joined(name: Name) -> Iterator[_Download]:
    """The download of that name that is on its way, or a new one; the last who leaves it ends it."""
    key = (name.key, hub_endpoint(), hub_cache())
    with _guard:
        download = _running.get(key)
        if download is None or download.over.is_set():
            download = _running[key] = _Download(name)
            threading.Thread(target=download.run, name=f"pull {name.canonical}", daemon=True).start()
        download.n_followers += 1
    try:
        yield download
    finally:
        with _guard:
            download.n_followers -= 1
            if download.n_followers == 0:
                download.stopped.set()
                if _running.get(key) is download:
                    del _running[key]


class _Download:
    """One name on its way, on threads of its own. `steps` grows; `n_bytes` says what is there of each file."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.n_followers = 0
        self.stopped = threading.Event()
        self.over = threading.Event()
        self.steps: list[PullStatus] = []
        self.n_bytes: dict[str, int] = {}
        self._entry: Entry | None = None
        self._error: BaseException | None = None

    def result(self) -> Entry:
        """Once it is over. Raises what went wrong, a fresh error for each who asks."""
        if self._entry is not None:
            return self._entry
        if isinstance(self._error, MoeggufError):
            raise type(self._error)(*self._error.args) from self._error
        raise PullError(f"fetching {self.name.canonical} has failed ({self._error!r:.200}).") from self._error

    def run(self) -> None:
        try:
            self._entry = self._fetch()
        except BaseException as error:  # told by those who wait
            self._error = error
        finally:
            self.over.set()

    def _fetch(self) -> Entry:
        from moegguf.models.hub_api import read_repository
        from moegguf.models.hub_fetch import missing_bytes

        self._step("pulling manifest")
        repository = read_repository(self.name.repo, self.stopped)
        choice = choose(repository.files, self.name.tag, repo=repository.repo)
        paths = (*choice.files, *((choice.mmproj,) if choice.mmproj else ()))
        files = [repository.files[path] for path in paths]
        check_space(hub_cache(), sum(missing_bytes(repository.repo, file) for file in files), self.name.canonical)
        for file in files:
            digest = f"sha256:{file.etag}" if file.is_large else ""
            self.steps.append(PullStatus(f"pulling {file.etag[:12]}", digest, file.path, file.size_bytes))
        self._fetch_files(repository, files)
        self._step("verifying sha256 digest")
        self._step("writing manifest")
        entry = _give_names(repository, choice, files)
        self._step("success")
        return entry

    def _step(self, status: str) -> None:
        self.steps.append(PullStatus(status))

    def _fetch_files(self, repository: Repository, files: list[HubFile]) -> None:
        """All files, some at once. Raises the first fault, after the others have stopped."""
        waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
        faults: list[BaseException] = []
        for file in files:
            waiting.put(file)
        threads = [
            threading.Thread(target=self._work, args=(repository, waiting, faults), name="pull file", daemon=True)
            for _ in range(min(N_AT_ONCE, len(files)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]

    def _work(self, repository: Repository, waiting: queue.SimpleQueue[HubFile], faults: list[BaseException]) -> None:
        from moegguf.models.hub_fetch import fetch_file

        with suppress(queue.Empty):
            while not faults:
                file = waiting.get_nowait()
                try:
                    fetch_file(repository.repo, repository.commit, file, self._counter(file), self.stopped)
                except BaseException as error:  # raised again by the thread that waits
                    faults.append(error)
                    self.stopped.set()

    def _counter(self, file: HubFile) -> Callable[[int], None]:
        def count(n_bytes: int) -> None:
            self.n_bytes[file.path] = n_bytes

        return count


def _give_names(repository: Repository, choice: FileSelection, files: list[HubFile]) -> Entry:
    """Links the commit's paths to the blobs, then has `main` be this commit."""
    folder = repo_folder(repository.repo)
    snapshot = folder / "snapshots" / repository.commit
    try:
        for file in files:
            _link(snapshot / file.path, folder / "blobs" / file.etag)
        (folder / "refs").mkdir(exist_ok=True)
        write_atomically(folder / ".main", repository.commit.encode())  # half a file in refs would be a damaged cache
        os.replace(folder / ".main", folder / "refs" / "main")
        found = Snapshot(repository.repo, snapshot)
        tag = next((tag for tag, other in models_in(found.paths()) if other.files == choice.files), DEFAULT_TAG)
        return found.entry(tag, choice)
    except OSError as error:
        raise PullError(
            f"{repository.repo} was fetched, but cannot be named in {str(folder)!r} ({error.strerror or error})."
        ) from error


def _link(place: Path, blob: Path) -> None:
    """A relative link, as huggingface_hub makes them; one that is right stays."""
    place.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blob, place.parent)
    if place.is_symlink() and os.readlink(place) == target:
        return
    place.unlink(missing_ok=True)
    try:
        place.symlink_to(target)
    except FileExistsError:  # made by another process just now
        pass
    except OSError:  # a file system without symbolic links
        os.link(blob, place)
