"""How much memory a model needs, and which idle models to unload so that it fits. Arithmetic only; no processes.

Sizes are those of `moegguf.engine.plan`, computed from the model's headers before anything is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS, layer_slots
from moegguf.engine.devices import NO_GPU, Device
from moegguf.engine.known_speeds import KnownSpeeds
from moegguf.engine.machine import Memory, count_cpus, read_memory
from moegguf.engine.memory import (
    choose_context,
    choose_kv_tokens,
    fit_kv_tokens,
    margin_bytes,
    pad_context,
    pooling_batch_tokens,
)
from moegguf.engine.placement import Choice, DeviceSpeeds, HitCurve, parse_placement
from moegguf.engine.placing import Budgets, Known, default_store, place
from moegguf.engine.plan import Plan, given_bytes, make_plan
from moegguf.engine.sequences import sequences_of
from moegguf.engine.tiers import VRAM_MARGIN_BYTES, host_bytes, parse_vram_cache, plan_tiers
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
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
    between the two; `load_config(plan)` is what the worker gets. `default_n_ctx`: the context without overrides.

    `device`: of a model that a GPU computes, with its memory there; the other bytes are then those of RAM, and plans
    are made by `plan_on_device(n_bytes, device_bytes)`."""

    wanted_bytes: int
    minimum_bytes: int
    plan_within: Callable[[int], Plan]
    load_config: Callable[[Plan], LoadConfig]
    default_n_ctx: int = 0
    device: str | None = None
    device_wanted_bytes: int = 0
    device_minimum_bytes: int = 0
    plan_on_device: Callable[[int, int], Plan] | None = None


Measure = Callable[..., ModelSize]
"""The signature of `measure`, which tests replace; they are given no GPU."""


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one model. `idle`: it may be unloaded; `stopping`: it is being unloaded. `device_bytes`: on the
    device of the model to be loaded."""

    name: str
    size_bytes: int
    idle: bool
    stopping: bool = False
    device_bytes: int = 0


@dataclass(frozen=True)
class Admission:
    """Reserve `reserve_bytes`, and `device_bytes`, and load; or unload the models in `unload` first; or, with neither,
    wait until others are idle."""

    reserve_bytes: int = 0
    unload: tuple[str, ...] = ()
    device_bytes: int = 0


def admit(
    size: ModelSize,
    limit_bytes: int,
    models: Sequence[MemoryUse],
    max_models: int | None = None,
    device_limit_bytes: int = 0,
) -> Admission:
    """Decides whether a model fits in `limit_bytes` of RAM, and in `device_limit_bytes` of its device, beside `models`,
    given least recently used first. Models are unloaded for the memory that is short only.

    Raises BudgetError when it would not fit without any other model.
    """
    if size.minimum_bytes > limit_bytes:
        raise BudgetError(
            f"the model needs at least {format_bytes(size.minimum_bytes)}, but all models together may take"
            f" {format_bytes(limit_bytes)}; lower num_ctx, close other programs, or set MOEGGUF_MEMORY."
        )
    if size.device_minimum_bytes > device_limit_bytes:
        raise BudgetError(
            f"the model needs at least {format_bytes(size.device_minimum_bytes)} on {size.device}, but all models"
            f" together may take {format_bytes(device_limit_bytes)} there; lower num_ctx, close other programs that use"
            " it, or start the server without --vram-cache."
        )
    free_bytes = limit_bytes - sum(m.size_bytes for m in models)
    free_on_device = device_limit_bytes - sum(m.device_bytes for m in models)
    n_free = (max_models or _UNLIMITED) - len(models)
    unload: list[str] = []
    for model in models:
        short, short_on_device = free_bytes < size.wanted_bytes, free_on_device < size.device_wanted_bytes
        if n_free > 0 and not short and not short_on_device:
            break
        helps = n_free <= 0 or short or model.device_bytes > 0
        if helps and (model.idle or model.stopping):
            free_bytes, n_free = free_bytes + model.size_bytes, n_free + 1
            free_on_device += model.device_bytes
            unload.append(model.name)
    if n_free <= 0 or free_bytes < size.minimum_bytes or free_on_device < size.device_minimum_bytes:
        return Admission()
    if unload:
        return Admission(unload=tuple(unload))
    on_device = min(free_on_device, size.device_wanted_bytes)
    return Admission(reserve_bytes=min(free_bytes, size.wanted_bytes), device_bytes=on_device)


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


class DeviceLimits:
    """The bytes that all models together may take on each device: what was free there at first, less what other
    programs have taken since. `lost`: devices that failed, which are not used again."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self._bytes: dict[str, int] = {}

    def update(self, device: Device, used_bytes: int) -> Device:
        """Takes what is free now, while models take `used_bytes`; returns the device as if there were no models."""
        free = device.free_bytes + used_bytes
        self._bytes[device.name] = limit = min(self._bytes.get(device.name, free), free)
        return replace(device, free_bytes=limit)

    def bytes(self, device: str | None) -> int:
        """The limit of a device, as of the last update."""
        return self._bytes.get(device, 0) if device else 0

    def choose(self, devices: Sequence[Device]) -> Device | None:
        """The one with the most free memory that has not failed; None when all have failed.

        Raises BudgetError where there was none.
        """
        there = [device for device in devices if device.name not in self.lost]
        if not there and not self.lost:
            raise BudgetError(NO_GPU)
        return max(there, key=lambda device: device.free_bytes, default=None)


