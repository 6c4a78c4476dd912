"""How much memory a model needs, and which idle models to unload so that it fits. Arithmetic only; no processes.

Sizes are those of `moegguf.engine.plan`, computed from the model's headers before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS, layer_slots
from moegguf.engine.machine import Memory, read_memory
from moegguf.engine.memory import choose_context, choose_kv_tokens, margin_bytes, pad_context, pooling_batch_tokens
from moegguf.engine.plan import Plan, given_bytes, make_plan
from moegguf.engine.sequences import sequences_of
from moegguf.errors import BudgetError
from moegguf.gguf.reader import ggml_type
from moegguf.models.details import layout_of, projector_of
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, format_bytes, parse_expert_cache
from moegguf.serving.events import LoadOverrides
from moegguf.serving.wire import LoadConfig
from moegguf.settings import Settings, read_environment

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class ModelSize:
    """Memory of a model: all that it can use, and the minimum. `plan_within(n_bytes)` plans for a number of bytes
    between the two; `load_config(plan)` is what the worker gets. `default_n_ctx`: the context without overrides."""

    wanted_bytes: int
    minimum_bytes: int
    plan_within: Callable[[int], Plan]
    load_config: Callable[[Plan], LoadConfig]
    default_n_ctx: int = 0


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


def admit(size: ModelSize, limit_bytes: int, models: Sequence[MemoryUse], max_models: int | None = None) -> Admission:
    """Decides whether a model fits in `limit_bytes` beside `models`, given least recently used first.

    Raises BudgetError when it would not fit without any other model.
    """
    if size.minimum_bytes > limit_bytes:
        raise BudgetError(
            f"the model needs at least {format_bytes(size.minimum_bytes)}, but all models together may take"
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


def expert_cache_within(cache: ExpertCache, n_experts: int, slot_bytes: int, reserved_bytes: int) -> int:
    """Bytes of whole slots that `cache` asks for, one at least, and at most those that were reserved when the model was
    loaded; "auto" asks for all of them.

    Raises BudgetError for a model without experts.
    """
    if not slot_bytes:
        raise BudgetError("the model has no experts, so there is no budget for them.")
    asked = {"auto": reserved_bytes, "fraction": int(cache.fraction * n_experts) * slot_bytes, "bytes": cache.n_bytes}
    return max(1, min(asked[cache.mode], reserved_bytes) // slot_bytes) * slot_bytes


def _without_margin(n_bytes: int) -> int:
    return max(0, n_bytes - margin_bytes(n_bytes))


def measure(entry: ModelEntry, overrides: LoadOverrides, settings: Settings, limit_bytes: int) -> ModelSize:
    """The memory that `entry` needs when loaded with `overrides`. Reads headers: call it from a thread.

    Raises ModelFormatError, ModelNotFoundError, BudgetError, OptionError.
    """
    layout = layout_of(entry.path)
    flash_attn = bool(settings.flash_attention) or settings.kv_cache_type != "f16"
    kv_type = ggml_type(settings.kv_cache_type) if settings.kv_cache_type != "f16" else None
    projector = projector_of(entry)
    cache = parse_expert_cache(overrides.expert_cache or read_environment().expert_cache)
    options: dict[str, Any] = {"flash_attn": flash_attn}
    if kv_type is not None:
        options |= {"type_k": kv_type, "type_v": kv_type}
    free_bytes = limit_bytes - (projector.total_bytes if projector else 0)
    if settings.n_ctx:
        default_n_ctx = pad_context(settings.n_ctx)
    else:
        default_n_ctx = choose_context(layout, free_bytes, DEFAULT_UBATCH_TOKENS, **options)
    n_ctx = pad_context(overrides.n_ctx) if overrides.n_ctx else default_n_ctx
    n_seq_max = sequences_of(layout, n_ctx, settings.n_parallel)
    kv_tokens = n_ctx
    if n_seq_max > 1:
        chosen_tokens = settings.kv_tokens or choose_kv_tokens(
            layout,
            free_bytes,
            DEFAULT_UBATCH_TOKENS,
            n_ctx,
            n_seq_max,
            pool_bytes=given_bytes(layout, cache),
            **options,
        )
        kv_tokens = pad_context(max(n_ctx, min(chosen_tokens, n_seq_max * n_ctx)))
    embedding = is_embedding(layout.metadata)
    n_batch = overrides.n_batch or (pooling_batch_tokens(n_ctx) if embedding else DEFAULT_UBATCH_TOKENS)
    options |= {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_batch if embedding else None, "margin": 0}
    options |= {"projector": projector, "kv_tokens": kv_tokens}

    def plan(cache: ExpertCache, n_bytes: int = _UNLIMITED, **others: Any) -> Plan:
        return make_plan(layout, cache, Memory(n_bytes, n_bytes, "the models' budget"), **options | others)

    def load_config(chosen: Plan) -> LoadConfig:
        return LoadConfig(
            name=entry.name,
            path=str(entry.path),
            mmproj=str(projector.path) if projector else None,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            kv_tokens=kv_tokens,
            schedule=settings.schedule,
            n_batch=n_batch,
            n_ubatch=chosen.n_ubatch,
            n_threads=overrides.n_threads,
            expert_cache_bytes=chosen.budget_bytes if layout.is_moe else None,
            type_k=kv_type,
            type_v=kv_type,
            flash_attn=flash_attn,
            embedding=embedding,
            verbose=settings.debug,
        )

    wanted = plan(cache)
    if not layout.is_moe:
        return ModelSize(wanted.total_bytes, wanted.total_bytes, lambda _: wanted, load_config, default_n_ctx)
    least_tokens = max(1, projector.one_pass_tokens if projector else 1)
    n_least = layer_slots(layout, least_tokens, wanted.streams)
    n_ubatch = options["n_ubatch"] or least_tokens
    least = plan(ExpertCache("bytes", n_bytes=n_least * wanted.slot_bytes), n_ubatch=n_ubatch)
    most = ExpertCache("auto", n_bytes=wanted.budget_bytes)

    def plan_within(n_bytes: int) -> Plan:
        return plan(most, n_bytes) if n_bytes > least.total_bytes else least

    minimum_bytes = min(least.total_bytes, wanted.total_bytes)
    return ModelSize(wanted.total_bytes, minimum_bytes, plan_within, load_config, default_n_ctx)


def is_embedding(metadata: Mapping[str, Any]) -> bool:
    """Whether the model is an embedding model: its GGUF header has a pooling type."""
    return bool(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))
