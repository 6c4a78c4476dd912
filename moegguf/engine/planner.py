"""The one plan: where a model's experts go on a machine, within budgets, decided before anything is loaded.

The context is chosen first, then slots and passes for every placement that is allowed and fits; with speeds the cost
model compares these. `make_plan` reads no weights, measures nothing and allocates nothing: the same arguments, the same
plan. A server makes it for its workers, and `Llama` for itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from moegguf.engine import cost
from moegguf.engine.budgets import AUTO, KINDS_OF, Budgets, Sizes
from moegguf.engine.cost import HitCurve, Kind, ModelBytes, Placement, Speeds, format_speed, known_hits, published_curve
from moegguf.engine.device_plan import plan_slots
from moegguf.engine.machine import Device, Machine
from moegguf.engine.memory import KV_PAD_TOKENS, compute_bytes, kv_bytes, margin_bytes
from moegguf.engine.plan import PlacementPlan, Plan, allowed_ubatch, slot_bytes
from moegguf.engine.pool_plan import VRAM_MARGIN_BYTES, Pool, host_bytes, ram_slots, short_of
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import slot_sizes
from moegguf.quantities import ExpertCache, format_bytes, format_bytes_up

SMALL_CTX_TOKENS = 4096  # up to here a default context may take more; where training is not known, the model's own
LEAST_CTX_TOKENS = 512
MAX_CTX_TOKENS = (1 << 31) - KV_PAD_TOKENS
KV_PARTS = 16  # numbers of tokens in the KV cache to choose from


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
    on_cpu = replace(
        budgets, sizes=choose_context(layout, budgets.sizes, machine.memory.available_bytes, (budgets.ram,))
    )
    if not machine.devices:
        return _plan_cpu(layout, machine, on_cpu)
    free_bytes = sum(device.free_bytes for device in machine.devices)
    on_devices = replace(budgets, sizes=choose_context(layout, budgets.sizes, free_bytes, budgets.vram))
    plans, refused = dict[Kind, Plan](), dict[Kind, BudgetError]()
    for kind, make in _WAYS.items():
        if budgets.divided and (kind == "layers" or plans):
            continue
        if kind == "layers" and "resident" in plans:
            continue  # slots for every expert are the same without the CPU
        try:
            found = make(layout, machine, on_cpu if kind == "cpu" else on_devices)
            plans["resident" if kind == "slots" and found.resident else kind] = found
        except BudgetError as error:
            refused[kind] = error
    kinds, reasons = _allowed(budgets, plans, refused), list[str]()
    found, placement = plans[kinds[0]], None
    if budgets.divided and budgets.choice == "auto" and kinds[0] != "cpu":
        reasons.append(
            "placement 'auto' is slots where layers are divided, or a GPU is chosen: no other one was compared"
        )
    elif speeds is not None and not budgets.divided:
        device_bytes = max(0, expert_bytes_on(layout, machine.devices[0], on_devices))
        hits = hits or published_curve(layout.n_expert, layout.n_expert_used)
        placement = _compare(layout, plans, kinds, budgets.choice, speeds, hits, device_bytes)
        found = plans[placement.chosen.kind]
        reasons.append(placement.reason)
    reasons += [f"not {kind}: {error}" for kind, error in refused.items() if kind in KINDS_OF[budgets.choice]]
    return replace(found, reasons=(*found.reasons, *reasons), placement=placement)


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


def choose_context(layout: ExpertLayout, sizes: Sizes, free_bytes: int, caches: Sequence[ExpertCache] = ()) -> Sizes:
    """`sizes` with a context and a KV cache, chosen for so much free memory, of which experts are given `caches`
    together ("auto": what is left).

    A context that is not given is the largest, up to the model's own, in a tenth of the free memory, or in a quarter
    where every expert fits beside it. Up to 4,096 tokens may take more, but never more than it leaves to experts, or
    than `caches`, when they are given, leave to it. A KV cache that is not given has all tokens that its sequences can
    have together, less by the same rule, and at least those of one: answers are rarely as long as their context can be,
    and memory of experts makes each of them faster. One that is given has no more than these, and no fewer, with a
    warning: without, the longest answer cannot end.

    Raises OptionError for a context that cannot be.
    """
    of_each = [_given_bytes(layout, cache) for cache in caches]
    pool_bytes = min(sum(of_each), layout.expert_bytes) if all(of_each) else 0
    free_bytes -= sizes.adapter_bytes + (sizes.projector.total_bytes if sizes.projector else 0)
    is_modest = partial(_is_modest, layout, sizes, free_bytes, pool_bytes)
    n_ctx, n_kv, defaults = sizes.n_ctx, sizes.kv_tokens, _default_contexts(layout)
    if n_ctx is None:
        n_ctx = next(filter(is_modest, defaults), defaults[-1])
    n_ctx = pad_context(n_ctx) or defaults[0]
    if not n_kv:
        parts = (n_ctx * (sizes.n_seq_max - 1) * part // KV_PARTS for part in range(KV_PARTS, 0, -1))
        n_kv = next(filter(is_modest, (pad_context(n_ctx + part) for part in parts)), n_ctx)
    elif n_kv < n_ctx:
        warnings.warn(
            f"kv_tokens={n_kv} cannot hold one context of {n_ctx} tokens, so {n_ctx} are kept; for less memory give"
            " a shorter context, too.",
            stacklevel=2,
        )
    n_kv = pad_context(max(n_ctx, min(n_kv, sizes.n_seq_max * n_ctx)))
    is_smaller = sizes.n_ctx is None and n_ctx < defaults[0]
    reasons = tuple(_context_reasons(n_ctx, n_kv, defaults[0], is_smaller))
    return replace(sizes, n_ctx=n_ctx, kv_tokens=n_kv, reasons=reasons)


def pad_context(n_ctx: int) -> int:
    """`n_ctx` rounded up as llama.cpp does it; else the bindings' buffers would be shorter than its context.

    Raises OptionError for a number that no context can have.
    """
    if not 0 <= n_ctx <= MAX_CTX_TOKENS:
        raise OptionError(f"n_ctx is a number of tokens from 1 to {MAX_CTX_TOKENS}, but is {n_ctx}.")
    return -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS


def _default_contexts(layout: ExpertLayout) -> tuple[int, ...]:
    """Contexts to choose from where the user gives none, largest first: the model's own, then powers of two below."""
    trained = pad_context(layout.hparams.n_ctx_train or SMALL_CTX_TOKENS)
    powers = (1 << bit for bit in reversed(range(trained.bit_length())))
    return (trained, *(n for n in powers if LEAST_CTX_TOKENS <= n < trained))


