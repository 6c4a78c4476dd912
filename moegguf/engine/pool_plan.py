"""Slots of one memory: with the tokens of a pass, beside everything else that lies there; and in RAM beside a device.

Buffers of a pass grow with its tokens. Fewer tokens leave room for more slots, which saves reading while answering;
but every pass of a prompt fetches most experts again, so fewer tokens mean more reading for a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moegguf.engine.budgets import Sizes
from moegguf.engine.cost import request_cost
from moegguf.engine.machine import Memory
from moegguf.engine.memory import F16, FIXED_BYTES, VOCAB_TOKEN_BYTES, MemoryNeeds, margin_bytes, row_bytes
from moegguf.engine.plan import NO_LIMIT, Plan, allowed_ubatch, layer_slots, slot_bytes, staging_bytes, staging_slots
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.quantities import GIB, ExpertCache, format_bytes, format_bytes_up

VRAM_MARGIN_BYTES = GIB  # stays free with "auto": drivers, displays and other programs take some at any time
SMALL_UBATCH_TOKENS = 32
ABOUT = 1.05


def ubatches_up_to(n_tokens: int) -> tuple[int, ...]:
    """Tokens of a pass to choose from, most first: powers of two, and every number where the pool may be that small."""
    sizes = {n_tokens, *range(1, min(n_tokens, SMALL_UBATCH_TOKENS) + 1)}
    sizes |= {1 << bit for bit in range(n_tokens.bit_length())}
    return tuple(sorted(sizes, reverse=True))


@dataclass(frozen=True)
class Fit:
    """Slots and tokens of a pass that fit together, and what else they need."""

    n_slots: int
    n_ubatch: int
    needs: MemoryNeeds

    def total_bytes(self, slot_bytes: int) -> int:
        """All memory, that of the pool too."""
        return self.needs.total_bytes(self.n_slots) + self.n_slots * slot_bytes


def best_fit(layout: ExpertLayout, slot_bytes: int, found: Iterable[Fit]) -> Fit:
    """The one with which a typical request moves the fewest bytes; of about equals the first, with the largest pass."""
    costs = [(request_cost(layout, slot_bytes, fit.n_slots, fit.n_ubatch), fit) for fit in found]
    least = min(cost for cost, _ in costs)
    return next(fit for cost, fit in costs if cost <= least * ABOUT)


@dataclass(frozen=True)
class Pool:
    """A model in one memory, or in those of several devices together, with slots for its experts.

    cache: the budget, given as `option`. margin: bytes that stay free with "auto"; None: `memory.margin_bytes`.
    streams: experts without a slot are streamed or staged. staging_bytes: of tensors in which prompts are staged;
    staging_within: a budget that is given holds them, too. slot_tokens: of a pass that is not staged
    (`plan.allowed_ubatch`). sizes: without choices left.
    """

    layout: ExpertLayout
    cache: ExpertCache
    memory: Memory
    sizes: Sizes
    margin: int | None = None
    streams: bool = False
    option: str = "expert_cache"
    staging_bytes: int = 0
    staging_within: bool = True
    slot_tokens: int = NO_LIMIT

    def plan(self) -> Plan:
        """The plan. Raises BudgetError, stating the minimum, when the budget (or, for "auto", the free memory) does not
        hold the experts that one token uses in one layer, or those of an image that has to be read in one pass."""
        layout, size, reasons = self.layout, slot_bytes(self.layout), list(self.sizes.reasons)
        if not layout.is_moe:
            reasons.append("the model has no experts, so it runs as plain llama.cpp")
            fit = Fit(0, self.sizes.most_ubatch, self._needs(self.sizes.most_ubatch))
        else:
            fit = (self._auto_fit if self.cache.mode == "auto" else self._fixed_fit)(reasons)
            reasons.append(_residency(layout, fit.n_slots))
        needs, total = fit.needs, fit.total_bytes(size) + self.staging_bytes
        return Plan(
            n_slots=fit.n_slots,
            slot_bytes=size,
            budget_bytes=fit.n_slots * size,
            resident=fit.n_slots == layout.n_expert_total,
            n_ctx=self.sizes.n_ctx or 0,
            n_ubatch=fit.n_ubatch,
            dense_bytes=needs.dense_bytes,
            kv_bytes=needs.kv_bytes,
            compute_bytes=needs.compute_bytes + fit.n_slots * needs.slot_work_bytes,
            total_bytes=total,
            available_bytes=self.memory.available_bytes,
            reasons=tuple(reasons),
            warnings=(*cycle_warnings(layout, fit.n_slots, size), *short_of(total, self.memory)),
            projector_bytes=needs.projector_bytes,
            streams=self.streams,
            staging_bytes=self.staging_bytes,
            slot_tokens=self.slot_tokens,
            kv_tokens=self.sizes.kv_tokens or 0,
        )

    def _needs(self, n_ubatch: int) -> MemoryNeeds:
        return self.sizes.needs(self.layout, n_ubatch)

    def _ubatches(self) -> tuple[int, ...]:
        """Tokens of a pass to choose from, most first."""
        least = self.sizes.one_pass_tokens
        return tuple(n for n in (*ubatches_up_to(self.sizes.most_ubatch), least) if n >= least)

    @property
    def _margin_bytes(self) -> int:
        return margin_bytes(self.memory.available_bytes) if self.margin is None else self.margin

    @property
    def _budgeted_bytes(self) -> int:
        """Bytes of staging tensors that a budget holds."""
        return self.staging_bytes if self.staging_within else 0

    def _auto_fit(self, reasons: list[str]) -> Fit:
        """Slots and tokens of a pass in what is free after everything else and the margin."""
        layout, size = self.layout, slot_bytes(self.layout)
        most = layout.n_expert_total
        if self.cache.n_bytes:
            most = min(most, self.cache.n_bytes // size - staging_slots(self._budgeted_bytes, size))
        found = list(self._fits(self.memory.available_bytes - self._margin_bytes - self.staging_bytes, most))
        if not found:
            raise self._too_little()
        kept = found[0].n_ubatch == self.sizes.n_ubatch
        fit = found[0] if kept else best_fit(layout, size, found)
        other = fit.needs.total_bytes(fit.n_slots) + self.staging_bytes
        reasons.append(
            f"{format_bytes(self.memory.available_bytes)} are free ({self.memory.limited_by});"
            f" {format_bytes(other)} go to weights that every token uses, the context and buffers,"
            f" {format_bytes(self._margin_bytes)} are kept as a margin"
        )
        saved = self._needs(self.sizes.most_ubatch).compute_bytes - fit.needs.compute_bytes
        why = f"that leaves {format_bytes(saved)} more for experts, which saves more reading than it costs"
        reasons += self._ubatch_reason(fit, why)
        return fit

    def _fits(self, usable_bytes: int, most_slots: int) -> Iterator[Fit]:
        """For each number of tokens of a pass the most slots that fit beside it, where a pass can run with them."""
        layout, size = self.layout, slot_bytes(self.layout)
        for n_ubatch in self._ubatches():
            needs = self._needs(n_ubatch)
            free = usable_bytes - needs.total_bytes(0)
            n_slots = min(most_slots, max(0, free) // (size + needs.slot_work_bytes))
            enough = n_slots >= layer_slots(layout, n_ubatch, self.streams)
            if enough and n_ubatch <= allowed_ubatch(layout, n_slots, self.streams, self.slot_tokens):
                yield Fit(n_slots, n_ubatch, needs)

    def _too_little(self) -> BudgetError:
        least = format_bytes_up(self.layout.n_expert_used * slot_bytes(self.layout))
        return BudgetError(
            f"{format_bytes(self.memory.available_bytes)} are free here (limited by {self.memory.limited_by}), but this"
            f" model needs {format_bytes(self._needs(1).total_bytes(0))} for weights that every token uses, a context"
            f" of {self.sizes.n_ctx} tokens and buffers, a margin of {format_bytes(self._margin_bytes)}, and at least"
            f" {least} for experts; free memory, lower n_ctx (--ctx), or give {self.option} a size."
        )

    def _fixed_fit(self, reasons: list[str]) -> Fit:
        """The slots of a given budget, and the most tokens of a pass that fit into the free memory beside them."""
        layout, size, one_pass = self.layout, slot_bytes(self.layout), self.sizes.one_pass_tokens
        n_slots = self._fixed_slots(reasons)
        allowed = allowed_ubatch(layout, n_slots, self.streams, self.slot_tokens)
        if allowed < one_pass:
            least = layer_slots(layout, one_pass) * size
            if self.slot_tokens < one_pass:
                least = staging_bytes(layout, 1) + layout.n_expert_used * size
            raise BudgetError(
                f"this model reads an image in one pass of {one_pass} tokens, but {self.option}={str(self.cache)!r}"
                f" allows passes of {allowed}; give at least {format_bytes_up(least)!r}, or load it without its"
                " projector."
            )
        sizes = [n for n in ubatches_up_to(min(allowed, self.sizes.most_ubatch)) if n >= one_pass]
        found = [Fit(n_slots, n, self._needs(n)) for n in sizes or [one_pass]]
        free_bytes = self.memory.available_bytes - self.staging_bytes
        within = [fit for fit in found if fit.total_bytes(size) <= free_bytes]
        fit = within[0] if within and not self.sizes.n_ubatch else found[0]
        reasons += self._ubatch_reason(fit, "more would not fit into the free memory")
        return fit

    def _fixed_slots(self, reasons: list[str]) -> int:
        """Slots of a share or a number of bytes, from the minimum to one for every expert."""
        cache, size, n_total = self.cache, slot_bytes(self.layout), self.layout.n_expert_total
        n_staged = staging_slots(self._budgeted_bytes, size)
        beside = f" beside {format_bytes(self._budgeted_bytes)} for staging" if n_staged else ""
        if cache.mode == "fraction":
            n_slots = min(n_total, math.floor(cache.fraction * n_total + 1e-9) - n_staged)
            reasons.append(f"{cache} of {n_total} experts is {n_slots} slots of {format_bytes(size)}{beside}")
        else:
            n_held = cache.n_bytes // size - n_staged
            n_slots = min(n_total, n_held)
            reasons.append(f"{cache} holds {n_held} slots of {format_bytes(size)}{beside}")
            if n_held > n_total:
                reasons.append(f"the budget is cut to {format_bytes(n_total * size)}, all experts of the model")
        if n_slots < (minimum := self.layout.n_expert_used):
            raise BudgetError(
                f"{self.option}={str(cache)!r} holds {n_slots} experts, but one token needs {minimum} in a layer, which"
                f" is {format_bytes(minimum * size)}; give at least {format_bytes_up(minimum * size)!r}."
            )
        return n_slots

    def _ubatch_reason(self, fit: Fit, why: str) -> Iterator[str]:
        """Why a prompt is read in passes of fewer tokens than usual: `why`, where the pool is not too small for
        more."""
        wanted, layout = self.sizes.most_ubatch, self.layout
        if fit.n_ubatch >= wanted:
            return
        text = f"a prompt is read {fit.n_ubatch} token{'s' * (fit.n_ubatch > 1)} at a time instead of {wanted}"
        if fit.n_ubatch == self.slot_tokens:
            yield f"{text}: experts in slots are computed exactly in passes of no more tokens on this device"
        elif layer_slots(layout, wanted, self.streams) > fit.n_slots:
            yield f"{fit.n_slots} slots are fewer than the {layout.n_expert} experts of a layer, so {text}"
        else:
            yield f"{text}: {why}"


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


def _residency(layout: ExpertLayout, n_slots: int) -> str:
    if n_slots == layout.n_expert_total:
        return "every expert has a slot of its own: nothing is read after the first use"
    share = n_slots / layout.n_expert_total
    return f"{n_slots} of {layout.n_expert_total} experts fit at a time ({share:.0%}); others are fetched"


def host_bytes(layout: ExpertLayout, n_ubatch: int) -> int:
    """RAM that a model takes whose layers are all on a device: token embeddings, logits, the vocabulary and
    buffers."""
    embedding = row_bytes(F16, layout.hparams.n_embd)
    vocabulary = layout.n_vocab * (embedding + 4 * n_ubatch + VOCAB_TOKEN_BYTES)
    return vocabulary + FIXED_BYTES


def ram_slots(
    layout: ExpertLayout, ram: ExpertCache, memory: Memory, slot_bytes: int, n_ubatch: int, margin: int | None = None
) -> int:
    """Slots in RAM for a budget; margin: as in `Pool`. Raises BudgetError where it holds no expert at all."""
    n_total = layout.n_expert_total
    if ram.mode == "fraction":
        n_slots = math.floor(ram.fraction * n_total + 1e-9)
    elif ram.mode == "bytes":
        n_slots = ram.n_bytes // slot_bytes
    else:
        margin = margin_bytes(memory.available_bytes) if margin is None else margin
        free = memory.available_bytes - margin - host_bytes(layout, n_ubatch)
        n_slots = max(0, min(free, ram.n_bytes or free)) // slot_bytes
    if n_slots < 1:
        raise BudgetError(
            f"expert_cache={str(ram)!r} holds no expert in the {format_bytes(memory.available_bytes)} of RAM that are"
            f" free; give at least {format_bytes_up(slot_bytes)!r}."
        )
    return min(n_slots, n_total)


def divide_ram_slots(total: int, n_on_cpu: int, n_below: int, least_on_cpu: int) -> tuple[int, int]:
    """(slots of layers that the CPU computes, slots below those of devices) of `total` in RAM, in proportion to
    n_on_cpu and n_below, which are the most of each; at least least_on_cpu, and one below where there are some."""
    n_cpu = max(least_on_cpu, round(total * n_on_cpu / (n_on_cpu + n_below)))
    n_cpu = min(n_on_cpu, n_cpu, total - min(1, n_below))
    return n_cpu, min(n_below, total - n_cpu)
