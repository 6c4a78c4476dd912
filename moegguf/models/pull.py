"""Downloads models from Hugging Face by name, reporting each step with Ollama's status texts.

All files of a model are downloaded before any is named; then the commit's links are made, and `main` is updated last.
So a name always means the old files or the new ones. Of two pulls of one file, in this process or in two, one waits,
and goes on with what the other has received when that one is stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moegguf.errors import ModelNotFoundError, PullError
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry, PullStatus
from moegguf.models.hub import Snapshot, find_cached, hub_cache, hub_offline
from moegguf.models.library import find_in_library, nearest_names
from moegguf.models.names import DEFAULT_TAG, Name, parse_name
from moegguf.models.selection import models_in, select_files

if TYPE_CHECKING:
    from moegguf.models.hub_api import HubFile

Report = Callable[[PullStatus], None]


def pull(name: str, catalog: Catalog, report: Report, cancelled: threading.Event | None = None) -> ModelEntry:
    """Downloads the model of this name from the Hub or the library, unless it is cached; returns it.

    `report` is called on this thread. Raises ModelNameError, ModelNotFoundError (no such repository or file), PullError
    (everything else, also when `cancelled` is set; received bytes are kept).
    """
    model = find_in_library(name)
    parsed = parse_name(model.hub_name if model else name)
    if not parsed.is_hub:
        near = " or ".join(map(repr, nearest_names(name)))
        raise ModelNotFoundError(
            f"{parsed.canonical!r} cannot be pulled"
            + (f"; did you mean {near}?" if near else ": it is not in the library.")
            + " Of other models of Hugging Face write hf.co/user/repository, or hf.co/user/repository:Q4_K_M for one"
            " quantisation."
        )
    if not hub_offline():
        entry = _fetch(parsed, report, cancelled or threading.Event())
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


def _fetch(name: Name, report: Report, stopped: threading.Event) -> ModelEntry:
    """Downloads the newest commit's files. Raises ModelNotFoundError, ModelFormatError, PullError."""
    from moegguf.models.hub_api import Stopped, read_repository
    from moegguf.models.hub_commit import fetch_files, link_commit

    try:
        report(PullStatus("pulling manifest"))
        repository = read_repository(name.repo, stopped)
        selection = select_files(repository.files, name.tag, repo=repository.repo)
        files = [repository.files[path] for path in selection.paths]
        progress = _Progress(files, report)
        fetch_files(files, name.canonical, progress.on_bytes, stopped, progress.report)
        progress.report()
    except Stopped:
        raise PullError(
            f"fetching {name.canonical} was stopped; received bytes are kept, pull again to continue."
        ) from None
    report(PullStatus("verifying sha256 digest"))
    report(PullStatus("writing manifest"))
    found = Snapshot(repository.repo, link_commit(repository, files))
    tag = next((tag for tag, other in models_in(found.paths()) if other.files == selection.files), DEFAULT_TAG)
    report(PullStatus("success"))
    return found.entry(tag, selection)


class _Progress:
    """The bytes of files that are on the disk, and which of them were reported."""

    def __init__(self, files: Sequence[HubFile], report: Report) -> None:
        self._received: dict[str, int] = {}
        self._report = report
        self._reported: dict[str, PullStatus] = {}
        for file in files:
            digest = f"sha256:{file.etag}" if file.is_large else ""
            status = PullStatus(f"pulling {file.etag[:12]}", digest, file.path, file.size_bytes)
            self._reported[file.path] = status
            report(status)

    def on_bytes(self, file: HubFile, n_bytes: int) -> None:
        """Notes what is there of a file; from any thread."""
        self._received[file.path] = n_bytes

    def report(self) -> None:
        """Reports the files of which more is there than the last time."""
        for path, n_bytes in list(self._received.items()):
            status = replace(self._reported[path], completed_bytes=n_bytes)
            if status != self._reported[path]:
                self._reported[path] = status
                self._report(status)
