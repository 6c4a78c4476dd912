"""Decides where a model's experts go on this machine, and plans that.

On one GPU by what placement.py predicts; on several, or where the caller divides layers, with slots (device_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from moegguf.controller.request_cost import divided, staging_bytes
from moegguf.controller.strategies import find_strategy
from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS
from moegguf.engine.device_plan import SplitOptions, plan_devices
from moegguf.engine.devices import Device, find_gpus, gpus, has_gpu
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
from moegguf.engine.plan import Plan, given_bytes, make_plan, slot_bytes
from moegguf.engine.tiers import (
    VRAM_MARGIN_BYTES,
    beside_experts_bytes,
    host_bytes,
    parse_vram_caches,
    plan_layers,
    plan_tiers,
)
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import padded, slot_tokens
from moegguf.native.store import StoreOptions
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.settings import parse_choice, read_environment

EVERY_LAYER = 999  # n_gpu_layers above any model's
NO_SPLIT, BY_LAYERS = 0, 1  # enum llama_split_mode

Known = Callable[[], tuple[DeviceSpeeds, HitCurve]]


@dataclass(frozen=True)
class Gpus:
    """GPUs to place experts on, the budget of all of them together or one of each, and what may be chosen.

    split: how layers are divided over several GPUs, or over GPUs and the CPU; None: one GPU computes every layer.
    refused: placements that the caller has decided against. staging: as in `tiers.with_best_staging`. computes_misses:
    as in `Planner`.
    """

    devices: tuple[Device, ...]
    vram: tuple[ExpertCache, ...]
    choice: Choice
    split: SplitOptions | None = None
    refused: frozenset[Kind] = frozenset()
    staging: int | None = None
    computes_misses: bool = False

    @property
    def n_gpu_layers(self) -> int:
        """As llama.cpp's, where they compute."""
        return -1 if self.split is None else self.split.n_gpu_layers

    def known(self, layout: ExpertLayout, n_threads: int, repack: bool) -> Known:
        """What is known of the first, of this machine's CPU with so many threads, and of the model; it is measured at
        most once."""

        def read() -> tuple[DeviceSpeeds, HitCurve]:
            known = KnownSpeeds(layout)
            return known.speeds(self.devices[0], n_threads, repack), known.hits()

        return read

    @property
    def free_bytes(self) -> int:
        """Of all of them together."""
        return sum(device.free_bytes for device in self.devices)

    def given_bytes(self, layout: ExpertLayout) -> int:
        """About the bytes of the budgets, together; 0 where one is "auto"."""
        of_each = [given_bytes(layout, cache) for cache in self.vram]
        return min(sum(of_each), layout.expert_bytes) if all(of_each) else 0

    def split_by_links(self, layout: ExpertLayout, n_threads: int, repack: bool) -> SplitOptions:
        """`split`, with the links of several devices where the user leaves the split to them; each is measured at most
        once."""
        split = self.split or SplitOptions()
        if split.tensor_split is not None or len(self.devices) < 2:
            return split
        known = KnownSpeeds(layout)
        measured = {device.name: known.link(device, n_threads, repack) for device in self.devices}
        return replace(split, links={name: link for name, link in measured.items() if link is not None})


