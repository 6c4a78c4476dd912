"""Tokens of a pass and slots of the pool, chosen together: both take memory, and which pays more depends on the model.

Buffers of a pass grow with its tokens. Fewer tokens leave room for more slots, which saves reading while answering;
but every pass of a prompt fetches most experts again, so fewer tokens mean more reading for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moegguf.controller.request_cost import NO_LIMIT, allowed_ubatch, request_cost
from moegguf.engine.memory import MemoryNeeds
from moegguf.gguf.experts import ExpertLayout

DEFAULT_UBATCH_TOKENS = 512
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


def layer_slots(layout: ExpertLayout, n_ubatch: int, streams: bool = False) -> int:
    """Slots that a pass may need at once: its experts of one layer, whatever the router chooses, or, where those that
    have no slot of their own are streamed, one token's."""
    return min(layout.n_expert, layout.n_expert_used * (1 if streams else n_ubatch))


def fits(
    layout: ExpertLayout,
    slot_bytes: int,
    usable_bytes: int,
    most_slots: int,
    ubatches: Sequence[int],
    needs: Callable[[int], MemoryNeeds],
    streams: bool = False,
    slot_tokens: int = NO_LIMIT,
) -> Iterator[Fit]:
    """For each number of tokens of a pass the most slots that fit beside it, where a pass can run with them.

    streams, slot_tokens: as in `allowed_ubatch`.
    """
    for n_ubatch in ubatches:
        needed = needs(n_ubatch)
        free = usable_bytes - needed.total_bytes(0)
        n_slots = min(most_slots, max(0, free) // (slot_bytes + needed.slot_work_bytes))
        enough = n_slots >= layer_slots(layout, n_ubatch, streams)
        if enough and n_ubatch <= allowed_ubatch(layout, n_slots, streams, slot_tokens):
            yield Fit(n_slots, n_ubatch, needed)


def best_fit(layout: ExpertLayout, slot_bytes: int, found: Iterable[Fit]) -> Fit:
    """The one with which a typical request moves the fewest bytes; of about equals the first, with the largest pass."""
    costs = [(request_cost(layout, slot_bytes, fit.n_slots, fit.n_ubatch), fit) for fit in found]
    least = min(cost for cost, _ in costs)
    return next(fit for cost, fit in costs if cost <= least * ABOUT)
