"""How much memory a model needs, how much there is, and which idle models make room. No processes.

A model has the plan that it gets with all that it can use, and those with less. Plans are made from the model's
headers, before anything is loaded; a worker gets the one that it is loaded with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from moegguf.engine.devices import NO_GPU
from moegguf.engine.drafts import drafted
from moegguf.engine.load import default_store, given_budgets
from moegguf.engine.machine import Device, Machine, Memory, count_cpus, read_memory
from moegguf.engine.memory import DEFAULT_UBATCH_TOKENS, Sizes, margin_bytes, pad_context, pooling_batch_tokens
from moegguf.engine.plan import Budgets, Plan, layer_slots, slot_bytes
from moegguf.engine.planner import make_plan, plan_known
from moegguf.engine.pool_plan import VRAM_MARGIN_BYTES, choose_context
from moegguf.engine.sequences import sequences_of
from moegguf.engine.speeds import KnownSpeeds
from moegguf.errors import BudgetError
from moegguf.gguf.adapter import read_adapter
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.reader import ggml_type
from moegguf.models.details import projector_of
from moegguf.models.entry import ModelEntry
from moegguf.quantities import ExpertCache, format_bytes
from moegguf.serving.events import LoadOverrides
from moegguf.serving.wire import LoadConfig
from moegguf.settings import Settings, read_environment

_UNLIMITED = 1 << 62


RAM = "RAM"
Room = Mapping[str, int]
"""Bytes in RAM, and on devices by their names."""


@dataclass(frozen=True)
class ModelSize:
    """Memory of a model: all that it can use, and the minimum, in RAM and on the device that computes it. `plan_within`
    plans for what is between the two; `load_config(plan)` is what the worker gets. `default_n_ctx`: the context without
    overrides."""

    wanted: Room
    minimum: Room
    plan_within: Callable[[Room], Plan]
    load_config: Callable[[Plan], LoadConfig]
    default_n_ctx: int = 0


def measure(
    entry: ModelEntry, overrides: LoadOverrides, settings: Settings, limit_bytes: int, gpu: Device | None = None
) -> ModelSize:
    """The memory that `entry` needs when loaded with `overrides`. Reads headers: call it from a thread.

    gpu: computes a model with experts, with as much of its memory for them, and placed, as the settings or the
    environment say; None: the CPU does.

    Raises ModelFormatError, ModelNotFoundError, BudgetError, OptionError.
    """
    chosen = dict(settings.loading)
    of_name = str(entry.draft) if entry.draft else None
    chosen["draft"] = overrides.draft or of_name or chosen.get("draft") or read_environment().draft
    chosen["n_threads"] = overrides.n_threads or chosen.get("n_threads")
    if entry.adapter is None:
        chosen.pop("lora_scale", None)
    type_k, type_v = (chosen.get(name, settings.kv_cache_type) for name in ("type_k", "type_v"))
    flash_attn = True if (type_k, type_v) != ("f16", "f16") else settings.flash_attention
    layout, projector = drafted(read_layout(entry.path), chosen["draft"], flash_attn), projector_of(entry)
    placement = "auto" if gpu is None else chosen.get("placement")
    cache = overrides.expert_cache or chosen.get("expert_cache")
    budgets = given_budgets(cache, chosen.get("vram_cache"), placement, {"n_gpu_layers": chosen.get("n_gpu_layers")})
    devices = () if gpu is None or not layout.is_moe else (gpu,)
    here = Machine(_memory(limit_bytes), devices=devices)
    free_bytes = min(limit_bytes, *(device.free_bytes for device in devices)) if devices else limit_bytes
    sizes = Sizes(settings.n_ctx or None, type_k=ggml_type(type_k), type_v=ggml_type(type_v), projector=projector)
    adapter_bytes = read_adapter(entry.adapter, layout.arch).n_bytes if entry.adapter else 0
    sizes = replace(sizes, flash_attn=bool(flash_attn), adapter_bytes=adapter_bytes)  # None may become off: needs more
    default_n_ctx = choose_context(layout, sizes, free_bytes).n_ctx or 0
    n_ctx = pad_context(overrides.n_ctx) if overrides.n_ctx else default_n_ctx
    embedding = is_embedding(layout.metadata)
    n_batch = overrides.n_batch or (pooling_batch_tokens(n_ctx) if embedding else DEFAULT_UBATCH_TOKENS)
    n_seq_max = sequences_of(layout, n_ctx, settings.n_parallel)
    sizes = replace(
        sizes, n_ctx=n_ctx, n_ubatch=n_batch if embedding else None, n_batch=n_batch, n_seq_max=n_seq_max,
        kv_tokens=settings.kv_tokens,
    )  # fmt: skip
    sizes = choose_context(layout, sizes, free_bytes, budgets.vram[0] if devices else budgets.ram)
    store, n_threads = default_store(chosen.get("strategy")), chosen["n_threads"] or count_cpus()
    budgets = replace(budgets, sizes=sizes, staging=store.staging, streams=store.overlap, margin_bytes=0)
    options = chosen | {
        "mmproj": str(projector.path) if projector else None,
        "n_ctx": n_ctx,
        "n_seq_max": n_seq_max,
        "n_batch": n_batch,
        "type_k": type_k if type_k != "f16" else None,
        "type_v": type_v if type_v != "f16" else None,
        "flash_attn": flash_attn,
        "embedding": embedding,
        "verbose": settings.debug,
        "lora_path": str(entry.adapter) if entry.adapter else None,
    }

    def plan_with(machine: Machine, budgets: Budgets) -> Plan:
        if budgets.choice == "slots":
            return make_plan(layout, machine, budgets)
        return plan_known(layout, machine, budgets, KnownSpeeds(layout, n_threads, store.repack).speeds_apart)

    def load_config(plan: Plan) -> LoadConfig:
        return LoadConfig(entry.name, str(entry.path), plan, options)

    return replace(_size(layout, here, budgets, plan_with, load_config), default_n_ctx=default_n_ctx)


def _size(
    layout: ExpertLayout,
    here: Machine,
    budgets: Budgets,
    plan_with: Callable[[Machine, Budgets], Plan],
    load_config: Callable[[Plan], LoadConfig],
) -> ModelSize:
    try:
        wanted = plan_with(here, budgets)
    except BudgetError:  # of the budgets themselves, or else `admit` says what is short
        wanted = plan_with(replace(here, memory=_memory(_UNLIMITED)), budgets)
    one_slot = slot_bytes(layout, [gpu.name for gpu in here.devices if wanted.on_device])
    least = wanted if not layout.is_moe else _least(layout, here, budgets, wanted, one_slot)
    ram, vram = (_at_most(cache, layout.n_expert_total, one_slot) for cache in (budgets.ram, budgets.vram[0]))
    smaller = replace(budgets, choice="slots" if wanted.on_device else "cpu", ram=ram, vram=(vram,))

    def plan_within(room: Room) -> Plan:
        if _fits(wanted, room):
            return wanted
        gpus = [
            replace(gpu, free_bytes=room.get(gpu.name, 0) + VRAM_MARGIN_BYTES)
            for gpu in here.devices if wanted.on_device
        ]  # fmt: skip
        with suppress(BudgetError):
            found = make_plan(layout, Machine(_memory(room[RAM]), devices=tuple(gpus)), smaller)
            if _fits(found, room):
                return found
        return least

    most, fewest = bytes_of(wanted), bytes_of(least)
    minimum = {place: min(n_bytes, fewest.get(place, 0)) for place, n_bytes in most.items()}
    return ModelSize(most, minimum, plan_within, load_config)


def _least(layout: ExpertLayout, here: Machine, budgets: Budgets, wanted: Plan, one_slot: int) -> Plan:
    """The plan that takes the least, on the device that `wanted` is on, whose slots have so many bytes."""
    if (wanted.layers_on and budgets.choice == "layers") or (wanted.on_device and budgets.divided):
        return wanted
    sizes = budgets.sizes
    n_tokens = 1 if wanted.on_device else sizes.one_pass_tokens
    fewest = ExpertCache("bytes", n_bytes=layer_slots(layout, n_tokens, wanted.streams) * one_slot)
    sizes = replace(sizes, n_ubatch=1 if wanted.on_device else sizes.n_ubatch or n_tokens)
    if not wanted.on_device:
        return make_plan(layout, replace(here, devices=()), replace(budgets, ram=fewest, sizes=sizes))
    ram = ExpertCache("bytes", n_bytes=one_slot)
    return make_plan(layout, here, replace(budgets, choice="slots", ram=ram, vram=(fewest,), sizes=sizes))


def _at_most(cache: ExpertCache, n_experts: int, one_slot: int) -> ExpertCache:
    """What fits, up to the budget."""
    n_bytes = int(cache.fraction * n_experts + 1e-9) * one_slot
    return ExpertCache("auto", n_bytes=n_bytes if cache.mode == "fraction" else cache.n_bytes)


def _memory(n_bytes: int) -> Memory:
    return Memory(n_bytes, n_bytes, "the models' budget")


def bytes_of(plan: Plan) -> dict[str, int]:
    """Where a plan takes how much."""
    device = plan.device or plan.layers_on
    return {RAM: plan.total_bytes} if device is None else {RAM: plan.host_bytes, device: plan.total_bytes}


def _fits(plan: Plan, room: Room) -> bool:
    return all(n_bytes <= room.get(place, 0) for place, n_bytes in bytes_of(plan).items())


def is_embedding(metadata: Mapping[str, Any]) -> bool:
    """Whether the model is an embedding model: its GGUF header has a pooling type."""
    return bool(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one model. `idle`: it may be unloaded, or is being unloaded."""

    name: str
    used: Room
    idle: bool


