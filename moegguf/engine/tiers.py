"""Plans for a device: slots there over slots in RAM, or whole layers there and slots in RAM for the rest.

Where several devices share the layers, or the CPU computes some: `device_plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from moegguf.controller.request_cost import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Passes,
    allowed_ubatch,
    best_staging,
    passes_cost,
    staging_bytes,
)
from moegguf.engine.batch import DEFAULT_UBATCH_TOKENS
from moegguf.engine.devices import Device
from moegguf.engine.machine import Memory
from moegguf.engine.memory import (
    F16,
    FIXED_BYTES,
    VOCAB_TOKEN_BYTES,
    MemoryNeeds,
    margin_bytes,
    memory_needs,
    row_bytes,
)
from moegguf.engine.plan import Plan, make_plan, slot_bytes
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.projector import ProjectorHeader
from moegguf.native.slot_sizes import padded, slot_sizes, slot_tokens
from moegguf.quantities import GIB, ExpertCache, format_bytes, format_bytes_up, parse_expert_cache

VRAM_MARGIN_BYTES = GIB  # stays free with "auto": drivers, displays and other programs take some at any time


def with_best_staging(layout: ExpertLayout, plan: Callable[[int], Plan], wanted: int | None) -> Plan:
    """Of the plans for devices with so many staging tensors each the best (`request_cost.best_staging`). wanted: with
    so many, beside a budget that is given, where they fit. Raises BudgetError where no plan does."""
    plans = dict[int, Plan | BudgetError]()

    def passes(n: int) -> Passes | None:
        found = plans[n] = _plan_or_error(plan, n)
        if isinstance(found, BudgetError) or (n and wanted is None and found.total_bytes > found.available_bytes):
            return None
        return Passes(found.device_slots, found.n_ubatch, found.staging_bytes, _has_every_expert(layout, found))

    n = best_staging(layout, passes, wanted)
    best = plans[n]
    if isinstance(best, BudgetError):
        raise best
    if n == 0:
        return best
    reasons = _staging_reasons(layout, n, best, plans[0])
    return replace(best, n_staging=n, reasons=(*best.reasons, *reasons))


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


def _plan_or_error(plan: Callable[[int], Plan], n: int) -> Plan | BudgetError:
    try:
        return plan(n)
    except BudgetError as error:  # without staging also where an image takes a pass of more tokens than have slots
        return error


def plan_tiers(
    layout: ExpertLayout,
    vram: ExpertCache,
    ram: ExpertCache,
    device: Device,
    memory: Memory,
    staging: int | None = None,
    **options: Any,
) -> Plan:
    """The plan for running `layout` on `device`, with `vram` for slots there and `ram` for slots below them.

    Weights that every token uses, the context, the buffers of a pass and staging tensors are on the device, too.
    staging: as in `with_best_staging`. options: those of `make_plan`. Raises BudgetError, stating the minimum, where
    either budget is too small.
    """
    layout = padded(layout, [device.name])

    def on_device(n: int) -> Plan:
        return make_plan(
            layout, vram, device.memory, margin=VRAM_MARGIN_BYTES, option="vram_cache", streams=False,
            staged_bytes=staging_bytes(layout, n), staging_within=staging is None,
            slot_tokens=slot_tokens(device.name), **options,
        )  # fmt: skip

    upper = with_best_staging(layout, on_device, staging if layout.is_moe else 0)
    n_slots = 0 if upper.resident else lower_slots(layout, ram, memory, upper.slot_bytes, upper.n_ubatch)
    host = host_bytes(layout, upper.n_ubatch) + n_slots * upper.slot_bytes
    reason = f"every layer is computed on {device.name}"
    if upper.resident:
        reason += ", which has a slot for every expert: none is kept in RAM"
    elif layout.is_moe:
        share = n_slots / layout.n_expert_total
        reason += f"; {n_slots} experts ({share:.0%}, {format_bytes(n_slots * upper.slot_bytes)}) fit into RAM below it"
    warnings = upper.warnings + _short_of_ram(host, memory)
    reasons = (*upper.reasons, reason)
    return replace(
        upper, device=device.name, n_lower_slots=n_slots, host_bytes=host, reasons=reasons, warnings=warnings
    )


def host_bytes(layout: ExpertLayout, n_ubatch: int) -> int:
    """RAM that a model takes whose layers are all on a device: token embeddings, logits, the vocabulary, buffers, and
    biases and scales of experts, which the CPU needs where it computes misses."""
    embedding = row_bytes(F16, layout.hparams.n_embd)
    vocabulary = layout.n_vocab * (embedding + 4 * n_ubatch + VOCAB_TOKEN_BYTES)
    return vocabulary + layout.expert_row_bytes + FIXED_BYTES


def beside_experts_bytes(needs: MemoryNeeds) -> int:
    """What a device holds besides experts: weights that every token uses, the context, buffers. Whatever else is to lie
    there has to be counted here."""
    return needs.total_bytes(0)


def plan_layers(
    layout: ExpertLayout,
    rest: ExpertLayout,
    ram: ExpertCache,
    device: Device,
    memory: Memory,
    *,
    n_ctx: int,
    n_ubatch: int | None = None,
    n_batch: int = DEFAULT_UBATCH_TOKENS,
    kv_tokens: int | None = None,
    type_k: int = F16,
    type_v: int = F16,
    flash_attn: bool = False,
    projector: ProjectorHeader | None = None,
    streams: bool = True,
) -> Plan:
    """The plan for computing `layout` on `device` but for the experts of the layers that `rest` has: those are computed
    by the CPU, from slots in RAM. Those of other layers are on the device, as every other weight is.

    options: those of `make_plan`, of which `streams` is that of these slots. Raises BudgetError where RAM holds too few
    experts for a token.
    """
    size, wanted = slot_bytes(rest), n_ubatch or min(DEFAULT_UBATCH_TOKENS, n_batch)
    n_slots = lower_slots(rest, ram, memory, size, wanted)
    if n_slots < rest.n_expert_used:
        raise BudgetError(
            f"expert_cache={str(ram)!r} holds {n_slots} experts, but one token needs {rest.n_expert_used} in a layer;"
            f" give at least {format_bytes_up(rest.n_expert_used * size)!r}."
        )
    least = projector.one_pass_tokens if projector else 1
    streams = streams and slot_sizes(rest).streams
    allowed = allowed_ubatch(rest, n_slots, streams)
    if allowed < least:
        raise BudgetError(
            f"an image takes a pass of {least} tokens, but {n_slots} slots in RAM allow {allowed}; give more with"
            " expert_cache."
        )
    n_ubatch = max(least, min(wanted, allowed))
    needs = memory_needs(rest, kv_tokens or n_ctx, n_ubatch, type_k, type_v, flash_attn, projector)
    if beside_experts_bytes(needs) > device.free_bytes:
        raise BudgetError(
            f"whole layers, context and buffers take {format_bytes(beside_experts_bytes(needs))}, but"
            f" {format_bytes(device.free_bytes)} of {device.name}'s memory are free; give less with vram_cache."
        )
    n_whole = len(layout.layers) - len(rest.layers)
    host = host_bytes(layout, n_ubatch) + n_slots * (size + needs.slot_work_bytes)
    reasons = [
        f"every layer is computed on {device.name}, but the experts of {len(rest.layers)} of {len(layout.layers)}"
        f" layers by the CPU; those of the other {n_whole} lie on {device.name}",
        f"{n_slots} of {rest.n_expert_total} experts of these layers fit into RAM ({format_bytes(n_slots * size)})",
    ]
    return Plan(
        n_slots=n_slots,
        slot_bytes=size,
        budget_bytes=n_slots * size,
        resident=n_slots == rest.n_expert_total,
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        compute_bytes=needs.compute_bytes,
        total_bytes=beside_experts_bytes(needs),
        available_bytes=device.free_bytes,
        reasons=tuple(reasons),
        warnings=_short_of_ram(host, memory),
        projector_bytes=needs.projector_bytes,
        streams=streams,
        host_bytes=host,
        layers_on=device.name,
    )


def _short_of_ram(n_bytes: int, memory: Memory) -> tuple[str, ...]:
    """The warning where so much RAM is not free."""
    if n_bytes <= memory.available_bytes:
        return ()
    return (
        f"about {format_bytes(n_bytes)} of RAM are needed, but {format_bytes(memory.available_bytes)} are free"
        f" (limited by {memory.limited_by}); the budget is kept as given, and the system may stop this process;"
        ' give less, or "auto"',
    )


def lower_slots(layout: ExpertLayout, ram: ExpertCache, memory: Memory, slot_bytes: int, n_ubatch: int) -> int:
    """Slots in RAM for a budget; 0 for a model without experts.

    Raises BudgetError where it holds no expert at all.
    """
    if not layout.is_moe:
        return 0
    n_total = layout.n_expert_total
    if ram.mode == "fraction":
        n_slots = math.floor(ram.fraction * n_total + 1e-9)
    elif ram.mode == "bytes":
        n_slots = ram.n_bytes // slot_bytes
    else:
        free = memory.available_bytes - margin_bytes(memory.available_bytes) - host_bytes(layout, n_ubatch)
        n_slots = max(0, min(free, ram.n_bytes or free)) // slot_bytes
    if n_slots < 1:
        raise BudgetError(
            f"expert_cache={str(ram)!r} holds no expert in the {format_bytes(memory.available_bytes)} of RAM that are"
            f" free; give at least {format_bytes_up(slot_bytes)!r}."
        )
    return min(n_slots, n_total)


def parse_vram_cache(value: str | int | float | ExpertCache) -> ExpertCache:
    """The budget in `value`. Raises BudgetError."""
    try:
        return parse_expert_cache(value)
    except BudgetError as error:
        raise BudgetError(str(error).replace("expert_cache", "vram_cache", 1)) from None


def parse_vram_caches(value: str | int | float | ExpertCache) -> tuple[ExpertCache, ...]:
    """One budget for all devices together, or, where commas are in it, one for each. Raises BudgetError."""
    if not isinstance(value, str):
        return (parse_vram_cache(value),)
    return tuple(map(parse_vram_cache, value.split(",")))