def expert_cache_within(cache: ExpertCache, n_experts: int, slot_bytes: int, reserved_bytes: int) -> int:
    """Bytes of whole slots that `cache` asks for, at most those that were reserved when the model was loaded; "auto"
    asks for all of them. Less than a slot stays as it was asked for: the model refuses it.

    Raises BudgetError for a model without experts.
    """
    if not slot_bytes:
        raise BudgetError("the model has no experts, so there is no budget for them.")
    asked = {"auto": reserved_bytes, "fraction": int(cache.fraction * n_experts) * slot_bytes, "bytes": cache.n_bytes}
    n_bytes = min(asked[cache.mode], reserved_bytes)
    return n_bytes // slot_bytes * slot_bytes or max(1, n_bytes)


def _without_margin(n_bytes: int) -> int:
    return max(0, n_bytes - margin_bytes(n_bytes))


def measure(
    entry: ModelEntry, overrides: LoadOverrides, settings: Settings, limit_bytes: int, gpu: Device | None = None
) -> ModelSize:
    """The memory that `entry` needs when loaded with `overrides`. Reads headers: call it from a thread.

    gpu: computes a model with experts, with MOEGGUF_VRAM_CACHE of its memory for them, placed as MOEGGUF_PLACEMENT
    says; None: the CPU does.

    Raises ModelFormatError, ModelNotFoundError, BudgetError, OptionError.
    """
    layout = layout_of(entry.path)
    flash_attn = True if settings.kv_cache_type != "f16" else settings.flash_attention
    kv_type = ggml_type(settings.kv_cache_type) if settings.kv_cache_type != "f16" else None
    projector = projector_of(entry)
    cache = parse_expert_cache(overrides.expert_cache or read_environment().expert_cache)
    options: dict[str, Any] = {"flash_attn": bool(flash_attn)}  # None may become off, which needs more
    if kv_type is not None:
        options |= {"type_k": kv_type, "type_v": kv_type}
    free_bytes = limit_bytes - (projector.total_bytes if projector else 0)
    beside = cache
    if gpu is not None and layout.is_moe:  # where the context lies, unless the CPU is faster
        free_bytes = min(free_bytes, gpu.free_bytes)
        beside = parse_vram_cache(read_environment().vram_cache or "auto")
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
            pool_bytes=given_bytes(layout, beside),
            **options,
        )
        kv_tokens = fit_kv_tokens(chosen_tokens, n_ctx, n_seq_max)
    embedding = is_embedding(layout.metadata)
    n_batch = overrides.n_batch or (pooling_batch_tokens(n_ctx) if embedding else DEFAULT_UBATCH_TOKENS)
    options |= {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_batch if embedding else None, "margin": 0}
    options |= {"projector": projector, "kv_tokens": kv_tokens}

    def plan(cache: ExpertCache, n_bytes: int = _UNLIMITED, **others: Any) -> Plan:
        return make_plan(layout, cache, Memory(n_bytes, n_bytes, "the models' budget"), **options | others)

    def load_config(chosen: Plan) -> LoadConfig:
        in_ram = chosen.lower_bytes if chosen.device else chosen.budget_bytes
        placement, in_vram = _placement_of(chosen)
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
            expert_cache_bytes=in_ram if layout.is_moe else None,
            vram_cache_bytes=in_vram,
            device=chosen.device or chosen.layers_on,
            placement=placement if layout.is_moe else None,
            type_k=kv_type,
            type_v=kv_type,
            flash_attn=flash_attn,
            embedding=embedding,
            verbose=settings.debug,
        )

    if gpu is not None and layout.is_moe:
        on_device = functools.partial(_plan_on_device, layout, gpu, options)
        vram_cache = parse_vram_cache(read_environment().vram_cache or "auto")
        with_slots = functools.partial(_size_on_device, on_device, layout, cache, vram_cache, load_config)
        choice = parse_placement(read_environment().placement)
        if choice == "slots":
            return replace(with_slots(), default_n_ctx=default_n_ctx)
        memory = Memory(limit_bytes, limit_bytes, "the models' budget")
        given = {name: value for name, value in options.items() if name != "margin"}
        budgets = Budgets(layout, cache, vram_cache, gpu, memory, given)
        placed = place(budgets, choice, _known(layout, gpu, overrides.n_threads or count_cpus())).plan
        kind = placed.placement.chosen.kind if placed.placement else "cpu"
        if kind == "layers":
            size = _size_of_layers(placed, load_config, with_slots if choice == "auto" else None)
            return replace(size, default_n_ctx=default_n_ctx)
        if kind != "cpu":
            return replace(with_slots(), default_n_ctx=default_n_ctx)
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


