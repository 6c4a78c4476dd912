"""What is in the Hugging Face cache on this machine, and the settings of its users. Never goes to the network.

The cache is huggingface_hub's own, which llama.cpp shares: `models--user--repo/` with `blobs/` (files by their
SHA-256), `snapshots/<commit>/` (links to them by name) and `refs/main` (the newest commit seen). So models that other
programs have fetched are models here, too. A set with a missing shard is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moegguf.errors import ModelNameError, ModelNotFoundError, PullError
from moegguf.models.entry import Entry
from moegguf.models.files import changed_at, digest_of, digest_of_digests, size_of
from moegguf.models.names import HUB_HOST, Name, parse_name
from moegguf.models.selection import FileSelection, choose, models_in

ENDPOINT = "https://huggingface.co"
MAX_REF_BYTES = 128
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TRUE = {"1", "ON", "YES", "TRUE"}


def hub_home() -> Path:
    """HF_HOME, as huggingface_hub finds it; read anew at each call."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _path(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"))


def hub_cache() -> Path:
    """The folder of the cache."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _path(named) if named else hub_home() / "hub"


def hub_endpoint() -> str:
    """The address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def hub_token() -> str | None:
    """The user's token: HF_TOKEN, or what `hf auth login` has stored."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token
    stored = os.environ.get("HF_TOKEN_PATH")
    try:
        return (_path(stored) if stored else hub_home() / "token").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def hub_offline() -> bool:
    """Whether the user has said to stay off the network."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in _TRUE


def _path(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository, as far as it is in the cache."""

    repo: str  # "user/repo"
    folder: Path

    def key(self, tag: str) -> str:
        """What the name with this tag is compared by."""
        return f"{HUB_HOST}/{self.repo}:{tag}".lower()

    def paths(self) -> list[str]:
        """The GGUF files that are there, by their path in the repository."""
        found = []
        for folder, _, names in os.walk(self.folder):
            inside = os.path.relpath(folder, self.folder)
            for name in names:
                if name.lower().endswith(".gguf") and os.path.isfile(os.path.join(folder, name)):
                    found.append(name if inside == "." else f"{inside.replace(os.sep, '/')}/{name}")
        return sorted(found)

    def entry(self, tag: str, choice: FileSelection) -> Entry:
        """The model of that name. Raises OSError when a file has just gone."""
        files = tuple(self.folder / path for path in choice.files)
        mmproj = self.folder / choice.mmproj if choice.mmproj else None
        return Entry(
            name=f"{HUB_HOST}/{self.repo}:{tag}",
            source="hub",
            files=files,
            size_bytes=size_of(files, mmproj),
            digest=_digest(files),
            modified=changed_at(files[0]),
            mmproj=mmproj,
        )


def repo_folder(repo: str) -> Path:
    """Where the cache keeps a repository."""
    return hub_cache() / ("models--" + repo.replace("/", "--"))


def find_cached(name: Name, hidden: Collection[str] = ()) -> Entry | None:
    """The model that a hub name means among the files of its repository that are here; None when there is none.

    `hidden`: keys of names that are not to be found.
    """
    if not name.is_hub:
        return None
    for snapshot in _snapshots(name.repo):
        models = [(tag, choice) for tag, choice in models_in(snapshot.paths()) if snapshot.key(tag) not in hidden]
        files = {path for _, choice in models for path in choice.files}
        with suppress(ModelNotFoundError, OSError):
            wanted = choose(files, name.tag).files
            tag, choice = next((tag, choice) for tag, choice in models if choice.files == wanted)
            return snapshot.entry(tag, choice)
    return None


def cached_models() -> Iterator[Entry]:
    """Every model in the cache that has a name, the newest commit of each."""
    seen: set[str] = set()
    for snapshot in _snapshots():
        for tag, choice in models_in(snapshot.paths()):
            with suppress(ModelNameError, OSError):
                entry = snapshot.entry(tag, choice)
                key = parse_name(entry.name).key
                if key not in seen:
                    seen.add(key)
                    yield entry


def _snapshots(repo: str | None = None) -> Iterator[Snapshot]:
    """Of one repository (its case does not matter) or of all; of each the commit that `main` is at first, then by
    age."""
    wanted = None if repo is None else f"models--{repo.replace('/', '--')}".lower()
    for folder in _folders(hub_cache(), wanted):
        kind, *parts = folder.name.split("--")
        if kind != "models" or len(parts) != 2:
            continue
        main = _main_commit(folder)
        commits = _folders(folder / "snapshots")
        commits.sort(key=lambda path: (path.name == main, _age(path), path.name), reverse=True)
        yield from (Snapshot("/".join(parts), commit) for commit in commits)


def _folders(path: Path, wanted: str | None = None) -> list[Path]:
    """The folders in `path`, or the one that has a name."""
    try:
        with os.scandir(path) as found:
            names = [part.name for part in found if wanted in (None, part.name.lower()) and part.is_dir()]
    except OSError:
        return []
    return [path / name for name in sorted(names)]


def _age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _main_commit(folder: Path) -> str:
    try:
        with open(folder / "refs" / "main", encoding="ascii") as file:
            return file.read(MAX_REF_BYTES).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _digest(files: tuple[Path, ...]) -> str:
    """A blob's file name is its SHA-256 when the hub keeps it as a large file."""
    blobs = [os.path.basename(os.readlink(path)) if path.is_symlink() else "" for path in files]
    if not all(_SHA256.fullmatch(blob) for blob in blobs):
        return digest_of(files)
    return blobs[0] if len(blobs) == 1 else digest_of_digests(blobs)


def delete_cached(entry: Entry, keep: Collection[Path]) -> int:
    """Deletes the entry's files, in every commit that is cached, but none of `keep`; returns the bytes freed.

    A blob that other files of the cache use stays. Raises PullError when the disk refuses.
    """
    from huggingface_hub import scan_cache_dir  # slow to import, and needed for nothing else here
    from huggingface_hub.errors import CacheNotFound

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
