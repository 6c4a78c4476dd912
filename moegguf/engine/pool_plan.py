"""Plans the slots of one memory, and the tokens of a pass, beside everything else that lies there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moegguf.controller.request_cost import NO_LIMIT, allowed_ubatch, staging_bytes, staging_slots
from moegguf.engine.batch import Fit, best_fit, fits, layer_slots, ubatches_up_to
from moegguf.engine.machine import Memory
from moegguf.engine.memory import MemoryNeeds, margin_bytes
from moegguf.engine.plan import Plan, Sizes, given_bytes, slot_bytes
from moegguf.errors import BudgetError
from moegguf.gguf.experts import ExpertLayout
from moegguf.quantities import ExpertCache, format_bytes, format_bytes_up


@dataclass(frozen=True)
class Pool:
    """A model in one memory, or in those of several devices together, with slots for its experts.

    cache: the budget, given as `option`. margin: bytes that stay free with "auto"; None: `memory.margin_bytes`.
    streams: experts without a slot are streamed or staged. staging_bytes: of tensors in which prompts are staged;
    staging_within: a budget that is given holds them, too. slot_tokens: of a pass that is not staged
    (`request_cost.allowed_ubatch`).
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
        free_bytes = self.memory.available_bytes - self.staging_bytes
        sizes = self.sizes.within(self.layout, free_bytes, given_bytes(self.layout, self.cache))
        return replace(self, sizes=sizes)._plan()

    def _plan(self) -> Plan:
        """The plan of sizes without choices left."""
        layout, size, reasons = self.layout, slot_bytes(self.layout), list[str]()
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
            warnings=tuple(self._warnings(fit.n_slots, size, total)),
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
        usable = self.memory.available_bytes - self._margin_bytes - self.staging_bytes
        found = list(fits(layout, size, usable, most, self._ubatches(), self._needs, self.streams, self.slot_tokens))
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

    def _warnings(self, n_slots: int, size: int, total: int) -> Iterator[str]:
        layout, memory = self.layout, self.memory
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


def _residency(layout: ExpertLayout, n_slots: int) -> str:
    if n_slots == layout.n_expert_total:
        return "every expert has a slot of its own: nothing is read after the first use"
    share = n_slots / layout.n_expert_total
    return f"{n_slots} of {layout.n_expert_total} experts fit at a time ({share:.0%}); others are fetched"
