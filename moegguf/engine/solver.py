"""The solver decides which memory holds which layers, slots, context and buffers,
within the budgets of a load.

`make_plan` plans the possible placements, and chooses the fastest one that is allowed
and fits (`_choose`), or the first one if no speeds are known. In the plan of
`_plan_cpu`, everything runs on the CPU. In the plan of `plan_layers`, everything except
the experts of some layers runs on a device. In the plan of `plan_slots`, layers run on
devices, from slots. There may be more slots in RAM below these, and some layers may run
on the CPU.

`Pool` decides for each memory how many slots it has, and how many tokens a pass has, in
addition to everything else in that memory. Buffers of a pass grow with its tokens.
Fewer tokens in a pass leave room for more slots, so answers read fewer experts. But a
prompt then has more passes, and every pass fetches most experts again.

The solver does not read weights, measure speeds or allocate memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from moegguf.controller.hit_rates import HitCurve
from moegguf.decisions import log_decision
from moegguf.engine import cost
from moegguf.engine.cost import (
    ANSWER_TOKENS,
    LONG_PROMPT_TOKENS,
    PROMPT_TOKENS,
    HitRates,
    Kind,
    ModelBytes,
    Placement,
    Speeds,
    request_cost,
)
from moegguf.engine.load_spec import F16, Budgets, LoadSpec
from moegguf.engine.machine import VRAM_MARGIN_BYTES, Device, Machine, Memory
from moegguf.engine.memory import Sizes, choose_context, fixed_bytes, slot_work_bytes
from moegguf.engine.plan import (
    NO_LIMIT,
    MemoryPlan,
    PlacementPlan,
    Plan,
    SupplyPlan,
    allowed_ubatch,
    divide_slots,
    layer_slots,
    mean_slot_bytes,
    size_classes,
    slot_bytes,
    slots_for,
    staging_bytes,
)
from moegguf.engine.recurrent import row_bytes
from moegguf.errors import BudgetError, OptionError
from moegguf.gguf.experts import ExpertLayout
from moegguf.native.slot_sizes import (
    has_size_classes,
    maps,
    padded,
    slot_sizes,
    slot_tokens,
)
from moegguf.native.store import STAGING_SHARE, STAGING_TENSORS
from moegguf.options import BUDGETS
from moegguf.quantities import ExpertCache, format_bytes, format_bytes_up

SMALL_UBATCH_TOKENS = 32
# The first fit is chosen whose cost is at most this many times the least cost. With
# 1.03, the chosen fit takes at most 1.05 times as long as the best one, without any
# measured speed (tests/pure/test_pass_choice.py). This holds for disks of 0.2 to 7 GB/s, and
# for memories of 10 to 100 GB/s. With 1.1, requests took up to 1.24 times as long.
ABOUT = 1.03
ON_CPU = -1
KINDS_OF: dict[str, tuple[Kind, ...]] = {
    "auto": ("resident", "slots", "layers", "cpu"),
    "layers": ("resident", "layers"),
    "slots": ("resident", "slots"),
    "slots-mapped": ("resident", "slots"),
    "cpu": ("cpu",),
}

Fit = tuple[int, int]
"""(slots, tokens of a pass) that fit together."""


def make_plan(
    layout: ExpertLayout,
    machine: Machine,
    spec: LoadSpec = LoadSpec(),
    speeds: Speeds | None = None,
    hits: HitCurve | None = None,
) -> Plan:
    """Returns the plan for running `layout` on `machine`. The plan may use the
    machine's devices.

    `speeds` contains the speeds of the only device, and is used to compare placements.
    If `speeds` is None, the plan has the first placement in KINDS_OF that is allowed
    and fits. `hits` contains the expected hit rates. If `hits` is None, published hit
    rates are used.

    Raises BudgetError if nothing that `spec` allows fits. Raises OptionError for
    options that do not fit the devices.
    """
    task = Task(layout, machine, Sizes.of(layout, spec))
    if not machine.devices:
        return _plan_cpu(task)
    plans, refused = _plan_each(task)
    kinds = _allowed(task, plans, refused)
    found = plans[kinds[0]]
    reasons = list[str]()
    placement = None
    if task.is_divided and spec.placement == "auto" and kinds[0] != "cpu":
        reasons.append(
            "placement 'auto' is slots if several devices share the layers; no other placement was compared"
        )
    elif speeds is not None and not task.is_divided:
        placement = _choose(
            task, plans, kinds, speeds, hits or HitRates(layout).curve()
        )
        found = plans[placement.chosen.kind]
        reasons.append(placement.reason)
    reasons += [
        f"not {kind}: {error}"
        for kind, error in refused.items()
        if kind in KINDS_OF[spec.placement]
    ]
    if task.wants_mapped and not found.resident:
        found = _mapped(task, found)
    warms_up = found.on_device and any(
        device.margin < VRAM_MARGIN_BYTES for device in machine.devices
    )
    return replace(
        found,
        reasons=(*found.reasons, *reasons),
        placement=placement,
        warms_up=warms_up,
    )


def _mapped(task: Task, plan: Plan) -> Plan:
    """Returns the plan with slots whose ids the device looks up itself (docs/gpu.md,
    "Mapped slots").

    Raises OptionError if several memories share the layers, or if the device's backend
    offers no range of addresses for its memory and RAM together. Raises BudgetError if
    RAM does not hold every expert.
    """
    names = ", ".join(device.name for device in task.machine.devices)
    n_experts = plan.n_experts
    if task.is_divided or not maps(names):
        raise OptionError(
            "placement 'slots-mapped' needs one GPU that computes every layer, and a backend that puts its memory and"
            f" RAM into one range of addresses, but this is not so for {names}; use placement 'slots'."
        )
    if plan.n_ram_slots < n_experts:
        raise BudgetError(
            f"placement 'slots-mapped' needs a slot in RAM for each of {n_experts} experts, but"
            f" {task.spec.budgets.ram.as_given} holds {plan.n_ram_slots}; give at least"
            f" {format_bytes_up(n_experts * plan.slot_bytes)!r}, or use placement 'slots'."
        )
    reason = f"{names} looks up slots itself, and reads experts without a slot on {names} directly from RAM"
    return replace(
        plan, supply=replace(plan.supply, maps=True), reasons=(*plan.reasons, reason)
    )


@dataclass(frozen=True)
class Task:
    """The input of the solver: a model, a machine, and the sizes and options of a
    load."""

    layout: ExpertLayout
    machine: Machine
    sizes: Sizes

    @property
    def spec(self) -> LoadSpec:
        """The options of the load."""
        return self.sizes.spec

    @property
    def is_divided(self) -> bool:
        """True if layers are divided among devices, or between one device and the
        CPU."""
        return self.spec.is_divided(self.machine.devices)

    @property
    def wants_mapped(self) -> bool:
        """True if slots should be mapped. They then have one size, and an arena for
        each kind of matrix."""
        return self.spec.placement == "slots-mapped"

    def cpu_streams(self, layout: ExpertLayout) -> bool:
        """Returns True if the store may stream the experts of this layout through the
        CPU's slots."""
        store = self.spec.store
        may_stream = store.overlap if self.machine.devices else store.can_stream
        return may_stream and slot_sizes(layout).streams

    @property
    def device_sizes(self) -> Sizes:
        """The sizes for planning on devices. With the draft option "auto", nothing is
        drafted on devices, so no snapshots and no checkpoints are planned."""
        sizes = replace(self.sizes, on_device=True)
        if self.spec.draft == "auto":
            return replace(sizes, n_rs_seq=0, n_checkpoints=0)
        return sizes

    @property
    def n_gpu_layers(self) -> int:
        """Number of layers that run on devices, as llama.cpp counts them; -1: every
        layer."""
        given = self.spec.n_gpu_layers
        return given if self.is_divided and given is not None else -1


