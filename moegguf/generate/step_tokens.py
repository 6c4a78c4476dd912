"""How many tokens of which answers a step computes: one of each that decodes, and of prompts what the budget leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moegguf.engine.sequences import Chunk
from moegguf.generate.batched_answer import BatchedAnswer
from moegguf.generate.kv_slots import KvSlots, common_tokens
from moegguf.native.events import Phase

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

MIN_SHARED_TOKENS = 32  # of a prefix that another prompt is about to compute, to wait for it
MIXED_STEP_TOKENS = 128  # of a step in which sequences decode, where experts need not be read for it

Part = tuple[BatchedAnswer, int]  # of a step: how many tokens of which answer


class StepTokens:
    """Divides a step's budget. `step_tokens`: of a step in which some decode; None: a whole pass where experts have to
    be read for it, else MIXED_STEP_TOKENS."""

    def __init__(self, llm: Llama, slots: KvSlots, step_tokens: int | None) -> None:
        self._llm = llm
        self._slots = slots
        self._pass_tokens = min(int(llm.context_params.n_ubatch), llm.n_batch)
        resident = llm.session is None or llm.plan.resident
        self._step_tokens = step_tokens or (
            min(MIXED_STEP_TOKENS, self._pass_tokens) if resident else self._pass_tokens
        )

    def parts(self, chosen: Sequence[BatchedAnswer], n_step: int) -> list[Part]:
        """The next token of every sequence that decodes, and tokens of prompts up to the budget. `n_step` counts steps:
        where a step has too few tokens for all, they take turns."""
        most = self._llm.n_batch
        if len(chosen) > most:  # as many in each turn
            n_turn = -(-len(chosen) // -(-len(chosen) // most))
            first = n_step * n_turn % len(chosen)
            chosen = (*chosen[first:], *chosen[:first])[:n_turn]
        parts = [(answer, 1) for answer in chosen if answer.decodes]
        budget = most if chosen[0].alone or len(self._slots) == 1 else self._pass_tokens
        if parts:
            budget = self._step_tokens
        n_left = min(max(budget, len(parts) + 1), most) - len(parts)
        prompts = list[BatchedAnswer]()
        for answer in chosen:
            if answer.decodes or n_left <= 0 or not self._begins(answer, prompts):
                continue
            n = _next_tokens(answer, n_left)
            n_left -= n
            prompts.append(answer)
            parts.append((answer, n))
        return parts

    def _begins(self, answer: BatchedAnswer, prompts: Sequence[BatchedAnswer]) -> bool:
        """Whether a prompt is evaluated in this step, after it got the longest prefix that another sequence holds; not
        when one of `prompts`, which are in the step, is about to compute more of it."""
        if answer.has_begun or not answer.sequence.reuses_prefix:
            answer.has_begun = True
            return True
        self._slots.share(answer)
        n_enough = answer.n_evaluated + MIN_SHARED_TOKENS
        if any(common_tokens(other.context, answer.context[:-1]) >= n_enough for other in prompts):
            return False
        answer.has_begun = True
        if not answer.timing.prompt_tokens:
            answer.timing.cached_tokens = answer.n_evaluated
        return True


def _next_tokens(answer: BatchedAnswer, n_most: int) -> int:
    """How many tokens of a prompt come next: a whole image, or those before one."""
    image = answer.image
    if image is None:
        return min(answer.n_pending, n_most)
    n_before = image.begin - answer.n_evaluated
    return min(n_before, n_most) or image.n_tokens


def chunk_of(part: Part) -> Chunk:
    """The tokens of a part, as the model takes them."""
    answer, n_tokens = part
    slot = answer.slot
    assert slot is not None
    n_past = len(slot.tokens)
    phase = Phase.DECODE if answer.decodes else Phase.PREFILL
    tokens = answer.context[n_past : n_past + n_tokens]
    return Chunk(slot.sequence, tokens, n_past, answer.number, phase, n_past + n_tokens == len(answer.context))