def _given_bytes(layout: ExpertLayout, cache: ExpertCache) -> int:
    """About the bytes of a budget that is a share or a size; 0 for "auto"."""
    given = {"auto": 0, "fraction": cache.fraction * layout.expert_bytes, "bytes": cache.n_bytes}[cache.mode]
    return min(round(given), layout.expert_bytes)


def _is_modest(layout: ExpertLayout, sizes: Sizes, free_bytes: int, pool_bytes: int, n_tokens: int) -> bool:
    """Whether a KV cache of `n_tokens` leaves enough memory to experts."""
    buffers = partial(compute_bytes, layout, flash_attn=sizes.flash_attn)
    # The weights of a model without experts are mapped: they need not stay in memory.
    dense_bytes = layout.dense_bytes + layout.tied_output_bytes if layout.is_moe else 0
    rest = free_bytes - margin_bytes(free_bytes) - dense_bytes - buffers(KV_PAD_TOKENS, 1)
    cached_bytes = kv_bytes(layout, n_tokens, sizes.type_k, sizes.type_v)
    if cached_bytes > (rest - pool_bytes if pool_bytes else rest // 2):
        return False
    n_bytes = cached_bytes + buffers(n_tokens, sizes.most_ubatch) - buffers(KV_PAD_TOKENS, sizes.most_ubatch)
    in_quarter = n_bytes <= min(free_bytes // 4, rest - layout.expert_bytes)
    return n_tokens <= SMALL_CTX_TOKENS or n_bytes <= free_bytes // 10 or in_quarter


def _context_reasons(n_ctx: int, n_kv: int, trained: int, is_smaller: bool) -> Iterator[str]:
    """Why the context that was chosen is smaller than the model's, and what sequences share."""
    why = "over a tenth of the free memory, or over a quarter where every expert fits beside it"
    if n_ctx < SMALL_CTX_TOKENS:
        why = "more memory than it would leave to experts"
    if is_smaller:
        yield f"the context has {n_ctx:,} of the model's {trained:,} tokens: more would take {why}; --ctx sets another"
    if n_kv > n_ctx:
        yield f"answers that are computed together share a context of {n_kv:,} tokens"


def _plan_cpu(layout: ExpertLayout, machine: Machine, budgets: Budgets) -> Plan:
    streams = budgets.streams and slot_sizes(layout).streams
    return Pool(layout, budgets.ram, machine.memory, budgets.sizes, budgets.margin_bytes, streams).plan()


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
    plans: Mapping[Kind, Plan],
    allowed: Sequence[Kind],
    choice: str,
    speeds: Speeds,
    hits: HitCurve,
    device_bytes: int,
) -> PlacementPlan:
    """The fastest of the allowed placements."""
    predicted = {kind: predict(layout, kind, found, speeds, hits) for kind, found in plans.items()}
    chosen = max((predicted[kind] for kind in allowed), key=lambda placement: placement.tokens_per_s)
    ordered = tuple(sorted(predicted.values(), key=lambda placement: -placement.tokens_per_s))
    reason = _reason(chosen, ordered, choice, hits, device_bytes)
    return PlacementPlan(ordered, chosen, reason, speeds, hits.source, device_bytes)


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


def _reason(chosen: Placement, found: tuple[Placement, ...], choice: str, hits: HitCurve, device_bytes: int) -> str:
    if chosen.kind == "resident":
        return f"every expert fits into {format_bytes(device_bytes)} of the device's memory"
    text = f"{chosen}: about {format_speed(chosen.tokens_per_s)} tokens/s"
    other = next((placement for placement in found if placement.kind != chosen.kind), None)
    if other is not None:
        text += f", against {format_speed(other.tokens_per_s)} with {other}"
    if chosen.slot_bytes or (other is not None and other.slot_bytes):
        text += f" (hit rates {hits.source})"
    return text if choice == "auto" else f"{text}; placement {choice!r} was asked for"


def expert_bytes_on(layout: ExpertLayout, device: Device, budgets: Budgets) -> int:
    """What a device that computes every layer has for experts within its budget, below 0 where not even everything else
    fits. budgets: with the context chosen."""
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

    budgets: with the context chosen. Raises BudgetError where the device has too little memory for what is no expert,
    or RAM too few experts of a token.
    """
    (device,), memory, ram = machine.devices, machine.memory, budgets.ram
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
            *sizes.reasons,
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