def _plan_on_device(
    layout: ExpertLayout,
    gpu: Device,
    options: Mapping[str, Any],
    caches: tuple[ExpertCache, ExpertCache],
    n_bytes: int = _UNLIMITED,
    device_bytes: int | None = None,
    **others: Any,
) -> Plan:
    """caches: in RAM, and on the device. device_bytes: what the model may take there, without the margin that
    "auto" leaves free; None: all that is free now."""
    if device_bytes is not None:
        gpu = replace(gpu, free_bytes=device_bytes + VRAM_MARGIN_BYTES)
    given = {name: value for name, value in options.items() if name != "margin"} | others
    return plan_tiers(layout, caches[1], caches[0], gpu, Memory(n_bytes, n_bytes, "the models' budget"), **given)


def _size_on_device(
    plan: Callable[..., Plan],
    layout: ExpertLayout,
    cache: ExpertCache,
    vram_cache: ExpertCache,
    load_config: Callable[[Plan], LoadConfig],
) -> ModelSize:
    wanted = plan((cache, vram_cache))
    n_least = layer_slots(layout, 1, wanted.streams)
    fewest = ExpertCache("bytes", n_bytes=n_least * wanted.slot_bytes)
    least = plan((ExpertCache("bytes", n_bytes=wanted.slot_bytes), fewest), n_ubatch=1)
    most = ExpertCache("auto", n_bytes=wanted.budget_bytes)
    in_ram = ExpertCache("bytes", n_bytes=max(wanted.slot_bytes, wanted.lower_bytes))

    def plan_on_device(n_bytes: int, device_bytes: int) -> Plan:
        if device_bytes <= least.total_bytes:
            return least
        upper = plan((in_ram, most), device_bytes=device_bytes)
        left = max(upper.slot_bytes, n_bytes - host_bytes(layout, upper.n_ubatch))
        fitting = ExpertCache("bytes", n_bytes=min(in_ram.n_bytes, left))
        return plan((fitting, most), device_bytes=device_bytes)

    return ModelSize(
        wanted.host_bytes, min(least.host_bytes, wanted.host_bytes), lambda _: wanted, load_config, 0, wanted.device,
        wanted.total_bytes, min(least.total_bytes, wanted.total_bytes), plan_on_device,
    )  # fmt: skip


def _known(layout: ExpertLayout, gpu: Device, n_threads: int) -> Known:
    """What is known of the device and the model, without memory there for this process."""

    def read() -> tuple[DeviceSpeeds, HitCurve]:
        known = KnownSpeeds(layout)
        return known.speeds_apart(gpu, n_threads, default_store().repack), known.hits()

    return read


def _size_of_layers(
    wanted: Plan, load_config: Callable[[Plan], LoadConfig], with_slots: Callable[[], ModelSize] | None
) -> ModelSize:
    """Of a plan with whole layers on a device. with_slots: the size with slots alone, for less memory; None: it is
    loaded as planned, or not."""
    device, in_ram, there = wanted.device or wanted.layers_on, wanted.host_bytes, wanted.total_bytes
    less = with_slots() if with_slots is not None else None

    def plan_on_device(n_bytes: int, device_bytes: int) -> Plan:
        enough = n_bytes >= in_ram and device_bytes >= there
        return (
            wanted
            if enough or less is None or less.plan_on_device is None
            else less.plan_on_device(n_bytes, device_bytes)
        )

    return ModelSize(
        in_ram, min(in_ram, less.minimum_bytes) if less else in_ram, lambda _: wanted, load_config, 0, device,
        there, min(there, less.device_minimum_bytes) if less else there, plan_on_device,
    )  # fmt: skip


def _placement_of(plan: Plan) -> tuple[Choice, int | None]:
    """What the worker is told so that it plans the same: the placement, and bytes on the device for experts."""
    if plan.device is None and plan.layers_on is None:
        return "cpu", None
    if plan.layers_on is None or plan.placement is None:
        return "slots", plan.budget_bytes + plan.staging_slots_bytes
    return "layers", plan.placement.device_bytes


def is_embedding(metadata: Mapping[str, Any]) -> bool:
    """Whether the model is an embedding model: its GGUF header has a pooling type."""
    return bool(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))
