"""Models that Ollama has on this machine, read and never written.

Layout of an Ollama store: `manifests/<host>/<namespace>/<model>/<tag>` lists layers by digest, `blobs/sha256-<hex>` has
their bytes. Whatever is damaged, leads out of the store or cannot be run as it is meant (adapters, models in the cloud)
is left out. Templates in Go's language are left out, too: the model's own is used.
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
from moegguf.models.entry import Entry
from moegguf.models.names import OLLAMA_HOST, Name, parse_name
from moegguf.models.recipe import check_messages, check_parameters, check_text, is_go_template

MAX_LAYER_BYTES = 4 << 20  # of the layers that are text
_KIND = "application/vnd.ollama.image."
SYSTEM_FOLDER = Path("/usr/share/ollama/.ollama/models")


def ollama_folders() -> list[Path]:
    """OLLAMA_MODELS, or where Ollama keeps models when it is not set."""
    named = os.environ.get("OLLAMA_MODELS", "")
    return [Path(named).expanduser()] if named else [Path("~/.ollama/models").expanduser(), SYSTEM_FOLDER]


def ollama_models() -> Iterator[Entry]:
    """Everything in the stores of this machine that can be used."""
    for folder in ollama_folders():
        yield from OllamaStore(folder).entries()


def find_in_ollama(name: Name) -> Entry | None:
    """The model that Ollama would run under this name."""
    for folder in ollama_folders():
        if found := OllamaStore(folder).find(name):
            return found
    return None


@dataclass(frozen=True)
class _Layers:
    """A manifest's layers by kind: files, and texts."""

    model: tuple[Path, ...]
    projector: tuple[Path, ...]
    texts: dict[str, list[str]]


class OllamaStore:
    """The store in `folder`, which need not be there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self) -> Iterator[Entry]:
        for manifest in sorted(self.folder.glob("manifests/*/*/*/*")):
            host, namespace, model, tag = manifest.relative_to(self.folder / "manifests").parts
            if entry := self._entry(manifest, Name(host, namespace, model, tag)):
                yield entry

    def find(self, name: Name) -> Entry | None:
        """A name without a host is one of Ollama's library, and `user/model` may be one of its users'."""
        wanted = {(name.host or OLLAMA_HOST, name.namespace or "library", name.model, name.tag)}
        if name.is_hub:
            wanted.add((OLLAMA_HOST, name.namespace, name.model, name.tag))
        keys = {tuple(part.lower() for part in parts) for parts in wanted}
        for manifest in sorted(self.folder.glob("manifests/*/*/*/*")):
            parts = manifest.relative_to(self.folder / "manifests").parts
            if tuple(part.lower() for part in parts) in keys and (entry := self._entry(manifest, Name(*parts))):
                return entry
        return None

    def blob(self, digest: str) -> Path:
        """The file of a digest. Raises ModelNameError for no digest, OSError when it is missing or leads away."""
        return self._inside(self.folder / "blobs" / blob_name(digest))

    def _inside(self, path: Path) -> Path:
        real = path.resolve(strict=True)
        if not real.is_relative_to(self.folder.resolve()) or not real.is_file():
            raise FileNotFoundError(str(path))
        return path

    def _entry(self, manifest: Path, name: Name) -> Entry | None:
        with suppress(OSError, MoeggufError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            shown = _shown(name)
            data = _read(self._inside(manifest))
            layers = self._layers(json.loads(data)["layers"])
            return _made(shown, manifest, data, layers)
        return None

    def _layers(self, listed: list[dict[str, Any]]) -> _Layers:
        """Raises ValueError when the layers are not a model that can be run."""
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


def _shown(name: Name) -> str:
    """As Ollama lists it. Raises ModelNameError for a folder that is no name."""
    full = parse_name(f"{name.host}/{name.namespace}/{name.model}:{name.tag}")
    if full.host != OLLAMA_HOST:
        return full.canonical
    short = f"{full.model}:{full.tag}"
    return short if full.namespace == "library" else f"{full.namespace}/{short}"


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_LAYER_BYTES:
        raise ValueError("too large")
    return path.read_bytes()


def _made(shown: str, manifest: Path, data: bytes, layers: _Layers) -> Entry:
    texts = layers.texts
    template = "\n".join(texts.get("template", [])) or None
    files = (*layers.model, *layers.projector[:1])
    return Entry(
        name=shown,
        source="ollama",
        files=layers.model,
        size_bytes=sum(path.stat().st_size for path in files),
        digest=hashlib.sha256(data).hexdigest(),
        modified=datetime.fromtimestamp(manifest.stat().st_mtime, UTC),
        mmproj=next(iter(layers.projector), None),
        system=check_text("system", "\n".join(texts["system"])) if "system" in texts else None,
        template=None if template is None or is_go_template(template) or "{{" not in template else template,
        parameters=check_parameters(json.loads(texts["params"][0]), quiet=True) if "params" in texts else {},
        messages=check_messages(json.loads(texts["messages"][0])) if "messages" in texts else (),
        license=check_text("license", "\n".join(texts["license"])) if "license" in texts else None,
    )
