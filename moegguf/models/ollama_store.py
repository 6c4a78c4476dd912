"""Models in Ollama's stores on this machine, which are read and never written.

Layout of an Ollama store: `manifests/<host>/<namespace>/<model>/<tag>` lists layers by digest, `blobs/sha256-<hex>` has
their bytes. Manifests that are damaged, lead out of the store or cannot be run (adapters, cloud models) are left out.
Go templates are left out, too: the model's own is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from moegguf.errors import MoeggufError
from moegguf.models.blobs import blob_name
from moegguf.models.entry import ModelEntry, size_of, weights_digest
from moegguf.models.names import OLLAMA_HOST, Name, name_or_none, parse_name
from moegguf.models.recipe import check_overrides, is_go_template

MAX_LAYER_BYTES = 4 << 20  # of the layers that are text
_KIND = "application/vnd.ollama.image."
SYSTEM_FOLDER = Path("/usr/share/ollama/.ollama/models")


def ollama_folders() -> list[Path]:
    """OLLAMA_MODELS, or Ollama's default folders when it is not set."""
    named = os.environ.get("OLLAMA_MODELS", "")
    return [Path(named).expanduser()] if named else [Path("~/.ollama/models").expanduser(), SYSTEM_FOLDER]


def ollama_models(text: str | None = None) -> Iterator[ModelEntry]:
    """All models in the stores that can be run; with `text` those that Ollama would run under this name: without a host
    one of Ollama's library; `user/model` may also be one of Ollama's users."""
    keys = None
    if text is not None:
        if (name := name_or_none(text)) is None:
            return
        names = [replace(name, host=name.host or OLLAMA_HOST, namespace=name.namespace or "library")]
        keys = {each.key for each in (*names, *([replace(name, host=OLLAMA_HOST)] if name.is_hub else []))}
    for folder in ollama_folders():
        yield from OllamaStore(folder).entries(keys)


class OllamaStore:
    """The store in `folder`, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self, keys: Collection[str] | None = None) -> Iterator[ModelEntry]:
        """The models that can be run; only those whose names have one of `keys` where these are given."""
        root = self.folder / "manifests"
        for manifest in sorted(root.glob("*/*/*/*")):
            name = Name(*manifest.relative_to(root).parts)
            if keys is None or name.key in keys:
                with suppress(OSError, MoeggufError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    yield self._entry(manifest, name)

    def blob(self, digest: str) -> Path:
        """The file of a digest. Raises ModelNameError, OSError when it is missing or outside the store."""
        return self._inside(self.folder / "blobs" / blob_name(digest))

    def _inside(self, path: Path) -> Path:
        real = path.resolve(strict=True)
        if not real.is_relative_to(self.folder.resolve()) or not real.is_file():
            raise FileNotFoundError(str(path))
        return path

    def _entry(self, manifest: Path, name: Name) -> ModelEntry:
        """The model of a manifest. Raises the errors that `entries` ignores when it cannot be run."""
        shown, data = _display_name(name), _read(self._inside(manifest))
        files: dict[str, list[Path]] = {"model": [], "projector": [], "adapter": []}
        parts: dict[str, list[str]] = {}
        for layer in json.loads(data)["layers"]:
            kind = str(layer["mediaType"]).removeprefix(_KIND)
            path = self.blob(layer["digest"])
            if kind in files and path.stat().st_size != layer["size"]:
                raise ValueError(kind)
            if kind in files:
                files[kind].append(path)
            else:
                parts.setdefault(kind, []).append(_read(path).decode("utf-8", "replace"))
        (model,) = files["model"]
        mmproj = next(iter(files["projector"]), None)
        adapter = files["adapter"][0] if files["adapter"] else None
        if len(files["adapter"]) > 1:
            raise ValueError("adapters")
        texts = {kind: "\n".join(each) for kind, each in parts.items()}
        template = texts.get("template", "")
        overrides = {
            "system": texts.get("system"),
            "template": template if "{{" in template and not is_go_template(template) else None,
            "license": texts.get("license"),
            "parameters": json.loads(parts["params"][0]) if "params" in parts else None,
            "messages": json.loads(parts["messages"][0]) if "messages" in parts else None,
        }
        return ModelEntry(
            name=shown,
            source="ollama",
            files=(model,),
            size_bytes=size_of((model, *filter(None, (mmproj, adapter)))),
            digest=hashlib.sha256(data).hexdigest(),
            files_digest=weights_digest((model,), adapter),
            modified=datetime.fromtimestamp(manifest.stat().st_mtime, UTC),
            mmproj=mmproj,
            adapter=adapter,
            **check_overrides(overrides),
        )


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
