"""Downloads files of a Hub repository by pattern, as llama-cpp-python's `from_pretrained` does."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from moegguf.errors import ModelNotFoundError, PullError
from moegguf.models.hub import hub_cache, hub_offline, snapshots
from moegguf.models.names import DEFAULT_TAG
from moegguf.models.selection import is_model, models_in, select_files

Folder = str | os.PathLike[str] | None


def fetch(
    repo_id: str,
    filename: str | None = None,
    others: Sequence[str] = (),
    local_dir: Folder = None,
    cache: Folder = None,
) -> Path:
    """Downloads the model that `filename` (a pattern) means, all its shards, and `others`; returns its first file.

    Into `local_dir`, else into `cache` (by default the Hub's). Files already there are not fetched again; without a
    network they are all there is. Raises ModelNotFoundError, listing the files there are, and PullError.
    """
    from huggingface_hub.utils import tqdm

    from moegguf.models.hub_api import HubFile, read_repository
    from moegguf.models.hub_commit import fetch_files, find_missing, link_commit, move_files

    folder, stopped = Path(local_dir) if local_dir else None, threading.Event()
    cache = folder / ".cache" / "moegguf" if folder else Path(cache or hub_cache())
    try:
        if hub_offline():
            raise PullError(f"{repo_id} is not in the cache, and HF_HUB_OFFLINE is set.")
        repository = read_repository(repo_id, stopped, cache)
    except PullError:
        if here := folder or next((snapshot.folder for snapshot in snapshots(cache, repo_id)), None):
            known = sorted(path.relative_to(here) for path in here.rglob("*") if path.is_file())
            paths = [path.as_posix() for path in known if path.parts[0] != ".cache"]
            if any(map(is_model, paths)):
                return here / _matching(paths, repo_id, filename, others)[0]
        raise
    files = [repository.files[path] for path in _matching(sorted(repository.files), repo_id, filename, others)]
    missing = find_missing(repository, files, folder, stopped) if folder else files
    received = dict.fromkeys(missing, 0)
    with tqdm(total=sum(file.size_bytes for file in missing), desc=repo_id, unit="B", unit_scale=True) as bar:

        def on_bytes(file: HubFile, n_bytes: int) -> None:
            received[file] = n_bytes
            bar.n = sum(received.values())
            bar.update(0)

        fetch_files(missing, repo_id, on_bytes, stopped)
    if folder is None:
        return link_commit(repository, files) / files[0].path
    move_files(repository, missing, folder)
    return folder / files[0].path


def _matching(paths: Sequence[str], repo_id: str, filename: str | None, others: Sequence[str]) -> list[str]:
    """The shards of the one model that `filename` means, first one first; then the one file for each of `others`."""
    found = [*_shards(paths, repo_id, filename)]
    for pattern in others:
        matching = [path for path in paths if fnmatch(path, pattern)]
        if len(matching) != 1:
            listed = ", ".join(matching[:40])
            raise ModelNotFoundError(f"{repo_id}: {len(matching)} files match {pattern!r}, not one: {listed}.")
        found += matching
    return found


def _shards(paths: Sequence[str], repo_id: str, filename: str | None) -> tuple[str, ...]:
    if filename is None:
        return select_files(paths, DEFAULT_TAG, repo=repo_id).files
    matching = [path for path in paths if is_model(path) and fnmatch(path, filename)]
    models = {selection.files for _, selection in models_in(paths) if set(selection.files) & set(matching)}
    if len(models) == 1:
        return models.pop()
    if len(models) > 1:
        some = ", ".join(sorted(files[0] for files in models)[:40])
        raise ModelNotFoundError(f"{repo_id}: {len(models)} models match {filename!r}: {some}; name one of them.")
    # A shard is missing, or nothing fits: the message lists the files.
    return select_files(paths, matching[0].rpartition("/")[2] if matching else filename, repo=repo_id).files
