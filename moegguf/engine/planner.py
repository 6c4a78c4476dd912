"""The one plan: where a model's experts go on a machine, within budgets, decided before anything is loaded.

On one device the placements that fit are planned and compared by the cost model; where layers are divided over several,
these have slots. `make_plan` reads no weights, measures nothing and allocates nothing: the same arguments, the same
plan. A server makes it for its workers, and `Llama` for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from moegguf.engine import cost
from moegguf.engine.budgets import AUTO, KINDS_OF, SMALL_CTX_TOKENS, Budgets, Sizes, default_contexts
from moegguf.engine.cost import HitCurve, Kind, ModelBytes, Placement, Speeds, format_speed, published_curve
from moegguf.engine.device_plan import plan_slots
from moegguf.engine.machine import Device, Machine
from moegguf.engine.plan import PlacementPlan, Plan, allowed_ubatch, slot_bytes
from moegguf.engine.pool_plan import VRAM_MARGIN_BYTES, Pool, host_bytes, ram_slots, short_of
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes
from moegguf.quantities import format_bytes, format_bytes_up


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
        found = _plan_cpu(layout, machine, budgets)
    elif budgets.divided:
        found = _plan_divided(layout, machine, budgets)
    else:
        hits = hits or published_curve(layout.n_expert, layout.n_expert_used)
        found = _plan_fastest(layout, machine, budgets, speeds, hits)
    return replace(found, reasons=(*_context_reasons(layout, budgets.sizes, found), *found.reasons))


def _plan_cpu(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    streams = budgets.streams and slot_sizes(layout).streams
    return Pool(layout, budgets.ram, machine.memory, budgets.sizes, budgets.margin_bytes, streams).plan()


def _plan_divided(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    try:
        found = plan_slots(layout, machine, budgets)
    except BudgetError as error:
        if budgets.choice != "auto" or budgets.vram != (AUTO,) or budgets.refuses_cpu:
            raise
        found = _plan_cpu(layout, machine, budgets)
        return replace(found, reasons=(*found.reasons, f"not slots on GPUs: {error}"))
    if budgets.choice == "auto":
        reason = "placement 'auto' is slots where layers are divided, or a GPU is chosen: no other one was compared"
        found = replace(found, reasons=(*found.reasons, reason))
    return found


def _plan_fastest(
    layout: ExpertLayout, machine: Machine, budgets: Budgets, speeds: Speeds | None, hits: HitCurve
) -> Plan:
    """The fastest of the placements that are allowed and fit; without speeds the first."""
    plans, refused = dict[Kind, Plan](), dict[Kind, BudgetError]()
    for kind, make in _WAYS.items():
        if kind == "layers" and "resident" in plans:
            continue  # slots for every expert are the same without the CPU
        try:
            found = make(layout, machine, budgets)
            plans["resident" if kind == "slots" and found.resident else kind] = found
        except BudgetError as error:
            refused[kind] = error
    allowed = [
        kind for kind in KINDS_OF[budgets.choice] if kind in plans and not (kind == "cpu" and budgets.refuses_cpu)
    ]
    if not allowed:
        short = next(error for kind, error in refused.items() if kind in KINDS_OF[budgets.choice])
        if budgets.refuses_cpu:
            short = BudgetError(f"{short} n_gpu_layers leaves no layer to the CPU: without it, that may compute.")
        raise short
    not_taken = [f"not {kind}: {error}" for kind, error in refused.items() if kind in KINDS_OF[budgets.choice]]
    if speeds is None:
        first = plans[allowed[0]]
        return replace(first, reasons=(*first.reasons, *not_taken))
    predicted = {kind: predict(layout, kind, found, speeds, hits) for kind, found in plans.items()}
    chosen = max((predicted[kind] for kind in allowed), key=lambda placement: placement.tokens_per_s)
    ordered = tuple(sorted(predicted.values(), key=lambda placement: -placement.tokens_per_s))
    best, device = plans[chosen.kind], machine.devices[0]
    device_bytes = max(0, expert_bytes_on(layout, device, budgets.on_devices(layout, device.free_bytes)))
    reason = _reason(chosen, ordered, budgets, hits, device_bytes)
    placement = PlacementPlan(ordered, chosen, reason, speeds, hits.source, device_bytes)
    return replace(best, reasons=(*best.reasons, reason, *not_taken), placement=placement)


def predict(layout: ExpertLayout, kind: Kind, plan: Plan, speeds: Speeds, hits: HitCurve) -> Placement:
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


def _reason(
    chosen: Placement, found: tuple[Placement, ...], budgets: Budgets, hits: HitCurve, device_bytes: int
) -> str:
    if chosen.kind == "resident":
        return f"every expert fits into {format_bytes(device_bytes)} of the device's memory"
    text = f"{chosen}: about {format_speed(chosen.tokens_per_s)} tokens/s"
    other = next((placement for placement in found if placement.kind != chosen.kind), None)
    if other is not None:
        text += f", against {format_speed(other.tokens_per_s)} with {other}"
    if chosen.slot_bytes or (other is not None and other.slot_bytes):
        text += f" (hit rates {hits.source})"
    return text if budgets.choice == "auto" else f"{text}; placement {budgets.choice!r} was asked for"


def _context_reasons(layout: ExpertLayout, sizes: Sizes, found: Plan) -> Iterator[str]:
    """Why the context that was chosen is smaller than the model's, and what sequences share."""
    trained = default_contexts(layout)[0]
    why = "over a tenth of the free memory, or over a quarter where every expert fits beside it"
    if found.n_ctx < SMALL_CTX_TOKENS:
        why = "more memory than it would leave to experts"
    if sizes.n_ctx is None and found.n_ctx < trained:
        yield (
            f"the context has {found.n_ctx:,} of the model's {trained:,} tokens: more would take {why}; --ctx sets"
            " another"
        )
    if found.kv_tokens > found.n_ctx:
        yield f"answers that are computed together share a context of {found.kv_tokens:,} tokens"


