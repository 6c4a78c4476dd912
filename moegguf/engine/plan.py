"""Turns a budget, a model and a machine into slot counts, and says why in plain words.

A slot has room for one expert of any layer: one place in each arena (gate, up, down; or gate_up, down). The
plan is made before anything is loaded; it reads no weights and allocates nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moegguf.engine.estimate import Expected, expect
from moegguf.engine.machine import Memory
from moegguf.engine.memory import F16, Needs, needs
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout, Kind
from moegguf.gguf.reader import GGML_TYPES
from moegguf.quantities import MIB, ExpertCache, format_bytes, format_bytes_up

ARENA_ALIGNMENT = 64
MARGIN_SHARE = 0.05  # of the memory that is free, left free by "auto"
MARGIN_BYTES = 256 * MIB  # at least


@dataclass(frozen=True)
class Plan:
    """Slots for the pool, the largest pass it allows, and the bytes of everything. Lists are sentences for
    people.

    `budget_bytes` is what the pool takes: n_slots * slot_bytes. `compute_bytes` includes the work memory of
    the slots. `total_bytes` is all of it together; `available_bytes` is what this process may take.
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


def slot_strides(layout: ExpertLayout) -> dict[Kind, int]:
    """{matrix kind: bytes from one slot to the next in its arena}, as the native store lays them out.

    The largest expert of that kind, rounded up to a multiple of 64 and of every block size used there.
    """
    strides: dict[Kind, int] = {}
    for kind in layout.kinds:
        matrices = [m for m in layout.matrices if m.kind == kind]
        unit = math.lcm(ARENA_ALIGNMENT, *(GGML_TYPES[m.ggml_type][2] for m in matrices))
        strides[kind] = -(-max(m.expert_bytes for m in matrices) // unit) * unit
    return strides


def slot_bytes(layout: ExpertLayout) -> int:
    """Bytes of one slot over all arenas; 0 for a model without experts."""
    return sum(slot_strides(layout).values())


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
) -> Plan:
    """The plan for running `layout` within `cache` on a machine with `memory`.

    Raises BudgetError, stating the minimum, when the budget (or, for "auto", the free memory) does not hold
    the experts that one token uses in one layer.
    """
    reasons: list[str] = []
    warnings: list[str] = []
    ask = needs(layout, n_ctx, n_ubatch, type_k, type_v, flash_attn)
    n_slots = _choose_slots(layout, cache, memory, ask, reasons) if layout.is_moe else 0
    if not layout.is_moe:
        reasons.append("the model has no experts, so it runs as plain llama.cpp")
    allowed = _allowed_ubatch(layout, n_slots, n_ubatch, reasons)
    if allowed < n_ubatch:
        n_ubatch, ask = allowed, needs(layout, n_ctx, allowed, type_k, type_v, flash_attn)
    size = slot_bytes(layout)
    total = ask.total_bytes(n_slots) + n_slots * size
    resident = n_slots == layout.n_expert_total
    _warn(layout, n_slots, total, memory, warnings)
    return Plan(
        n_slots=n_slots,
        slot_bytes=size,
        budget_bytes=n_slots * size,
        resident=resident,
        n_ubatch=n_ubatch,
        dense_bytes=ask.dense_bytes,
        kv_bytes=ask.kv_bytes,
        compute_bytes=ask.compute_bytes + n_slots * ask.slot_work_bytes,
        total_bytes=total,
        available_bytes=memory.available_bytes,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        expected=expect(layout, n_slots, disk_bytes_per_s),
    )


def _choose_slots(layout: ExpertLayout, cache: ExpertCache, memory: Memory, ask: Needs, reasons: list[str]) -> int:
    """Slots for the pool, from the minimum to one for every expert."""
    size, n_total = slot_bytes(layout), layout.n_expert_total
    if cache.mode == "auto":
        n_slots = _auto_slots(layout, memory, ask, size, reasons)
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
            f"expert_cache={str(cache)!r} has room for {n_slots} experts, but one token needs {minimum} in"
            f" a layer, which is {need} bytes; give at least {format_bytes_up(need)!r}."
        )
    if n_slots == n_total:
        reasons.append("every expert has a slot of its own: nothing is read after the first use")
    else:
        reasons.append(f"{n_slots} of {n_total} experts fit at a time ({n_slots / n_total:.0%}); others are fetched")
    return n_slots


def _auto_slots(layout: ExpertLayout, memory: Memory, ask: Needs, size: int, reasons: list[str]) -> int:
    """Slots in what is free after everything else and a margin."""
    margin = max(int(memory.available_bytes * MARGIN_SHARE), MARGIN_BYTES)
    other = ask.total_bytes(0)
    free = memory.available_bytes - other - margin
    n_slots = min(layout.n_expert_total, max(0, free) // (size + ask.slot_work_bytes))
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
    """The most tokens of one pass whose experts of one layer surely fit in the pool."""
    if n_slots >= layout.n_expert or not layout.is_moe:
        return n_ubatch
    allowed = max(1, n_slots // layout.n_expert_used)
    if allowed < n_ubatch:
        reasons.append(
            f"{n_slots} slots are fewer than the {layout.n_expert} experts of a layer, so a prompt is read"
            f" {allowed} token{'s' if allowed > 1 else ''} at a time instead of {n_ubatch}"
        )
    return min(n_ubatch, allowed)


def _warn(layout: ExpertLayout, n_slots: int, total: int, memory: Memory, warnings: list[str]) -> None:
    if n_slots < layout.token_cycle_slots:
        size = slot_bytes(layout)
        cycle = f"{layout.token_cycle_slots} slots, {format_bytes_up(layout.token_cycle_slots * size)}"
        warnings.append(
            f"{format_bytes(n_slots * size)} for experts is below one token's experts over all layers"
            f" ({cycle}); the hit rate will be low"
        )
    if total > memory.available_bytes:
        warnings.append(
            f"about {format_bytes(total)} are needed, but {format_bytes(memory.available_bytes)} are free"
            f" (limited by {memory.limited_by}); the budget is kept as given, and the system may stop this"
            ' process; give less, or "auto"'
        )