@dataclass(frozen=True)
class Admission:
    """Reserve this and load; or unload the models in `unload` first, for the bytes that are `short`; or, with neither,
    wait until others are idle."""

    reserve: Room = field(default_factory=dict)
    unload: tuple[str, ...] = ()
    short: Room = field(default_factory=dict)


def admit(size: ModelSize, limits: Room, models: Sequence[MemoryUse], max_models: int | None = None) -> Admission:
    """Decides whether a model fits in `limits` beside `models`, given least recently used first. Models are unloaded
    for the memory that is short only.

    Raises BudgetError when it would not fit without any other model.
    """
    for place, n_bytes in size.minimum.items():
        if n_bytes > limits[place]:
            raise BudgetError(
                f"the model needs at least {format_bytes(n_bytes)} {'of' if place == RAM else 'on'} {place}, but all"
                f" models together may take {format_bytes(limits[place])} there; lower num_ctx, close other programs"
                " that use it, or change MOEGGUF_MEMORY, or --vram-cache on a GPU."
            )
    free = {place: limits[place] - sum(model.used.get(place, 0) for model in models) for place in size.wanted}
    shortage = {place: n_bytes - free[place] for place, n_bytes in size.wanted.items() if n_bytes > free[place]}
    n_free = (max_models or _UNLIMITED) - len(models)
    unload: list[str] = []
    for model in models:
        short = [place for place, n_bytes in size.wanted.items() if free[place] < n_bytes]
        if n_free > 0 and not short:
            break
        if model.idle and (n_free <= 0 or any(model.used.get(place) for place in short)):
            free = {place: n_bytes + model.used.get(place, 0) for place, n_bytes in free.items()}
            n_free += 1
            unload.append(model.name)
    if n_free <= 0 or any(free[place] < n_bytes for place, n_bytes in size.minimum.items()):
        return Admission()
    if unload:
        return Admission(unload=tuple(unload), short=shortage)
    return Admission({place: min(free[place], n_bytes) for place, n_bytes in size.wanted.items()})