def gpus_for(
    vram_cache: str | int | float | ExpertCache | None,
    placement: str | None,
    options: Mapping[str, Any],
    name: str | None = None,
) -> Gpus | None:
    """The GPUs that experts are placed on: that of this name, or those that options leave. None: no GPU is planned.

    vram_cache, placement None: of the environment. Where none of these names a budget or a placement, GPUs are used
    where there are some, unless `name` or options say that the caller divides the model. options: n_gpu_layers,
    split_mode, main_gpu and tensor_split, as llama_cpp.Llama takes them; with n_gpu_layers -1 GPUs compute every layer,
    also where the CPU would be faster.

    Raises BudgetError where there is no GPU for what was asked, OptionError for an unknown one, for another placement,
    and for options that contradict it.
    """
    environment = read_environment()
    choice = parse_placement(environment.placement if placement is None else placement)
    vram_cache = (environment.vram_cache or None) if vram_cache is None else vram_cache
    n_gpu_layers, mode = options.get("n_gpu_layers"), options.get("split_mode", BY_LAYERS)
    if choice == "cpu":
        if n_gpu_layers:
            raise OptionError(f"placement 'cpu' uses no GPU, but n_gpu_layers is {n_gpu_layers}; leave one out.")
        return None
    some_layers = n_gpu_layers is not None and 0 <= n_gpu_layers < EVERY_LAYER
    divided = some_layers or mode not in (NO_SPLIT, BY_LAYERS)
    if not vram_cache and placement in (None, "auto") and (divided or name or vram_cache == "" or not gpus()):
        return None
    devices = _devices(name, mode, options.get("main_gpu", 0))
    vram = parse_vram_caches(vram_cache or "auto")
    tensor_split = options.get("tensor_split") if mode == BY_LAYERS else None
    whole = len(devices) == len(vram) == 1 and not some_layers and tensor_split is None
    if choice == "layers" and not whole:
        names = ", ".join(device.name for device in devices)
        raise OptionError(
            f"placement 'layers' is for one GPU with one budget and every layer, but these are to compute: {names}"
            f" (n_gpu_layers {n_gpu_layers}, tensor_split {tensor_split}); take placement 'slots', or choose one GPU"
            f" (split_mode {NO_SPLIT}, main_gpu) and leave these options out."
        )
    chosen_one = choice == "auto" and mode == NO_SPLIT and name is None and len(gpus()) > 1
    refused: frozenset[Kind] = frozenset() if n_gpu_layers is None else frozenset({"cpu"})
    if whole and not chosen_one:
        return Gpus(devices, vram, choice, None, refused)
    split = SplitOptions(-1 if n_gpu_layers is None else n_gpu_layers, tensor_split)
    return Gpus(devices, vram, choice, split, refused)


def _devices(name: str | None, split_mode: int, main_gpu: int) -> tuple[Device, ...]:
    """Every GPU, or the one that `name` or main_gpu chooses."""
    if split_mode not in (NO_SPLIT, BY_LAYERS):
        raise OptionError(
            f"split_mode {split_mode} divides each matrix among devices, but a slot holds a whole expert; take"
            f" {BY_LAYERS} (layers), or {NO_SPLIT} (main_gpu alone), or leave vram_cache and placement out."
        )
    devices = find_gpus(name)
    if split_mode == BY_LAYERS or name is not None:
        return tuple(devices)
    if not 0 <= main_gpu < len(devices):
        names = ", ".join(f"{device.index} ({device.name})" for device in devices)
        raise OptionError(f"main_gpu is {main_gpu}, but there are: {names}.")
    return (devices[main_gpu],)


def default_store(device: str | None = None) -> StoreOptions:
    """How experts are moved where the caller does not say it: as the strategy of MOEGGUF_STRATEGY does, to `device`."""
    return replace(find_strategy(read_environment().strategy).store_options(), device=device)


@dataclass(frozen=True)
class Placed:
    """A plan, and the layout of the experts that have slots in it: those of other layers are plain weights.

    tensor_split: with which llama.cpp divides layers over the plan's devices; None: one computes all.
    """

    plan: Plan
    layout: ExpertLayout
    tensor_split: list[float] | None = None

    @property
    def on_device(self) -> bool:
        """Whether a device computes the layers."""
        return self.plan.device is not None or self.plan.layers_on is not None


