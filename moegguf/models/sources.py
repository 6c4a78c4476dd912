"""Finds models on this machine: the demo in the package, and models in the models
folder (MOEGGUF_MODELS), in the Hugging Face cache and in Ollama's stores. Makes no
network requests.

The Hugging Face cache is huggingface_hub's own, which llama.cpp shares, so models that
other programs have fetched are found, too. `models--user--repo/` has `blobs/` (the
files, named by their digests), `snapshots/<commit>/` (links to the blobs, with the
files' names) and `refs/main` (the commit of `main` that was fetched last). A cached
model with a missing shard is not listed.

An Ollama store has `manifests/<host>/<namespace>/<model>/<tag>`, which list layers by
digest, and the layers' bytes in `blobs/sha256-<hex>`. This module never writes to a
store. A manifest is left out if it is damaged, leads out of the store or describes a
model that cannot be run (several adapters, cloud models). Go templates are left out, so
the model's own template is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

from moegguf.errors import ModelNameError, ModelNotFoundError, MoeggufError, PullError
from moegguf.gguf.shards import shards_of
from moegguf.models.entry import (
    ModelEntry,
    Source,
    blob_name,
    digest_of,
    modified_at,
    size_of,
    weights_digest,
)
from moegguf.models.names import (
    DEFAULT_TAG,
    HUB_HOST,
    OLLAMA_HOST,
    Name,
    hub_name_of,
    name_or_none,
    parse_name,
)
from moegguf.models.recipe import check_overrides, is_go_template
from moegguf.models.selection import (
    FileSelection,
    first_of,
    is_model,
    models_in,
    projector_beside,
    select_files,
    shard_of,
)
from moegguf.package import package_folders
from moegguf.regular_file import open_regular
from moegguf.settings import models_folder

DEMO_NAME = "demo"
DEMO_FILE = "moegguf-demo-Q4_0.gguf"
# Maximum number of .gguf files in a folder that are searched for a projector.
MAX_NEIGHBOURS = 4096
ENDPOINT = "https://huggingface.co"
MAX_REF_BYTES = 128
_TRUE = {"1", "ON", "YES", "TRUE"}
# Maximum size of a manifest, or of a layer that is read as text.
MAX_LAYER_BYTES = 4 << 20
_KIND = "application/vnd.ollama.image."
SYSTEM_FOLDER = Path("/usr/share/ollama/.ollama/models")


def demo_path() -> Path | None:
    """Returns the path of the model that ships with the package; None if this
    installation has none."""
    paths = (folder / "demo" / DEMO_FILE for folder in package_folders())
    return next((path for path in paths if path.is_file()), None)


def demo_models(text: str | None = None) -> Iterator[ModelEntry]:
    """Yields the model that ships with the package, if this installation has it. With
    `text`, yields the model only if `text` is the model's name. In this case, raises
    ModelNotFoundError if the model is missing."""
    if text is not None and text.lower() not in (
        DEMO_NAME,
        f"{DEMO_NAME}:{DEFAULT_TAG}",
    ):
        return
    if path := demo_path():
        yield file_entry(path, "demo", f"{DEMO_NAME}:{DEFAULT_TAG}")
    elif text is not None:
        raise ModelNotFoundError(
            f"the demo model ({DEMO_FILE}) is not in this installation; install moegguf again, or name another model."
        )


def folder_files() -> list[Path]:
    """Returns the first file of each model in the models folder (MOEGGUF_MODELS) and in
    folders directly below it. If two models have the same name, returns only the one
    whose path comes first."""
    folder = models_folder()
    # glob() is used because Path.glob() raises an error for a link that cannot be
    # followed.
    folders = (
        folder / name
        for name in ("", *glob("*/", root_dir=folder, include_hidden=True))
    )
    return _first_files(path for each in folders for path in _gguf_files(each))


def folder_models(text: str | None = None) -> Iterator[ModelEntry]:
    """Yields the models in the models folder (MOEGGUF_MODELS). Without `text`, leaves
    out files whose names cannot be model names, and files that cannot be read. With
    `text`, yields only the model with this name. `text` may omit ".gguf", shard numbers
    and the tag `latest`.

    With `text`, raises ModelNameError if the file name cannot be a model's name, and
    OSError if the file cannot be read.
    """
    wanted = (
        None
        if text is None
        else _plain_name(text.lower().removesuffix(f":{DEFAULT_TAG}")).lower()
    )
    for path in folder_files():
        name = _plain_name(path.name)
        if wanted in (None, name.lower()):
            with suppress(*() if wanted else (ModelNameError, OSError)):
                yield file_entry(path, "folder", parse_name(name).canonical)


def file_name(path: Path) -> str:
    """Returns the name of a model, derived from the name of its first file. Raises
    ModelNameError if the file's name cannot be a model's name."""
    return parse_name(_plain_name(path.name)).canonical


def _plain_name(file: str) -> str:
    """Returns `file` without ".gguf" and shard numbers. A dash replaces each character
    that names may not contain."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", shard_of(file).prefix)