def expert_bytes_on(layout: ExpertLayout, device: Device, budgets: Budgets) -> int:
    """What a device that computes every layer has for experts within its budget, below 0 where not even everything else
    fits. budgets: `on_devices`."""
    budget, sizes = budgets.vram[0], budgets.sizes
    free = device.free_bytes - sizes.needs(layout, sizes.most_ubatch).total_bytes(0) - VRAM_MARGIN_BYTES
    if budget.mode == "auto":
        return min(free, budget.n_bytes or free)
    if budget.mode == "bytes":
        return budget.n_bytes
    every_slot = layout.n_expert_total * slot_bytes(layout)  # more than the experts, where types differ in size
    return every_slot if budget.fraction >= 1 else round(budget.fraction * layout.expert_bytes)


def plan_layers(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    """The plan for computing everything on a device but the experts of the first layers, which the CPU computes from
    slots in RAM. Experts of as many last layers as fit lie on the device, as every other weight does.

    Raises BudgetError where the device has too little memory for what is no expert, or RAM too few experts of a token.
    """
    (device,), memory, ram = machine.devices, machine.memory, budgets.ram
    budgets = budgets.on_devices(layout, device.free_bytes)
    sizes, whole = budgets.sizes, _last_layers(layout, expert_bytes_on(layout, device, budgets))
    rest = layout.only(layer.il for layer in layout.layers if layer.il not in whole)
    size = slot_bytes(rest)
    n_slots = ram_slots(rest, ram, memory, size, sizes.most_ubatch, budgets.margin_bytes)
    if n_slots < rest.n_expert_used:
        raise BudgetError(
            f"expert_cache={str(ram)!r} holds {n_slots} experts, but one token needs {rest.n_expert_used} in a layer;"
            f" give at least {format_bytes_up(rest.n_expert_used * size)!r}."
        )
    streams = budgets.streams and slot_sizes(rest).streams
    allowed = allowed_ubatch(rest, n_slots, streams)
    if allowed < sizes.one_pass_tokens:
        raise BudgetError(
            f"an image takes a pass of {sizes.one_pass_tokens} tokens, but {n_slots} slots in RAM allow {allowed}; give"
            " more with expert_cache."
        )
    n_ubatch = min(sizes.most_ubatch, allowed)
    needs = sizes.needs(rest, n_ubatch)
    if needs.total_bytes(0) > device.free_bytes:
        raise BudgetError(
            f"whole layers, context and buffers take {format_bytes(needs.total_bytes(0))}, but"
            f" {format_bytes(device.free_bytes)} of {device.name}'s memory are free; give less with vram_cache, lower"
            " n_ctx (--ctx), or take placement 'cpu'."
        )
    host = host_bytes(layout, n_ubatch) + n_slots * (size + needs.slot_work_bytes)
    return Plan(
        n_slots=n_slots,
        slot_bytes=size,
        budget_bytes=n_slots * size,
        resident=n_slots == rest.n_expert_total,
        n_ctx=sizes.n_ctx or 0,
        n_ubatch=n_ubatch,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        compute_bytes=needs.compute_bytes,
        total_bytes=needs.total_bytes(0),
        available_bytes=device.free_bytes,
        reasons=(
            f"every layer is computed on {device.name}, but the experts of {len(rest.layers)} of {len(layout.layers)}"
            f" layers by the CPU; those of the other {len(whole)} lie on {device.name}",
            f"{n_slots} of {rest.n_expert_total} experts of these layers fit into RAM ({format_bytes(n_slots * size)})",
        ),
        warnings=tuple(short_of(host, memory, " of RAM")),
        projector_bytes=needs.projector_bytes,
        streams=streams,
        host_bytes=host,
        layers_on=device.name,
        kv_tokens=sizes.kv_tokens or 0,
        whole_layers=tuple(sorted(whole)),
        n_gpu_layers=-1,
    )


def _last_layers(layout: ExpertLayout, n_bytes: int) -> set[int]:
    """Numbers of the last layers with experts, without the first, whose experts fit into so many bytes."""
    found = set[int]()
    for layer in reversed(layout.layers[1:]):
        n_bytes -= layer.n_expert * layer.expert_bytes
        if n_bytes < 0:
            break
        found.add(layer.il)
    return found


_WAYS: Mapping[Kind, Callable[[ExpertLayout, Machine, Budgets], Plan]] = {
    "slots": plan_slots,
    "layers": plan_layers,
    "cpu": _plan_cpu,
}
