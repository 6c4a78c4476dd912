"""Plans slots on devices, over slots in RAM: one device computes every layer, or several, and the CPU, share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from moegguf.controller.request_cost import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Passes,
    best_staging,
    passes_cost,
    staging_bytes,
)
from moegguf.engine.device_split import count_layers
from moegguf.engine.machine import Machine
from moegguf.engine.plan import Budgets, Plan
from moegguf.engine.pool_plan import Pool
from moegguf.engine.ram_plan import VRAM_MARGIN_BYTES, host_bytes, lower_slots, short_of_ram
from moegguf.engine.split_plan import SplitPlanner
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import padded, slot_tokens
from moegguf.quantities import format_bytes


def plan_slots(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    """The plan with slots on the machine's devices, and others below them in RAM. Weights that every token uses, the
    context, the buffers of a pass and staging tensors are on the devices, too.

    Raises BudgetError, stating the minimum, where a budget is too small, OptionError for a split that does not fit the
    devices.
    """
    layout = padded(layout, [device.name for device in machine.devices])
    free_bytes = sum(device.free_bytes for device in machine.devices)
    sizes = budgets.sizes.within(layout, free_bytes, budgets.given_vram_bytes(layout))
    budgets = replace(budgets, sizes=sizes)
    alone = len(machine.devices) == len(budgets.vram) == 1 and not 0 <= budgets.n_gpu_layers <= count_layers(layout)
    on_devices = _on_one if alone else _on_several
    found = _with_best_staging(layout, lambda n: on_devices(layout, machine, budgets, n), budgets.staging)
    return replace(found, n_gpu_layers=budgets.n_gpu_layers)


def _on_several(layout: ExpertLayout, machine: Machine, budgets: Budgets, n_staging: int) -> Plan:
    return SplitPlanner(layout, machine, budgets, n_staging).plan()


def _on_one(layout: ExpertLayout, machine: Machine, budgets: Budgets, n_staging: int) -> Plan:
    (device,), memory = machine.devices, machine.memory
    upper = Pool(
        layout, budgets.vram[0], device.memory, budgets.sizes, VRAM_MARGIN_BYTES, n_staging > 0, "vram_cache",
        staging_bytes(layout, n_staging), budgets.staging is None, slot_tokens(device.name),
    ).plan()  # fmt: skip
    size, n_lower = upper.slot_bytes, 0
    reason = f"every layer is computed on {device.name}"
    if upper.resident:
        reason += ", which has a slot for every expert: none is kept in RAM"
    else:
        n_lower = lower_slots(layout, budgets.ram, memory, size, upper.n_ubatch, budgets.margin_bytes)
        share = n_lower / layout.n_expert_total
        reason += f"; {n_lower} experts ({share:.0%}, {format_bytes(n_lower * size)}) fit into RAM below it"
    host = host_bytes(layout, upper.n_ubatch) + n_lower * size
    return replace(
        upper, device=device.name, n_lower_slots=n_lower, host_bytes=host, reasons=(*upper.reasons, reason),
        warnings=upper.warnings + short_of_ram(host, memory),
    )  # fmt: skip


def _with_best_staging(layout: ExpertLayout, plan: Callable[[int], Plan], wanted: int | None) -> Plan:
    """The best of the plans with so many staging tensors on each device (`request_cost.best_staging`). wanted: with
    so many, beside a budget that is given, where they fit. Raises BudgetError where no plan does."""
    plans = dict[int, Plan | BudgetError]()

    def passes(n: int) -> Passes | None:
        try:
            found = plans[n] = plan(n)
        except BudgetError as error:  # without staging also where an image takes a pass of more tokens than have slots
            plans[n] = error
            return None
        if n and wanted is None and found.total_bytes > found.available_bytes:
            return None
        return Passes(found.device_slots, found.n_ubatch, found.staging_bytes, _has_every_expert(layout, found))

    n = best_staging(layout, passes, wanted)
    best = plans[n]
    if isinstance(best, BudgetError):
        raise best
    if n == 0:
        return best
    return replace(best, n_staging=n, reasons=(*best.reasons, *_staging_reasons(layout, n, best, plans[0])))


def _staging_reasons(layout: ExpertLayout, n: int, staged: Plan, without: Plan | BudgetError) -> Iterator[str]:
    yield (
        f"prompts are staged in {n} tensor{'s' * (n > 1)} of a layer's experts"
        f" ({format_bytes(staged.staging_bytes)}): slots keep theirs meanwhile"
    )
    if n == 1 and isinstance(without, Plan):
        moved, otherwise = (
            format_bytes(round(passes_cost(layout, Passes(plan.device_slots, plan.n_ubatch), plan is staged)))
            for plan in (staged, without)
        )
        yield (
            f"a prompt of {PROMPT_TOKENS} tokens and an answer of {ANSWER_TOKENS} then move about {moved}, against"
            f" {otherwise} with {without.device_slots} slots, which are exact for passes of {without.n_ubatch}"
            f" token{'s' * (without.n_ubatch > 1)}"
        )


def _has_every_expert(layout: ExpertLayout, plan: Plan) -> bool:
    """Whether every device has a slot for each expert of its layers."""
    n_experts = {layer.il: layer.n_expert for layer in layout.layers}
    of_devices = [part for part in plan.devices if part.name is not None]
    return plan.resident or (
        len(of_devices) > 0
        and all(part.n_slots >= sum(n_experts.get(il, 0) for il in part.layers) for part in of_devices)
    )
