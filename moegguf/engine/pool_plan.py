"""Slots of one memory: with the context and the tokens of a pass, beside everything else that lies there; and in RAM
beside a device.

Buffers of a pass grow with its tokens. Fewer tokens leave room for more slots, which saves reading while answering;
but every pass of a prompt fetches most experts again, so fewer tokens mean more reading for a prompt.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moegguf.engine.cost import request_cost
from moegguf.engine.machine import Memory
from moegguf.engine.memory import (
    F16,
    FIXED_BYTES,
    KV_PAD_TOKENS,
    VOCAB_TOKEN_BYTES,
    Sizes,
    compute_bytes,
    kv_bytes,
    margin_bytes,
    pad_context,
    row_bytes,
)
from moegguf.engine.plan import (
    AUTO,
    NO_LIMIT,
    Budgets,
    Plan,
    allowed_ubatch,
    layer_slots,
    slot_bytes,
    slots_for,
    staging_bytes,
)
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.quantities import GIB, ExpertCache, format_bytes, format_bytes_up

VRAM_MARGIN_BYTES = GIB  # stays free with "auto": drivers, displays and other programs take some at any time
SMALL_UBATCH_TOKENS = 32
ABOUT = 1.05
SMALL_CTX_TOKENS = 4096  # up to here a default context may take more; where training is not known, the model's own
LEAST_CTX_TOKENS = 512
KV_PARTS = 16  # numbers of tokens in the KV cache to choose from

Fit = tuple[int, int]
"""(slots, tokens of a pass) that fit together."""


def best_fit(layout: ExpertLayout, slot_bytes: int, found: Iterable[Fit]) -> Fit:
    """The one with which a typical request moves the fewest bytes; of about equals the first, with the largest pass."""
    costs = [(request_cost(layout, slot_bytes, *fit), fit) for fit in found]
    least = min(cost for cost, _ in costs)
    return next(fit for cost, fit in costs if cost <= least * ABOUT)


def budget_slots(cache: ExpertCache, layout: ExpertLayout, slot_bytes: int, free_bytes: int = 0) -> int:
    """Slots of a budget, maybe more than there are experts; "auto": in what is free."""
    if cache.mode == "fraction":
        return math.floor(cache.fraction * layout.n_expert_total + 1e-9)
    n_bytes = cache.n_bytes if cache.mode == "bytes" else min(free_bytes, cache.n_bytes or free_bytes)
    return max(0, n_bytes) // slot_bytes


def placed(
    layout: ExpertLayout, memory: Memory, sizes: Sizes, fit: Fit, beside: bool, staging_bytes: int = 0, **others: Any
) -> Plan:
    """The plan where everything but slots lies in this memory, and slots `beside` it, or elsewhere. others: its other
    fields."""
    (n_slots, n_ubatch), size = fit, slot_bytes(layout)
    needs, n_beside = sizes.needs(layout, n_ubatch), n_slots * beside
    return Plan(
        n_slots=n_slots,
        slot_bytes=size,
        budget_bytes=n_slots * size,
        resident=n_slots == layout.n_expert_total,
        n_ctx=sizes.n_ctx or 0,
        n_ubatch=n_ubatch,
        dense_bytes=needs.dense_bytes,
        kv_bytes=needs.kv_bytes,
        compute_bytes=needs.compute_bytes + n_beside * needs.slot_work_bytes,
        total_bytes=needs.total_bytes(n_beside) + n_beside * size + staging_bytes,
        available_bytes=memory.available_bytes,
        projector_bytes=needs.projector_bytes,
        staging_bytes=staging_bytes,
        kv_tokens=sizes.kv_tokens or 0,
        **others,
    )


def choose_context(layout: ExpertLayout, sizes: Sizes, free_bytes: int, cache: ExpertCache = AUTO) -> Sizes:
    """`sizes` with a context and a KV cache, chosen for so much free memory, of which experts are given `cache`
    ("auto": what is left).

    A context that is not given is the largest, up to the model's own, in a tenth of the free memory, or in a quarter
    where every expert fits beside it. Up to 4,096 tokens may take more, but never more than it leaves to experts, or
    than a `cache` that is given leaves to it. A KV cache that is not given has all tokens that its sequences can have
    together, less by the same rule, and at least those of one: answers are rarely as long as their context can be, and
    memory of experts makes each of them faster. One that is given has no more than these, and no fewer, with a warning:
    without, the longest answer cannot end.

    Raises OptionError for a context that cannot be.
    """
    given_bytes = 0 if cache.mode == "auto" else cache.n_bytes or round(cache.fraction * layout.expert_bytes)
    pool_bytes = min(given_bytes, layout.expert_bytes)
    free_bytes -= sizes.adapter_bytes + (sizes.projector.total_bytes if sizes.projector else 0)
    buffers = partial(compute_bytes, layout, flash_attn=sizes.flash_attn)
    # The weights of a model without experts are mapped: they need not stay in memory.
    dense_bytes = layout.dense_bytes + layout.tied_output_bytes if layout.is_moe else 0
    rest = free_bytes - margin_bytes(free_bytes) - dense_bytes - buffers(KV_PAD_TOKENS, 1)
    modest_bytes = max(free_bytes // 10, min(free_bytes // 4, rest - layout.expert_bytes))

    def is_modest(n_tokens: int) -> bool:
        """Whether a KV cache of so many tokens leaves enough memory to experts."""
        cached_bytes = kv_bytes(layout, n_tokens, sizes.type_k, sizes.type_v)
        grown = buffers(n_tokens, sizes.most_ubatch) - buffers(KV_PAD_TOKENS, sizes.most_ubatch)
        is_small = n_tokens <= SMALL_CTX_TOKENS or cached_bytes + grown <= modest_bytes
        return is_small and cached_bytes <= (rest - pool_bytes if pool_bytes else rest // 2)

    n_ctx, n_kv, reasons = sizes.n_ctx, sizes.kv_tokens, list[str]()
    trained = pad_context(layout.hparams.n_ctx_train or SMALL_CTX_TOKENS)
    if n_ctx is None:
        powers = (1 << bit for bit in reversed(range(trained.bit_length())))
        defaults = (trained, *(n for n in powers if LEAST_CTX_TOKENS <= n < trained))
        n_ctx = next(filter(is_modest, defaults), defaults[-1])
        if n_ctx < trained:
            reasons.append(
                f"the context has {n_ctx:,} of the model's {trained:,} tokens: more would take too much of the memory"
                " for experts; --ctx sets another"
            )
    n_ctx = pad_context(n_ctx) or trained
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
    if n_kv > n_ctx:
        reasons.append(f"answers that are computed together share a context of {n_kv:,} tokens")
    return replace(sizes, n_ctx=n_ctx, kv_tokens=n_kv, reasons=tuple(reasons))


@dataclass
class Pool:
    """A model in one memory, or in those of several devices together, with slots for its experts.

    cache: the budget, given as `option`. margin_bytes: stay free with "auto". streams: experts without a slot are
    streamed or staged. staging_bytes: of tensors in which prompts are staged; staging_within: a budget that is given
    holds them, too. slot_tokens: of a pass that is not staged (`plan.allowed_ubatch`). sizes: those that are not
    given are chosen here.
    """

    layout: ExpertLayout
    cache: ExpertCache
    memory: Memory
    sizes: Sizes
    margin_bytes: int
    streams: bool = False
    option: str = "expert_cache"
    staging_bytes: int = 0
    staging_within: bool = True
    slot_tokens: int = NO_LIMIT

    def __post_init__(self) -> None:
        """Raises OptionError for a context that cannot be."""
        self.sizes = choose_context(self.layout, self.sizes, self.memory.available_bytes, self.cache)

    def plan(self) -> Plan:
        """The plan. Raises BudgetError, stating the minimum, when the budget (or, for "auto", the free memory) does not
        hold the experts that one token uses in one layer, or those of an image that has to be read in one pass."""
        layout, sizes, reasons = self.layout, self.sizes, list(self.sizes.reasons)
        if not layout.is_moe:
            reasons.append("the model has no experts, so it runs as plain llama.cpp")
            fit = 0, sizes.most_ubatch
        else:
            fit = (self._auto_fit if self.cache.mode == "auto" else self._given_fit)(slot_bytes(layout), reasons)
            n_slots, n_total = fit[0], layout.n_expert_total
            reasons.append(
                "every expert has a slot of its own: nothing is read after the first use"
                if n_slots == n_total
                else f"{n_slots} of {n_total} experts fit at a time ({n_slots / n_total:.0%}); others are fetched"
            )
        made = placed(
            layout, self.memory, sizes, fit, True, self.staging_bytes, streams=self.streams,
            slot_tokens=self.slot_tokens, reasons=tuple(reasons), warnings=(),
        )  # fmt: skip
        too_few, too_large = cycle_warnings(layout, fit[0], made.slot_bytes), short_of(made.total_bytes, self.memory)
        return replace(made, warnings=(*too_few, *too_large))

    def _auto_fit(self, size: int, reasons: list[str]) -> Fit:
        """Slots and tokens of a pass in what is free after everything else and the margin."""
        layout, sizes, free_bytes = self.layout, self.sizes, self.memory.available_bytes
        most, found = layout.n_expert_total, list[Fit]()
        if self.cache.n_bytes:
            most = min(most, self.cache.n_bytes // size - self._staging_slots(size))
        for n_ubatch in self._ubatches(sizes.most_ubatch):
            needs = sizes.needs(layout, n_ubatch)
            usable = free_bytes - self.margin_bytes - self.staging_bytes - needs.total_bytes(0)
            n_slots = min(most, max(0, usable) // (size + needs.slot_work_bytes))
            if n_slots >= layout.n_expert_used and n_ubatch <= self._allowed(n_slots):
                found.append((n_slots, n_ubatch))
        if not found:
            least = format_bytes_up(layout.n_expert_used * size)
            raise BudgetError(
                f"{format_bytes(free_bytes)} are free here (limited by {self.memory.limited_by}), but this model needs"
                f" {format_bytes(sizes.needs(layout, 1).total_bytes(0))} for weights that every token uses, a context"
                f" of {sizes.n_ctx} tokens and buffers, a margin of {format_bytes(self.margin_bytes)}, and at least"
                f" {least} for experts; free memory, lower n_ctx (--ctx), or give {self.option} a size."
            )
        fit = found[0] if found[0][1] == sizes.n_ubatch else best_fit(layout, size, found)
        beside = sizes.needs(layout, fit[1]).total_bytes(fit[0]) + self.staging_bytes
        reasons.append(
            f"{format_bytes(free_bytes)} are free ({self.memory.limited_by}); {format_bytes(beside)} go to weights that"
            f" every token uses, the context and buffers, {format_bytes(self.margin_bytes)} are kept as a margin"
        )
        reasons += self._ubatch_reason(fit, "that leaves more for experts, which saves more reading than it costs")
        return fit

    def _given_fit(self, size: int, reasons: list[str]) -> Fit:
        """The slots of a given budget, and the most tokens of a pass that fit into the free memory beside them."""
        layout, sizes, budget = self.layout, self.sizes, f"{self.option}={str(self.cache)!r}"
        n_total, n_staged = layout.n_expert_total, self._staging_slots(size)
        n_held = budget_slots(self.cache, layout, size) - n_staged
        n_slots = min(n_total, n_held)
        beside = f" beside {format_bytes(self.staging_bytes)} for staging" if n_staged else ""
        reasons.append(f"{self.cache} of {n_total} experts is {n_held} slots of {format_bytes(size)}{beside}")
        if n_slots < layout.n_expert_used:
            raise too_few(budget, n_slots, layout.n_expert_used, size)
        allowed, one_pass = self._allowed(n_slots), sizes.one_pass_tokens
        if allowed < one_pass:
            least = layer_slots(layout, one_pass) * size
            if self.slot_tokens < one_pass:
                least = staging_bytes(layout, 1) + layout.n_expert_used * size
            raise BudgetError(
                f"this model reads an image in one pass of {one_pass} tokens, but {budget} allows passes of {allowed};"
                f" give at least {format_bytes_up(least)!r}, or load it without its projector."
            )
        ubatches = self._ubatches(min(allowed, sizes.most_ubatch))
        free_bytes = self.memory.available_bytes - self.staging_bytes - n_slots * size
        fitting = (n for n in ubatches if sizes.n_ubatch or sizes.needs(layout, n).total_bytes(n_slots) <= free_bytes)
        fit = n_slots, next(fitting, ubatches[0])
        reasons += self._ubatch_reason(fit, "more would not fit into the free memory")
        return fit

    def _staging_slots(self, size: int) -> int:
        """Slots of the budget that staging tensors take."""
        return slots_for(self.staging_bytes, size) if self.staging_within else 0

    def _allowed(self, n_slots: int) -> int:
        return allowed_ubatch(self.layout, n_slots, self.streams, self.slot_tokens)

    def _ubatches(self, most: int) -> list[int]:
        """Tokens of a pass to choose from, most first: powers of two, and every number where the pool may be small."""
        least, powers = self.sizes.one_pass_tokens, (1 << bit for bit in range(most.bit_length()))
        numbers = {most, least, *range(1, SMALL_UBATCH_TOKENS + 1), *powers}
        return sorted((n for n in numbers if least <= n <= most), reverse=True)

    def _ubatch_reason(self, fit: Fit, why: str) -> Iterator[str]:
        """Why a prompt is read in passes of fewer tokens than usual: `why`, where the pool is not too small for
        more."""
        (n_slots, n_ubatch), wanted, layout = fit, self.sizes.most_ubatch, self.layout
        if n_ubatch >= wanted:
            return
        if n_ubatch == self.slot_tokens:
            why = "experts in slots are computed exactly in passes of no more tokens on this device"
        elif layer_slots(layout, wanted, self.streams) > n_slots:
            why = f"{n_slots} slots are fewer than the {layout.n_expert} experts of a layer"
        yield f"a prompt is read {n_ubatch} token{'s' * (n_ubatch > 1)} at a time instead of {wanted}: {why}"


def too_few(budget: str, n_slots: int, least: int, size: int, where: str = "") -> BudgetError:
    """The error of a budget that holds fewer experts than a token uses, in slots of `size` bytes. where: " on GPU1"."""
    return BudgetError(
        f"{budget} holds {n_slots} experts{where}, but a token needs {least} in a layer, which is"
        f" {format_bytes(least * size)}; give at least {format_bytes_up(least * size)!r}."
    )


def cycle_warnings(layout: ExpertLayout, n_slots: int, slot_bytes: int) -> Iterator[str]:
    """A sentence where so few slots hold less than a token's experts over all layers."""
    if n_slots < layout.token_cycle_slots:
        cycle = f"{layout.token_cycle_slots} slots, {format_bytes_up(layout.token_cycle_slots * slot_bytes)}"
        yield (
            f"{format_bytes(n_slots * slot_bytes)} for experts is below one token's experts over all layers"
            f" ({cycle}); the hit rate will be low"
        )