def only_model(folder: Path) -> Path:
    """Returns the first file of the only model in `folder`. If models have the same
    name (`_plain_name`, ignoring case), only the one whose path comes first counts.
    Raises ModelNotFoundError if there is no model, or more than one."""
    files = _first_files(_gguf_files(folder))
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelNotFoundError(
            f"the folder {str(folder)!r} has no GGUF file; give the path of one."
        )
    some = first_of([repr(file.name) for file in files], 3)
    raise ModelNotFoundError(
        f"the folder {str(folder)!r} has {len(files)} models; give the path of one: {some}."
    )


def file_entry(path: Path, source: Source, name: str) -> ModelEntry:
    """Returns the entry of the model whose first (or only) file is at `path`. Raises
    OSError when a file cannot be read."""
    files = shards_of(path)
    names = [file.name for file in _gguf_files(path.parent)[:MAX_NEIGHBOURS]]
    found = projector_beside(path.name, names)
    mmproj = path.with_name(found) if found else None
    if mmproj and not os.path.isfile(mmproj):  # a broken link, a pipe or a folder
        mmproj = None
    size_bytes = size_of((*files, mmproj) if mmproj else files)
    return ModelEntry(
        name, source, files, size_bytes, digest_of(files), modified_at(path), mmproj
    )


def _gguf_files(folder: Path) -> list[Path]:
    """Returns the paths in a folder that end with .gguf in upper or lower case. Returns
    an empty list if the folder cannot be read."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.suffix.lower() == ".gguf"]
    return []


def _first_files(files: Iterable[Path]) -> list[Path]:
    """Returns the first file of each model among `files`, sorted by path. If two models
    have the same name, returns only the one whose path comes first."""
    models: dict[str, Path] = {}
    for file in sorted(
        file for file in files if is_model(file.name) and os.path.isfile(file)
    ):
        if shard_of(file.name).number == 1:
            models.setdefault(_plain_name(file.name).lower(), file)
    return list(models.values())


def hub_cache() -> Path:
    """Returns the cache's folder according to huggingface_hub's rules. Unlike
    huggingface_hub, this function reads the environment on each call."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(
        os.path.expandvars(os.path.expanduser(named or os.path.join(home, "hub")))
    )


