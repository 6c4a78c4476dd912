"""The one plan: where a model's experts go on a machine, within budgets, decided before anything is loaded.

On one device the placements that fit are planned and compared by the cost model; where layers are divided over several,
these have slots. `make_plan` reads no weights, measures nothing and allocates nothing: the same arguments, the same
plan. A server makes it for its workers, and `Llama` for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from moegguf.engine import cost
from moegguf.engine.cost import HitCurve, Kind, ModelBytes, Placement, Speeds, format_speed, published_curve
from moegguf.engine.device_plan import plan_slots
from moegguf.engine.machine import Machine
from moegguf.engine.memory import SMALL_CTX_TOKENS, default_contexts
from moegguf.engine.plan import AUTO, KINDS_OF, Budgets, PlacementPlan, Plan, Sizes
from moegguf.engine.pool_plan import Pool
from moegguf.engine.ram_plan import expert_bytes_on, plan_layers
from moegguf.errors import BudgetError
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
        found = _plan_cpu(layout, machine, budgets)
    elif budgets.divided:
        found = _plan_divided(layout, machine, budgets)
    else:
        hits = hits or published_curve(layout.n_expert, layout.n_expert_used)
        found = _plan_fastest(layout, machine, budgets, speeds, hits)
    found = replace(found, reasons=(*_context_reasons(layout, budgets.sizes, found), *found.reasons))
    return _with_misses_computed(found) if budgets.computes_misses else found


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


_WAYS: Mapping[Kind, Callable[[ExpertLayout, Machine, Budgets], Plan]] = {
    "slots": plan_slots,
    "layers": plan_layers,
    "cpu": _plan_cpu,
}


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
    predicted = {kind: predict(layout, kind, found, speeds, hits, budgets) for kind, found in plans.items()}
    chosen = max((predicted[kind] for kind in allowed), key=lambda placement: placement.tokens_per_s)
    ordered = tuple(sorted(predicted.values(), key=lambda placement: -placement.tokens_per_s))
    best = plans[chosen.kind]
    sizes = budgets.sizes.within(layout, machine.devices[0].free_bytes, budgets.given_vram_bytes(layout))
    device_bytes = max(0, expert_bytes_on(layout, machine.devices[0], budgets.vram[0], sizes))
    reason = _reason(chosen, ordered, budgets, hits, device_bytes)
    placement = PlacementPlan(ordered, chosen, reason, speeds, hits.source, device_bytes)
    return replace(best, reasons=(*best.reasons, reason, *not_taken), placement=placement)


def predict(
    layout: ExpertLayout, kind: Kind, plan: Plan, speeds: Speeds, hits: HitCurve, budgets: Budgets
) -> Placement:
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
    from_disk = 1 - hits.at((plan.n_slots + plan.n_lower_slots) / n_total)
    seconds = cost.slots_s(model, speeds, hit_rate, from_disk, budgets.computes_misses)
    if kind == "resident":
        return Placement(kind, 1 / seconds, len(layout.layers), hit_rate=1.0)
    return Placement(kind, 1 / seconds, 0, plan.budget_bytes, hit_rate, not budgets.computes_misses)


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


def _with_misses_computed(found: Plan) -> Plan:
    """The plan where the CPU computes what a device lacks; with a warning where it has nothing to compute from."""
    if found.n_lower_slots:
        reason = "misses='compute': the CPU computes experts that are not in VRAM where that is faster, so answers are"
        return replace(found, exact=False, reasons=(*found.reasons, reason + " not exact"))
    warning = (
        "misses='compute' has no effect, and answers are exact: there are no slots in VRAM over slots in RAM, whose"
        " misses the CPU could compute"
    )
    return replace(found, warnings=(*found.warnings, warning))
