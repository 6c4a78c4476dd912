"""Which idle models to unload so that another fits, and how much memory there is. Arithmetic only; no processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moegguf.engine.devices import NO_GPU
from moegguf.engine.machine import Device, Memory, read_memory
from moegguf.engine.memory import margin_bytes
from moegguf.errors import BudgetError
from moegguf.quantities import ExpertCache, format_bytes
from moegguf.serving.model_size import ModelSize
from moegguf.settings import Settings

_UNLIMITED = 1 << 62


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


def planned_budgets(plan: Mapping[str, Any]) -> tuple[int, int]:
    """What a model with this plan (as JSON) was loaded with for slots: in RAM, and on its device, there with what
    prompts are staged in."""
    if plan.get("device"):
        return plan.get("n_ram_slots", 0) * plan["slot_bytes"], plan["vram_cache_bytes"]
    return plan.get("budget_bytes", 0), 0


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
