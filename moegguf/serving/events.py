"""What a worker tells while it loads and answers, and what is known of a loaded model. Plain data.

Besides these, an answer's events are `moegguf.generate.request`'s `PromptProgress`, `Delta` and, last, `Done`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from moegguf.engine.stats import Stats
from moegguf.generate.request import Delta, PromptProgress, Timing


@dataclass(frozen=True)
class LoadOptions:
    """How a model is opened. None: as the settings of the server say."""

    n_ctx: int | None = None
    n_batch: int | None = None
    n_threads: int | None = None
    expert_cache: str | None = None


@dataclass(frozen=True)
class Loading:
    """A share of the weights has been read."""

    share: float


@dataclass(frozen=True)
class Done:
    """The answer has ended. `load_s`: what loading the model took for this request, 0 when it was there."""

    timing: Timing
    load_s: float


Event = Loading | PromptProgress | Delta | Done


@dataclass(frozen=True)
class Loaded:
    """A model in memory. Sizes in bytes, as planned: all of it, and what lies on a GPU. `expires`: when it leaves if
    nobody asks (aware UTC); None: never. `queue`: requests that wait for it. `stats`: since it was loaded."""

    name: str
    digest: str
    pid: int
    n_ctx: int
    size_bytes: int
    vram_bytes: int
    expires: datetime | None
    busy: bool
    stopping: bool
    queue: int
    n_requests: int
    stats: Stats
    plan: Mapping[str, Any] = field(default_factory=dict)  # moegguf.engine.plan.Plan as JSON, without `expected`
    decisions: Mapping[str, Any] = field(default_factory=dict)  # Llama.decisions()


@dataclass(frozen=True)
class Snapshot:
    """A look at the experts of a loaded model, a few times a second while someone watches.

    Per layer with experts (`layers`: their il) and expert, row by row: `state` 0 absent, 1 on its way, 2 there;
    `uses` and `loads` since the view before, at most 255. `stats` since load; `tokens_per_s` of the answer being
    written, 0 when idle.
    """

    model: str
    layers: tuple[int, ...]
    n_expert: int
    state: bytes
    uses: bytes
    loads: bytes
    stats: Stats
    busy: bool
    tokens_per_s: float
    seconds: float  # since load
