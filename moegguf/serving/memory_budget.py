"""Computes the memory that a model needs, the memory that is available, and which idle
models must be unloaded.

Each model has a plan with all the memory that it can use, and plans with less memory.
Plans are built from the headers of the model's files, before anything is loaded. A
worker receives the plan with which it loads its model. This module does not handle
processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from moegguf.engine.devices import query_gpus
from moegguf.engine.load import choose_gpus, known_speeds, plan_load, read_model
from moegguf.engine.load_spec import Budgets, ListGpus, LoadSpec
from moegguf.engine.machine import Device, Machine, Memory, read_memory
from moegguf.engine.memory import Sizes, choose_context, may_draft
from moegguf.engine.plan import Plan, layer_slots, slot_bytes
from moegguf.engine.solver import make_plan
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.models.details import files_of
from moegguf.models.entry import ModelEntry
from moegguf.options import BUDGETS
from moegguf.quantities import ExpertCache, format_bytes
from moegguf.serving.events import LoadOverrides
from moegguf.settings import Settings

_UNLIMITED = 1 << 62

RAM = "RAM"
Room = Mapping[str, int]
"""{RAM or name of a device: bytes}"""


@dataclass(frozen=True)
class LoadConfig:
    """The model that a worker loads, with its plan and options."""

    name: str
    path: str
    spec: LoadSpec
    plan: Plan  # sizes and places of all memory of the model
    # Further keyword arguments of `Llama`.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSize:
    """The memory that a model needs, and functions that plan its load."""

    wanted: Room  # all memory that the model can use
    minimum: Room  # the minimum memory for loading the model
    # Creates a plan for memory between `minimum` and `wanted`.
    plan_within: Callable[[Room], Plan]
    # Creates the configuration of a worker that loads with this plan.
    load_config: Callable[[Plan], LoadConfig]
    default_n_ctx: int = 0  # context length of a load that does not set one


def load_options(
    entry: ModelEntry, overrides: LoadOverrides, settings: Settings
) -> dict[str, Any]:
    """Returns the load options of a model. If several sources have an option, the first
    of them in this order is used: `overrides`, the draft model of the entry,
    `settings.loading`, other files of the entry."""
    files = files_of(entry)
    given = {**files, **settings.loading}
    if "draft" in files:
        given["draft"] = files["draft"]
    given |= overrides
    if "lora_path" not in given:
        given.pop("lora_scale", None)
    return given


def measure(
    entry: ModelEntry,
    overrides: LoadOverrides,
    settings: Settings,
    memory: Memory,
    list_gpus: ListGpus = query_gpus,
) -> ModelSize:
    """Returns the memory that `entry` needs when it is loaded with `overrides`. Reads
    file headers, so the event loop must not call it directly.

    memory: RAM for all models together. list_gpus: called only if experts may be placed
    on GPUs (`LoadSpec.choose_gpus`).

    Raises ModelFormatError, ModelNotFoundError, BudgetError or OptionError.
    """
    given = load_options(entry, overrides, settings)
    spec = LoadSpec.of(given, commands=True)
    layout = read_model(entry.path, spec)
    machine = Machine(memory, devices=choose_gpus(layout, spec, list_gpus) or ())
    wanted = _best_plan(layout, spec, machine)
    planner = _Planner(
        layout,
        # Less memory does not shorten the context.
        wanted.context.fixed_in(spec),
        wanted,
        machine if wanted.on_device else replace(machine, devices=()),
    )
    least = planner.least()
    options = {**LoadSpec.others(given), "verbose": settings.debug}
    drafting = spec if may_draft(spec) else replace(spec, draft="off")

    def load_config(plan: Plan) -> LoadConfig:
        return LoadConfig(entry.name, str(entry.path), drafting, plan, options)

    default = replace(spec, n_ctx=LoadSpec.of(settings.loading, commands=True).n_ctx)
    most_bytes, least_bytes = bytes_of(wanted), bytes_of(least)
    return ModelSize(
        wanted=most_bytes,
        minimum={
            place: min(n_bytes, least_bytes.get(place, 0))
            for place, n_bytes in most_bytes.items()
        },
        plan_within=lambda room: planner.plan_within(room, least),
        load_config=load_config,
        default_n_ctx=_best_plan(layout, default, machine).context.n_ctx
        if "n_ctx" in overrides
        else wanted.context.n_ctx,
    )


def _best_plan(layout: ExpertLayout, spec: LoadSpec, machine: Machine) -> Plan:
    """Returns the plan in which a model can use all memory that models may use.

    If this memory is too small for the options, returns a plan for unlimited RAM, with
    the context length that would be chosen on `machine`. `admit` then decides whether a
    smaller plan fits.
    """
    measure_speeds = known_speeds(layout, spec).speeds_apart
    try:
        return plan_load(layout, spec, machine, measure_speeds)
    except BudgetError:
        free_bytes = min(
            machine.memory.available_bytes,
            *(device.free_bytes for device in machine.devices),
            _UNLIMITED,
        )
        sizes = choose_context(layout, Sizes.of(layout, spec), free_bytes)
        endless = replace(machine, memory=_models_memory(_UNLIMITED))
        spec = replace(spec, n_ctx=sizes.n_ctx)
        return plan_load(layout, spec, endless, measure_speeds)


def _models_memory(n_bytes: int) -> Memory:
    """Returns RAM of this size, which models may use completely."""
    return Memory(n_bytes, n_bytes, "the models' budget", 0)


@dataclass(frozen=True)
class _Planner:
    """Creates plans for one model that need less memory than the plan `wanted`."""

    layout: ExpertLayout
    spec: LoadSpec  # the options of the load, with the context sizes of `wanted`
    wanted: Plan
    # The memory that all models share, without devices if `wanted` uses none.
    machine: Machine

    def plan_within(self, room: Room, least: Plan) -> Plan:
        """Returns the plan for the memory `room`: `wanted` if it fits, otherwise a plan
        with fewer slots if one fits, otherwise `least`."""
        if _fits(self.wanted, room):
            return self.wanted
        smaller = replace(
            self.spec,
            placement="slots" if self.machine.devices else "cpu",
            budgets=self.spec.budgets.as_limits(
                self.layout.n_expert_total,
                self._slot_bytes(),
                self.wanted.device_slot_bytes,
            ),
        )
        gpus = [
            replace(gpu, free_bytes=room.get(gpu.name, 0), margin_bytes=0)
            for gpu in self.machine.devices
        ]
        machine = Machine(_models_memory(room[RAM]), devices=tuple(gpus))
        with suppress(BudgetError):
            found = make_plan(self.layout, machine, smaller)
            if _fits(found, room):
                return found
        return least

    def _slot_bytes(self) -> int:
        names = [device.name for device in self.machine.devices]
        return slot_bytes(self.layout, names)

    def least(self) -> Plan:
        """Returns the plan with the fewest slots, on the devices of `wanted`. Returns
        `wanted` for a model without experts, if the options fix which layers are on
        devices, and if no such plan is possible."""
        layout, spec, devices = self.layout, self.spec, self.machine.devices
        as_asked = (
            self.wanted.layers_on and spec.placement == "layers"
        ) or spec.is_divided(devices[:1])
        if not layout.is_moe or (devices and as_asked):
            return self.wanted
        sizes = Sizes.of(layout, spec).with_context(layout, self.wanted.context.n_ctx)
        n_tokens = 1 if devices else sizes.one_pass_tokens
        n_slots = layer_slots(layout, n_tokens, self.wanted.supply.streams)
        one_slot = self._slot_bytes()
        if devices:
            fewest = n_slots * len(devices) * one_slot
            budgets = Budgets.of({BUDGETS[RAM]: one_slot, BUDGETS["VRAM"]: fewest})
            spec = replace(spec, placement="slots", budgets=budgets, n_ubatch=1)
        else:
            budgets = Budgets.of({BUDGETS[RAM]: n_slots * one_slot})
            n_ubatch = sizes.n_ubatch or sizes.one_pass_tokens
            spec = replace(spec, placement="cpu", budgets=budgets, n_ubatch=n_ubatch)
        with suppress(BudgetError):
            return make_plan(layout, self.machine, spec)
        return self.wanted


def bytes_of(plan: Plan) -> dict[str, int]:
    """Returns {RAM or device: bytes that the plan needs there}."""
    return {part.name or RAM: part.total_bytes for part in plan.memories}


def _fits(plan: Plan, room: Room) -> bool:
    return all(
        n_bytes <= room.get(place, 0) for place, n_bytes in bytes_of(plan).items()
    )


@dataclass(frozen=True)
class MemoryUse:
    """The memory that one model uses."""

    name: str
    used: Room
    idle: bool  # True if the model may be unloaded, or is being unloaded


@dataclass(frozen=True)
class Admission:
    """The decision about a load. If `reserve` and `unload` are empty, the load must
    wait until other models are idle."""

    # {place: bytes to reserve}; not empty: the model is loaded now.
    reserve: Room = field(default_factory=dict)
    unload: tuple[str, ...] = ()  # names of the models to unload first
    # {place: bytes missing before unloading}.
    short: Room = field(default_factory=dict, compare=False)


def admit(
    size: ModelSize,
    limits: Room,
    models: Sequence[MemoryUse],
    max_models: int | None = None,
) -> Admission:
    """Decides whether a model can be loaded within `limits`. `models` are the other
    models, least recently used first.

    Idle models are chosen for unloading in this order. An idle model is chosen if it
    has memory in a place where bytes are missing, or if there would be more than
    `max_models` models. Raises BudgetError if the model's minimum would not fit even
    without any other model.
    """
    for place, n_bytes in size.minimum.items():
        if n_bytes > limits[place]:
            raise BudgetError(
                f"the model needs at least {format_bytes(n_bytes)} {'of' if place == RAM else 'on'} {place}, but all"
                f" models together may use {format_bytes(limits[place])} there; lower num_ctx, or close other programs"
                " that use this memory and restart the server (for RAM, you can set a larger MOEGGUF_MEMORY)."
            )
    free = Counter({place: limits[place] for place in size.wanted})
    for model in models:
        free.subtract(model.used)

    def missing() -> Room:
        return {
            place: n_bytes - free[place]
            for place, n_bytes in size.wanted.items()
            if n_bytes > free[place]
        }

    shortage = missing()
    n_free = (max_models or _UNLIMITED) - len(models)
    unload: list[str] = []
    for model in models:
        short = missing()
        if n_free > 0 and not short:
            break
        if model.idle and (
            n_free <= 0 or any(model.used.get(place) for place in short)
        ):
            free.update(model.used)
            n_free += 1
            unload.append(model.name)
    if n_free <= 0 or any(
        free[place] < n_bytes for place, n_bytes in size.minimum.items()
    ):
        return Admission()
    if unload:
        return Admission(unload=tuple(unload), short=shortage)
    return Admission(
        {place: min(free[place], n_bytes) for place, n_bytes in size.wanted.items()}
    )


class MemoryLimits:
    """The bytes that all models together may use.

    In RAM, the setting `memory_bytes` is the limit. Without a setting, the limit is the
    memory that was free at construction, less a margin. It is smaller if other programs
    have taken more memory since then. On a device, the limit is the smallest number of
    free bytes seen so far, where memory used by models is treated as free.
    """

    def __init__(
        self, settings: Settings, memory: Callable[[], Memory] = read_memory
    ) -> None:
        # Names of devices that have failed, which are not used again.
        self.lost: set[str] = set()
        self._memory = memory
        self._setting_bytes = settings.memory_bytes
        self._at_start = memory()
        self._on_device: dict[str, int] = {}  # {device: its limit in bytes}

    def ram(self, used_bytes: int) -> Memory:
        """Returns the RAM for all models together, given that they now use
        `used_bytes`."""
        if self._setting_bytes:
            return _models_memory(self._setting_bytes)
        now = self._memory()
        free_bytes = min(
            self._at_start.available_bytes, now.available_bytes + used_bytes
        )
        return replace(now, available_bytes=free_bytes)

    def of(self, place: str, used_bytes: int) -> int:
        """Returns the limit in bytes at `place` (RAM or a device), given that models
        now use `used_bytes` there. The limit of a device that `gpus` has not listed is
        0."""
        return (
            self.ram(used_bytes).usable_bytes
            if place == RAM
            else self._on_device.get(place, 0)
        )

    def gpus(self, devices: Sequence[Device], used: Room) -> list[Device] | None:
        """Returns the devices that have not failed, with the bytes that would be free
        without models. `used` are the bytes that models use now. Returns None if
        devices have failed and no other device is left."""
        there = [device for device in devices if device.name not in self.lost]
        for device in there:
            free = device.free_bytes + used.get(device.name, 0)
            self._on_device[device.name] = min(
                self._on_device.get(device.name, free), free
            )
        found = [
            replace(device, free_bytes=self._on_device[device.name]) for device in there
        ]
        return None if self.lost and not found else found


def expert_cache_within(
    cache: ExpertCache, n_experts: int, slot_bytes: int, reserved_bytes: int
) -> int:
    """Returns a budget in bytes, limited to the bytes reserved at the model's load and
    rounded down to whole slots.

    "auto" means all reserved bytes. A budget of less than one slot is not rounded, and
    is at least 1 byte, so that the model refuses this budget.

    Raises BudgetError for a model without experts.
    """
    if not slot_bytes:
        raise BudgetError(
            "the model has no experts, so it takes no budget for them; leave the budget out."
        )
    asked = {
        "auto": reserved_bytes,
        "fraction": int(cache.fraction * n_experts * slot_bytes),
        "bytes": cache.n_bytes,
    }
    n_bytes = min(asked[cache.mode], reserved_bytes)
    return n_bytes // slot_bytes * slot_bytes or max(1, n_bytes)