@dataclass(frozen=True)
class Budgets:
    """What is to be placed where. options: those of `make_plan`; without `n_ctx`, what the device allows is chosen.
    on_cpu: those that differ where the CPU computes everything, and RAM has the context."""

    layout: ExpertLayout
    ram: ExpertCache
    vram: ExpertCache
    device: Device
    memory: Memory
    options: dict[str, Any]
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    staging: int | None = None  # as in `tiers.with_best_staging`
    computes_misses: bool = False  # as in `Planner`

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
    def _slots_layout(self) -> ExpertLayout:
        """With the padding of slots on the device."""
        return padded(self.layout, [self.device.name])

    @property
    def _n_ubatch(self) -> int:
        return self.options.get("n_ubatch") or min(DEFAULT_UBATCH_TOKENS, self.options.get("n_batch", 1 << 20))

    def planner(self, speeds: DeviceSpeeds, curve: HitCurve) -> Planner:
        """Predicts with the memories as these budgets divide them, and the context half full."""
        options, layout = self.options, self._slots_layout
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
            self._staging_bytes(device_bytes),
            self.computes_misses,
        )

    def _staging_bytes(self, device_bytes: int) -> int:
        """Of so much memory for experts."""
        layout = self._slots_layout
        size = slot_bytes(layout)
        window = slot_tokens(self.device.name)
        _, n_staging = divided(layout, device_bytes // size, window, self._n_ubatch, self.staging)
        return staging_bytes(layout, n_staging)

    def plan(self, placement: Placement, streams: bool) -> Placed:
        """The plan of one placement. Raises BudgetError where a budget does not allow it."""
        layout, options = self.layout, dict(self.options)

        def on_device(layout: ExpertLayout, vram: ExpertCache) -> Plan:
            return plan_tiers(layout, vram, self.ram, self.device, self.memory, self.staging, **options)

        if placement.kind == "cpu":
            options |= self.on_cpu
            return Placed(make_plan(layout, self.ram, self.memory, **options, streams=streams), layout)
        if placement.kind == "resident":
            full = ExpertCache("fraction", fraction=1.0)
            return Placed(on_device(layout, full if self.vram.mode == "auto" else self.vram), layout)
        if placement.kind == "slots":
            return Placed(on_device(layout, self.vram), layout)
        rest = layout.only(layer.il for layer in layout.layers[: len(layout.layers) - placement.n_layers])
        if placement.kind == "layers":
            plan = plan_layers(layout, rest, self.ram, self.device, self.memory, **options, streams=streams)
            return Placed(plan, rest)
        if self.vram.mode == "auto":
            return Placed(on_device(rest, self.vram), rest)
        staged_bytes = self._staging_bytes(_within(self.vram, self._slots_layout, 0))
        slots = ExpertCache("bytes", n_bytes=placement.slot_bytes + staged_bytes)
        return Placed(on_device(rest, slots), rest)


def place(
    budgets: Budgets, choice: Choice, known: Known, *, streams: bool = True, without: Collection[Kind] = ()
) -> Placed:
    """The plan of the fastest placement that `choice` allows and that the budgets hold, with the reason.

    streams: as in `make_plan`, of the CPU's slots. without: placements not to be taken. Raises
    BudgetError, OptionError where the device has no kernel for the model's experts and a placement there was asked for.
    """
    sized, refused = budgets.with_context(), dict[Kind, BudgetError]()
    try:
        planner = sized.planner(*known())
    except OptionError as error:
        if choice != "auto" or "cpu" in without:
            raise
        placed = budgets.plan(Placement("cpu", 0.0), streams)
        reasons = (*placed.plan.reasons, f"not on {budgets.device.name}: {error}")
        return Placed(replace(placed.plan, reasons=reasons), placed.layout)
    while True:
        try:
            found = planner.plan(choice, without={*refused, *without})
        except BudgetError as error:
            reason = next(iter(refused.values()), error)
            if "cpu" in without:
                reason = BudgetError(f"{reason} n_gpu_layers leaves no layer to the CPU: without it, that may compute.")
            raise reason from None
        kind = found.chosen.kind
        try:
            of = budgets if kind == "cpu" else sized  # RAM may allow a larger context
            placed = of.plan(found.chosen, streams)
        except BudgetError as error:
            refused[kind] = error
            continue
        reasons = (*placed.plan.reasons, found.reason, *(f"not {kind}: {error}" for kind, error in refused.items()))
        return Placed(replace(placed.plan, reasons=reasons, placement=found), placed.layout)


def place_on(
    where: Gpus,
    layout: ExpertLayout,
    ram: ExpertCache,
    memory: Memory,
    n_threads: int,
    options: dict[str, Any],
    *,
    repack: bool = True,
    streams: bool = True,
    on_cpu: Mapping[str, Any] = MappingProxyType({}),
) -> Placed:
    """The plan on these GPUs, and on the CPU beside them, which computes with so many threads.

    options: those of `make_plan`; on_cpu: those that differ where the CPU computes everything. repack, streams: of the
    CPU's slots. Raises BudgetError, OptionError.
    """
    if where.split is None:
        budgets = Budgets(
            layout, ram, where.vram[0], where.devices[0], memory, options, on_cpu, where.staging, where.computes_misses
        )  # fmt: skip
        known = where.known(layout, n_threads, repack)
        return place(budgets, where.choice, known, streams=streams, without=where.refused)
    try:
        split = where.split_by_links(layout, n_threads, repack)
        split = replace(split, staging=where.staging, streams=streams)
        plan, tensor_split = plan_devices(layout, where.vram, ram, where.devices, memory, split, **options)
    except BudgetError as error:
        if where.choice != "auto" or where.vram != (ExpertCache("auto"),) or "cpu" in where.refused:
            raise
        plan = make_plan(layout, ram, memory, **{**options, **on_cpu}, streams=streams)
        return Placed(replace(plan, reasons=(*plan.reasons, f"not slots on GPUs: {error}")), layout)
    if where.choice == "auto":
        reason = "placement 'auto' is slots where layers are divided, or a GPU is chosen: no other one was compared"
        plan = replace(plan, reasons=(*plan.reasons, reason))
    return Placed(plan, layout, tensor_split)


def _within(cache: ExpertCache, layout: ExpertLayout, free_bytes: int) -> int:
    """Bytes of a budget for experts, of which "auto" takes what is free."""
    if cache.mode == "auto":
        return min(free_bytes, cache.n_bytes or free_bytes)
    if cache.mode == "bytes":
        return cache.n_bytes
    every_slot = layout.n_expert_total * slot_bytes(layout)  # more than the experts, where types differ in size
    return every_slot if cache.fraction >= 1 else round(cache.fraction * layout.expert_bytes)


def with_misses_computed(plan: Plan) -> Plan:
    """The plan where the CPU computes what a device lacks; with a warning where it has nothing to compute from."""
    if plan.n_lower_slots:
        reason = "misses='compute': the CPU computes experts that are not in VRAM where that is faster, so answers are"
        return replace(plan, exact=False, reasons=(*plan.reasons, reason + " not exact"))
    warning = (
        "misses='compute' has no effect, and answers are exact: there are no slots in VRAM over slots in RAM, whose"
        " misses the CPU could compute"
    )
    return replace(plan, warnings=(*plan.warnings, warning))


def with_placement_unused(plan: Plan, placement: str | None) -> Plan:
    """The plan of a machine without a GPU, with a reason where the environment places experts on one. placement: as
    `gpus_for` takes it."""
    wanted = read_environment().placement
    if placement is not None or wanted not in ("slots", "layers") or has_gpu():
        return plan
    reason = f"MOEGGUF_PLACEMENT is {wanted!r}, but this build of moegguf sees no GPU: the CPU computes every layer"
    return replace(plan, reasons=(*plan.reasons, reason))


def plan_here(
    layout: ExpertLayout,
    expert_cache: str | ExpertCache,
    vram_cache: str | None = None,
    placement: str | None = None,
    n_gpu_layers: int | None = None,
    misses: str | None = None,
    **options: Any,
) -> Plan:
    """The plan for this machine now. vram_cache, placement: as `gpus_for` takes them. misses: what happens to experts
    that a device lacks (`options.MISSES`); None: of MOEGGUF_MISSES. options: those of `make_plan`.

    Raises BudgetError, OptionError.
    """
    cache, memory = parse_expert_cache(expert_cache), read_memory()
    computes_misses = parse_choice("misses", read_environment().misses if misses is None else misses) == "compute"
    found = gpus_for(vram_cache, placement, {"n_gpu_layers": n_gpu_layers}) if layout.is_moe else None
    if found is None:
        plan = with_placement_unused(make_plan(layout, cache, memory, **options), placement)
    else:
        found = replace(found, computes_misses=computes_misses)
        plan = place_on(found, layout, cache, memory, count_cpus(), options).plan
    return with_misses_computed(plan) if computes_misses else plan