def hub_endpoint() -> str:
    """Returns the address of the Hub, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def hub_offline() -> bool:
    """Returns whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids requests to the
    Hub."""
    value = (
        os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    )
    return value.upper() in _TRUE


@dataclass(frozen=True)
class Snapshot:
    """The cached part of one commit of a repository."""

    repo: str  # "user/repo"
    folder: Path

    def key(self, tag: str) -> str:
        """Returns the key (`Name.key`) of the model with this tag in the snapshot's
        repository."""
        return f"{HUB_HOST}/{self.repo}:{tag}".lower()

    def paths(self) -> list[str]:
        """Returns the cached GGUF files as paths in the repository, sorted."""
        files = (
            path
            for path in self.folder.rglob("*")
            if path.name.lower().endswith(".gguf") and os.path.isfile(path)
        )
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def entry(self, tag: str, selection: FileSelection) -> ModelEntry:
        """Returns the entry of the model with this tag and these files. Raises OSError
        when a file is missing."""
        files = tuple(self.folder / path for path in selection.files)
        name = f"{HUB_HOST}/{self.repo}:{tag}"
        size_bytes = size_of(self.folder / path for path in selection.paths)
        mmproj = self.folder / selection.mmproj if selection.mmproj else None
        return ModelEntry(
            name,
            "hub",
            files,
            size_bytes,
            digest_of(files),
            modified_at(files[0]),
            mmproj,
        )


def repo_folder(repo: str, cache: Path) -> Path:
    """Returns the folder of the repository "user/repo" in a cache."""
    return cache / ("models--" + repo.replace("/", "--"))


def cached_models(
    text: str | None = None, hidden: Collection[str] = ()
) -> Iterator[ModelEntry]:
    """Yields every complete model in the cache, except models that no tag selects. If
    several commits have a model of the same name, yields the model in the commit of
    `main`, or else in the newest commit. With `text`, yields only models that this Hub
    name may refer to. `hidden` holds keys of names to leave out."""
    name = text and hub_name_of(text)
    seen = set(hidden)
    if text is not None and not name:
        return
    for snapshot in snapshots(hub_cache(), name.repo if name else None):
        models = {
            tag: selection
            for tag, selection in models_in(snapshot.paths())
            if snapshot.key(tag) not in seen
        }
        wanted: tuple[str, ...] = ()
        if name:
            with suppress(ModelNotFoundError):
                wanted = select_files(
                    {path for each in models.values() for path in each.files}, name.tag
                ).files
        for tag, selection in models.items():
            if not name or selection.files == wanted:
                with suppress(ModelNameError, OSError):
                    entry = snapshot.entry(tag, selection)
                    seen.add(parse_name(entry.name).key)
                    yield entry


def snapshots(cache: Path, repo: str | None = None) -> Iterator[Snapshot]:
    """Yields the cached commits of the repository `repo` (in upper or lower case), or
    of all repositories if `repo` is None. For each repository, the commit of `main`
    comes first, then the other commits, newest first."""
    wanted = None if repo is None else repo_folder(repo, cache).name.lower()
    for folder in sorted(cache.glob("models--*/")):
        _, *parts = folder.name.split("--")
        if len(parts) == 2 and wanted in (None, folder.name.lower()):
            main = ""
            with (
                suppress(OSError, UnicodeDecodeError),
                open_regular(folder / "refs" / "main") as file,
            ):
                main = file.read(MAX_REF_BYTES).decode("ascii").strip()
            with suppress(OSError):  # another process has deleted it in the meantime
                commits = [
                    (path.name == main, path.stat().st_mtime_ns, path)
                    for path in folder.glob("snapshots/*/")
                ]
                yield from (
                    Snapshot("/".join(parts), path)
                    for *_, path in sorted(commits, reverse=True)
                )


def delete_cached(entry: ModelEntry, keep: Collection[Path]) -> None:
    """Deletes the entry's files from every cached commit, except links to the blobs in
    `keep`.

    Keeps a blob that other files of the same repository link to. Raises PullError when
    a file cannot be deleted.
    """
    repository = hub_cache() / entry.path.relative_to(hub_cache()).parts[0]
    snapshots = repository / "snapshots"
    paths = {Path(*path.relative_to(snapshots).parts[1:]) for path in entry.all_files}
    links = {commit / path for commit in snapshots.iterdir() for path in paths}
    try:
        for link in filter(Path.exists, links):
            if (blob := link.resolve()) not in keep:
                link.unlink()
                if not any(other.resolve() == blob for other in snapshots.rglob("*")):
                    blob.unlink(missing_ok=True)
    except OSError as error:
        raise PullError(
            f"{entry.name} cannot be removed from {str(hub_cache())!r} ({error}); correct this and retry."
        ) from error


def ollama_folders() -> list[Path]:
    """Returns a list with only the folder in OLLAMA_MODELS, or Ollama's default folders
    if the variable is not set."""
    named = os.environ.get("OLLAMA_MODELS", "")
    return (
        [Path(named).expanduser()]
        if named
        else [Path("~/.ollama/models").expanduser(), SYSTEM_FOLDER]
    )


def ollama_models(text: str | None = None) -> Iterator[ModelEntry]:
    """Yields the models in Ollama's stores that can be run. With `text`, yields only
    models with this name. A name without a host refers to Ollama's registry, and a name
    without a namespace to the registry's library. `user/model` and `hf.co/user/model`
    can refer to a user of Ollama's registry, too."""
    keys = None
    if text is not None:
        if (name := name_or_none(text)) is None:
            return
        full = replace(
            name, host=name.host or OLLAMA_HOST, namespace=name.namespace or "library"
        )
        keys = {full.key}
        if name.is_hub:
            keys.add(replace(name, host=OLLAMA_HOST).key)
    for folder in ollama_folders():
        for manifest in sorted(folder.glob("manifests/*/*/*/*")):
            name = Name(*manifest.parts[-4:])
            if keys is None or name.key in keys:
                with suppress(
                    OSError,
                    MoeggufError,
                    ValueError,
                    KeyError,
                    TypeError,
                    AttributeError,
                    RecursionError,
                ):
                    yield _manifest_entry(folder, manifest, name)


