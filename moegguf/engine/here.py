"""Plans for this machine now: its devices and memory, and what its user gives, by options or environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moegguf.controller.strategies import find_strategy
from moegguf.engine.cost import Speeds
from moegguf.engine.devices import find_gpus, gpus, has_gpu
from moegguf.engine.estimate import known_hits
from moegguf.engine.machine import Device, Machine, count_cpus, read_memory
from moegguf.engine.plan import Budgets, Plan, Sizes, parse_placement
from moegguf.engine.planner import make_plan
from moegguf.engine.speeds import KnownSpeeds
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.store import StoreOptions
from moegguf.quantities import ExpertCache, parse_expert_cache
from moegguf.settings import parse_choice, read_environment

EVERY_LAYER = 999  # n_gpu_layers above any model's
NO_SPLIT, BY_LAYERS = 0, 1  # enum llama_split_mode

Budget = str | int | float | ExpertCache


def parse_vram_cache(value: Budget) -> ExpertCache:
    """The budget in `value`. Raises BudgetError."""
    try:
        return parse_expert_cache(value)
    except BudgetError as error:
        raise BudgetError(str(error).replace("expert_cache", "vram_cache", 1)) from None


def parse_vram_caches(value: Budget) -> tuple[ExpertCache, ...]:
    """One budget for all devices together, or, where commas are in it, one for each. Raises BudgetError."""
    if not isinstance(value, str):
        return (parse_vram_cache(value),)
    return tuple(map(parse_vram_cache, value.split(",")))


def given_budgets(
    expert_cache: Budget | None, vram_cache: Budget | None, placement: str | None, misses: str | None = None
) -> Budgets:
    """What is given here, and what the environment gives where it is None. Raises BudgetError, OptionError."""
    environment = read_environment()
    return Budgets(
        parse_expert_cache(environment.expert_cache if expert_cache is None else expert_cache),
        parse_vram_caches((environment.vram_cache if vram_cache is None else vram_cache) or "auto"),
        parse_placement(environment.placement if placement is None else placement),
        computes_misses=parse_choice("misses", environment.misses if misses is None else misses) == "compute",
    )


def with_gpus(
    budgets: Budgets,
    vram_cache: Budget | None,
    placement: str | None,
    options: Mapping[str, Any],
    name: str | None = None,
) -> tuple[Budgets, tuple[Device, ...]]:
    """The GPUs that experts may be placed on, that of this name, or those that options leave, and the budgets as
    options divide layers over them; no GPU where none is used.

    vram_cache, placement: as given; None: of the environment. Where none of these names a budget or a placement, GPUs
    are used where there are some, unless `name` or options say that the caller divides the model. options:
    n_gpu_layers, split_mode, main_gpu and tensor_split, as llama_cpp.Llama takes them; with n_gpu_layers -1 GPUs
    compute every layer, also where the CPU would be faster.

    Raises BudgetError where there is no GPU for what was asked, OptionError for an unknown one, and for options that
    contradict a placement.
    """
    if vram_cache is None:
        vram_cache = read_environment().vram_cache or None
    n_gpu_layers, mode = options.get("n_gpu_layers"), options.get("split_mode", BY_LAYERS)
    if budgets.choice == "cpu":
        if n_gpu_layers:
            raise OptionError(f"placement 'cpu' uses no GPU, but n_gpu_layers is {n_gpu_layers}; leave one out.")
        return budgets, ()
    some_layers = n_gpu_layers is not None and 0 <= n_gpu_layers < EVERY_LAYER
    divided = some_layers or mode not in (NO_SPLIT, BY_LAYERS)
    if not vram_cache and placement in (None, "auto") and (divided or name or vram_cache == "" or not gpus()):
        return budgets, ()
    devices = _devices(name, mode, options.get("main_gpu", 0))
    tensor_split = options.get("tensor_split") if mode == BY_LAYERS else None
    whole = len(devices) == len(budgets.vram) == 1 and not some_layers and tensor_split is None
    if budgets.choice == "layers" and not whole:
        names = ", ".join(device.name for device in devices)
        raise OptionError(
            f"placement 'layers' is for one GPU with one budget and every layer, but these are to compute: {names}"
            f" (n_gpu_layers {n_gpu_layers}, tensor_split {tensor_split}); take placement 'slots', or choose one GPU"
            f" (split_mode {NO_SPLIT}, main_gpu) and leave these options out."
        )
    one_of_several = budgets.choice == "auto" and mode == NO_SPLIT and name is None and len(gpus()) > 1
    return replace(
        budgets,
        refuses_cpu=n_gpu_layers is not None,
        divided=not whole or one_of_several,
        n_gpu_layers=-1 if whole or n_gpu_layers is None else n_gpu_layers,
        tensor_split=None if tensor_split is None else tuple(tensor_split),
    ), devices


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


def default_store(strategy: str | None = None) -> StoreOptions:
    """How experts are moved where the caller does not say it: as the strategy does. None: MOEGGUF_STRATEGY."""
    return find_strategy(read_environment().strategy if strategy is None else strategy).store


def plan_known(layout: ExpertLayout, machine: Machine, budgets: Budgets, measure: Callable[[Device], Speeds]) -> Plan:
    """`make_plan` with what is known of the model, and with speeds where they decide between placements.

    measure: the speeds of a device with the model. Raises BudgetError, OptionError, also where the device has no kernel
    for the model's experts and has to be used.
    """
    if not machine.devices or budgets.divided:
        return make_plan(layout, machine, budgets)
    (device,) = machine.devices
    try:
        return make_plan(layout, machine, budgets, measure(device), known_hits(layout))
    except OptionError as error:
        if budgets.choice != "auto" or budgets.refuses_cpu:
            raise
        found = make_plan(layout, replace(machine, devices=()), budgets)
        return replace(found, reasons=(*found.reasons, f"not on {device.name}: {error}"))


def plan_now(
    layout: ExpertLayout,
    budgets: Budgets,
    devices: tuple[Device, ...],
    placement: str | None = None,
    n_threads: int | None = None,
    repack: bool = True,
) -> Plan:
    """The plan for this machine now, on these devices. placement: as given; n_threads, repack: of the CPU beside them.

    Raises BudgetError, OptionError.
    """
    known = KnownSpeeds(layout, n_threads or count_cpus(), repack)
    found = plan_known(layout, Machine(read_memory(), devices=devices), budgets, known.speeds)
    wanted = read_environment().placement
    if devices or not layout.is_moe or placement is not None or wanted not in ("slots", "layers") or has_gpu():
        return found
    reason = f"MOEGGUF_PLACEMENT is {wanted!r}, but this build of moegguf sees no GPU: the CPU computes every layer"
    return replace(found, reasons=(*found.reasons, reason))


def plan_here(
    layout: ExpertLayout,
    expert_cache: Budget | None = None,
    vram_cache: Budget | None = None,
    placement: str | None = None,
    n_gpu_layers: int | None = None,
    misses: str | None = None,
    **sizes: Any,
) -> Plan:
    """The plan that `Llama` would make now. sizes: fields of `Sizes`. Raises BudgetError, OptionError."""
    budgets = replace(given_budgets(expert_cache, vram_cache, placement, misses), sizes=Sizes(**sizes))
    devices: tuple[Device, ...] = ()
    if layout.is_moe:
        budgets, devices = with_gpus(budgets, vram_cache, placement, {"n_gpu_layers": n_gpu_layers})
    return plan_now(layout, budgets, devices, placement)
