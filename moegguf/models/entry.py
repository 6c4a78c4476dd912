"""Data about a named model: its name, the overrides that replace values of its files,
and the sizes and digests of its files. Also defines classes for the facts from the
files' headers, and for the steps of a download."""

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
# Name of a file that is named after its SHA-256.
_CONTENT_ADDRESS = re.compile(r"(?:sha256-)?([0-9a-f]{64})", re.ASCII)

Source = Literal["demo", "path", "folder", "hub", "ollama", "own"]


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The values that a model's name sets in place of those in the model's files. None
    or an empty value keeps the value of the files."""

    system: str | None = None
    template: str | None = None  # chat template in Jinja
    # {name of a Modelfile's PARAMETER: value}.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    license: str | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """Returns the five fields as keyword arguments."""
        return {each.name: getattr(self, each.name) for each in fields(Overrides)}


@dataclass(frozen=True)
class NamedModel(Overrides):
    """A model's name and the overrides that replace values of its files, without the
    paths of the files.

    `name` is canonical and has a tag ("demo:latest", "hf.co/user/repo:Q4_K_M").
    """

    name: str


@dataclass(frozen=True)
class ModelEntry(NamedModel):
    """One name and the model that it stands for on this machine."""

    source: Source
    files: tuple[Path, ...]  # the shards in order
    size_bytes: int
    # hex digits that identify the files and the adapter (`weights_digest`), the same
    # for all names of the files
    weights: str
    # Last change of the first file, manifest or index entry, as an aware datetime in
    # UTC.
    modified: datetime
    mmproj: Path | None = None  # a projector for images
    adapter: Path | None = None  # a LoRA adapter that is loaded with the model
    draft: Path | None = None  # a smaller model that guesses the model's next tokens
    # The name from which this one was created; "": created from files, or not created
    # here.
    parent: str = ""
    missing: tuple[Path, ...] = ()  # shards, and the adapter, that no longer exist

    @property
    def digest(self) -> str:
        """64 hex digits that identify the files and the overrides. Equal to `weights`
        if nothing is overridden."""
        given = {
            name: value
            for name, value in self.overrides.items()
            if value not in (None, (), {})
        }
        if not given:
            return self.weights
        text = json.dumps(
            {"files": self.weights, **given}, sort_keys=True, default=dict
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def path(self) -> Path:
        """The file to open: the first shard."""
        return self.files[0]

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The shards, and the projector, adapter and draft model if there are any."""
        return (*self.files, *filter(None, (self.mmproj, self.adapter, self.draft)))


@dataclass(frozen=True)
class Details:
    """Facts from the headers of an entry's files."""

    family: str
    parameter_size: str  # abbreviated, such as "30.5B"
    n_parameters: int
    quantization: str  # name of the file type, such as "Q4_K_M"
    n_ctx_train: int
    n_embd: int
    n_expert: int
    n_expert_used: int
    # Some of completion, vision, tools, thinking, insert, embedding, rerank.
    capabilities: tuple[str, ...]
    template: str | None
    # The first file's GGUF key-values, except long values and arrays of strings.
    metadata: Mapping[str, Any]
    # The file's separate template for conversations with tools.
    tool_template: str | None = None


@dataclass(frozen=True)
class PullStatus:
    """A step of a download."""

    status: str  # Ollama's text for the step
    # digest of the file that is fetched; "" for a small file, and for a step without a
    # file.
    digest: str = ""
    file: str = ""
    total_bytes: int = 0
    completed_bytes: int | None = None  # None until bytes of the file were reported


def blob_name(digest: str) -> str:
    """Returns the file name for a digest: "sha256-" and its 64 hex digits in lower
    case. Raises ModelNameError if `digest` is not a SHA-256 digest."""
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ModelNameError(
            f"a digest must be 'sha256:' and 64 hexadecimal digits, but this is {digest!r:.80}."
        )
    return f"sha256-{match[1].lower()}"


def digest_of(files: tuple[Path, ...]) -> str:
    """Returns 64 hex digits that identify the contents of the files. If the name of
    each file, or of the file that it links to, is a SHA-256, these names are used and
    no file is read.

    Otherwise the digest is computed from each file's size, first MiB and last MiB,
    because hashing all of a 200 GB model would take minutes. These parts contain the
    beginning of the header, and weights that differ between training runs. A change
    that affects only the bytes between these parts is not detected. Raises OSError if a
    file cannot be read.
    """
    targets = [os.readlink(path) if path.is_symlink() else str(path) for path in files]
    addresses = [
        _CONTENT_ADDRESS.fullmatch(os.path.basename(target)) for target in targets
    ]
    if all(addresses):
        return combined_digest([address[1] for address in addresses if address])
    return combined_digest(
        [_sample(FileVersion.of(path, path.stat())) for path in files]
    )


def weights_digest(files: tuple[Path, ...], adapter: Path | None) -> str:
    """Returns 64 hex digits that identify the model's files and its adapter, computed
    as in `digest_of`. Raises OSError if a file cannot be read."""
    of_files = digest_of(files)
    return combined_digest([of_files, digest_of((adapter,))]) if adapter else of_files


def combined_digest(digests: list[str]) -> str:
    """Returns one digest for a model, from the digests of its files in order. A single
    file keeps its own digest."""
    return (
        digests[0]
        if len(digests) == 1
        else hashlib.sha256("\n".join(digests).encode()).hexdigest()
    )


def size_of(files: Iterable[Path]) -> int:
    """Returns the total size of these files in bytes. Raises OSError if a file is
    missing."""
    return sum(path.stat().st_size for path in files)


def modified_at(path: Path) -> datetime:
    """Returns the modification time of a file or link. Raises OSError if the file is
    missing."""
    return utc_time(path.lstat().st_mtime)


@lru_cache(maxsize=4096)
def _sample(file: FileVersion) -> str:
    """Returns a digest of a file's size, first MiB and last MiB. Caches the digests of
    the 4096 file versions used last."""
    digest = hashlib.sha256(f"{file.n_bytes}\n".encode())
    with open(file.path, "rb") as stream:
        digest.update(stream.read(SAMPLE_BYTES))
        if file.n_bytes > SAMPLE_BYTES:
            stream.seek(max(SAMPLE_BYTES, file.n_bytes - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
