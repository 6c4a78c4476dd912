"""Turns a budget, a model and a machine into slot counts, with the reasons as sentences.

A slot holds one expert of any layer: one place in each arena (gate, up, down; or gate_up, down). The plan is made
before anything is loaded; it reads no weights and allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moegguf.engine.estimate import Expected, expect
from moegguf.engine.machine import Memory
from moegguf.engine.memory import F16, MemoryNeeds, memory_needs
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.projector import ProjectorHeader
from moegguf.native.store import slot_sizes
from moegguf.quantities import MIB, ExpertCache, format_bytes, format_bytes_up

MARGIN_BYTES = 256 * MIB  # left free at least


@dataclass(frozen=True)
class Plan:
    """Slots for the pool, the largest pass it allows (`n_ubatch` tokens), and where all bytes go.

    `budget_bytes` is what the pool takes: n_slots * slot_bytes. `compute_bytes` includes the work memory of the slots,
    `projector_bytes` that of reading an image.
    `total_bytes` is the sum; `available_bytes` is what this process may take. `reasons` and `warnings` are sentences
    for the user.
    """

    n_slots: int
    slot_bytes: int
    budget_bytes: int
    resident: bool
    n_ubatch: int
    dense_bytes: int
    kv_bytes: int
    compute_bytes: int
    total_bytes: int
    available_bytes: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    expected: Expected
    projector_bytes: int = 0


def margin_bytes(free_bytes: int) -> int:
    """How many of the free bytes stay free when the budget is chosen here: a twentieth, or MARGIN_BYTES."""
    return max(free_bytes // 20, MARGIN_BYTES)


def slot_bytes(layout: ExpertLayout) -> int:
    """Bytes of one slot over all arenas, as the native store lays them out; 0 for a model without experts."""
    return slot_sizes(layout).slot_bytes


def make_plan(
    layout: ExpertLayout,
    cache: ExpertCache,
    memory: Memory,
    *,
    n_ctx: int = 4096,
    n_ubatch: int = 512,
    type_k: int = F16,
    type_v: int = F16,
    flash_attn: bool = False,
    disk_bytes_per_s: float | None = None,
    projector: ProjectorHeader | None = None,
) -> Plan:
    """The plan for running `layout` within `cache` on a machine with `memory`; with a `projector` also on images.

    Raises BudgetError, stating the minimum, when the budget (or, for "auto", the free memory) does not hold the experts
    that one token uses in one layer, or those of an image that has to be read in one pass.
    """
    reasons: list[str] = []
    n_image_pass = projector.one_pass_tokens if projector else 0
    n_ubatch = max(n_ubatch, n_image_pass)
    needs = memory_needs(layout, n_ctx, n_ubatch, type_k, type_v, flash_attn, projector)
    size = slot_bytes(layout)
    n_slots = _choose_slots(layout, cache, memory, needs, size, reasons) if layout.is_moe else 0
    if not layout.is_moe:
        reasons.append("the model has no experts, so it runs as plain llama.cpp")
    allowed = _allowed_ubatch(layout, n_slots, n_ubatch, reasons)
    if allowed < n_image_pass:
        least = min(layout.n_expert, n_image_pass * layout.n_expert_used) * size
        raise BudgetError(
            f"this model reads an image in one pass of {n_image_pass} tokens, but expert_cache={str(cache)!r} allows"
            f" passes of {allowed}; give at least {format_bytes_up(least)!r}, or load it without its projector."
        )
    if allowed < n_ubatch:
        n_ubatch, needs = allowed, memory_needs(layout, n_ctx, allowed, type_k, type_v, flash_attn, projector)
    total = needs.total_bytes(n_slots) + n_slots * size
    resident = n_slots == layout.n_expert_total
    return Plan(
        n_slots=n_slots,
        slot_bytes=size,
        budget_bytes=n_slots * size,
        resident=resident,
        n_ubatch=n_ubatch,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        compute_bytes=needs.compute_bytes + n_slots * needs.slot_work_bytes,
        total_bytes=total,
        available_bytes=memory.available_bytes,
        reasons=tuple(reasons),
        warnings=tuple(_warnings(layout, n_slots, size, total, memory)),
        expected=expect(layout, n_slots, disk_bytes_per_s),
        projector_bytes=needs.projector_bytes,
    )


def _choose_slots(
    layout: ExpertLayout, cache: ExpertCache, memory: Memory, needs: MemoryNeeds, size: int, reasons: list[str]
) -> int:
    """Slots of `size` bytes for the pool, from the minimum to one for every expert."""
    n_total = layout.n_expert_total
    if cache.mode == "auto":
        n_slots = _auto_slots(layout, memory, needs, size, reasons)
    elif cache.mode == "fraction":
        n_slots = min(n_total, math.floor(cache.fraction * n_total + 1e-9))
        reasons.append(f"{cache} of {n_total} experts is {n_slots} slots of {format_bytes(size)}")
    else:
        n_slots = min(n_total, cache.n_bytes // size)
        reasons.append(f"{cache} holds {cache.n_bytes // size} slots of {format_bytes(size)}")
        if cache.n_bytes > n_total * size:
            reasons.append(f"the budget is cut to {format_bytes(n_total * size)}, all experts of the model")
    minimum = layout.n_expert_used
    if n_slots < minimum:
        need = minimum * size
        raise BudgetError(
            f"expert_cache={str(cache)!r} holds {n_slots} experts, but one token needs {minimum} in"
            f" a layer, which is {need} bytes; give at least {format_bytes_up(need)!r}."
        )
    if n_slots == n_total:
        reasons.append("every expert has a slot of its own: nothing is read after the first use")
    else:
        reasons.append(f"{n_slots} of {n_total} experts fit at a time ({n_slots / n_total:.0%}); others are fetched")
    return n_slots


def _auto_slots(layout: ExpertLayout, memory: Memory, needs: MemoryNeeds, size: int, reasons: list[str]) -> int:
    """Slots in what is free after everything else and a margin."""
    margin = margin_bytes(memory.available_bytes)
    other = needs.total_bytes(0)
    free = memory.available_bytes - other - margin
    n_slots = min(layout.n_expert_total, max(0, free) // (size + needs.slot_work_bytes))
    free_text, other_text = format_bytes(memory.available_bytes), format_bytes(other)
    if n_slots < layout.n_expert_used:
        least = format_bytes_up(layout.n_expert_used * size)
        raise BudgetError(
            f"{free_text} are free here (limited by {memory.limited_by}), but this model needs {other_text}"
            " for weights that every token uses, the context and buffers, a margin of"
            f" {format_bytes(margin)}, and at least {least} for experts; free memory, lower n_ctx or"
            " n_ubatch, or give expert_cache a size."
        )
    reasons.append(
        f"{free_text} are free ({memory.limited_by}); {other_text} go to weights that every token uses, the"
        f" context and buffers, {format_bytes(margin)} stay free"
    )
    return n_slots


def _allowed_ubatch(layout: ExpertLayout, n_slots: int, n_ubatch: int, reasons: list[str]) -> int:
    """The most tokens of a pass whose experts of one layer fit in the pool, whatever the router chooses."""
    if n_slots >= layout.n_expert or not layout.is_moe:
        return n_ubatch
    allowed = max(1, n_slots // layout.n_expert_used)
    if allowed < n_ubatch:
        reasons.append(
            f"{n_slots} slots are fewer than the {layout.n_expert} experts of a layer, so a prompt is read"
            f" {allowed} token{'s' if allowed > 1 else ''} at a time instead of {n_ubatch}"
        )
    return min(n_ubatch, allowed)


def _warnings(layout: ExpertLayout, n_slots: int, size: int, total: int, memory: Memory) -> Iterator[str]:
    if n_slots < layout.token_cycle_slots:
        cycle = f"{layout.token_cycle_slots} slots, {format_bytes_up(layout.token_cycle_slots * size)}"
        yield (
            f"{format_bytes(n_slots * size)} for experts is below one token's experts over all layers"
            f" ({cycle}); the hit rate will be low"
        )
    if total > memory.available_bytes:
        yield (
            f"about {format_bytes(total)} are needed, but {format_bytes(memory.available_bytes)} are free"
            f" (limited by {memory.limited_by}); the budget is kept as given, and the system may stop this"
            ' process; give less, or "auto"'
        )
