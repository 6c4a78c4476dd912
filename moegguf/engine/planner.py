"""The one plan: where a model's experts go on a machine, within budgets, decided before anything is loaded.

Context, slots and passes are chosen for every placement that is allowed and fits; with speeds the cost model compares
these. `make_plan` reads no weights, measures nothing and allocates nothing: the same arguments, the same plan. A server
makes it for its workers, and `Llama` for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moegguf.controller.hit_rates import HitCurve
from moegguf.decisions import log_decision
from moegguf.engine import cost
from moegguf.engine.cost import HitRates, Kind, ModelBytes, Placement, Speeds, format_speed
from moegguf.engine.device_plan import plan_slots
from moegguf.engine.machine import Device, Machine
from moegguf.engine.memory import Sizes
from moegguf.engine.plan import AUTO, KINDS_OF, Budgets, PlacementPlan, Plan, allowed_ubatch, slot_bytes
from moegguf.engine.pool_plan import (
    VRAM_MARGIN_BYTES,
    Pool,
    choose_context,
    host_bytes,
    placed,
    ram_slots,
    short_of,
    too_few,
)
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes
from moegguf.quantities import format_bytes


def make_plan(
    layout: ExpertLayout,
    machine: Machine,
    budgets: Budgets = Budgets(),
    speeds: Speeds | None = None,
    hits: HitCurve | None = None,
) -> Plan:
    """The plan for running `layout` on `machine`: on its devices, if it has some and the model has experts.

    speeds: of one device, by which placements are compared; None: the first that fits is taken. hits: hit rates to
    expect; None: published ones. Raises BudgetError, stating the minimum, where nothing that `budgets` allow fits, and
    OptionError for options that do not fit the devices.
    """
    if not machine.devices:
        return _plan_cpu(layout, machine, budgets)
    plans, refused = dict[Kind, Plan](), dict[Kind, BudgetError]()
    for kind, make in _WAYS.items():
        # Slots for every expert are the same as whole layers without the CPU.
        if kind == "layers" and (budgets.divided or "resident" in plans):
            continue
        if kind == "cpu" and budgets.divided and plans:
            continue
        try:
            found = make(layout, machine, budgets)
            plans["resident" if kind == "slots" and found.resident else kind] = found
        except BudgetError as error:
            refused[kind] = error
    kinds, reasons, placement = _allowed(budgets, plans, refused), list[str](), None
    found = plans[kinds[0]]
    if budgets.divided and budgets.choice == "auto" and kinds[0] != "cpu":
        reasons.append("placement 'auto' is slots where layers are divided: no other one was compared")
    elif speeds is not None and not budgets.divided:
        hits = hits or HitRates(layout).curve()
        placement = _compare(layout, machine.devices[0], budgets, plans, kinds, speeds, hits)
        found = plans[placement.chosen.kind]
        reasons.append(placement.reason)
    reasons += [f"not {kind}: {error}" for kind, error in refused.items() if kind in KINDS_OF[budgets.choice]]
    return replace(found, reasons=(*found.reasons, *reasons), placement=placement)


def plan_known(layout: ExpertLayout, machine: Machine, budgets: Budgets, measure: Callable[[Device], Speeds]) -> Plan:
    """`make_plan` with what is known of the model, and with speeds where they decide between placements.

    measure: the speeds of a device with the model. Raises BudgetError, OptionError, also where the device has no kernel
    for the model's experts and has to be used.
    """
    speeds, hits, reasons = None, None, list[str]()
    if machine.devices and not budgets.divided:
        (device,) = machine.devices
        try:
            speeds, hits = measure(device), HitRates.of(layout).curve()
        except OptionError as error:
            if budgets.choice != "auto" or budgets.refuses_cpu:
                raise
            machine, reasons = replace(machine, devices=()), [f"not on {device.name}: {error}"]
    found = make_plan(layout, machine, budgets, speeds, hits)
    return replace(found, reasons=(*found.reasons, *reasons))


def _plan_cpu(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    ram, streams = machine.memory, budgets.streams and slot_sizes(layout).streams
    return Pool(layout, budgets.ram, ram, budgets.sizes, budgets.margin_of(ram), streams).plan()


def _allowed(budgets: Budgets, plans: Mapping[Kind, Plan], refused: Mapping[Kind, BudgetError]) -> list[Kind]:
    """The kinds of these plans that may be taken. Raises why the first that was asked for is none, where none may."""
    no_cpu = budgets.refuses_cpu or (budgets.divided and budgets.vram != (AUTO,))
    asked = [kind for kind in KINDS_OF[budgets.choice] if not (kind == "cpu" and no_cpu)]
    if kinds := [kind for kind in asked if kind in plans]:
        return kinds
    short = [error for kind, error in refused.items() if kind in asked]
    if budgets.divided:
        raise short[-1]
    if budgets.refuses_cpu:
        raise BudgetError(f"{short[0]} n_gpu_layers leaves no layer to the CPU: without it, that may compute.")
    raise short[0]


def _compare(
    layout: ExpertLayout,
    device: Device,
    budgets: Budgets,
    plans: Mapping[Kind, Plan],
    allowed: Sequence[Kind],
    speeds: Speeds,
    hits: HitCurve,
) -> PlacementPlan:
    """The fastest of the allowed placements."""
    predicted = {kind: _predict(layout, kind, found, speeds, hits) for kind, found in plans.items()}
    chosen = max((predicted[kind] for kind in allowed), key=lambda placement: placement.tokens_per_s)
    ordered = tuple(sorted(predicted.values(), key=lambda placement: -placement.tokens_per_s))
    reason = f"{chosen}: about {format_speed(chosen.tokens_per_s)} tokens/s"
    for other in [placement for placement in ordered if placement.kind != chosen.kind][:1]:
        reason += f", against {format_speed(other.tokens_per_s)} with {other}"
    if "slots" in predicted:
        reason += f" (hit rates {hits.source})"
    device_bytes = max(0, expert_room(layout, device, budgets)[1])
    if chosen.kind == "resident":
        reason = f"every expert fits into {format_bytes(device_bytes)} of the device's memory"
    predictions = {placement.kind: round(placement.tokens_per_s, 2) for placement in ordered}
    log_decision("placement_chosen", placement=chosen.kind, tokens_per_s=predictions, why=reason)
    return PlacementPlan(ordered, chosen, reason, speeds, hits.source, device_bytes)


def _predict(layout: ExpertLayout, kind: Kind, plan: Plan, speeds: Speeds, hits: HitCurve) -> Placement:
    """The placement of a plan of this kind, with the tokens per second that the cost model predicts, the context half
    full."""
    model, n_total = ModelBytes.of(layout, plan.kv_bytes // 2), layout.n_expert_total
    if kind == "layers":
        rest = plan.slots_layout(layout)
        share = rest.expert_bytes / layout.expert_bytes
        from_disk = share * (1 - hits.at(plan.n_slots / rest.n_expert_total))
        seconds = cost.layers_s(model, speeds, len(rest.layers), share, from_disk)
        return Placement(kind, 1 / seconds, len(plan.whole_layers))
    hit_rate = hits.at(plan.n_slots / n_total)
    if kind == "cpu":
        return Placement(kind, 1 / cost.cpu_s(model, speeds, 1 - hit_rate))
    from_disk = 1 - hits.at((plan.n_slots + plan.n_ram_slots) / n_total)
    seconds = cost.slots_s(model, speeds, hit_rate, from_disk)
    if kind == "resident":
        return Placement(kind, 1 / seconds, len(layout.layers), hit_rate=1.0)
    return Placement(kind, 1 / seconds, 0, plan.budget_bytes, hit_rate)


def expert_room(layout: ExpertLayout, device: Device, budgets: Budgets) -> tuple[Sizes, int]:
    """The context of a device that computes every layer, and its bytes for experts within its budget, below 0 where not
    even everything else fits."""
    budget = budgets.vram[0]
    sizes = choose_context(layout, budgets.sizes, device.free_bytes, budget)
    if budget.mode == "auto":
        free = device.free_bytes - sizes.needs(layout, sizes.most_ubatch).total_bytes(0) - VRAM_MARGIN_BYTES
        return sizes, min(free, budget.n_bytes or free)
    if budget.mode == "fraction" and budget.fraction >= 1:
        return sizes, layout.n_expert_total * slot_bytes(layout)  # more than the experts, where types differ in size
    return sizes, budget.n_bytes or round(budget.fraction * layout.expert_bytes)


def plan_layers(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    """The plan for computing everything on a device but the experts of the first layers, which the CPU computes from
    slots in RAM. Experts of as many last layers as fit lie on the device, as every other weight does.

    Raises BudgetError where the device has too little memory for what is no expert, or RAM too few experts of a token.
    """
    (device,), ram, whole = machine.devices, machine.memory, set[int]()
    sizes, left_bytes = expert_room(layout, device, budgets)
    for layer in reversed(layout.layers[1:]):
        left_bytes -= layer.n_expert * layer.expert_bytes
        if left_bytes < 0:
            break
        whole.add(layer.il)
    rest = layout.only(layer.il for layer in layout.layers if layer.il not in whole)
    size = slot_bytes(rest)
    n_slots = ram_slots(rest, budgets, ram, size, sizes.most_ubatch)
    if n_slots < rest.n_expert_used:
        raise too_few(f"expert_cache={str(budgets.ram)!r}", n_slots, rest.n_expert_used, size)
    streams = budgets.streams and slot_sizes(rest).streams
    allowed = allowed_ubatch(rest, n_slots, streams)
    if allowed < sizes.one_pass_tokens:
        raise BudgetError(
            f"an image takes a pass of {sizes.one_pass_tokens} tokens, but {n_slots} slots in RAM allow {allowed}; give"
            " more with expert_cache."
        )
    n_ubatch = min(sizes.most_ubatch, allowed)
    host = host_bytes(layout, n_ubatch) + n_slots * (size + sizes.needs(rest, n_ubatch).slot_work_bytes)
    reasons = (
        f"every layer is computed on {device.name}, but the experts of {len(rest.layers)} of {len(layout.layers)}"
        f" layers by the CPU; those of the other {len(whole)} lie on {device.name}",
        f"{n_slots} of {rest.n_expert_total} experts of these layers fit into RAM ({format_bytes(n_slots * size)})",
    )
    plan = placed(
        rest, device.memory, sizes, (n_slots, n_ubatch), False, reasons=(*sizes.reasons, *reasons),
        warnings=tuple(short_of(host, ram, " of RAM")), streams=streams, host_bytes=host, layers_on=device.name,
        whole_layers=tuple(sorted(whole)), n_gpu_layers=-1,
    )  # fmt: skip
    if plan.total_bytes > device.free_bytes:
        raise BudgetError(
            f"whole layers, context and buffers take {format_bytes(plan.total_bytes)}, but"
            f" {format_bytes(device.free_bytes)} of {device.name}'s memory are free; give less with vram_cache, lower"
            " n_ctx (--ctx), or take placement 'cpu'."
        )
    return plan


_WAYS: Mapping[Kind, Callable[[ExpertLayout, Machine, Budgets], Plan]] = {
    "slots": plan_slots,
    "layers": plan_layers,
    "cpu": _plan_cpu,
}