def _plan_each(task: Task) -> tuple[dict[Kind, Plan], dict[Kind, BudgetError]]:
    """Returns the plan of each kind that fits, and the errors of the kinds that do not
    fit. Leaves out kinds that are impossible or that could not be better than the
    others."""
    plans = dict[Kind, Plan]()
    refused = dict[Kind, BudgetError]()
    for kind, plan in _WAYS.items():
        # Whole layers need a task that is not divided (`is_divided`). They have no
        # advantage if the device has a slot for every expert.
        if kind == "layers" and (task.is_divided or "resident" in plans):
            continue
        if kind == "cpu" and task.is_divided and plans:
            continue
        try:
            found = plan(task)
        except BudgetError as error:
            refused[kind] = error
        else:
            plans["resident" if kind == "slots" and found.resident else kind] = found
    return plans, refused


def _allowed(
    task: Task, plans: Mapping[Kind, Plan], refused: Mapping[Kind, BudgetError]
) -> list[Kind]:
    """Returns the kinds of these plans that the options allow. If there are none,
    raises the BudgetError of a requested kind."""
    spec = task.spec
    no_cpu = spec.refuses_cpu or (
        task.is_divided and spec.budgets.vram != Budgets().vram
    )
    asked = [
        kind for kind in KINDS_OF[spec.placement] if not (kind == "cpu" and no_cpu)
    ]
    if kinds := [kind for kind in asked if kind in plans]:
        return kinds
    short = [error for kind, error in refused.items() if kind in asked]
    if task.is_divided:
        raise short[-1]
    if spec.refuses_cpu and spec.placement == "auto":
        raise BudgetError(
            f"{short[0]} n_gpu_layers rules out a plan without the GPU; leave n_gpu_layers out, so that the CPU can"
            " compute every layer."
        )
    raise short[0]


def _choose(
    task: Task,
    plans: Mapping[Kind, Plan],
    allowed: Sequence[Kind],
    speeds: Speeds,
    hits: HitCurve,
) -> PlacementPlan:
    """Chooses the fastest of the allowed placements, and explains the choice."""
    predicted = {
        kind: predict(task.layout, kind, found, speeds, hits)
        for kind, found in plans.items()
    }
    ordered = tuple(
        sorted(predicted.values(), key=lambda placement: placement.request_s)
    )
    chosen = next(placement for placement in ordered if placement.kind in allowed)
    reason = f"{chosen}: about {chosen.speeds}"
    if other := next((placement for placement in ordered if placement != chosen), None):
        reason += f", against {other.speeds} with {other}"
    reason += f"; compared for a prompt of {PROMPT_TOKENS} tokens and an answer of {ANSWER_TOKENS}"
    if "slots" in predicted:
        reason += f" (hit rates {hits.source})"
    device_bytes = max(0, _expert_room(task, task.machine.devices[0])[1])
    if chosen.kind == "resident":
        reason = f"every expert fits into {format_bytes(device_bytes)} of the device's memory"
    predictions = {
        placement.kind: round(placement.tokens_per_s, 2) for placement in ordered
    }
    log_decision(
        "placement_chosen", placement=chosen.kind, tokens_per_s=predictions, why=reason
    )
    return PlacementPlan(ordered, chosen, reason, speeds, hits.source, device_bytes)


