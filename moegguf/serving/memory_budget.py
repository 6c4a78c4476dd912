"""How much memory a model needs, and which idle models to unload so that it fits. Arithmetic only; no processes.

Sizes are those of `moegguf.engine.plan`, computed from the model's headers before anything is loaded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.engine.machine import Memory, read_memory
from moegguf.engine.memory import choose_context, pooling_batch_tokens
from moegguf.engine.plan import Plan, make_plan, margin_bytes
from moegguf.errors import BudgetError
from moegguf.gguf.reader import ggml_type
from moegguf.models.details import layout_of, projector_of
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, format_bytes, parse_expert_cache
from moegguf.serving.events import LoadOverrides
from moegguf.serving.wire import LoadConfig
from moegguf.settings import Settings, read_environment

DEFAULT_BATCH_TOKENS = 512
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class ModelSize:
    """Memory of a model: all that it can use, and the minimum. `plan_within(n_bytes)` plans for a number of bytes
    between the two; `load_config(plan)` is what the worker gets."""

    wanted_bytes: int
    minimum_bytes: int
    plan_within: Callable[[int], Plan]
    load_config: Callable[[Plan], LoadConfig]


Measure = Callable[[ModelEntry, LoadOverrides, Settings, int], ModelSize]
"""The signature of `measure`, which tests replace."""


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one model. `idle`: it may be unloaded; `stopping`: it is being unloaded."""

    name: str
    size_bytes: int
    idle: bool
    stopping: bool = False


@dataclass(frozen=True)
class Admission:
    """Reserve `reserve_bytes` and load; or unload the models in `unload` first; or, with neither, wait until others
    are idle."""

    reserve_bytes: int = 0
    unload: tuple[str, ...] = ()


def admit(
    size: ModelSize, limit_bytes: int, models: Sequence[MemoryUse], max_models: int | None = None, name: str = ""
) -> Admission:
    """Decides whether a model fits in `limit_bytes` beside `models`, given least recently used first.

    Raises BudgetError when it would not fit without any other model.
    """
    if size.minimum_bytes > limit_bytes:
        raise BudgetError(
            f"{name!r} needs at least {format_bytes(size.minimum_bytes)}, but all models together may take"
            f" {format_bytes(limit_bytes)}; lower num_ctx, close other programs, or set MOEGGUF_MEMORY."
        )
    free_bytes = limit_bytes - sum(m.size_bytes for m in models)
    n_free = (max_models or _UNLIMITED) - len(models)
    unload: list[str] = []
    for model in models:
        if n_free > 0 and free_bytes >= size.wanted_bytes:
            break
        if model.idle or model.stopping:
            free_bytes, n_free = free_bytes + model.size_bytes, n_free + 1
            unload.append(model.name)
    if n_free <= 0 or free_bytes < size.minimum_bytes:
        return Admission()
    if unload:
        return Admission(unload=tuple(unload))
    return Admission(reserve_bytes=min(free_bytes, size.wanted_bytes))


class MemoryLimit:
    """The bytes that all models together may take: the setting, or else the memory that was free at construction,
    less what other programs have taken since."""

    def __init__(self, settings: Settings, memory: Callable[[], Memory] = read_memory) -> None:
        self._memory = memory
        self._setting_bytes = settings.memory_bytes
        self._free_at_start_bytes = _without_margin(memory().available_bytes)

    def bytes(self, used_bytes: int) -> int:
        """The current limit, while models take `used_bytes`."""
        if self._setting_bytes is not None:
            return self._setting_bytes
        return min(self._free_at_start_bytes, _without_margin(self._memory().available_bytes) + used_bytes)


def _without_margin(n_bytes: int) -> int:
    return max(0, n_bytes - margin_bytes(n_bytes))


def measure(entry: ModelEntry, overrides: LoadOverrides, settings: Settings, limit_bytes: int) -> ModelSize:
    """The memory that `entry` needs when loaded with `overrides`. Reads headers: call it from a thread.

    Raises ModelFormatError, ModelNotFoundError, BudgetError, OptionError.
    """
    layout = layout_of(entry.path)
    flash_attn = bool(settings.flash_attention) or settings.kv_cache_type != "f16"
    kv_type = ggml_type(settings.kv_cache_type) if settings.kv_cache_type != "f16" else None
    limit = Memory(limit_bytes, limit_bytes, "the models' budget")
    n_ctx = choose_context(layout, overrides.n_ctx or settings.n_ctx, limit)
    embedding = is_embedding(layout.metadata)
    n_batch, n_ubatch = _batch_sizes(overrides, n_ctx, embedding)
    projector = projector_of(entry)
    options: dict[str, Any] = {"n_ctx": n_ctx, "n_ubatch": n_ubatch, "flash_attn": flash_attn, "projector": projector}
    if kv_type is not None:
        options |= {"type_k": kv_type, "type_v": kv_type}

    def plan(cache: ExpertCache) -> Plan:
        return make_plan(layout, cache, Memory(_UNLIMITED, _UNLIMITED, "nothing"), **options)

    def load_config(chosen: Plan) -> LoadConfig:
        return LoadConfig(
            name=entry.name,
            path=str(entry.path),
            mmproj=str(projector.path) if projector else None,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=overrides.n_threads,
            expert_cache_bytes=chosen.budget_bytes if layout.is_moe else None,
            type_k=kv_type,
            type_v=kv_type,
            flash_attn=flash_attn,
            embedding=embedding,
            verbose=settings.debug,
        )

    wanted = plan(parse_expert_cache(overrides.expert_cache or read_environment().expert_cache))
    if not layout.is_moe:
        return ModelSize(wanted.total_bytes, wanted.total_bytes, lambda _: wanted, load_config)
    plans = _PlansBySlots(plan, wanted.n_slots, wanted.slot_bytes)
    minimum_bytes = min(plans.plan(layout.n_expert_used).total_bytes, wanted.total_bytes)
    return ModelSize(wanted.total_bytes, minimum_bytes, plans.largest_within, load_config)


class _PlansBySlots:
    """Plans by number of slots, at most `max_slots`; more slots never need less memory."""

    def __init__(self, plan: Callable[[ExpertCache], Plan], max_slots: int, slot_bytes: int) -> None:
        self._plan, self._max_slots, self._slot_bytes = plan, max_slots, slot_bytes

    def plan(self, n_slots: int) -> Plan:
        return self._plan(ExpertCache("bytes", n_bytes=n_slots * self._slot_bytes))

    def largest_within(self, n_bytes: int) -> Plan:
        n_fitting = bisect_right(range(self._max_slots + 1), n_bytes, key=self._total_bytes)
        return self.plan(max(0, n_fitting - 1))

    def _total_bytes(self, n_slots: int) -> int:
        try:
            return self.plan(n_slots).total_bytes
        except BudgetError:  # fewer slots than one token needs
            return 0


def _batch_sizes(overrides: LoadOverrides, n_ctx: int, embedding: bool) -> tuple[int, int]:
    """(n_batch, n_ubatch). A model that pools needs all tokens of a text in one pass."""
    default = pooling_batch_tokens(n_ctx) if embedding else DEFAULT_BATCH_TOKENS
    n_batch = overrides.n_batch or default
    return n_batch, n_batch if embedding else min(DEFAULT_BATCH_TOKENS, n_batch)


def is_embedding(metadata: Mapping[str, Any]) -> bool:
    """Whether the model is an embedding model: its GGUF header has a pooling type."""
    return bool(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))