def short_of(n_bytes: int, memory: Memory, where: str = "") -> Iterator[str]:
    """A sentence where so much of a memory is not free; where: " of RAM"."""
    if n_bytes > memory.available_bytes:
        yield (
            f"about {format_bytes(n_bytes)}{where} are needed, but {format_bytes(memory.available_bytes)} are free"
            f" (limited by {memory.limited_by}); the budget is kept as given, and loading may fail, or the system stop"
            ' this process; give less, or "auto"'
        )


def host_bytes(layout: ExpertLayout, n_ubatch: int) -> int:
    """RAM that a model takes whose layers are all on a device: token embeddings, logits, the vocabulary and
    buffers."""
    embedding = row_bytes(F16, layout.hparams.n_embd)
    return layout.n_vocab * (embedding + 4 * n_ubatch + VOCAB_TOKEN_BYTES) + FIXED_BYTES


def ram_slots(layout: ExpertLayout, budgets: Budgets, ram: Memory, slot_bytes: int, n_ubatch: int) -> int:
    """Slots in RAM beside a device. Raises BudgetError where the budget holds no expert at all."""
    free_bytes = ram.available_bytes - budgets.margin_of(ram) - host_bytes(layout, n_ubatch)
    n_slots = budget_slots(budgets.ram, layout, slot_bytes, free_bytes)
    if n_slots < 1:
        raise BudgetError(
            f"expert_cache={str(budgets.ram)!r} holds no expert in the {format_bytes(ram.available_bytes)} of RAM that"
            f" are free; give at least {format_bytes_up(slot_bytes)!r}."
        )
    return min(n_slots, layout.n_expert_total)


def divide_ram_slots(total: int, n_on_cpu: int, n_below: int, least_on_cpu: int) -> tuple[int, int]:
    """(slots of layers that the CPU computes, slots below those of devices) of `total` in RAM, in proportion to
    n_on_cpu and n_below, which are the most of each; at least least_on_cpu, and one below where there are some."""
    n_cpu = max(least_on_cpu, round(total * n_on_cpu / (n_on_cpu + n_below)))
    n_cpu = min(n_on_cpu, n_cpu, total - min(1, n_below))
    return n_cpu, min(n_below, total - n_cpu)
