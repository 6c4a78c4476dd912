"""Takes a model's files out of the Hugging Face cache, by huggingface_hub's own rules. Imports that library, which is
slow."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from moegguf.errors import PullError
from moegguf.models.entry import Entry
from moegguf.models.hub import hub_cache


def delete_cached(entry: Entry, keep: Collection[Path]) -> int:
    """Deletes the entry's files, in every commit that is cached, but none of `keep`; returns the bytes freed.

    A blob that other files of the cache use stays. Raises PullError when the disk refuses.
    """
    wanted = {_in_repository(path) for path in (*entry.files, *((entry.mmproj,) if entry.mmproj else ()))}
    try:
        cache = scan_cache_dir(hub_cache())
        files = [
            file
            for repo in cache.repos
            for revision in repo.revisions
            for file in revision.files
            if (repo.repo_path, file.file_path.relative_to(revision.snapshot_path)) in wanted
            and file.blob_path.resolve() not in keep
        ]
        if not any(repo.repo_path == folder for repo in cache.repos for folder, _ in wanted):
            raise OSError(next(map(str, cache.warnings), "its folder is not one of huggingface_hub's"))
        strategy = cache.delete_files(*files)
        strategy.execute()
    except (OSError, CacheNotFound) as error:
        raise PullError(f"{entry.name} cannot be removed from {str(hub_cache())!r} ({error}).") from error
    return int(strategy.expected_freed_size)


def _in_repository(path: Path) -> tuple[Path, Path]:
    """(folder of the repository in the cache, path in the repository)."""
    parts = path.relative_to(hub_cache()).parts
    return hub_cache().resolve() / parts[0], Path(*parts[3:])