def predict(
    layout: ExpertLayout, kind: Kind, plan: Plan, speeds: Speeds, hits: HitCurve
) -> Placement:
    """Returns the placement of a plan of this kind, with the tokens per second that the
    cost model predicts while the context is half full."""
    model = ModelBytes.of(layout, plan.needs.kv_bytes // 2)
    rest = layout.without(plan.whole_layers)
    share = rest.expert_bytes / layout.expert_bytes
    held = plan.n_slots / rest.n_expert_total
    in_ram = min(1.0, held + plan.n_ram_slots / rest.n_expert_total)
    hit_rate = hits.at(held)
    read = 1 - hits.at(in_ram)
    prompt = partial(
        cost.prompt_tokens_per_s,
        layout,
        model,
        speeds,
        plan.n_ubatch,
        read=share * (1 - in_ram),
    )
    if kind == "layers":
        seconds = cost.layers_s(model, speeds, len(rest.layers), share, share * read)
        prompt = partial(prompt, on_cpu=share)
    elif kind == "cpu":
        seconds = cost.cpu_s(model, speeds, read)
        prompt = partial(prompt, on_cpu=1.0, dense_on_cpu=True)
    else:
        seconds = cost.slots_s(model, speeds, hit_rate, read)
        prompt = partial(
            prompt, copied=1 - (held if plan.supply.n_staging else hit_rate)
        )
    n_long = min(LONG_PROMPT_TOKENS, plan.context.n_ctx)
    return Placement(
        kind,
        1 / seconds,
        prompt(),
        n_long,
        prompt(n_prompt=n_long),
        n_layers=len(layout.layers) if kind == "resident" else len(plan.whole_layers),
        slot_bytes=plan.budget_bytes,
        hit_rate=hit_rate,
    )


# Slots of one memory.


def best_fit(
    layout: ExpertLayout, found: Iterable[Fit], n_ctx: int = PROMPT_TOKENS
) -> Fit:
    """Returns the first fit whose cost is at most the least cost times `ABOUT`. The
    cost (`request_cost`) is for typical requests in a context of `n_ctx` tokens."""
    costs = [(request_cost(layout, *fit, n_ctx), fit) for fit in found]
    least = min(cost for cost, _ in costs)
    return next(fit for cost, fit in costs if cost <= least * ABOUT)


def budget_slots(
    cache: ExpertCache, layout: ExpertLayout, slot_bytes: int, free_bytes: int = 0
) -> int:
    """Returns how many slots a budget holds, which may be more than there are experts.
    "auto": the slots that fit into `free_bytes`, or into the budget's own limit if that
    is smaller."""
    if cache.mode == "fraction":
        return math.floor(cache.fraction * layout.n_expert_total + 1e-9)
    n_bytes = (
        cache.n_bytes
        if cache.mode == "bytes"
        else min(free_bytes, cache.n_bytes or free_bytes)
    )
    return max(0, n_bytes) // slot_bytes


@dataclass
class Pool:
    """Plans the slots of a model's experts, and the tokens of a pass, in one memory or
    in several devices' memories."""

    layout: ExpertLayout
    cache: ExpertCache  # budget for experts
    memory: Memory
    sizes: Sizes  # missing sizes are chosen here
    streams: bool = False  # True: experts without a slot are streamed or staged
    staging_bytes: int = 0  # bytes of the staging tensors on all devices
    staging_within: bool = True  # True: a given budget includes these tensors
    # Maximum tokens in a pass that is not staged (`plan.allowed_ubatch`).
    slot_tokens: int = NO_LIMIT
    slot_bytes: int = 0  # mean bytes of a slot; 0: as large as the largest expert

    def __post_init__(self) -> None:
        """Chooses the context. Raises OptionError for an impossible one."""
        self.sizes = choose_context(
            self.layout, self.sizes, self.memory.available_bytes, self.cache
        )
        self.slot_bytes = self.slot_bytes or slot_bytes(self.layout)
        self.reasons = list(self.sizes.reasons)
        # A sentence about the tokens of a pass, which `fit` sets.
        self.pass_reason = ""

    def fit(self) -> Fit:
        """Returns the number of slots, and the best number of tokens in a pass. Returns
        no slots for a model without experts.

        Raises BudgetError, with the minimum, if the budget (or, for "auto", the free
        memory) is too small. The budget must hold the experts that one token uses in
        one layer, and the experts of an image that must be read in one pass.
        """
        layout = self.layout
        sizes = self.sizes
        if not layout.is_moe:
            return 0, sizes.usual_ubatch
        is_auto = self.cache.mode == "auto"
        found = self._auto_fits() if is_auto else self._given_fits()
        fit = found[0]
        if fit[1] != sizes.n_ubatch:
            fit = best_fit(layout, found, sizes.n_ctx or PROMPT_TOKENS)
        n_slots, n_ubatch = fit
        if is_auto:
            needs = sizes.needs(layout, n_ubatch, n_slots)
            beside = needs.total_bytes + self.staging_bytes
            self.reasons.append(
                f"{format_bytes(self.memory.available_bytes)} are free ({self.memory.limited_by});"
                f" {format_bytes(beside)} go to weights that every token uses, the context and buffers,"
                f" {format_bytes(self.memory.margin)} are kept as a margin"
            )
        self.pass_reason = self._explain(n_slots, n_ubatch, found)
        return fit

    def _auto_fits(self) -> list[Fit]:
        """Returns the candidates to choose from, for the memory that remains after
        everything else and the margin. Raises BudgetError if the memory is too
        small."""
        layout = self.layout
        sizes = self.sizes
        memory = self.memory
        size = self.slot_bytes
        most = layout.n_expert_total
        found = list[Fit]()
        if self.cache.n_bytes:
            most = min(most, self.cache.n_bytes // size - self._staging_slots())
        for n_ubatch in self._ubatches(sizes.most_ubatch(layout)):
            if found and found[0] == (layout.n_expert_total, sizes.usual_ubatch):
                # Every expert has a slot with a usual pass, so a different one would
                # save nothing.
                break
            needs = sizes.needs(layout, n_ubatch)
            free_bytes = memory.usable_bytes - self.staging_bytes - needs.total_bytes
            work_bytes = 0 if sizes.on_device else slot_work_bytes(layout, n_ubatch)
            n_slots = min(most, max(0, free_bytes) // (size + work_bytes))
            if n_slots >= layout.n_expert_used and n_ubatch <= self._allowed(n_slots):
                found.append((n_slots, n_ubatch))
        if not found:
            least = format_bytes_up(layout.n_expert_used * size)
            others = sizes.needs(layout, sizes.one_pass_tokens)
            raise BudgetError(
                f"{format_bytes(memory.available_bytes)} are free here (limited by {memory.limited_by}), but this model"
                f" needs {format_bytes(others.total_bytes)} for weights that every token uses, a"
                f" context of {sizes.n_ctx} tokens and buffers, a margin of {format_bytes(memory.margin)}, and at least"
                f" {least} for experts; free memory, lower n_ctx (--ctx), or give {self.cache.option} a size."
            )
        return found

    def _given_fits(self) -> list[Fit]:
        """Returns the candidates to choose from for a given budget: pairs of its number
        of slots and a number of tokens in a pass. Raises BudgetError if the budget is
        too small.

        If the user has set the number of tokens, it is the only candidate, even if the
        memory is too small for it. A pass that is longer than usual must leave the
        margin of the memory free. If no number fits, the usual one is the only
        candidate.
        """
        layout = self.layout
        sizes = self.sizes
        memory = self.memory
        size = self.slot_bytes
        budget = self.cache.as_given
        n_total = layout.n_expert_total
        n_staged = self._staging_slots()
        n_held = budget_slots(self.cache, layout, size) - n_staged
        n_slots = min(n_total, n_held)
        staging = (
            f", plus {format_bytes(self.staging_bytes)} for staging" if n_staged else ""
        )
        self.reasons.append(
            f"{self.cache} of {n_total} experts is {n_held} slots of {format_bytes(size)}{staging}"
        )
        if n_slots < layout.n_expert_used:
            raise too_few(budget, n_slots, layout.n_expert_used, size)
        allowed = self._allowed(n_slots)
        one_pass = sizes.one_pass_tokens
        if allowed < one_pass:
            least = layer_slots(layout, one_pass) * size
            if self.slot_tokens < one_pass:
                least = staging_bytes(layout, 1) + layout.n_expert_used * size
            raise BudgetError(
                f"this model reads an image in one pass of {one_pass} tokens, but {budget} allows passes of {allowed};"
                f" give at least {format_bytes_up(least)!r}, or load it without its projector."
            )
        ubatches = self._ubatches(min(allowed, sizes.most_ubatch(layout)))
        if sizes.n_ubatch:
            return [(n_slots, ubatches[0])]
        beside = self.staging_bytes + n_slots * size
        found = list[Fit]()
        for n_ubatch in ubatches:
            is_longer = n_ubatch > sizes.usual_ubatch
            if is_longer and n_slots == n_total:
                continue  # every expert has a slot, so a longer pass would save nothing
            free_bytes = memory.usable_bytes if is_longer else memory.available_bytes
            if (
                sizes.needs(layout, n_ubatch, n_slots).total_bytes + beside
                <= free_bytes
            ):
                found.append((n_slots, n_ubatch))
        return found or [(n_slots, ubatches[0])]

    def _staging_slots(self) -> int:
        """Returns how many slots of the budget staging tensors occupy; 0 if the budget
        does not include them."""
        if not self.staging_within:
            return 0
        return slots_for(self.staging_bytes, self.slot_bytes)

    def _allowed(self, n_slots: int) -> int:
        return allowed_ubatch(self.layout, n_slots, self.streams, self.slot_tokens)

    def _ubatches(self, most: int) -> list[int]:
        """Returns the candidate numbers of tokens in a pass: the usual one, then
        larger, then smaller ones.

        Larger and smaller ones are the powers of two, every number up to
        SMALL_UBATCH_TOKENS, and the limits: `most`, and the tokens of an image.
        """
        least = self.sizes.one_pass_tokens
        usual = min(self.sizes.usual_ubatch, most)
        powers = (1 << bit for bit in range(most.bit_length()))
        numbers = sorted(
            {most, usual, least, *range(1, SMALL_UBATCH_TOKENS + 1), *powers}
        )
        larger = [n for n in numbers if usual < n <= most]
        smaller = [n for n in reversed(numbers) if least <= n < usual]
        return [usual, *larger, *smaller]

    def _explain(self, n_slots: int, n_ubatch: int, found: Sequence[Fit]) -> str:
        """Returns the sentence about the tokens of a pass. found: the fits from which
        `n_slots` and `n_ubatch` were chosen."""
        wanted = self.sizes.usual_ubatch
        layout = self.layout
        if n_ubatch == wanted:
            return pass_reason(n_ubatch, self._why_usual(n_slots, found))
        if n_ubatch > wanted:
            why = "a long prompt then reads the experts without a slot less often"
        elif n_ubatch == self.slot_tokens:
            why = "experts in slots give exact results on this device only in passes of at most this size"
        elif layer_slots(layout, wanted, self.streams) > n_slots:
            why = f"{n_slots} slots are fewer than the {layout.n_expert} experts of a layer"
        elif self.cache.mode == "auto":
            why = "this leaves more memory for experts, which saves more reading than the short passes cost"
        else:
            why = "more would not fit into the free memory"
        return pass_reason(n_ubatch, why, wanted)

    def _why_usual(self, n_slots: int, found: Sequence[Fit]) -> str:
        """Returns the reason why a pass has neither more nor fewer tokens than
        usual."""
        sizes = self.sizes
        if sizes.n_ubatch:
            return "as given"
        if n_slots == self.layout.n_expert_total:
            return "every expert has a slot, so longer passes would not save reading"
        if not sizes.is_fused(self.layout):
            return "longer passes take much more memory if attention is not fused"
        if (
            min(self._allowed(n_slots), sizes.most_ubatch(self.layout))
            == sizes.usual_ubatch
        ):
            return "neither the context nor a batch holds more tokens"
        if any(n_ubatch > sizes.usual_ubatch for _, n_ubatch in found):
            return "longer passes would read experts less often, but would save too few bytes"
        return "a longer one does not fit into the free memory"


def pass_reason(n_ubatch: int, why: str, wanted: int | None = None) -> str:
    """Returns a sentence about the tokens of a pass. wanted: the usual number of
    tokens, if `n_ubatch` differs from it."""
    instead = f" instead of {wanted}" if wanted else ""
    return f"a prompt is read {n_ubatch} token{'s' * (n_ubatch > 1)} at a time{instead}: {why}"


def _planned(
    layout: ExpertLayout,
    sizes: Sizes,
    memories: Sequence[MemoryPlan],
    n_ubatch: int,
    slot_bytes: int,
    device_slot_bytes: int = 0,
    **others: Any,
) -> Plan:
    """Returns a plan with these memories. others: other fields of the plan."""
    return Plan(
        memories=tuple(memories),
        slot_bytes=slot_bytes,
        device_slot_bytes=device_slot_bytes or slot_bytes,
        n_experts=layout.n_expert_total,
        context=sizes.context(n_ubatch),
        n_ubatch=n_ubatch,
        **others,
    )


def _plan_cpu(task: Task) -> Plan:
    """Returns the plan in which everything runs on the CPU."""
    layout = task.layout
    memory = task.machine.memory
    streams = task.cpu_streams(layout)
    pool = Pool(layout, task.spec.budgets.ram, memory, task.sizes, streams)
    n_slots, n_ubatch = pool.fit()
    n_total = layout.n_expert_total
    reasons = ["the model has no experts, so it runs as plain llama.cpp"]
    if layout.is_moe:
        held = "every expert has its own slot, so nothing is read after its first use"
        if n_slots < n_total:
            held = (
                f"{n_slots} of {n_total} experts fit at a time ({n_slots / n_total:.0%});"
                " others are read when needed"
            )
        reasons = [held, pool.pass_reason]
    needs = pool.sizes.needs(layout, n_ubatch, n_slots)
    total_bytes = needs.total_bytes + n_slots * pool.slot_bytes
    warnings = [
        *cycle_warnings(layout, n_slots, pool.slot_bytes),
        *short_of(total_bytes, memory),
    ]
    if not layout.is_moe and pool.cache.mode != "auto":
        warnings.append(
            "this model has no experts, so a budget for experts has no effect"
        )
    layers = tuple(range(layout.hparams.n_layer_all))
    ram = MemoryPlan(None, layers, n_slots, total_bytes, memory.available_bytes)
    return _planned(
        layout, pool.sizes, [ram], n_ubatch, pool.slot_bytes, needs=needs, supply=SupplyPlan(streams),
        reasons=(*pool.reasons, *reasons), warnings=tuple(warnings),
    )  # fmt: skip


def too_few(
    budget: str,
    n_slots: int,
    least: int,
    size: int,
    where: str = "",
    n_devices: int = 1,
) -> BudgetError:
    """Returns the error for a budget that holds `n_slots` experts, fewer than the
    `least` that a token uses.

    size: bytes of a slot. where: words such as " on GPU1". n_devices: number of devices
    that share the budget.
    """
    together = f" for {n_devices} devices together" if n_devices > 1 else ""
    return BudgetError(
        f"{budget} holds {n_slots} experts{where}, but a token needs {least} in a layer, which is"
        f" {format_bytes(least * size)}; give at least {format_bytes_up(n_devices * least * size)!r}{together}."
    )


def cycle_warnings(
    layout: ExpertLayout, n_slots: int, slot_bytes: int
) -> Iterator[str]:
    """Yields a sentence if `n_slots` slots hold fewer experts than one token uses in
    all layers."""
    if n_slots < layout.token_cycle_slots:
        cycle = f"{layout.token_cycle_slots} slots, {format_bytes_up(layout.token_cycle_slots * slot_bytes)}"
        yield (
            f"{format_bytes(n_slots * slot_bytes)} for experts is below one token's experts over all layers"
            f" ({cycle}); the hit rate will be low"
        )


def short_of(
    n_bytes: int, memory: Memory, where: str = "", tier: str = "RAM"
) -> Iterator[str]:
    """Yields a sentence if `n_bytes` are more than a memory has free. where: words such
    as " of RAM". tier: the key of the memory's budget in BUDGETS."""
    if n_bytes > memory.available_bytes:
        yield (
            f"about {format_bytes(n_bytes)}{where} are needed, but {format_bytes(memory.available_bytes)} are free"
            f" (limited by {memory.limited_by}); loading may fail, or the system may stop this process; free memory,"
            f' lower n_ctx (--ctx), or if you gave {BUDGETS[tier]}, set a smaller one or "auto"'
        )


# RAM while layers run on devices.


def host_bytes(layout: ExpertLayout, n_ubatch: int) -> int:
    """Returns the estimated bytes of RAM that a model uses if all layers run on a
    device: logits and `fixed_bytes`."""
    return 4 * n_ubatch * layout.n_vocab + fixed_bytes(layout)


def ram_slots(
    layout: ExpertLayout,
    cache: ExpertCache,
    ram: Memory,
    slot_bytes: int,
    n_ubatch: int,
) -> int:
    """Returns how many slots a budget holds in RAM if layers run on a device, at most
    one for each expert. Raises BudgetError if the budget holds no expert."""
    free_bytes = ram.available_bytes - ram.margin - host_bytes(layout, n_ubatch)
    n_slots = budget_slots(cache, layout, slot_bytes, free_bytes)
    if n_slots < 1:
        raise BudgetError(
            f"{cache.as_given} holds no expert ({format_bytes(ram.available_bytes)} of RAM are free); give"
            f" at least {format_bytes_up(slot_bytes)!r}, or free memory for 'auto'."
        )
    return min(n_slots, layout.n_expert_total)


def divide_ram_slots(
    total: int, n_on_cpu: int, n_below: int, least_on_cpu: int
) -> tuple[int, int]:
    """Divides `total` slots in RAM. Returns (slots for layers that run on the CPU,
    slots from which devices fill their own slots).

    Both numbers are in proportion to `n_on_cpu` and `n_below`, and never larger than
    these. The CPU gets at least `least_on_cpu` slots. Devices get at least one slot
    unless `n_below` is 0.
    """
    n_cpu = max(least_on_cpu, round(total * n_on_cpu / (n_on_cpu + n_below)))
    n_cpu = min(n_on_cpu, n_cpu, total - min(1, n_below))
    return n_cpu, min(n_below, total - n_cpu)


# Whole layers on one device.


def _expert_room(task: Task, device: Device) -> tuple[Sizes, int]:
    """Returns the sizes for a device that runs every layer, and the bytes for experts
    on the device. A given budget is returned even if it does not fit. For "auto" the
    bytes are negative if the device cannot even hold everything else."""
    budget = task.spec.budgets.vram[0]
    layout = task.layout
    sizes = choose_context(layout, task.device_sizes, device.free_bytes, budget)
    if budget.mode == "auto":
        free = (
            device.free_bytes
            - sizes.needs(layout, sizes.usual_ubatch).total_bytes
            - device.margin
        )
        return sizes, min(free, budget.n_bytes or free)
    if budget.mode == "fraction" and budget.fraction >= 1:
        # every slot has the size of the largest expert, so this may be more than
        # `expert_bytes`
        return sizes, layout.n_expert_total * slot_bytes(layout)
    return sizes, budget.n_bytes or round(budget.fraction * layout.expert_bytes)


def _last_layers(layout: ExpertLayout, n_bytes: int) -> tuple[int, ...]:
    """Returns the indices of the last layers whose experts together occupy at most
    `n_bytes`, but never of every layer."""
    whole = list[int]()
    for layer in reversed(layout.layers[1:]):
        n_bytes -= layer.n_expert * layer.expert_bytes
        if n_bytes < 0:
            break
        whole.append(layer.il)
    return tuple(sorted(whole))


def plan_layers(task: Task) -> Plan:
    """Returns the plan in which every layer runs on a device, except that the experts
    of the first layers run on the CPU, from slots in RAM. The device holds the experts
    of as many of the last layers as fit. It also holds all other weights except token
    embeddings and other row tables, which stay in the file.

    Raises BudgetError if the device has too little memory, or if RAM holds too few
    experts for a token or an image.
    """
    (device,) = task.machine.devices
    ram = task.machine.memory
    layout = task.layout
    cache = task.spec.budgets.ram
    sizes, room_bytes = _expert_room(task, device)
    whole = _last_layers(layout, room_bytes)
    rest = layout.without(whole)
    size = slot_bytes(rest)
    n_slots = ram_slots(rest, cache, ram, size, sizes.usual_ubatch)
    if n_slots < rest.n_expert_used:
        raise too_few(cache.as_given, n_slots, rest.n_expert_used, size)
    streams = task.cpu_streams(rest)
    allowed = allowed_ubatch(rest, n_slots, streams)
    if allowed < sizes.one_pass_tokens:
        raise BudgetError(
            f"this model reads an image in one pass of {sizes.one_pass_tokens} tokens, but {n_slots} slots in RAM allow"
            f" passes of {allowed}; raise {cache.option}, or load it without its projector."
        )
    n_ubatch = min(sizes.usual_ubatch, allowed)
    needs = sizes.needs(rest, n_ubatch)
    host = host_bytes(layout, n_ubatch) + n_slots * (
        size + slot_work_bytes(layout, n_ubatch)
    )
    on_device = needs.total_bytes
    if on_device > device.free_bytes:
        raise BudgetError(
            f"whole layers, context and buffers take {format_bytes(on_device)}, but only"
            f" {format_bytes(device.free_bytes)} of {device.name}'s memory is free; set a smaller"
            " vram_cache (--vram-cache) if you gave one, lower n_ctx"
            " (--ctx), or use placement 'cpu'."
        )
    reasons = (
        f"{device.name} computes every layer, except that the CPU computes the experts of {len(rest.layers)} of"
        f" {len(layout.layers)} layers; the experts of the other {len(whole)} layers are on {device.name}",
        f"{n_slots} of {rest.n_expert_total} experts of these layers fit into RAM ({format_bytes(n_slots * size)})",
        pass_reason(
            n_ubatch,
            "as given"
            if sizes.n_ubatch
            else "as many as the slots in RAM and a usual pass allow",
        ),
    )
    layers = tuple(range(layout.hparams.n_layer_all))
    memories = (
        MemoryPlan(device.name, layers, 0, on_device, device.free_bytes),
        MemoryPlan(None, layers, n_slots, host, ram.available_bytes),
    )
    return _planned(
        rest, sizes, memories, n_ubatch, size, needs=needs, supply=SupplyPlan(streams), whole_layers=whole,
        reasons=(*sizes.reasons, *reasons), warnings=tuple(short_of(host, ram, " of RAM")),
    )  # fmt: skip


# Slots on devices.


def device_of_layers(
    n_layer: int, tensor_split: Sequence[float], n_gpu_layers: int = -1
) -> list[int]:
    """Returns the index of the device that runs each layer, or ON_CPU (llama-model.cpp,
    load_tensors).

    Layers go to devices in order, as llama.cpp splits a model. The last `n_gpu_layers`
    layers run on devices, and the output is counted as the last one; -1: every layer
    and the output. n_layer: number of layers that llama.cpp counts. Raises OptionError
    for an invalid split.
    """
    split = np.asarray(tensor_split, np.float32)
    if (
        split.size == 0
        or not np.isfinite(split).all()
        or (split < 0).any()
        or split.sum() == 0
    ):
        raise OptionError(
            f"tensor_split is {list(tensor_split)}, but must have a number for each device, each 0 or more and at"
            " least one above 0."
        )
    bounds = np.cumsum(split, dtype=np.float32)
    bounds /= bounds[-1]
    n_on_devices = n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layer + 1)
    first = n_layer + 1 - n_on_devices
    places = np.arange(n_layer - first, dtype=np.float32) / np.float32(
        max(1, n_on_devices)
    )
    return [ON_CPU] * min(first, n_layer) + np.searchsorted(
        bounds, places, side="right"
    ).tolist()


def share_out(
    total: int, shares: Sequence[int], most: Sequence[int], least: int
) -> list[int]:
    """Divides `total` slots among several devices in proportion to `shares`.

    No device gets more than its entry in `most`; the other devices get the remaining
    slots. If there are enough slots, each device gets at least `least`, or its `most`
    if that is smaller. The share of a device that may get slots must be above 0.
    """
    least = min(least, total // max(1, sum(of > 0 for of in most)))
    given = [min(of, least) for of in most]
    while (left := total - sum(given)) > 0 and (
        free := [d for d in range(len(most)) if given[d] < most[d]]
    ):
        weight = sum(shares[d] for d in free)
        more = {d: min(most[d] - given[d], left * shares[d] // weight) for d in free}
        if not any(more.values()):
            more = {free[0]: 1}
        for d, n in more.items():
            given[d] += n
    return given


def plan_slots(task: Task) -> Plan:
    """Returns the plan with slots on the machine's devices, and more slots below them
    in RAM if some expert has no slot there.

    Devices also hold the weights that every token uses, the context, the buffers of a
    pass and staging tensors. Each device has the largest number of staging tensors
    (STAGING_TENSORS, 1 or none) that fits and saves time (`_pays`). There are none if
    every expert has a slot on a device. The store's options may set the number of
    staging tensors instead; their bytes are then not part of the budget vram_cache.

    Raises BudgetError if a budget is too small. Raises OptionError for an impossible
    split or number.
    """
    wanted = task.spec.store.staging
    if wanted is not None and not 0 <= wanted <= STAGING_TENSORS:
        raise OptionError(
            f"staging must be a number of tensors from 0 to {STAGING_TENSORS}, but is {wanted}."
        )
    task = replace(
        task,
        layout=padded(task.layout, [device.name for device in task.machine.devices]),
    )
    without: Plan | None = None
    # Also raised if an image needs a longer pass than the slots allow, which staging may
    # solve.
    with suppress(BudgetError):
        without = _plan_slots(task, 0)
    tensors = (
        range(STAGING_TENSORS, 0, -1) if wanted is None else [wanted] * (wanted > 0)
    )
    # Only if some expert has no slot on a device.
    for n in tensors if without is None or without.n_ram_slots else ():
        try:
            staged = _plan_slots(task, n)
        except BudgetError:
            continue
        if wanted is not None or _pays(task.layout, n, staged, without):
            reason = (
                f"prompts are staged in {n} tensor{'s' * (n > 1)} of a layer's experts"
                f" ({format_bytes(staged.supply.staging_bytes)}): slots keep their experts meanwhile"
            )
            return replace(staged, reasons=(*staged.reasons, reason))
    if without is None:
        return _plan_slots(task, 0)  # raises the BudgetError
    return without


def _pays(layout: ExpertLayout, n: int, staged: Plan, without: Plan | None) -> bool:
    """Returns True if the plan `staged`, with `n` staging tensors, fits into the free
    memory and is better than the plan `without`.

    Several tensors are better if they occupy at most STAGING_SHARE of the memory for
    experts. One tensor is better if a typical request then moves fewer bytes than
    without staging, where prompts are split into short passes so that slots give exact
    results. If slots hold one token's experts in all layers without staging, they must
    also hold them with staging. `without` is None if there is no plan without staging.
    """
    if staged.total_bytes > staged.available_bytes:
        return False
    if n > 1:
        n_bytes = staged.supply.staging_bytes
        return n_bytes <= STAGING_SHARE * (
            n_bytes + staged.device_slots * staged.device_slot_bytes
        )
    if without is None:
        return True
    if staged.device_slots < layout.token_cycle_slots <= without.device_slots:
        return False
    cost, otherwise = (
        request_cost(
            layout, plan.device_slots, plan.n_ubatch, prompts_take_slots=plan is without
        )
        for plan in (staged, without)
    )
    return cost < otherwise


def _plan_slots(task: Task, n_staging: int) -> Plan:
    """Returns a plan with `n_staging` staging tensors on each device. Layers with large
    experts have a pool of their own if all layers are on one device, this saves memory,
    and each pool has enough slots for a pass. Mapped slots all have the same size.

    Raises the same errors as `_SlotsPlanner`.
    """
    if (
        classes := size_classes(task.layout)
        if has_size_classes() and not task.wants_mapped
        else ()
    ):
        with suppress(BudgetError):
            found = _SlotsPlanner(task, n_staging, classes).plan()
            n_slots = divide_slots(task.layout, classes, found.device_slots)
            if not found.size_classes or min(n_slots) >= found.pass_slots(
                task.layout, on_device=True
            ):
                return found
    return _SlotsPlanner(task, n_staging).plan()


class _SlotsPlanner:
    """Creates a plan with `n_staging` staging tensors on each device. In lists of
    parts, the last part is the CPU's.

    classes: layers whose slots have the same size (`plan.size_classes`). They are
    ignored if layers are divided among several memories.

    Raises BudgetError, and OptionError for a split or budgets that do not fit the
    devices.
    """

    def __init__(
        self, task: Task, n_staging: int, classes: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self._task = task
        self._n_staging = n_staging
        self._layout = task.layout
        self._devices = task.machine.devices
        self._vram = task.spec.budgets.vram
        # Number of layers that llama.cpp counts in `n_gpu_layers`. This includes
        # multi-token-prediction layers, but not the output.
        self._n_layer = task.layout.hparams.n_layer_all
        self._names = ", ".join(device.name for device in self._devices)
        n_devices = len(self._devices)
        n_gpu_layers = task.n_gpu_layers
        self._is_alone = (
            n_devices == len(self._vram) == 1 and not 0 <= n_gpu_layers <= self._n_layer
        )
        self._split = None if self._is_alone else task.spec.tensor_split
        self._check_numbers()
        self._classes = classes if self._is_alone else ()
        # True: one given budget is for all devices together
        self._is_shared = len(self._vram) == 1 and self._vram[0].mode != "auto"
        # bytes of the staging tensors on each device
        self._staging_bytes = staging_bytes(
            self._layout, n_staging, can_pack=not task.wants_mapped
        )
        self._slot_tokens = min(slot_tokens(device.name) for device in self._devices)
        memory = Memory(
            sum(device.total_bytes for device in self._devices),
            sum(device.free_bytes for device in self._devices),
            f"the device{'s' * (n_devices > 1)} {self._names}",
            sum(device.margin for device in self._devices),
        )
        self._pool = Pool(
            self._layout,
            self._joint_budget(),
            memory,
            task.device_sizes,
            n_staging > 0,
            n_devices * self._staging_bytes,
            task.spec.store.staging is None,
            # `_allowed` limits passes with several devices.
            self._slot_tokens if self._is_alone else NO_LIMIT,
            0
            if task.wants_mapped
            else mean_slot_bytes(self._layout, self._classes or [range(self._n_layer)]),
        )
        self._n_slots, self._n_ubatch = self._pool.fit()
        self._needs = self._pool.sizes.needs(self._layout, self._n_ubatch)
        self._size = self._pool.slot_bytes  # mean bytes of a slot on a device
        self._ram_size = max(
            slot_bytes(self._layout), slot_bytes(self._layout, on_device=True)
        )
        embedding_bytes = self._layout.n_vocab * row_bytes(
            F16, self._layout.hparams.n_embd
        )
        self._output_bytes = min(
            self._needs.dense_bytes,
            max(self._layout.tied_output_bytes, embedding_bytes),
        )
        self._layer_bytes = self._bytes_by_layer()

    def _check_numbers(self) -> None:
        """Raises BudgetError or OptionError if the number of budgets or proportions
        does not fit the number of devices."""
        n_devices = len(self._devices)
        n_vram = len(self._vram)
        if n_vram not in (1, n_devices):
            raise BudgetError(
                f"vram_cache has {n_vram} budgets for {n_devices} devices ({self._names}); give one for all of them"
                " together, or one for each."
            )
        if self._split is not None and len(self._split) != n_devices:
            raise OptionError(
                f"tensor_split has {len(self._split)} proportions for {n_devices} devices ({self._names}); give one for"
                " each."
            )

    def _joint_budget(self) -> ExpertCache:
        """Returns the budget of all devices together; "auto" if one of several budgets
        is "auto"."""
        if len(self._vram) == 1:
            return self._vram[0]
        if any(cache.mode == "auto" for cache in self._vram):
            return Budgets().vram[0]
        given = (
            cache.n_bytes or round(cache.fraction * self._layout.expert_bytes)
            for cache in self._vram
        )
        return ExpertCache("bytes", n_bytes=sum(given), tier="VRAM")

    def _bytes_by_layer(self) -> list[int]:
        """Returns the size in bytes of each layer. This is its own weights except
        experts, its part of the KV cache, and an equal share of the weights that belong
        to no layer. The output is not included."""
        layout = self._layout
        needs = self._needs
        n_layer = self._n_layer
        own = [layout.layer_dense_bytes.get(il, 0) for il in range(n_layer)]
        sizes = self._pool.sizes
        shares = sizes.kv_shares(layout, self._n_ubatch)
        kv_shares = [shares[il] for il in range(n_layer)]
        kv_shares = kv_shares if any(kv_shares) else [1] * n_layer
        rest = max(0, needs.dense_bytes - self._output_bytes - sum(own))
        return [
            dense + -(-needs.kv_bytes * n // sum(kv_shares)) + -(-rest // n_layer)
            for dense, n in zip(own, kv_shares, strict=True)
        ]

    def plan(self) -> Plan:
        """Makes the plan."""
        layout = self._layout
        size = self._size
        memory = self._task.machine.memory
        tensor_split, on = self._device_of_layers()
        order = (*range(len(self._devices)), ON_CPU)
        layers = [tuple(il for il, d in enumerate(on) if d == index) for index in order]
        counts = [layout.experts_in(of) for of in layers]
        on_cpu = layers[-1]
        slots = self._slots(layers[:-1])
        below = sum(n for n, n_slots in zip(counts, slots, strict=False) if n_slots < n)
        n_cpu, n_ram = self._ram_slots(on_cpu, counts[-1], below)
        n_ubatch = min([self._n_ubatch, *self._allowed([*slots, n_cpu], counts)])
        why_ubatch = self._pool.pass_reason
        if n_ubatch < self._n_ubatch:
            why_ubatch = pass_reason(
                n_ubatch,
                "the slots hold the experts of at most this number of tokens",
                self._n_ubatch,
            )
        host = (
            host_bytes(layout, n_ubatch)
            + (n_ram + n_cpu) * self._ram_size
            + self._bytes_of(on_cpu)
        )
        parts = list[MemoryPlan]()
        warnings = [
            *cycle_warnings(layout, sum(slots) + n_cpu, size),
            *short_of(host, memory, " of RAM"),
        ]
        for device, of, n in zip(self._devices, layers, slots, strict=False):
            n_bytes = self._bytes_without_slots(of) + n * size
            parts.append(MemoryPlan(device.name, of, n, n_bytes, device.free_bytes))
            warnings += short_of(n_bytes, device.memory, f" on {device.name}", "VRAM")
        parts.append(
            MemoryPlan(None, on_cpu, n_cpu, host, memory.available_bytes, n_ram)
        )
        supply = SupplyPlan(
            self._streams(on_cpu=n_cpu > 0),
            self._slot_tokens,
            self._n_staging,
            self._staging_bytes * sum(n > 0 for n in slots),
        )
        return _planned(
            layout, self._pool.sizes, parts, n_ubatch, self._ram_size, size, needs=self._needs,
            supply=supply,
            size_classes=self._classes,
            tensor_split=tensor_split,
            reasons=(*self._pool.reasons, *self._reasons(parts), why_ubatch),
            warnings=tuple(warnings),
        )  # fmt: skip

    def _device_of_layers(self) -> tuple[tuple[float, ...] | None, list[int]]:
        """Returns the tensor_split for llama.cpp (None if one device has all layers),
        and the device of each layer. Unless the user has set tensor_split, the split is
        in proportion to the memory that devices have for layers. Raises OptionError if
        no layer with experts is on a device."""
        if self._is_alone:
            return None, [0] * self._n_layer
        n_gpu_layers = self._task.n_gpu_layers
        rooms = list[int]()
        beside = self._needs.compute_bytes + self._staging_bytes
        for d, device in enumerate(self._devices):
            free = max(1, device.free_bytes - device.margin - beside)
            rooms.append(min(free, self._slots_bytes(d, free)))
        split = tuple(map(float, self._split or rooms))
        on = device_of_layers(self._n_layer, split, n_gpu_layers)
        if not self._layout.experts_in([il for il, d in enumerate(on) if d != ON_CPU]):
            raise OptionError(
                f"n_gpu_layers {n_gpu_layers} puts no layer with experts on a device, but slots in its memory need one;"
                " give a larger n_gpu_layers, or use placement 'cpu' without vram_cache."
            )
        return split, on

    def _slots_bytes(self, d: int, free_bytes: int) -> int:
        """Returns how many bytes device `d` has for slots: its own budget without
        staging tensors; `free_bytes` if the budget is shared; for "auto", at most
        `free_bytes`."""
        cache = self._vram[0] if len(self._vram) == 1 else self._vram[d]
        if self._is_shared:
            return free_bytes
        if cache.mode == "auto":
            return min(free_bytes, cache.n_bytes or free_bytes)
        n_bytes = (
            cache.n_bytes or budget_slots(cache, self._layout, self._size) * self._size
        )
        if self._task.spec.store.staging is None:
            return max(0, n_bytes - self._staging_bytes)
        return n_bytes

    def _bytes_of(self, layers: Iterable[int]) -> int:
        return sum(self._layer_bytes[il] for il in layers)

    def _bytes_without_slots(self, layers: Sequence[int]) -> int:
        """Returns how many bytes a device with these layers holds in addition to its
        slots."""
        if self._is_alone:
            return self._needs.total_bytes + self._staging_bytes
        output = self._output_bytes if self._n_layer - 1 in layers else 0
        staged = self._staging_bytes if self._layout.experts_in(layers) else 0
        return self._bytes_of(layers) + output + self._needs.compute_bytes + staged

    def _slots(self, layers: Sequence[Sequence[int]]) -> list[int]:
        """Returns each device's number of slots. `layers` lists the layers of each
        device. If all devices share one budget, slots that do not fit on a device go to
        the others."""
        if self._is_alone:
            return [self._n_slots]
        size = self._size
        least = self._layout.n_expert_used
        most = [self._layout.experts_in(of) for of in layers]
        left = [
            d.free_bytes - self._bytes_without_slots(of)
            for d, of in zip(self._devices, layers, strict=True)
        ]
        if not self._is_shared:
            rooms = [
                free - d.margin for d, free in zip(self._devices, left, strict=True)
            ]
            own = (
                self._slots_bytes(d, max(0, room)) // size
                for d, room in enumerate(rooms)
            )
            return [min(pair) for pair in zip(most, own, strict=True)]
        total = min(self._n_slots, sum(most))
        held = [
            min(n, max(least, n_bytes // size))
            for n, n_bytes in zip(most, left, strict=True)
        ]
        return share_out(total, most, held if sum(held) >= total else most, least)

    def _allowed(self, slots: Sequence[int], counts: Sequence[int]) -> Iterator[int]:
        """Yields the largest number of tokens in a pass for each memory, given its
        slots and the experts (`counts`) of its layers.

        A memory with a slot for each expert of its layers yields nothing, because it
        sets no limit. Raises BudgetError for fewer slots than a token needs.
        """
        least = self._layout.n_expert_used
        budgets = self._task.spec.budgets
        names = [*(device.name for device in self._devices), None]
        for name, n_slots, n_experts in zip(names, slots, counts, strict=True):
            if not n_experts:
                continue
            if n_slots < least:
                budget = budgets.as_given("VRAM" if name else "RAM")
                n_sharing = (
                    sum(n > 0 for n in counts[:-1])
                    if name and len(self._vram) == 1
                    else 1
                )
                raise too_few(
                    budget,
                    n_slots,
                    least,
                    self._size,
                    f" on {name or 'the CPU'}",
                    n_sharing,
                )
            if n_slots < n_experts:
                streams = self._streams(on_cpu=name is None)
                yield allowed_ubatch(self._layout, n_slots, streams, slot_tokens(name))

    def _streams(self, *, on_cpu: bool) -> bool:
        """Returns True if a pass may use more experts of a layer than there are slots,
        because the CPU streams experts, or because a device stages them."""
        if on_cpu:
            return self._task.cpu_streams(self._layout)
        return self._n_staging > 0

    def _ram_slots(
        self, cpu_layers: Sequence[int], n_on_cpu: int, n_below: int
    ) -> tuple[int, int]:
        """Returns (slots of layers that run on the CPU, slots from which the devices'
        slots are filled), in proportion to experts.

        Raises BudgetError if there are too few slots.
        """
        if n_on_cpu + n_below == 0:
            return 0, 0
        memory = self._task.machine.memory
        cache = self._task.spec.budgets.ram
        taken = self._bytes_of(cpu_layers) + (
            self._needs.compute_bytes if n_on_cpu else 0
        )
        left = replace(memory, available_bytes=max(0, memory.available_bytes - taken))
        total = min(
            ram_slots(self._layout, cache, left, self._ram_size, self._n_ubatch),
            n_on_cpu + n_below,
        )
        least_cpu = min(n_on_cpu, self._layout.n_expert_used)
        least_below = min(1, n_below)
        if total < least_cpu + least_below:
            least = format_bytes_up((least_cpu + least_below) * self._ram_size)
            raise BudgetError(
                f"{cache.as_given} holds {total} experts, but the CPU needs {least_cpu} for its layers and"
                f" the devices need {least_below}; give at least {least!r}, or put more layers on devices"
                " (n_gpu_layers)."
            )
        return divide_ram_slots(total, n_on_cpu, n_below, least_cpu)

    def _reasons(self, parts: Sequence[MemoryPlan]) -> Iterator[str]:
        for part in parts:
            if part.layers:
                yield (
                    f"{len(part.layers)} layers ({part.layers[0]} to {part.layers[-1]}) are computed on"
                    f" {part.name or 'the CPU'}, with slots for {part.n_slots} of their"
                    f" {self._layout.experts_in(part.layers)} experts ({format_bytes(part.n_slots * self._size)})"
                )
        ram = parts[-1]
        if ram.n_below:
            yield f"{ram.n_below} experts ({format_bytes(ram.n_below * self._ram_size)}) fit into RAM below the devices"
        elif not ram.n_slots:
            yield "every expert has a slot on a device: none is kept in RAM"
        if self._classes:
            n_large = len(self._classes[-1])
            more = self._ram_size / self._size - 1
            yield (
                f"{n_large} layers with larger experts have larger slots of their own, which leaves memory for"
                f" {more:.0%} more slots"
            )


_WAYS: Mapping[Kind, Callable[[Task], Plan]] = {
    "slots": plan_slots,
    "layers": plan_layers,
    "cpu": _plan_cpu,
}
