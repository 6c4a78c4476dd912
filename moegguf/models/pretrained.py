"""Downloads files of a Hub repository by pattern, as llama-cpp-python's `from_pretrained` does."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from moegguf.errors import ModelNotFoundError, MoeggufError, PullError
from moegguf.models.hub import hub_cache, hub_endpoint, hub_offline
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

    Into `local_dir`, else into the Hub's cache. Files already there are not fetched again; without a network only the
    cache is used. Raises ModelNotFoundError, listing the files there are, and PullError.
    """
    paths, cached = _paths(repo_id, cache)
    files = _files(paths, repo_id, filename)
    wanted = [*files, *(_one(paths, repo_id, pattern) for pattern in others)]
    if cached is not None:
        return cached / files[0]
    return _snapshot(repo_id, cache, local_dir=local_dir, allow_patterns=list(map(glob.escape, wanted))) / files[0]


def _paths(repo_id: str, cache: Folder) -> tuple[list[str], Path | None]:
    """(all files of the repository, None); when the Hub cannot be reached, (those in the cache, their folder)."""
    from moegguf.models.hub_api import read_repository

    try:
        if not hub_offline():
            return sorted(read_repository(repo_id, threading.Event()).files), None
        unreachable: MoeggufError = PullError(f"{repo_id} is not in the cache, and HF_HUB_OFFLINE is set.")
    except PullError as error:
        unreachable = error
    try:
        folder = _snapshot(repo_id, cache, local_files_only=True)
    except MoeggufError:
        raise unreachable from None
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()), folder


def _snapshot(repo_id: str, cache: Folder, **options: Any) -> Path:
    """huggingface_hub.snapshot_download, with its errors as ours."""
    import huggingface_hub

    from moegguf.models.hub_api import hub_errors

    options |= {"endpoint": hub_endpoint(), "cache_dir": cache or hub_cache()}
    with hub_errors(repo_id):
        return Path(huggingface_hub.snapshot_download(repo_id, **options))


def _files(paths: Sequence[str], repo_id: str, filename: str | None) -> tuple[str, ...]:
    """The shards of the one model that matches, first one first."""
    if filename is None:
        return select_files(paths, DEFAULT_TAG, repo=repo_id).files
    matching = [path for path in paths if is_model(path) and fnmatch(path, filename)]
    models = {selection.files for _, selection in models_in(paths) if set(selection.files) & set(matching)}
    if len(models) == 1:
        return models.pop()
    if len(models) > 1:
        some = ", ".join(sorted(files[0] for files in models)[:40])
        raise ModelNotFoundError(f"{repo_id}: {len(models)} models match {filename!r}: {some}; name one of them.")
    if matching:  # a shard is missing
        return select_files(paths, matching[0].rpartition("/")[2], repo=repo_id).files
    return select_files(paths, filename, repo=repo_id).files  # raises, listing the files


def _one(paths: Sequence[str], repo_id: str, pattern: str) -> str:
    found = [path for path in paths if fnmatch(path, pattern)]
    if len(found) != 1:
        raise ModelNotFoundError(f"{repo_id}: {len(found)} files match {pattern!r}, not one: {', '.join(found[:40])}.")
    return found[0]
