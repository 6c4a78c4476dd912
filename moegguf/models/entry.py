"""A model by name, and what is told about it without running it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

Source = Literal["demo", "path", "folder", "hub", "ollama", "own"]


@dataclass(frozen=True)
class Entry:
    """One name and what it stands for.

    `name` is canonical and has a tag ("demo:latest", "hf.co/user/repo:Q4_K_M"). `files`: the shards, first one first.
    `digest`: 64 hex digits, the same as long as the files are. `system`, `template` (Jinja), `parameters` (Ollama's
    option names), `messages`, `license`: what the name adds to the files. `modified` is aware, UTC.
    """

    name: str
    source: Source
    files: tuple[Path, ...]
    size_bytes: int
    digest: str
    modified: datetime
    mmproj: Path | None = None
    system: str | None = None
    template: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    license: str | None = None
    parent: str = ""

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.files[0]


@dataclass(frozen=True)
class Details:
    """What the headers of an entry's files say. `parameter_size` as people write it ("30.5B"), `quantization` as the
    file's main type ("Q4_K_M"). `capabilities`: of completion, tools, thinking, insert, embedding. `metadata`: all
    GGUF keys."""

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


@dataclass(frozen=True)
class PullStatus:
    """A step of a download: Ollama's words, and for a file its digest and bytes (`completed_bytes` None at its
    start)."""

    status: str
    digest: str = ""
    file: str = ""
    total_bytes: int = 0
    completed_bytes: int | None = None
