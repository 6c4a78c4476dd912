"""Events of an answer, state of loaded models and snapshots of their experts. Plain data.

An answer's events are `moegguf.generate.request`'s `PromptProgress` and `Delta`, then one `Done`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from moegguf.engine.stats import Stats
from moegguf.generate.request import AnswerSummary, Delta, PromptProgress
from moegguf.options import LOAD_PARAMETERS


@dataclass(frozen=True)
class LoadOverrides:
    """How a model is loaded. None: the server's setting."""

    n_ctx: int | None = None
    n_batch: int | None = None
    n_threads: int | None = None
    expert_cache: str | None = None
    draft: str | None = None
    mirror: Sequence[str] | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> LoadOverrides:
        """Those among Ollama's options; None and 0 mean the server's setting."""
        known = {ours: parameters.get(name) for name, ours in LOAD_PARAMETERS.items()}
        return cls(**{f.name: known[f.name] or None for f in fields(cls)})

    def with_defaults(self, defaults: LoadOverrides) -> LoadOverrides:
        """These, with those of `defaults` where they are None."""
        missing = {name: value for name, value in vars(defaults).items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True)
class Done:
    """The end of an answer. `load_s`: time that loading took for this request, 0 when the model was loaded already.
    `decisions`: those of the model (`Llama.decisions`)."""

    summary: AnswerSummary
    load_s: float
    decisions: Mapping[str, Any] = field(default_factory=dict)


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
    """A model in memory. Sizes in bytes, as planned: in total, and the part on GPUs. `name`: the first of the `names`
    that use it. `expires`: when it is unloaded if it stays idle (aware UTC); None: never. `queue`: number of waiting
    requests. `stats`: since it was loaded. `expert_cache_bytes`, `vram_cache_bytes`: for experts in RAM, and on GPUs,
    of the total. `n_parallel`: requests that it answers at once, `n_answering`: now. `last_answer_tokens`,
    `last_answer_s`: of the client's answer that ended last, as its `AnswerSummary` has them."""

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
    plan: Mapping[str, Any] = field(default_factory=dict)  # moegguf.engine.plan.Plan as JSON
    decisions: Mapping[str, Any] = field(default_factory=dict)  # Llama.decisions()
    names: tuple[LoadedName, ...] = ()
    expert_cache_bytes: int = 0
    vram_cache_bytes: int = 0
    n_parallel: int = 1
    n_answering: int = 0
    last_answer_tokens: int = 0
    last_answer_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """State of all experts of a loaded model, which a client that watches asks for a few times a second.

    Where clients are told apart, `state`, `uses` and `loads` are those of the client's own requests (`ExpertUses`). Per
    layer with experts (`layers`: their il) and expert, row by row: `state` 0 on disk, 1 loading, 2 in RAM, 3 in
    VRAM (`moegguf.engine.session.Place`); `uses` and `loads` since the load, 4 bytes each; of `since`, 1 byte each.
    `stats`, `answer_tokens` and `seconds` since the load; `tokens_per_s` of all answers together, 0 when idle.
    """

    model: str
    layers: tuple[int, ...]
    n_expert: int
    state: bytes
    uses: bytes
    loads: bytes
    stats: Stats
    busy: bool
    seconds: float
    answer_tokens: int = 0
    tokens_per_s: float = 0.0

    def since(self, before: Snapshot | None) -> Snapshot:
        """With the uses and loads since an earlier snapshot, at most 255, and the speed; nothing since None, or since
        one of an earlier load."""
        import numpy as np

        if before is None or before.layers != self.layers or before.seconds > self.seconds:
            before = self
        pairs = ((getattr(self, name), getattr(before, name)) for name in ("uses", "loads"))
        counts = (np.frombuffer(now, np.uint32) - np.frombuffer(then, np.uint32) for now, then in pairs)
        uses, loads = (np.minimum(each, 255).astype(np.uint8).tobytes() for each in counts)
        speed = (self.answer_tokens - before.answer_tokens) / max(self.seconds - before.seconds, 1e-3)
        return replace(self, uses=uses, loads=loads, tokens_per_s=max(0.0, speed))
