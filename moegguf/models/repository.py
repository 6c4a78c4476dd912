"""Files of a repository on the Hugging Face Hub by pattern, as llama-cpp-python's `from_pretrained` names them."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from moegguf.errors import ModelNotFoundError, MoeggufError, PullError
from moegguf.models.hub import hub_cache, hub_endpoint, hub_offline, hub_token
from moegguf.models.names import DEFAULT_TAG
from moegguf.models.selection import choose, is_model, models_in

Folder = str | os.PathLike[str] | None


def fetch(
    repo_id: str,
    filename: str | None = None,
    others: Sequence[str] = (),
    local_dir: Folder = None,
    cache: Folder = None,
) -> Path:
    """The file to open of the model that `filename` (a pattern) means, with all its shards, and `others` fetched.

    They go into `local_dir`, else into the cache of the Hub; what is there already is not fetched again, and without a
    network the cache is all there is. Raises ModelNotFoundError, listing what there is, and PullError.
    """
    paths, cached = _paths(repo_id, cache)
    files = _files(paths, repo_id, filename)
    wanted = [*files, *(_one(paths, repo_id, pattern) for pattern in others)]
    if cached is not None:
        return cached / files[0]
    return _snapshot(repo_id, cache, local_dir=local_dir, allow_patterns=list(map(glob.escape, wanted))) / files[0]


def _paths(repo_id: str, cache: Folder) -> tuple[list[str], Path | None]:
    """All files of the repository; those in the cache, and where they are, when the Hub cannot be asked."""
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
    """As huggingface_hub; raises what the Hub's refusals mean."""
    import httpx2
    import huggingface_hub

    from moegguf.models.hub_api import explain

    known = {"endpoint": hub_endpoint(), "token": hub_token() or False, "cache_dir": cache or hub_cache()}
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, **known, **options))
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise explain(error, repo_id) from error


def _files(paths: Sequence[str], repo_id: str, filename: str | None) -> tuple[str, ...]:
    """The shards of the one model that fits, first one first."""
    if filename is None:
        return choose(paths, DEFAULT_TAG, repo=repo_id).files
    fit = [path for path in paths if is_model(path) and fnmatch(path, filename)]
    models = {choice.files for _, choice in models_in(paths) if set(choice.files) & set(fit)}
    if len(models) == 1:
        return models.pop()
    if len(models) > 1:
        some = ", ".join(sorted(files[0] for files in models)[:40])
        raise ModelNotFoundError(f"{repo_id}: {len(models)} models fit {filename!r}: {some}; name one of them.")
    if fit:  # a shard is missing
        return choose(paths, fit[0].rpartition("/")[2], repo=repo_id).files
    return choose(paths, filename, repo=repo_id).files  # raises, and lists what there is


def _one(paths: Sequence[str], repo_id: str, pattern: str) -> str:
    found = [path for path in paths if fnmatch(path, pattern)]
    if len(found) != 1:
        raise ModelNotFoundError(f"{repo_id}: {len(found)} files fit {pattern!r}, not one: {', '.join(found[:40])}.")
    return found[0]
