"""Other budgets for the experts of a loaded model, as slots of its tiers: at least what its passes use, at most those
that it was loaded with, which "auto" gives back."""

from __future__ import annotations

from moegguf.engine.here import Budget, parse_vram_cache
from moegguf.engine.plan import Plan
from moegguf.engine.ram_plan import divide_ram_slots
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.store import Store, Tier
from moegguf.quantities import ExpertCache, format_bytes_up, parse_expert_cache

Slots = tuple[Tier, int | None]  # of a tier; of one of the store's devices alone
EVERY_DEVICE: Slots = Tier.COMPUTE, None  # those in VRAM; where the CPU computes every layer, those in RAM


class Resize:
    """The budgets of one loaded model, which has this plan and store. layout: of the experts that have slots.
    stages_beside: staging tensors were asked for, beside a budget in VRAM."""

    def __init__(self, plan: Plan, layout: ExpertLayout, store: Store, stages_beside: bool) -> None:
        self._plan, self._layout, self._store, self._stages_beside = plan, layout, store, stages_beside

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
        cache, plan = parse_vram_cache(vram_cache), self._plan
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
        staged = 0 if self._stages_beside or cache.mode == "auto" else plan.staging_slots_bytes // plan.slot_bytes
        least = sum(device.pass_slots for device in self._store.devices if device.name is not None)
        n_slots = self._asked(cache, plan.device_slots + staged) - staged
        return self._checked(n_slots, least, f"vram_cache={str(cache)!r}", staged)

    def _below_vram(self, expert_cache: Budget) -> dict[Slots, int]:
        """In RAM, below devices and of the layers that the CPU computes beside them, in their proportion at load."""
        store, plan, cache = self._store, self._plan, parse_expert_cache(expert_cache)
        option = f"expert_cache={str(cache)!r}"
        cpu = next((index for index, device in enumerate(store.devices) if device.name is None), None)
        n_cpu = 0 if cpu is None else store.device(cpu)["n_slots"]
        n_lower = store.tier(Tier.RAM)["n_slots"] if Tier.RAM in store.tiers else 0
        if n_cpu + n_lower == 0:
            raise BudgetError(
                f"{option}: the model was loaded with every expert in VRAM, so it has no slots in RAM; change"
                " vram_cache, or load it again with less of that."
            )
        total = self._asked(cache, n_cpu + n_lower)
        if cpu is None:
            if not total:
                size = format_bytes_up(plan.slot_bytes)
                raise BudgetError(f"{option} holds no expert; give at least {size!r}.")
            return {(Tier.RAM, None): total}
        least, one_below = min(n_cpu, plan.pass_slots(self._layout, on_device=False)), min(1, n_lower)
        n_layers = len(store.devices[cpu].layers)
        self._checked(total, least + one_below, f"{option}, of which {n_layers} layers on the CPU have some,")
        n_cpu, below = divide_ram_slots(total, n_cpu, n_lower, least)
        return {(Tier.COMPUTE, cpu): n_cpu} | ({(Tier.RAM, None): below} if n_lower else {})

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