def ollama_blob(folder: Path, digest: str) -> Path:
    """Returns the path of the blob with this digest in a store. Raises ModelNameError
    if `digest` is not a digest, and OSError if the blob is missing or outside the
    store."""
    return _inside(folder, folder / "blobs" / blob_name(digest))


def _inside(folder: Path, path: Path) -> Path:
    real = path.resolve(strict=True)
    if not real.is_relative_to(folder.resolve()) or not real.is_file():
        raise FileNotFoundError(str(path))
    return path


def _manifest_entry(folder: Path, manifest: Path, name: Name) -> ModelEntry:
    """Returns the entry of the model that a manifest describes. If the model cannot be
    run, raises one of the errors that `ollama_models` ignores."""
    shown = _display_name(name)
    files: dict[str, list[Path]] = {"model": [], "projector": [], "adapter": []}
    parts: dict[str, list[str]] = {}
    for layer in json.loads(_read(_inside(folder, manifest)))["layers"]:
        kind = str(layer["mediaType"]).removeprefix(_KIND)
        path = ollama_blob(folder, layer["digest"])
        if kind in files and path.stat().st_size != layer["size"]:
            raise ValueError(kind)
        if kind in files:
            files[kind].append(path)
        else:
            parts.setdefault(kind, []).append(_read(path).decode("utf-8", "replace"))
    (model,) = files["model"]
    mmproj = next(iter(files["projector"]), None)
    (adapter,) = files["adapter"] or (None,)
    texts = {kind: "\n".join(each) for kind, each in parts.items()}
    template = texts.get("template", "")
    overrides = {
        "system": texts.get("system"),
        "template": template
        if "{{" in template and not is_go_template(template)
        else None,
        "license": texts.get("license"),
        "parameters": _parameters_of_ollama(parts),
        "messages": json.loads(parts["messages"][0]) if "messages" in parts else None,
    }
    return ModelEntry(
        name=shown,
        source="ollama",
        files=(model,),
        size_bytes=size_of((model, *filter(None, (mmproj, adapter)))),
        weights=weights_digest((model,), adapter),
        modified=modified_at(manifest),
        mmproj=mmproj,
        adapter=adapter,
        **check_overrides(overrides),
    )


def _parameters_of_ollama(parts: Mapping[str, Sequence[str]]) -> dict[str, Any] | None:
    """Returns the parameters of a model in an Ollama store, or None if its manifest
    lists none. The parameter `mirror` is left out, because the model's author cannot
    know paths on this machine."""
    if "params" not in parts:
        return None
    return {
        name: value
        for name, value in json.loads(parts["params"][0]).items()
        if name != "mirror"
    }


def _display_name(name: Name) -> str:
    """Returns the name as Ollama lists it. Raises ModelNameError if the parts do not
    form a valid name."""
    full = parse_name(f"{name.host}/{name.namespace}/{name.model}:{name.tag}")
    if full.host != OLLAMA_HOST:
        return full.canonical
    short = f"{full.model}:{full.tag}"
    return short if full.namespace == "library" else f"{full.namespace}/{short}"


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_LAYER_BYTES:
        raise ValueError("too large")
    return path.read_bytes()
