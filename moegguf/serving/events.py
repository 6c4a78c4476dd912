"""Events of an answer, state of loaded models and snapshots of their experts. Plain data.

An answer's events are `moegguf.generate.request`'s `PromptProgress` and `Delta`, then one `Done`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from moegguf.engine.stats import Stats
from moegguf.generate.request import AnswerSummary, Delta, PromptProgress
from moegguf.options import LOAD_PARAMETERS


@dataclass(frozen=True)
class LoadOverrides:
    """Options of a load. None: the server's setting."""

    n_ctx: int | None = None
    n_batch: int | None = None
    n_threads: int | None = None
    expert_cache: str | None = None
    draft: str | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> LoadOverrides:
        """Reads Ollama's options. None and 0 mean the server's setting."""
        known = {ours: parameters.get(name) for name, ours in LOAD_PARAMETERS.items()}
        return cls(**{f.name: known[f.name] or None for f in fields(cls)})

    def with_defaults(self, defaults: LoadOverrides) -> LoadOverrides:
        """Returns a copy in which options that are None come from `defaults`."""
        missing = {name: value for name, value in vars(defaults).items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True)
class Done:
    """The end of an answer."""

    summary: AnswerSummary
    load_s: float  # time that loading took for this request, 0 when the model was loaded already
    decisions: Mapping[str, Any] = field(default_factory=dict)  # `Llama.decisions`


Event = PromptProgress | Delta | Done


@dataclass(frozen=True)
class LoadedName:
    """A name that uses a model in memory, with its digest, and when it gives the model up if it stays unused (aware
    UTC; None: never)."""

    name: str
    digest: str
    expires: datetime | None


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. Sizes are in bytes, as planned."""

    name: str  # the first of the `names` that use the model
    digest: str
    pid: int
    n_ctx: int
    size_bytes: int  # all memory of the model
    vram_bytes: int  # the part of size_bytes on GPUs
    expires: datetime | None  # time at which the model is unloaded if it stays idle (aware UTC); None: never
    busy: bool
    stopping: bool
    queue: int  # number of waiting requests
    n_requests: int
    stats: Stats  # statistics since the load
    plan: Mapping[str, Any] = field(default_factory=dict)  # moegguf.engine.plan.Plan as JSON
    decisions: Mapping[str, Any] = field(default_factory=dict)  # Llama.decisions()
    names: tuple[LoadedName, ...] = ()
    expert_cache_bytes: int = 0  # the part of size_bytes for experts in RAM
    vram_cache_bytes: int = 0  # the part of size_bytes for experts on GPUs
    n_parallel: int = 1  # requests that the model answers at once
    n_answering: int = 0  # requests that it answers now
    last_answer_tokens: int = 0  # tokens of the client's answer that ended last (`AnswerSummary`)
    last_answer_s: float = 0.0  # time of that answer


@dataclass(frozen=True)
class Snapshot:
    """The state of all experts of a loaded model. A client that watches reads it a few times a second.

    `state`, `uses` and `loads` have a number for each expert, layer by layer. With `tells_clients_apart` they count
    only the requests of one client (`ExpertUses`). A snapshot from `since` has uses and loads of 1 byte each.
    """

    model: str
    layers: tuple[int, ...]  # il of the layers with experts
    n_expert: int
    state: bytes  # 0 on disk, 1 loading, 2 in RAM, 3 in VRAM (`moegguf.engine.session.Place`)
    uses: bytes  # uint32 since the load
    loads: bytes  # uint32 since the load
    stats: Stats
    busy: bool
    seconds: float  # time since the load
    answer_tokens: int = 0
    tokens_per_s: float = 0.0  # speed of all answers together, 0 when idle

    def since(self, before: Snapshot | None) -> Snapshot:
        """Returns a copy with the uses and loads since an earlier snapshot, at most 255, and the speed.

        Nothing has changed since None, or since a snapshot of an earlier load.
        """
        import numpy as np

        if before is None or before.layers != self.layers or before.seconds > self.seconds:
            before = self
        pairs = ((getattr(self, name), getattr(before, name)) for name in ("uses", "loads"))
        counts = (np.frombuffer(now, np.uint32) - np.frombuffer(then, np.uint32) for now, then in pairs)
        uses, loads = (np.minimum(each, 255).astype(np.uint8).tobytes() for each in counts)
        speed = (self.answer_tokens - before.answer_tokens) / max(self.seconds - before.seconds, 1e-3)
        return replace(self, uses=uses, loads=loads, tokens_per_s=max(0.0, speed))
