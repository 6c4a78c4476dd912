"""Downloads models from Hugging Face by name, reporting each step with Ollama's status texts.

All files of a model are downloaded before any is named; then the commit's links are made, and `main` is updated last.
So a name always means the old files or the new ones. Concurrent pulls of one name share one download, which stops when
the last of them is cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moegguf.errors import ModelNotFoundError, MoeggufError, PullError
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry, PullStatus
from moegguf.models.hub import Snapshot, find_cached, hub_cache, hub_endpoint, hub_offline
from moegguf.models.names import DEFAULT_TAG, Name, parse_name
from moegguf.models.selection import models_in, select_files

if TYPE_CHECKING:
    from moegguf.models.hub_api import HubFile

REPORT_S = 0.2

Report = Callable[[PullStatus], None]


def pull(name: str, catalog: Catalog, report: Report, cancelled: threading.Event | None = None) -> ModelEntry:
    """Downloads the model of this name from the Hub, unless it is cached; returns it.

    `report` is called on this thread, about every REPORT_S. Raises ModelNameError, ModelNotFoundError (no such
    repository or file), PullError (everything else, also when `cancelled` is set; received bytes are kept).
    """
    parsed = parse_name(name)
    if not parsed.is_hub:
        raise ModelNotFoundError(
            f"{parsed.canonical!r} cannot be pulled: models come from Hugging Face; write hf.co/user/repository, or"
            " hf.co/user/repository:Q4_K_M for one quantisation."
        )
    if not hub_offline():
        with _shared_download(parsed) as download:
            entry = _report_until_done(download, report, cancelled)
    elif found := find_cached(parsed):
        entry = found
        report(PullStatus("success"))
    else:
        raise PullError(
            f"{parsed.canonical} is not in {str(hub_cache())!r}, and HF_HUB_OFFLINE is set; unset it to fetch the"
            " model."
        )
    catalog.unhide(entry.name)
    return entry


def _report_until_done(download: _Download, report: Report, cancelled: threading.Event | None) -> ModelEntry:
    """Reports steps and progress until the download has ended; returns the model or raises the download's error."""
    reported: dict[str, PullStatus] = {}
    while True:
        done = download.done.wait(REPORT_S if reported else 0.02)
        for key, status in list(download.statuses.items()):
            if key not in reported and status.completed_bytes is not None:
                report(replace(status, completed_bytes=None))
            if reported.get(key) != status:
                reported[key] = status
                report(status)
        if done:
            return download.result()
        if cancelled is not None and cancelled.is_set():
            raise PullError(
                f"fetching {download.name.canonical} was stopped; received bytes are kept, pull again to continue."
            )


_running: dict[tuple[str, str, Path], _Download] = {}
_running_lock = threading.Lock()


@contextmanager
def _shared_download(name: Name) -> Iterator[_Download]:
    """The running download of that name, or a new one; stopped when no `with` uses it any more."""
    key = (name.key, hub_endpoint(), hub_cache())
    with _running_lock:
        download = _running.get(key)
        if download is None or download.done.is_set():
            download = _running[key] = _Download(name)
            threading.Thread(target=download.run, name=f"pull {name.canonical}", daemon=True).start()
        download.n_users += 1
    try:
        yield download
    finally:
        with _running_lock:
            download.n_users -= 1
            if download.n_users == 0:
                download.stopped.set()
                if _running.get(key) is download:
                    del _running[key]


class _Download:
    """The download of one name, on threads of its own. `statuses`: its steps so far, and files by path, in order."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.n_users = 0
        self.stopped = threading.Event()
        self.done = threading.Event()
        self.statuses: dict[str, PullStatus] = {}
        self._entry: ModelEntry | None = None
        self._error: BaseException | None = None

    def result(self) -> ModelEntry:
        """The model, once `done` is set. Raises the download's error, a new exception for each caller."""
        if self._entry is not None:
            return self._entry
        if isinstance(self._error, MoeggufError):
            raise type(self._error)(*self._error.args) from self._error
        raise PullError(f"fetching {self.name.canonical} has failed ({self._error!r:.200}).") from self._error

    def run(self) -> None:
        try:
            self._entry = self._fetch()
        except BaseException as error:  # raised by result()
            self._error = error
        finally:
            self.done.set()

    def _fetch(self) -> ModelEntry:
        from moegguf.models.hub_api import read_repository
        from moegguf.models.hub_commit import fetch_files, link_commit

        self._step("pulling manifest")
        repository = read_repository(self.name.repo, self.stopped)
        selection = select_files(repository.files, self.name.tag, repo=repository.repo)
        files = [repository.files[path] for path in selection.paths]
        for file in files:
            digest = f"sha256:{file.etag}" if file.is_large else ""
            status = PullStatus(f"pulling {file.etag[:12]}", digest, file.path, file.size_bytes)
            self.statuses[file.path] = status
        fetch_files(files, self.name.canonical, self._on_bytes, self.stopped)
        self._step("verifying sha256 digest")
        self._step("writing manifest")
        found = Snapshot(repository.repo, link_commit(repository, files))
        tag = next((tag for tag, other in models_in(found.paths()) if other.files == selection.files), DEFAULT_TAG)
        self._step("success")
        return found.entry(tag, selection)

    def _step(self, status: str) -> None:
        self.statuses[status] = PullStatus(status)

    def _on_bytes(self, file: HubFile, n_bytes: int) -> None:
        self.statuses[file.path] = replace(self.statuses[file.path], completed_bytes=n_bytes)
