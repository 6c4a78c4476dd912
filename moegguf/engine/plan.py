"""Turns a budget, a model and a machine into context, batch and slots, with the reasons as sentences.

A slot holds one expert of any layer: one place in each arena (gate, up, down; or gate_up, down). The plan is made
before anything is loaded; it reads no weights and allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from moegguf.controller.request_cost import NO_LIMIT, allowed_ubatch, staging_bytes, staging_slots
from moegguf.engine.batch import (
    DEFAULT_UBATCH_TOKENS,
    Fit,
    best_fit,
    fits,
    layer_slots,
    ubatches_up_to,
)
from moegguf.engine.machine import Memory
from moegguf.engine.memory import (
    F16,
    SMALL_CTX_TOKENS,
    MemoryNeeds,
    choose_context,
    default_contexts,
    margin_bytes,
    memory_needs,
    pad_context,
)
from moegguf.engine.placement import PlacementPlan
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.gguf.projector import ProjectorHeader
from moegguf.native.slot_sizes import slot_sizes
from moegguf.quantities import ExpertCache, format_bytes, format_bytes_up


@dataclass(frozen=True)
class DevicePlan:
    """What one of several devices gets: layers, by number, and slots for their experts. name: ggml's; None: the CPU,
    whose slots are in RAM. total_bytes: its memory, those slots included.
    """

    name: str | None
    layers: tuple[int, ...]
    n_slots: int
    total_bytes: int


@dataclass(frozen=True)
class Plan:
    """Slots for the pool, tokens of context and of a pass (`n_ubatch`), and where all bytes go.

    `budget_bytes` is what the pool takes: n_slots * slot_bytes. `compute_bytes` includes the work memory of the slots,
    `projector_bytes` that of reading an image. `streams`: a pass may use more experts of a layer than there are slots:
    in the CPU's memory, where it computes layers, else on a device.
    `total_bytes` is the sum; `available_bytes` is what this process may take. `reasons` and `warnings` are sentences
    for the user.
    """

    n_slots: int
    slot_bytes: int
    budget_bytes: int
    resident: bool
    n_ctx: int
    n_ubatch: int
    dense_bytes: int
    kv_bytes: int
    compute_bytes: int
    total_bytes: int
    available_bytes: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    projector_bytes: int = 0
    streams: bool = False
    device: str | None = None  # ggml's name of the one, or names of those, that all of this but `n_lower_slots` is on
    devices: tuple[DevicePlan, ...] = ()  # where several compute: each one's part, in llama.cpp's order, the CPU last
    n_lower_slots: int = 0  # in RAM, below those of the device
    host_bytes: int = 0  # of RAM, with those slots and the CPU's, where there is a device
    layers_on: str | None = None  # the device that computes everything but the experts with slots, which are in RAM
    n_staging: int = 0  # tensors of a layer's full shape on the device, in which prompts are staged
    staging_bytes: int = 0  # that they take, beside slots; part of total_bytes
    placement: PlacementPlan | None = None  # why the experts are placed so; None: nothing was to be decided
    slot_tokens: int = NO_LIMIT  # of a pass on a device, that slots are for: more are staged, or read in several
    exact: bool = True  # the tokens of an all-resident run; False: the CPU computes what the device lacks

    @property
    def device_slots(self) -> int:
        """Slots on devices, without those of layers that the CPU computes beside them."""
        return self.n_slots - sum(part.n_slots for part in self.devices if part.name is None)

    @property
    def lower_bytes(self) -> int:
        """What the slots in RAM below a device take."""
        return self.n_lower_slots * self.slot_bytes

    @property
    def staging_slots_bytes(self) -> int:
        """What staging tensors take of a `vram_cache` that is given: whole slots."""
        return staging_slots(self.staging_bytes, self.slot_bytes) * self.slot_bytes

    def pass_slots(self, layout: ExpertLayout, on_device: bool) -> int:
        """Slots of a pool for layers of `layout` that a pass may need at once, on a device or in the CPU's memory."""
        if on_device and self.n_staging:
            return layer_slots(layout, min(self.n_ubatch, self.slot_tokens))
        return layer_slots(layout, self.n_ubatch, self.streams and not on_device)


