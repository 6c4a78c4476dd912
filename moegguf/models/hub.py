"""The Hugging Face cache on this machine, and the Hub's environment variables. Makes no network requests.

The cache is huggingface_hub's own, which llama.cpp shares: `models--user--repo/` with `blobs/` (files by their
SHA-256), `snapshots/<commit>/` (links to them by name) and `refs/main` (the newest commit seen). So models fetched by
other programs are found, too. A model with a missing shard is not listed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moegguf.errors import ModelNameError, ModelNotFoundError, PullError
from moegguf.models.entry import ModelEntry, digest_of, modified_at, size_of
from moegguf.models.names import HUB_HOST, hub_name_of, parse_name
from moegguf.models.selection import FileSelection, models_in, select_files

ENDPOINT = "https://huggingface.co"
MAX_REF_BYTES = 128
_TRUE = {"1", "ON", "YES", "TRUE"}


def hub_cache() -> Path:
    """The folder of the cache, by huggingface_hub's rules; read at each call, where that reads them at import."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(os.path.expanduser(named or os.path.join(home, "hub"))))


def hub_endpoint() -> str:
    """The address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def hub_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in _TRUE


@dataclass(frozen=True)
class Snapshot:
    """The cached part of one commit of a repository."""

    repo: str  # "user/repo"
    folder: Path

    def key(self, tag: str) -> str:
        """The key of the name with this tag (`Name.key`)."""
        return f"{HUB_HOST}/{self.repo}:{tag}".lower()

    def paths(self) -> list[str]:
        """The cached GGUF files, by their path in the repository."""
        files = (path for path in self.folder.rglob("*") if path.name.lower().endswith(".gguf") and path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def entry(self, tag: str, selection: FileSelection) -> ModelEntry:
        """The model of that name. Raises OSError when a file is missing."""
        files = tuple(self.folder / path for path in selection.files)
        name, size_bytes = f"{HUB_HOST}/{self.repo}:{tag}", size_of(self.folder / path for path in selection.paths)
        mmproj = self.folder / selection.mmproj if selection.mmproj else None
        return ModelEntry(name, "hub", files, size_bytes, digest_of(files), modified_at(files[0]), mmproj)


def repo_folder(repo: str, cache: Path) -> Path:
    """Where a cache keeps a repository."""
    return cache / ("models--" + repo.replace("/", "--"))


def cached_models(text: str | None = None, hidden: Collection[str] = ()) -> Iterator[ModelEntry]:
    """Every model in the cache that has a name, the newest commit of each; with `text` those that this hub name means.
    `hidden`: keys of names to leave out."""
    name, seen = text and hub_name_of(text), set(hidden)
    if text is not None and not name:
        return
    for snapshot in snapshots(hub_cache(), name.repo if name else None):
        models = {tag: selection for tag, selection in models_in(snapshot.paths()) if snapshot.key(tag) not in seen}
        if name:
            wanted: tuple[str, ...] = ()
            with suppress(ModelNotFoundError):
                wanted = select_files({path for each in models.values() for path in each.files}, name.tag).files
            models = {tag: selection for tag, selection in models.items() if selection.files == wanted}
        for tag, selection in models.items():
            with suppress(ModelNameError, OSError):
                entry = snapshot.entry(tag, selection)
                seen.add(parse_name(entry.name).key)
                yield entry


def snapshots(cache: Path, repo: str | None = None) -> Iterator[Snapshot]:
    """The commits of one repository (in any case) or of all; for each that of `main` first, then the newest."""
    wanted = None if repo is None else repo_folder(repo, cache).name.lower()
    for folder in sorted(cache.glob("models--*/")):
        _, *parts = folder.name.split("--")
        if len(parts) == 2 and wanted in (None, folder.name.lower()):
            main = ""
            with suppress(OSError, UnicodeDecodeError), open(folder / "refs" / "main", encoding="ascii") as file:
                main = file.read(MAX_REF_BYTES).strip()
            with suppress(OSError):  # deleted in the meantime
                commits = [(path.name == main, path.stat().st_mtime_ns, path) for path in folder.glob("snapshots/*/")]
                yield from (Snapshot("/".join(parts), path) for *_, path in sorted(commits, reverse=True))


def delete_cached(entry: ModelEntry, keep: Collection[Path]) -> int:
    """Deletes the entry's files from every cached commit, except `keep`; returns the bytes freed.

    A blob that other files of the cache use stays. Raises PullError when a file cannot be deleted.
    """
    from huggingface_hub import scan_cache_dir  # slow to import
    from huggingface_hub.errors import CacheNotFound

    inside = [path.relative_to(hub_cache()).parts for path in entry.all_files]
    wanted = {(hub_cache().resolve() / parts[0], Path(*parts[3:])) for parts in inside}  # (repository, path in it)
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
