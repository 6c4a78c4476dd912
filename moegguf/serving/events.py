"""Defines plain data: load options, the state of loaded models, and snapshots of their
experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from moegguf.engine.stats import Stats
from moegguf.options import BUDGETS, load_options_of

if TYPE_CHECKING:
    from moegguf.engine.plan import Plan

LoadOverrides = Mapping[str, Any]
"""{load option: value} of a request or of a model's name. No value is None."""
NO_OVERRIDES: LoadOverrides = MappingProxyType({})


def load_overrides(parameters: Mapping[str, Any]) -> LoadOverrides:
    """Returns the load options in `parameters`, which have Ollama's names. Leaves out
    options with a value of None, 0 or "", and num_gpu, which only a chat without a
    server reads."""
    read = {name: value for name, value in parameters.items() if name != "num_gpu"}
    return load_options_of(read)


@dataclass(frozen=True)
class LoadedName:
    """A name that uses a loaded model. Several names may use one model."""

    name: str
    digest: str
    # Time (aware UTC) at which the name stops using the model if it stays idle; None:
    # never.
    expires: datetime | None


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. Sizes in bytes are planned, not measured."""

    name: str  # first name that uses the model; if there is none, the entry's name
    digest: str
    pid: int
    n_ctx: int
    size_bytes: int  # all memory of the model, in RAM and on GPUs
    vram_bytes: int  # the part of size_bytes on GPUs
    # Time at which the model is unloaded if it stays idle (aware UTC); None: never.
    expires: datetime | None
    busy: bool
    stopping: bool
    queue: int  # number of waiting requests
    n_requests: int
    stats: Stats  # statistics since the model was loaded, as last sent by the worker
    plan: Plan  # the plan with which the model was loaded
    # Value of `Llama.decisions()` that the worker last sent.
    decisions: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[LoadedName, ...] = ()
    # {tier: bytes of its budget now} (`Plan.cache_bytes`); 0 for VRAM: no GPU has slots
    cache_bytes: Mapping[str, int] = field(
        default_factory=lambda: dict.fromkeys(BUDGETS, 0)
    )
    n_parallel: int = 1  # maximum number of requests that the model answers at once
    n_answering: int = 0  # number of granted requests that generate or embed
    # Number of tokens of the last answer to the owner of the current request.
    last_answer_tokens: int = 0
    # Seconds from the end of that answer's prompt to the end of the answer.
    last_answer_s: float = 0.0
    # Counters of all computation during that answer.
    last_answer_stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True)
class Snapshot:
    """The state of all experts of a loaded model.

    `state`, `uses` and `loads` have one number for each expert, layer by layer. With
    the setting `tells_clients_apart` they cover only the requests of one client
    (`ExpertUses`). In snapshots from `since`, uses and loads are uint8.
    """

    model: str
    # Numbers (il) of the layers that have experts; empty: the model has no expert
    # store.
    layers: tuple[int, ...]
    n_expert: int
    # 0 on disk, 1 loading, 2 in RAM, 3 in VRAM (`moegguf.engine.session.Place`).
    state: bytes
    # uint32: look-ups since the model was loaded; layers that hold every expert may
    # count them only while watched
    uses: bytes
    # uint32: number of times that the expert was assigned a slot since the model was
    # loaded.
    loads: bytes
    stats: Stats
    busy: bool
    seconds: float  # time since the model was loaded
    answer_tokens: int = 0  # tokens of all answers since the model was loaded
    tokens_per_s: float = 0.0  # speed of all answers together, which `since` computes

    def since(self, before: Snapshot | None) -> Snapshot:
        """Returns a copy with the uses and loads (255 or less) since an earlier
        snapshot, and the speed since then.

        Uses, loads and speed are 0 if `before` is None, has other layers, or is from an
        earlier load (its `seconds`, tokens or one of its counts are larger).
        """
        import numpy as np

        if before is None or before.layers != self.layers:
            before = self
        now, then = (
            np.frombuffer(each.uses + each.loads, np.uint32).reshape(2, -1)
            for each in (self, before)
        )
        is_later = (
            self.seconds >= before.seconds
            and self.answer_tokens >= before.answer_tokens
        )
        if not is_later or (now < then).any():
            before, then = self, now
        uses, loads = (
            counts.tobytes() for counts in np.minimum(now - then, 255).astype(np.uint8)
        )
        speed = (self.answer_tokens - before.answer_tokens) / max(
            self.seconds - before.seconds, 1e-3
        )
        return replace(self, uses=uses, loads=loads, tokens_per_s=speed)