@dataclass(frozen=True)
class _Request:
    """What is planned: a model, its options, and the memory there is. None: chosen here."""

    layout: ExpertLayout
    memory: Memory
    margin_bytes: int
    n_ubatch: int | None
    n_batch: int
    type_k: int
    type_v: int
    flash_attn: bool
    projector: ProjectorHeader | None = None
    streams: bool = False
    kv_tokens: int | None = None
    option: str = "expert_cache"  # that the budget was given with
    staging_bytes: int = 0
    budgeted_bytes: int = 0  # of these, that a budget that was given holds
    slot_tokens: int = NO_LIMIT

    @property
    def one_pass_tokens(self) -> int:
        """Tokens that a pass has to hold, for an image; 1 where an image may be read in several."""
        return max(1, self.projector.one_pass_tokens if self.projector else 1)

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.layout)

    def allowed_ubatch(self, n_slots: int) -> int:
        """The most tokens of a pass with so many slots."""
        return allowed_ubatch(self.layout, n_slots, self.streams, self.slot_tokens)

    @property
    def usable_bytes(self) -> int:
        """Free memory without the margin."""
        return self.memory.available_bytes - self.margin_bytes - self.staging_bytes

    def needs(self, n_ctx: int, n_ubatch: int) -> MemoryNeeds:
        n_kv = self.kv_tokens or n_ctx
        return memory_needs(self.layout, n_kv, n_ubatch, self.type_k, self.type_v, self.flash_attn, self.projector)

    def ubatches(self) -> tuple[int, ...]:
        """Tokens of a pass to choose from, most first."""
        least = self.one_pass_tokens
        wanted = max(least, self.n_ubatch or min(DEFAULT_UBATCH_TOKENS, self.n_batch))
        return tuple(n for n in (*ubatches_up_to(wanted), least) if n >= least)


def slot_bytes(layout: ExpertLayout) -> int:
    """Bytes of one slot over all arenas, as the native store lays them out; 0 for a model without experts."""
    return slot_sizes(layout).slot_bytes


