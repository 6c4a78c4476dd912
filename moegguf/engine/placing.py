"""Decides where a model's experts go on this machine (placement.py predicts), and plans that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moegguf.controller.systems import find_system
from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS
from moegguf.engine.devices import Device, find_gpu, gpus
from moegguf.engine.known_speeds import KnownSpeeds
from moegguf.engine.machine import Memory, count_cpus, read_memory
from moegguf.engine.memory import choose_context, default_contexts, margin_bytes, memory_needs, pad_context
from moegguf.engine.placement import (
    Choice,
    DeviceSpeeds,
    HitCurve,
    Kind,
    ModelBytes,
    Placement,
    Planner,
    parse_placement,
)
from moegguf.engine.plan import Plan, make_plan
from moegguf.engine.tiers import (
    VRAM_MARGIN_BYTES,
    beside_experts_bytes,
    host_bytes,
    parse_vram_cache,
    plan_layers,
    plan_tiers,
)
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.store import StoreOptions
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.settings import read_environment

EVERY_LAYER = 999  # n_gpu_layers above any model's

Known = Callable[[], tuple[DeviceSpeeds, HitCurve]]


@dataclass(frozen=True)
class Gpu:
    """A GPU to place experts on, the budget there, and what may be chosen."""

    device: Device
    vram: ExpertCache
    choice: Choice

    def known(self, layout: ExpertLayout, n_threads: int, repack: bool) -> Known:
        """What is known of it, of this machine's CPU with so many threads, and of the model; it is measured at most
        once."""

        def read() -> tuple[DeviceSpeeds, HitCurve]:
            known = KnownSpeeds(layout)
            return known.speeds(self.device, n_threads, repack), known.hits()

        return read


def gpu_for(
    vram_cache: str | int | float | ExpertCache | None,
    placement: str | None,
    n_gpu_layers: int | None = None,
    name: str | None = None,
) -> Gpu | None:
    """The GPU that experts are placed on: of this name, or the one with the most free memory. None: no GPU is planned.

    vram_cache, placement None: of the environment. Where none of these names a budget or a placement, a GPU is used
    where there is one, unless `name` or n_gpu_layers say that the caller divides the model.

    Raises BudgetError where there is no GPU for what was asked, OptionError for an unknown one, for another placement,
    and for layers that contradict it.
    """
    environment = read_environment()
    choice = parse_placement(environment.placement if placement is None else placement)
    vram_cache = (environment.vram_cache or None) if vram_cache is None else vram_cache
    divided = n_gpu_layers is not None and 0 <= n_gpu_layers < EVERY_LAYER
    if choice == "cpu":
        if (n_gpu_layers or 0) > 0:
            raise OptionError(f"placement 'cpu' uses no GPU, but n_gpu_layers is {n_gpu_layers}; leave one out.")
        return None
    if not vram_cache and placement in (None, "auto") and (divided or name or vram_cache == "" or not gpus()):
        return None
    if divided:
        raise OptionError(
            f"on a GPU with vram_cache or a placement it computes every layer, but n_gpu_layers is {n_gpu_layers};"
            " leave one of them out."
        )
    return Gpu(find_gpu(name), parse_vram_cache(vram_cache or "auto"), choice)


def default_store(device: str | None = None) -> StoreOptions:
    """How experts are moved where the caller does not say it: as the system of MOEGGUF_SYSTEM does, to `device`."""
    return replace(find_system(read_environment().system).store_options(), device=device)


@dataclass(frozen=True)
class Placed:
    """A plan, and the layout of the experts that have slots in it: those of other layers are plain weights."""

    plan: Plan
    layout: ExpertLayout

    @property
    def on_device(self) -> bool:
        """Whether a device computes the layers."""
        return self.plan.device is not None or self.plan.layers_on is not None


@dataclass(frozen=True)
class Budgets:
    """What is to be placed where. options: those of `make_plan`; without `n_ctx`, what the device allows is chosen."""

    layout: ExpertLayout
    ram: ExpertCache
    vram: ExpertCache
    device: Device
    memory: Memory
    options: dict[str, Any]

    def with_context(self) -> Budgets:
        """The same with a number of tokens of context."""
        options, layout = self.options, self.layout
        n_ctx = options.get("n_ctx")
        if n_ctx is None:
            chosen = {name: options[name] for name in ("type_k", "type_v", "flash_attn") if name in options}
            projector = options.get("projector")
            free_bytes = self.device.free_bytes - (projector.total_bytes if projector else 0)
            n_ctx = choose_context(layout, free_bytes, self._n_ubatch, **chosen)
        return replace(self, options=options | {"n_ctx": pad_context(n_ctx) or default_contexts(layout)[0]})

    @property
    def _n_ubatch(self) -> int:
        return self.options.get("n_ubatch") or min(DEFAULT_UBATCH_TOKENS, self.options.get("n_batch", 1 << 20))

    def planner(self, speeds: DeviceSpeeds, curve: HitCurve) -> Planner:
        """Predicts with the memories as these budgets divide them, and the context half full."""
        options, layout = self.options, self.layout
        n_tokens = options.get("kv_tokens") or options["n_ctx"]
        sized = {name: options[name] for name in ("type_k", "type_v", "flash_attn", "projector") if name in options}
        needs = memory_needs(layout, n_tokens, self._n_ubatch, **sized)
        device_bytes = _within(
            self.vram, layout, self.device.free_bytes - beside_experts_bytes(needs) - VRAM_MARGIN_BYTES
        )
        free_bytes = self.memory.available_bytes - margin_bytes(self.memory.available_bytes)
        return Planner(
            ModelBytes.of(layout, needs.kv_bytes // 2),
            speeds,
            curve,
            device_bytes,
            max(0, _within(self.ram, layout, free_bytes - host_bytes(layout, self._n_ubatch))),
            max(0, _within(self.ram, layout, free_bytes - needs.total_bytes(0))),
        )

    def plan(self, placement: Placement, streams: bool) -> Placed:
        """The plan of one placement. Raises BudgetError where a budget does not allow it."""
        layout, options = self.layout, self.options

        def on_device(layout: ExpertLayout, vram: ExpertCache) -> Plan:
            return plan_tiers(layout, vram, self.ram, self.device, self.memory, **options)

        if placement.kind == "cpu":
            return Placed(make_plan(layout, self.ram, self.memory, **options, streams=streams), layout)
        if placement.kind == "resident":
            full = ExpertCache("fraction", fraction=1.0)
            return Placed(on_device(layout, full if self.vram.mode == "auto" else self.vram), layout)
        if placement.kind == "slots":
            return Placed(on_device(layout, self.vram), layout)
        rest = layout.only(layer.il for layer in layout.layers[: len(layout.layers) - placement.n_layers])
        if placement.kind == "layers":
            return Placed(plan_layers(layout, rest, self.ram, self.device, self.memory, **options), rest)
        slots = self.vram if self.vram.mode == "auto" else ExpertCache("bytes", n_bytes=placement.slot_bytes)
        return Placed(on_device(rest, slots), rest)


def place(budgets: Budgets, choice: Choice, known: Known, *, streams: bool = True) -> Placed:
    """The plan of the fastest placement that `choice` allows and that the budgets hold, with the reason.

    streams: as in `make_plan`, where the CPU computes everything. Raises BudgetError.
    """
    sized, refused = budgets.with_context(), dict[Kind, BudgetError]()
    planner = sized.planner(*known())
    while True:
        try:
            found = planner.plan(choice, without=refused)
        except BudgetError as error:
            raise next(iter(refused.values()), error) from None
        kind = found.chosen.kind
        try:
            of = budgets if kind == "cpu" else sized  # RAM may allow a larger context
            placed = of.plan(found.chosen, streams)
        except BudgetError as error:
            refused[kind] = error
            continue
        reasons = (*placed.plan.reasons, found.reason, *(f"not {kind}: {error}" for kind, error in refused.items()))
        return Placed(replace(placed.plan, reasons=reasons, placement=found), placed.layout)


def _within(cache: ExpertCache, layout: ExpertLayout, free_bytes: int) -> int:
    """Bytes of a budget for experts, of which "auto" takes what is free."""
    if cache.mode == "auto":
        return min(free_bytes, cache.n_bytes or free_bytes)
    return round(cache.fraction * layout.expert_bytes) if cache.mode == "fraction" else cache.n_bytes


def plan_here(
    layout: ExpertLayout,
    expert_cache: str | ExpertCache,
    vram_cache: str | None = None,
    placement: str | None = None,
    n_gpu_layers: int | None = None,
    **options: Any,
) -> Plan:
    """The plan for this machine now. vram_cache, placement: as `gpu_for` takes them. options: those of `make_plan`.

    Raises BudgetError, OptionError.
    """
    cache, memory = parse_expert_cache(expert_cache), read_memory()
    gpu = gpu_for(vram_cache, placement, n_gpu_layers) if layout.is_moe else None
    if gpu is None:
        return make_plan(layout, cache, memory, **options)
    known = gpu.known(layout, count_cpus(), repack=True)
    return place(Budgets(layout, cache, gpu.vram, gpu.device, memory, options), gpu.choice, known).plan
