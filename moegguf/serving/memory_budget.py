"""What a model needs in memory, and which idle ones leave so that it fits. Plans and sums; no processes.

Sizes are those of `moegguf.engine.plan`, made from the model's headers before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moegguf.engine.machine import Memory, read_memory
from moegguf.engine.memory import choose_context
from moegguf.engine.plan import MARGIN_BYTES, MARGIN_SHARE, Plan, make_plan
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import GGML_TYPES
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, format_bytes, parse_expert_cache
from moegguf.serving.events import LoadOptions
from moegguf.serving.wire import Order
from moegguf.settings import Settings, read_environment

DEFAULT_BATCH_TOKENS = 512
MOST_POOLED_TOKENS = 2048
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Size:
    """What a model may take: with all it wishes for, and at the least. `plan_within` plans for a number of bytes
    between the two."""

    wanted_bytes: int
    least_bytes: int
    plan_within: Callable[[int], Plan]
    order: Callable[[Plan], Order]


Measure = Callable[[ModelEntry, LoadOptions, Settings, int], Size]
"""`measure`, or what stands for it where there are no models."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that takes memory. `idle`: nobody uses it, so it may leave; `leaving`: it is on its way."""

    name: str
    size_bytes: int
    idle: bool
    leaving: bool = False


@dataclass(frozen=True)
class Admission:
    """Take `take_bytes` now; or first let `leave` go; or, with neither, wait until others are idle."""

    take_bytes: int = 0
    leave: tuple[str, ...] = ()


def admit(
    size: Size, limit_bytes: int, loaded: Sequence[LoadedModel], max_models: int | None = None, name: str = ""
) -> Admission:
    """Whether there is room within `limit_bytes` beside the `tenants`, which come least recently used first.

    Raises BudgetError when there is none even in an empty house.
    """
    if size.least_bytes > limit_bytes:
        raise BudgetError(
            f"{name!r} needs at least {format_bytes(size.least_bytes)}, but all models together may take"
            f" {format_bytes(limit_bytes)}; lower num_ctx, close other programs, or set MOEGGUF_MEMORY."
        )
    free, places = limit_bytes - sum(t.size_bytes for t in loaded), (max_models or _UNLIMITED) - len(loaded)
    leave: list[str] = []
    for model in loaded:
        if places > 0 and free >= size.wanted_bytes:
            break
        if model.idle or model.leaving:
            free, places = free + model.size_bytes, places + 1
            leave.append(model.name)
    if places <= 0 or free < size.least_bytes:
        return Admission()
    if leave:
        return Admission(leave=tuple(leave))
    return Admission(take_bytes=min(free, size.wanted_bytes))


class Limit:
    """The bytes that all models together may take: the setting, or else what was free when this was made and what
    others have left of it since."""

    def __init__(self, settings: Settings, memory: Callable[[], Memory] = read_memory) -> None:
        self._memory = memory
        self._given = settings.memory_bytes
        self._free_at_start = _without_margin(memory().available_bytes)

    def bytes(self, used_bytes: int) -> int:
        """Now, while models have taken `used_bytes`."""
        if self._given is not None:
            return self._given
        return min(self._free_at_start, _without_margin(self._memory().available_bytes) + used_bytes)


def _without_margin(n_bytes: int) -> int:
    return max(0, n_bytes - max(int(n_bytes * MARGIN_SHARE), MARGIN_BYTES))


def measure(entry: ModelEntry, load: LoadOptions, settings: Settings, limit_bytes: int) -> Size:
    """What `entry` needs when loaded as `load` says. Reads headers: call it from a thread.

    Raises ModelFormatError, ModelNotFoundError, BudgetError, OptionError.
    """
    layout = _layout(entry.path)
    flash_attn = bool(settings.flash_attention) or settings.kv_cache_type != "f16"
    kv_type = _ggml_type(settings.kv_cache_type) if settings.kv_cache_type != "f16" else None
    n_ctx = choose_context(layout, load.n_ctx or settings.n_ctx, Memory(limit_bytes, limit_bytes, "the models' budget"))
    embedding = is_embedding(layout.metadata)
    n_batch, n_ubatch = _batches(load, n_ctx, embedding)
    options: dict[str, Any] = {"n_ctx": n_ctx, "n_ubatch": n_ubatch, "flash_attn": flash_attn}
    if kv_type is not None:
        options |= {"type_k": kv_type, "type_v": kv_type}

    def plan(cache: ExpertCache) -> Plan:
        return make_plan(layout, cache, Memory(_UNLIMITED, _UNLIMITED, "nothing"), **options)

    def order(chosen: Plan) -> Order:
        return Order(
            name=entry.name,
            path=str(entry.path),
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=load.n_threads,
            expert_cache_bytes=chosen.budget_bytes if layout.is_moe else None,
            type_k=kv_type,
            type_v=kv_type,
            flash_attn=flash_attn,
            embedding=embedding,
            verbose=settings.debug,
        )

    purpose = plan(parse_expert_cache(load.expert_cache or read_environment().expert_cache))
    if not layout.is_moe:
        return Size(purpose.total_bytes, purpose.total_bytes, lambda _: purpose, order)
    by_slots = _Slots(plan, purpose.n_slots, purpose.slot_bytes)
    least = by_slots.plan(layout.n_expert_used)
    return Size(purpose.total_bytes, min(least.total_bytes, purpose.total_bytes), by_slots.largest_within, order)


class _Slots:
    """Plans by their number of slots; more slots never need less memory."""

    def __init__(self, plan: Callable[[ExpertCache], Plan], n_most: int, slot_bytes: int) -> None:
        self._plan, self._n_most, self._slot_bytes = plan, n_most, slot_bytes

    def plan(self, n_slots: int) -> Plan:
        return self._plan(ExpertCache("bytes", n_bytes=n_slots * self._slot_bytes))

    def largest_within(self, n_bytes: int) -> Plan:
        least, most = 0, self._n_most  # `least` fits, or is not tried
        while least < most:
            middle = -(-(least + most) // 2)
            try:
                fits = self.plan(middle).total_bytes <= n_bytes
            except BudgetError:  # fewer than one token needs
                fits = True
            least, most = (middle, most) if fits else (least, middle - 1)
        return self.plan(least)


def _batches(load: LoadOptions, n_ctx: int, embedding: bool) -> tuple[int, int]:
    """(n_batch, n_ubatch). A model that pools needs all of a text in one pass."""
    n_batch = load.n_batch or (min(n_ctx, MOST_POOLED_TOKENS) if embedding else DEFAULT_BATCH_TOKENS)
    return n_batch, n_batch if embedding else min(DEFAULT_BATCH_TOKENS, n_batch)


def is_embedding(metadata: Mapping[str, Any]) -> bool:
    """The model gives vectors for texts: its file says how it pools."""
    return bool(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))


def _layout(path: Path) -> ExpertLayout:
    stat = path.stat() if path.exists() else None
    return _layout_of(path, stat and stat.st_mtime_ns, stat and stat.st_size)


@lru_cache(maxsize=16)
def _layout_of(path: Path, mtime_ns: int | None, n_bytes: int | None) -> ExpertLayout:
    return read_layout(path)


def _ggml_type(name: str) -> int:
    return next(number for number, (known, *_) in GGML_TYPES.items() if known.lower() == name)
