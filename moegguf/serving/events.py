"""Plain data: the events of an answer, the state of loaded models, and snapshots of their experts.

The events of an answer are `PromptProgress` and `Delta` of `moegguf.generate.request`, and one `Done` at the end.
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
    """Load options of a request or of a model's name. None stands for the server's setting."""

    n_ctx: int | None = None
    n_batch: int | None = None
    n_threads: int | None = None
    expert_cache: str | None = None
    draft: str | None = None
    mirror: Sequence[str] | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> LoadOverrides:
        """Converts load options with Ollama's names. None, 0 and a missing option stand for the server's setting."""
        known = {ours: parameters.get(name) for name, ours in LOAD_PARAMETERS.items()}
        return cls(**{f.name: known[f.name] or None for f in fields(cls)})

    def with_defaults(self, defaults: LoadOverrides) -> LoadOverrides:
        """Returns a copy in which options that are None come from `defaults`."""
        missing = {name: value for name, value in vars(defaults).items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True)
class Done:
    """The last event of an answer."""

    summary: AnswerSummary
    load_s: float  # seconds for loading the model for this request; 0 if it was already loaded
    decisions: Mapping[str, Any] = field(default_factory=dict)  # `Llama.decisions`


Event = PromptProgress | Delta | Done


@dataclass(frozen=True)
class LoadedName:
    """A name that uses a loaded model. Several names may use one model."""

    name: str
    digest: str
    expires: datetime | None  # time (aware UTC) at which the name stops using the model if it stays idle; None: never


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. Sizes in bytes are planned sizes."""

    name: str  # the first of `names`
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
    n_parallel: int = 1  # requests that the model can answer at once
    n_answering: int = 0  # requests that the model is answering now
    last_answer_tokens: int = 0  # tokens of the last answer to the owner who reads this state
    last_answer_s: float = 0.0  # seconds from the first to the last token of this answer


@dataclass(frozen=True)
class Snapshot:
    """The state of all experts of a loaded model. A client that shows the experts reads it a few times per second.

    `state`, `uses` and `loads` have one number for each expert, layer by layer. With the setting `tells_clients_apart`
    they count only the requests of one client (`ExpertUses`). In snapshots from `since`, uses and loads are uint8.
    """

    model: str
    layers: tuple[int, ...]  # numbers (il) of the layers that have experts
    n_expert: int
    state: bytes  # 0 on disk, 1 loading, 2 in RAM, 3 in VRAM (`moegguf.engine.session.Place`)
    uses: bytes  # uint32: uses of each expert since the model was loaded
    loads: bytes  # uint32: loads of each expert into a slot since the model was loaded
    stats: Stats
    busy: bool
    seconds: float  # time since the model was loaded
    answer_tokens: int = 0  # tokens of all answers since the model was loaded
    tokens_per_s: float = 0.0  # speed of all answers together, 0 when idle

    def since(self, before: Snapshot | None) -> Snapshot:
        """Returns a copy with the uses and loads (255 or less) since an earlier snapshot, and the speed since then.

        If `before` is None, or was taken before the model was loaded again, the copy has no uses and loads.
        """
        import numpy as np

        if before is None or before.layers != self.layers or before.seconds > self.seconds:
            before = self
        pairs = ((getattr(self, name), getattr(before, name)) for name in ("uses", "loads"))
        counts = (np.frombuffer(now, np.uint32) - np.frombuffer(then, np.uint32) for now, then in pairs)
        uses, loads = (np.minimum(each, 255).astype(np.uint8).tobytes() for each in counts)
        speed = (self.answer_tokens - before.answer_tokens) / max(self.seconds - before.seconds, 1e-3)
        return replace(self, uses=uses, loads=loads, tokens_per_s=max(0.0, speed))
