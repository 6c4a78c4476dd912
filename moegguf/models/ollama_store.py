"""Models in Ollama's stores on this machine, which are read and never written.

Layout of an Ollama store: `manifests/<host>/<namespace>/<model>/<tag>` lists layers by digest, `blobs/sha256-<hex>` has
their bytes. Manifests that are damaged, lead out of the store or cannot be run (adapters, cloud models) are left out.
Go templates are left out, too: the model's own is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moegguf.errors import MoeggufError
from moegguf.models.blobs import blob_name
from moegguf.models.entry import ModelEntry, digest_of, size_of
from moegguf.models.names import OLLAMA_HOST, Name, parse_name
from moegguf.models.recipe import check_overrides, is_go_template

MAX_LAYER_BYTES = 4 << 20  # of the layers that are text
_KIND = "application/vnd.ollama.image."
SYSTEM_FOLDER = Path("/usr/share/ollama/.ollama/models")


def ollama_folders() -> list[Path]:
    """OLLAMA_MODELS, or Ollama's default folders when it is not set."""
    named = os.environ.get("OLLAMA_MODELS", "")
    return [Path(named).expanduser()] if named else [Path("~/.ollama/models").expanduser(), SYSTEM_FOLDER]


def ollama_models() -> Iterator[ModelEntry]:
    """All models in the stores that can be run."""
    for folder in ollama_folders():
        yield from OllamaStore(folder).entries()


def find_in_ollama(name: Name) -> ModelEntry | None:
    """The model that Ollama would run under this name."""
    for folder in ollama_folders():
        if found := OllamaStore(folder).find(name):
            return found
    return None


@dataclass(frozen=True)
class _Layers:
    """A manifest's layers by kind: files, and texts ("system", "template", "params", "messages", "license")."""

    model: tuple[Path, ...]
    projector: tuple[Path, ...]
    texts: dict[str, list[str]]


class OllamaStore:
    """The store in `folder`, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self) -> Iterator[ModelEntry]:
        """The models that can be run."""
        for manifest, name in self._manifests():
            if entry := self._entry(manifest, name):
                yield entry

    def find(self, name: Name) -> ModelEntry | None:
        """The model of this name: without a host in Ollama's library; `user/model` also as one of Ollama's users."""
        wanted = {(name.host or OLLAMA_HOST, name.namespace or "library", name.model, name.tag)}
        if name.is_hub:
            wanted.add((OLLAMA_HOST, name.namespace, name.model, name.tag))
        keys = {Name(*parts).key for parts in wanted}
        for manifest, found in self._manifests():
            if found.key in keys and (entry := self._entry(manifest, found)):
                return entry
        return None

    def _manifests(self) -> Iterator[tuple[Path, Name]]:
        root = self.folder / "manifests"
        for manifest in sorted(root.glob("*/*/*/*")):
            yield manifest, Name(*manifest.relative_to(root).parts)

    def blob(self, digest: str) -> Path:
        """The file of a digest. Raises ModelNameError, OSError when it is missing or outside the store."""
        return self._inside(self.folder / "blobs" / blob_name(digest))

    def _inside(self, path: Path) -> Path:
        real = path.resolve(strict=True)
        if not real.is_relative_to(self.folder.resolve()) or not real.is_file():
            raise FileNotFoundError(str(path))
        return path

    def _entry(self, manifest: Path, name: Name) -> ModelEntry | None:
        with suppress(OSError, MoeggufError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            shown = _display_name(name)
            data = _read(self._inside(manifest))
            layers = self._layers(json.loads(data)["layers"])
            return _make_entry(shown, manifest, data, layers)
        return None

    def _layers(self, listed: list[dict[str, Any]]) -> _Layers:
        """The layers' files and texts. Raises ValueError when they are not a model that can be run."""
        files: dict[str, list[Path]] = {"model": [], "projector": []}
        texts: dict[str, list[str]] = {}
        for layer in listed:
            kind = str(layer["mediaType"]).removeprefix(_KIND)
            if kind == "adapter":
                raise ValueError("adapters")
            path = self.blob(layer["digest"])
            if kind in files:
                if path.stat().st_size != layer["size"]:
                    raise ValueError("size")
                files[kind].append(path)
            else:
                texts.setdefault(kind, []).append(_read(path).decode("utf-8", "replace"))
        if len(files["model"]) != 1:
            raise ValueError("model")
        return _Layers(tuple(files["model"]), tuple(files["projector"]), texts)


def _display_name(name: Name) -> str:
    """The name as Ollama lists it. Raises ModelNameError for a folder that is no name."""
    full = parse_name(f"{name.host}/{name.namespace}/{name.model}:{name.tag}")
    if full.host != OLLAMA_HOST:
        return full.canonical
    short = f"{full.model}:{full.tag}"
    return short if full.namespace == "library" else f"{full.namespace}/{short}"


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_LAYER_BYTES:
        raise ValueError("too large")
    return path.read_bytes()


def _make_entry(shown: str, manifest: Path, data: bytes, layers: _Layers) -> ModelEntry:
    texts = {
        kind: "\n".join(parts) for kind, parts in layers.texts.items() if kind in ("system", "template", "license")
    }
    template = texts.pop("template", "")
    if "{{" in template and not is_go_template(template):
        texts["template"] = template
    data_of = {kind: json.loads(layers.texts[kind][0]) for kind in ("params", "messages") if kind in layers.texts}
    return ModelEntry(
        name=shown,
        source="ollama",
        files=layers.model,
        size_bytes=size_of((*layers.model, *layers.projector[:1])),
        digest=hashlib.sha256(data).hexdigest(),
        files_digest=digest_of(layers.model),
        modified=datetime.fromtimestamp(manifest.stat().st_mtime, UTC),
        mmproj=next(iter(layers.projector), None),
        **check_overrides({**texts, "parameters": data_of.get("params"), "messages": data_of.get("messages")}),
    )