def make_plan(
    layout: ExpertLayout,
    cache: ExpertCache,
    memory: Memory,
    *,
    n_ctx: int | None = None,
    n_ubatch: int | None = None,
    n_batch: int = DEFAULT_UBATCH_TOKENS,
    type_k: int = F16,
    type_v: int = F16,
    flash_attn: bool = False,
    margin: int | None = None,
    projector: ProjectorHeader | None = None,
    streams: bool = True,
    kv_tokens: int | None = None,
    option: str = "expert_cache",
    staged_bytes: int = 0,
    staging_within: bool = True,
    slot_tokens: int = NO_LIMIT,
) -> Plan:
    """The plan for running `layout` within `cache` on a machine with `memory`.

    n_ctx: 0 is the model's own; None: the largest that leaves most memory to experts (`memory.choose_context`).
    n_ubatch: stays as given unless the pool is too small for it; None: at most n_batch, chosen together with the slots
    (`batch.best_fit`). margin: bytes that stay free with "auto"; None: `margin_bytes`. projector: of a model that reads
    images, too. streams: whether the store may stream experts, where the CPU's kernels can (`SlotSizes.streams`).
    kv_tokens: of all sequences that the context holds; None: n_ctx, of one. option: the name of the budget, for
    messages. staged_bytes: of tensors in which prompts are staged, on devices; staging_within: a budget that is given
    holds them, too. slot_tokens: of a pass that is not staged (`request_cost.allowed_ubatch`).

    Raises BudgetError, stating the minimum, when the budget (or, for "auto", the free memory) does not hold the experts
    that one token uses in one layer, or those of an image that has to be read in one pass.
    """
    margin = margin_bytes(memory.available_bytes) if margin is None else margin
    streams = staged_bytes > 0 or (streams and slot_sizes(layout).streams)
    request = _Request(
        layout, memory, margin, n_ubatch, n_batch, type_k, type_v, flash_attn, projector, streams, kv_tokens, option,
        staged_bytes, staged_bytes if staging_within else 0, slot_tokens,
    )  # fmt: skip
    reasons: list[str] = []
    options: dict[str, Any] = {"type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
    if n_ctx is None:
        pool_bytes = given_bytes(layout, cache)
        free_bytes = memory.available_bytes - (projector.total_bytes if projector else 0) - staged_bytes
        n_ctx = choose_context(layout, free_bytes, request.ubatches()[0], pool_bytes=pool_bytes, **options)
        reasons += _context_reason(layout, n_ctx)
    n_ctx = pad_context(n_ctx) or default_contexts(layout)[0]
    if kv_tokens and kv_tokens > n_ctx:
        reasons.append(f"answers that are computed together share a context of {kv_tokens:,} tokens")
    if not layout.is_moe:
        reasons.append("the model has no experts, so it runs as plain llama.cpp")
        n_ubatch = request.ubatches()[0]
        fit = Fit(0, n_ubatch, request.needs(n_ctx, n_ubatch))
    elif cache.mode == "auto":
        fit = _auto_fit(request, n_ctx, cache, reasons)
    else:
        fit = _fixed_fit(request, n_ctx, cache, reasons)
    return _plan(request, n_ctx, fit, reasons)


def given_bytes(layout: ExpertLayout, cache: ExpertCache) -> int:
    """About the bytes of a budget that is a share or a size; 0 for "auto"."""
    given = {"auto": 0, "fraction": cache.fraction * layout.expert_bytes, "bytes": cache.n_bytes}[cache.mode]
    return min(round(given), layout.expert_bytes)


def _plan(request: _Request, n_ctx: int, fit: Fit, reasons: list[str]) -> Plan:
    layout, needs, size = request.layout, fit.needs, request.slot_bytes
    total = needs.total_bytes(fit.n_slots) + fit.n_slots * size + request.staging_bytes
    if layout.is_moe:
        reasons.append(_residency(layout, fit.n_slots))
    return Plan(
        n_slots=fit.n_slots,
        slot_bytes=size,
        budget_bytes=fit.n_slots * size,
        resident=fit.n_slots == layout.n_expert_total,
        n_ctx=n_ctx,
        n_ubatch=fit.n_ubatch,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        compute_bytes=needs.compute_bytes + fit.n_slots * needs.slot_work_bytes,
        total_bytes=total,
        available_bytes=request.memory.available_bytes,
        reasons=tuple(reasons),
        warnings=tuple(_warnings(layout, fit.n_slots, size, total, request.memory)),
        projector_bytes=needs.projector_bytes,
        streams=request.streams,
        staging_bytes=request.staging_bytes,
        slot_tokens=request.slot_tokens,
    )


def _residency(layout: ExpertLayout, n_slots: int) -> str:
    if n_slots == layout.n_expert_total:
        return "every expert has a slot of its own: nothing is read after the first use"
    share = n_slots / layout.n_expert_total
    return f"{n_slots} of {layout.n_expert_total} experts fit at a time ({share:.0%}); others are fetched"


def _context_reason(layout: ExpertLayout, n_ctx: int) -> Iterator[str]:
    """Why the chosen context is smaller than the model's."""
    trained = default_contexts(layout)[0]
    why = "over a tenth of the free memory, or over a quarter where every expert fits beside it"
    if n_ctx < SMALL_CTX_TOKENS:
        why = "more memory than it would leave to experts"
    if n_ctx < trained:
        yield f"the context has {n_ctx:,} of the model's {trained:,} tokens: more would take {why}; --ctx sets another"


def _auto_fit(request: _Request, n_ctx: int, cache: ExpertCache, reasons: list[str]) -> Fit:
    """Slots and tokens of a pass in what is free after everything else and the margin."""
    layout, size = request.layout, request.slot_bytes
    most = min(layout.n_expert_total, cache.n_bytes // size if cache.n_bytes else layout.n_expert_total)
    needs = partial(request.needs, n_ctx)
    sizes = request.ubatches()
    found = list(fits(layout, size, request.usable_bytes, most, sizes, needs, request.streams, request.slot_tokens))
    if not found:
        raise _too_little(request, n_ctx)
    kept = found[0].n_ubatch == request.n_ubatch
    fit = found[0] if kept else best_fit(layout, size, found)
    other = fit.needs.total_bytes(fit.n_slots) + request.staging_bytes
    reasons.append(
        f"{format_bytes(request.memory.available_bytes)} are free ({request.memory.limited_by});"
        f" {format_bytes(other)} go to weights that every token uses, the context and buffers,"
        f" {format_bytes(request.margin_bytes)} are kept as a margin"
    )
    saved = request.needs(n_ctx, request.ubatches()[0]).compute_bytes - fit.needs.compute_bytes
    why = f"that leaves {format_bytes(saved)} more for experts, which saves more reading than it costs"
    reasons += _ubatch_reason(request, fit, why)
    return fit


def _too_little(request: _Request, n_ctx: int) -> BudgetError:
    layout, memory = request.layout, request.memory
    least = format_bytes_up(layout.n_expert_used * request.slot_bytes)
    other = format_bytes(request.needs(n_ctx, 1).total_bytes(0))
    return BudgetError(
        f"{format_bytes(memory.available_bytes)} are free here (limited by {memory.limited_by}), but this model needs"
        f" {other} for weights that every token uses, a context of {n_ctx} tokens and buffers, a margin of"
        f" {format_bytes(request.margin_bytes)}, and at least {least} for experts; free memory, lower n_ctx (--ctx), or"
        f" give {request.option} a size."
    )


def _fixed_fit(request: _Request, n_ctx: int, cache: ExpertCache, reasons: list[str]) -> Fit:
    """The slots of a given budget, and the most tokens of a pass that fit into the free memory beside them."""
    n_slots = _fixed_slots(request, cache, reasons)
    allowed = request.allowed_ubatch(n_slots)
    if allowed < request.one_pass_tokens:
        least = layer_slots(request.layout, request.one_pass_tokens) * request.slot_bytes
        if request.slot_tokens < request.one_pass_tokens:
            least = staging_bytes(request.layout, 1) + request.layout.n_expert_used * request.slot_bytes
        raise BudgetError(
            f"this model reads an image in one pass of {request.one_pass_tokens} tokens, but"
            f" {request.option}={str(cache)!r} allows passes of {allowed}; give at least"
            f" {format_bytes_up(least)!r}, or load it without its projector."
        )
    sizes = [n for n in ubatches_up_to(min(allowed, request.ubatches()[0])) if n >= request.one_pass_tokens]
    sizes = sizes or [request.one_pass_tokens]
    found = [Fit(n_slots, n, request.needs(n_ctx, n)) for n in sizes]
    free_bytes = request.memory.available_bytes - request.staging_bytes
    within = [fit for fit in found if fit.total_bytes(request.slot_bytes) <= free_bytes]
    fit = within[0] if within and not request.n_ubatch else found[0]
    reasons += _ubatch_reason(request, fit, "more would not fit into the free memory")
    return fit


def _fixed_slots(request: _Request, cache: ExpertCache, reasons: list[str]) -> int:
    """Slots of a share or a number of bytes, from the minimum to one for every expert."""
    layout, size, n_total = request.layout, request.slot_bytes, request.layout.n_expert_total
    n_staged = staging_slots(request.budgeted_bytes, size)
    beside = f" beside {format_bytes(request.budgeted_bytes)} for staging" if n_staged else ""
    if cache.mode == "fraction":
        n_slots = min(n_total, math.floor(cache.fraction * n_total + 1e-9) - n_staged)
        reasons.append(f"{cache} of {n_total} experts is {n_slots} slots of {format_bytes(size)}{beside}")
    else:
        n_held = cache.n_bytes // size - n_staged
        n_slots = min(n_total, n_held)
        reasons.append(f"{cache} holds {n_held} slots of {format_bytes(size)}{beside}")
        if n_held > n_total:
            reasons.append(f"the budget is cut to {format_bytes(n_total * size)}, all experts of the model")
    minimum = layout.n_expert_used
    if n_slots < minimum:
        need = minimum * size
        raise BudgetError(
            f"{request.option}={str(cache)!r} holds {n_slots} experts, but one token needs {minimum} in"
            f" a layer, which is {format_bytes(need)}; give at least {format_bytes_up(need)!r}."
        )
    return n_slots


def _ubatch_reason(request: _Request, fit: Fit, why: str) -> Iterator[str]:
    """Why a prompt is read in passes of fewer tokens than usual: `why`, where the pool is not too small for more."""
    wanted, layout = request.ubatches()[0], request.layout
    if fit.n_ubatch >= wanted:
        return
    text = f"a prompt is read {fit.n_ubatch} token{'s' * (fit.n_ubatch > 1)} at a time instead of {wanted}"
    if fit.n_ubatch == request.slot_tokens:
        yield f"{text}: experts in slots are computed exactly in passes of no more tokens on this device"
    elif layer_slots(layout, wanted, request.streams) > fit.n_slots:
        yield f"{fit.n_slots} slots are fewer than the {layout.n_expert} experts of a layer, so {text}"
    else:
        yield f"{text}: {why}"


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
