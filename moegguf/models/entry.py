"""A model by name, what its name adds to its files, and what is known of the files without opening them as models."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from moegguf.errors import ModelNameError
from moegguf.gguf.reader import FileVersion
from moegguf.quantities import utc_time

SAMPLE_BYTES = 1 << 20

_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})", re.ASCII)
_CONTENT_ADDRESS = re.compile(r"(?:sha256-)?([0-9a-f]{64})", re.ASCII)  # a file's name in a store of blobs

Source = Literal["demo", "path", "folder", "hub", "ollama", "own"]


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The additions of a name to the files of its model; None or empty keeps the files' own.

    `template` is Jinja; `parameters` have Ollama's option names.
    """

    system: str | None = None
    template: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    license: str | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """Returns the five fields as keyword arguments."""
        return {each.name: getattr(self, each.name) for each in fields(Overrides)}


@dataclass(frozen=True)
class NamedModel(Overrides):
    """A name and what it adds to its files, wherever these are.

    `name` is canonical and has a tag ("demo:latest", "hf.co/user/repo:Q4_K_M").
    """

    name: str


@dataclass(frozen=True)
class ModelEntry(NamedModel):
    """One name and what it stands for on this machine.

    The shards are in their order; shards in `missing` are no longer there. `weights` has 64 hex digits that change with
    the files (`weights_digest`), so names of one set of files have one value. `modified` is aware, in UTC.
    """

    source: Source
    files: tuple[Path, ...]
    size_bytes: int
    weights: str
    modified: datetime
    mmproj: Path | None = None  # projector for images
    adapter: Path | None = None  # LoRA adapter that the model is loaded with
    draft: Path | None = None  # smaller model that guesses the model's tokens
    parent: str = ""  # name that this one was made from
    missing: tuple[Path, ...] = ()

    @property
    def digest(self) -> str:
        """64 hex digits that change with the files and the overrides; `weights` without overrides."""
        given = {name: value for name, value in self.overrides.items() if value not in (None, (), {})}
        if not given:
            return self.weights
        text = json.dumps({"files": self.weights, **given}, sort_keys=True, default=dict)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.files[0]

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The shards, and the projector, adapter and draft model when there are such."""
        return (*self.files, *filter(None, (self.mmproj, self.adapter, self.draft)))


@dataclass(frozen=True)
class Details:
    """Facts from the headers of an entry's files.

    `parameter_size` is abbreviated ("30.5B"), `quantization` the file's main type ("Q4_K_M"). `capabilities`: of
    completion, vision, tools, thinking, insert, embedding, rerank. `metadata`: all GGUF keys. `tool_template`: the
    template of conversations with tools where the file has one for them.
    """

    family: str
    parameter_size: str
    n_parameters: int
    quantization: str
    n_ctx_train: int
    n_embd: int
    n_expert: int
    n_expert_used: int
    capabilities: tuple[str, ...]
    template: str | None
    metadata: Mapping[str, Any]
    tool_template: str | None = None


@dataclass(frozen=True)
class PullStatus:
    """A step of a download: Ollama's text, and for a file its digest and bytes (`completed_bytes` None at first)."""

    status: str
    digest: str = ""
    file: str = ""
    total_bytes: int = 0
    completed_bytes: int | None = None


def blob_name(digest: str) -> str:
    """The file name of a digest, "sha256-<hex>"; nothing else builds one. Raises ModelNameError for what is no
    digest."""
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ModelNameError(f'a digest is "sha256:" and 64 hexadecimal digits, but this is {digest!r:.80}.')
    return f"sha256-{match[1].lower()}"


def digest_of(files: tuple[Path, ...]) -> str:
    """64 hex digits that change with the files: their SHA-256, where a file or the one it links to is named by it.

    Else over each file's size, first and last MiB: the header, and weights that differ between trainings. Hashing all
    of a 200 GB model would take minutes. Raises OSError.
    """
    targets = [os.readlink(path) if path.is_symlink() else str(path) for path in files]
    addresses = [_CONTENT_ADDRESS.fullmatch(os.path.basename(target)) for target in targets]
    if all(addresses):
        return combined_digest([address[1] for address in addresses if address])
    return combined_digest([_sample(FileVersion.of(path, path.stat())) for path in files])


def weights_digest(files: tuple[Path, ...], adapter: Path | None) -> str:
    """64 hex digits that change with what is computed: the files, and an adapter. Raises OSError."""
    of_files = digest_of(files)
    return combined_digest([of_files, digest_of((adapter,))]) if adapter else of_files


def combined_digest(digests: list[str]) -> str:
    """Returns one digest for a model of several files, in their order. A single file keeps its own digest."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def size_of(files: Iterable[Path]) -> int:
    """Bytes of these files on disk. Raises OSError."""
    return sum(path.stat().st_size for path in files)


def modified_at(path: Path) -> datetime:
    """Returns the modification time of a file or link. Raises OSError."""
    return utc_time(path.lstat().st_mtime)


@lru_cache(maxsize=4096)
def _sample(file: FileVersion) -> str:
    """The digest of one file, computed again only when the file has changed."""
    digest = hashlib.sha256(f"{file.n_bytes}\n".encode())
    with open(file.path, "rb") as stream:
        digest.update(stream.read(SAMPLE_BYTES))
        if file.n_bytes > SAMPLE_BYTES:
            stream.seek(max(SAMPLE_BYTES, file.n_bytes - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