class MemoryLimits:
    """The bytes that all models together may take: of RAM the setting, or else what was free at construction; on each
    device what was free there at first; less what other programs have taken since. `lost`: devices that failed, which
    are not used again."""

    def __init__(self, settings: Settings, memory: Callable[[], Memory] = read_memory) -> None:
        self.lost: set[str] = set()
        self._memory = memory
        self._setting_bytes = settings.memory_bytes
        self._at_start_bytes = _without_margin(memory().available_bytes)
        self._on_device: dict[str, int] = {}  # as of its last choice

    def of(self, place: str, used_bytes: int) -> int:
        """The current limit there, while models take `used_bytes`."""
        if place != RAM:
            return self._on_device.get(place, 0)
        free_bytes = _without_margin(self._memory().available_bytes) + used_bytes
        return self._setting_bytes or min(self._at_start_bytes, free_bytes)

    def choose(self, devices: Sequence[Device], used_on: Callable[[str], int]) -> Device | None:
        """The device with the most free memory that has not failed, as if there were no models, which take `used_on` of
        it; None when all have failed. Raises BudgetError where there was none."""
        there = [device for device in devices if device.name not in self.lost]
        if not there and not self.lost:
            raise BudgetError(NO_GPU)
        if (best := max(there, key=lambda device: device.free_bytes, default=None)) is None:
            return None
        free = best.free_bytes + used_on(best.name)
        self._on_device[best.name] = limit = min(self._on_device.get(best.name, free), free)
        return replace(best, free_bytes=limit)


def planned_budgets(plan: Mapping[str, Any]) -> dict[str, int]:
    """What a model with this plan (as JSON) was loaded with for slots: `expert_cache` in RAM, and `vram_cache` on its
    device, there with what prompts are staged in."""
    if plan.get("device"):
        return {"expert_cache": plan.get("n_ram_slots", 0) * plan["slot_bytes"], "vram_cache": plan["vram_cache_bytes"]}
    return {"expert_cache": plan.get("budget_bytes", 0), "vram_cache": 0}


def expert_cache_within(cache: ExpertCache, n_experts: int, slot_bytes: int, reserved_bytes: int) -> int:
    """Bytes of whole slots that `cache` asks for, at most those that were reserved when the model was loaded; "auto"
    asks for all of them. Less than a slot stays as it was asked for: the model refuses it.

    Raises BudgetError for a model without experts.
    """
    if not slot_bytes:
        raise BudgetError("the model has no experts, so there is no budget for them.")
    asked = {"auto": reserved_bytes, "fraction": int(cache.fraction * n_experts * slot_bytes), "bytes": cache.n_bytes}
    n_bytes = min(asked[cache.mode], reserved_bytes)
    return n_bytes // slot_bytes * slot_bytes or max(1, n_bytes)


def _without_margin(n_bytes: int) -> int:
    return max(0, n_bytes - margin_bytes(n_bytes))
