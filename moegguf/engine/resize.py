"""Other budgets for the experts of a loaded model, as slots of its tiers: at least what its passes use, at most those
that it was loaded with, which "auto" gives back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from moegguf.engine.load import Budget
from moegguf.engine.pool_plan import divide_ram_slots
from moegguf.errors import BudgetError
from moegguf.native import library
from moegguf.native.store import Tier
from moegguf.quantities import ExpertCache, format_bytes_up, parse_expert_cache

if TYPE_CHECKING:
    from moegguf.engine.context import Context
    from moegguf.engine.plan import Plan
    from moegguf.engine.session import Session
    from moegguf.engine.upstream import UpstreamLlama

Slots = tuple[Tier, int | None]  # of a tier; of one of the store's devices alone
EVERY_DEVICE: Slots = Tier.COMPUTE, None  # those in VRAM; where the CPU computes every layer, those in RAM


def set_budget(
    llm: UpstreamLlama,
    context: Context,
    session: Session | None,
    expert_cache: Budget | None,
    vram_cache: Budget | None,
) -> None:
    """`Llama.set_budget` of a model with this context and session."""
    context.check_caller()
    with context.lock:
        context.check_open()
        if session is None:
            return
        store, plan, controller = session.store, session.plan, context.controller
        on_device, wanted = plan.device is not None, _Budgets(session).slots(expert_cache, vram_cache)
        try:
            if on_device:
                library.llama_cpp().llama_synchronize(llm.ctx)
            for (tier, device), n_slots in reversed(wanted.items()):  # at once: nothing computes under this lock
                store.resize(n_slots, tier, device, at_once=True)
        finally:
            if wanted.get(EVERY_DEVICE, plan.device_slots) < plan.device_slots:
                _shorten_passes(llm, plan)
            if controller is not None and any(tier is Tier.COMPUTE for tier, _ in wanted):
                controller.update(store.info()["n_slots_usable"] if on_device else wanted[EVERY_DEVICE])


def _shorten_passes(llm: UpstreamLlama, plan: Plan) -> None:
    """To what slots are exact for, where passes were planned for a device with every expert."""
    most = plan.slot_tokens
    if plan.device is None or plan.n_staging or min(llm.n_batch, plan.n_ubatch) <= most:
        return
    llm.n_batch = most
    warnings.warn(
        f"{plan.device} had a slot for every expert, and stages no prompts: with fewer slots they are read"
        f" {most} token{'s' * (most > 1)} at a time, as slots are exact for no more; load the model again with this"
        " vram_cache to have them staged.",
        stacklevel=4,
    )


class _Budgets:
    """The budgets of one loaded model."""

    def __init__(self, session: Session) -> None:
        self._plan, self._layout, self._store = session.plan, session.layout, session.store

    def slots(self, expert_cache: Budget | None, vram_cache: Budget | None) -> dict[Slots, int]:
        """Slots of each tier, and of the CPU beside devices, that change; those in RAM last. None: as it is. Raises
        BudgetError below what passes use, and for a tier that the model does not have."""
        wanted: dict[Slots, int] = {}
        if vram_cache is not None:
            wanted[EVERY_DEVICE] = self._in_vram(vram_cache)
        if expert_cache is not None and self._plan.device is None:
            cache = parse_expert_cache(expert_cache)
            n_slots = self._asked(cache, self._store.tier()["n_slots"])
            least = self._plan.pass_slots(self._layout, on_device=False)
            wanted[EVERY_DEVICE] = self._checked(n_slots, least, f"expert_cache={str(cache)!r}")
        elif expert_cache is not None:
            wanted |= self._below_vram(expert_cache)
        return wanted

    def _in_vram(self, vram_cache: Budget) -> int:
        """On all devices together, in a budget that holds staging tensors, too, as at load."""
        cache, plan = parse_expert_cache(vram_cache, "vram_cache"), self._plan
        if plan.layers_on is not None:
            raise BudgetError(
                f"vram_cache={vram_cache!r}: {plan.layers_on} has the experts of whole layers, which stay there; load"
                " the model again with another vram_cache, or with placement 'slots'."
            )
        if plan.device is None:
            raise BudgetError(
                f"vram_cache={vram_cache!r}: the CPU computes this model, so it has no experts in VRAM; load it with"
                " vram_cache (--vram-cache) to use a GPU."
            )
        beside = self._store.options.staging is not None  # staging tensors were asked for, beside the budget
        staged = 0 if beside or cache.mode == "auto" else plan.staging_slots_bytes // plan.slot_bytes
        least = sum(device.pass_slots for device in self._store.devices if device.name is not None)
        n_slots = self._asked(cache, plan.device_slots + staged) - staged
        return self._checked(n_slots, least, f"vram_cache={str(cache)!r}", staged)

    def _below_vram(self, expert_cache: Budget) -> dict[Slots, int]:
        """In RAM, below devices and of the layers that the CPU computes beside them, in their proportion at load."""
        store, plan, cache = self._store, self._plan, parse_expert_cache(expert_cache)
        option = f"expert_cache={str(cache)!r}"
        cpu = next((index for index, device in enumerate(store.devices) if device.name is None), None)
        n_cpu = 0 if cpu is None else store.device(cpu)["n_slots"]
        n_ram = store.tier(Tier.RAM)["n_slots"] if Tier.RAM in store.tiers else 0
        if n_cpu + n_ram == 0:
            raise BudgetError(
                f"{option}: the model was loaded with every expert in VRAM, so it has no slots in RAM; change"
                " vram_cache, or load it again with less of that."
            )
        total = self._asked(cache, n_cpu + n_ram)
        if cpu is None:
            if not total:
                size = format_bytes_up(plan.slot_bytes)
                raise BudgetError(f"{option} holds no expert; give at least {size!r}.")
            return {(Tier.RAM, None): total}
        least, one_below = min(n_cpu, plan.pass_slots(self._layout, on_device=False)), min(1, n_ram)
        n_layers = len(store.devices[cpu].layers)
        self._checked(total, least + one_below, f"{option}, of which {n_layers} layers on the CPU have some,")
        n_cpu, below = divide_ram_slots(total, n_cpu, n_ram, least)
        return {(Tier.COMPUTE, cpu): n_cpu} | ({(Tier.RAM, None): below} if n_ram else {})

    def _asked(self, cache: ExpertCache, most: int) -> int:
        """Slots of a budget, of which there are so many at most."""
        share = int(cache.fraction * self._layout.n_expert_total + 1e-9)
        asked = {"auto": most, "fraction": share, "bytes": cache.n_bytes // self._plan.slot_bytes}
        return min(asked[cache.mode], most)

    def _checked(self, n_slots: int, least: int, option: str, n_staged: int = 0) -> int:
        if n_slots < least:
            size = format_bytes_up((least + n_staged) * self._plan.slot_bytes)
            raise BudgetError(
                f"{option} is too small for a model that was loaded to read {self._plan.n_ubatch} tokens at a time;"
                f" give at least {size!r}, or load it again with the smaller budget."
            )
        return n_slots
