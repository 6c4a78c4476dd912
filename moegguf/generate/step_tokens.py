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
# From 64 tokens on, ggml's flash attention on the CPU computes tiles of 64 tokens by 64 cells of the KV cache, all of
# one in which any token sees any cell; below, only what a token sees. Tiles are faster where a sequence has an eighth
# of the cells or more: 32 sequences of 50 tokens take 1.4 times as long by tiles, 4 of them 0.9 (demo, one thread).
ROW_STEP_TOKENS = 63
ROW_SEQUENCES = 48  # of a step, at most; more take turns, so that prompts have room beside them
ROWS_PAY_CELLS = 8  # times the tokens of the longest prompt

Part = tuple[BatchedAnswer, int]  # of a step: how many tokens of which answer


class StepTokens:
    """Divides a step's budget. `step_tokens`: of a step in which some decode; None: a whole pass where experts have to
    be read for it, else MIXED_STEP_TOKENS, or ROW_STEP_TOKENS where these are faster."""

    def __init__(self, llm: Llama, slots: KvSlots, step_tokens: int | None) -> None:
        self._llm = llm
        self._slots = slots
        self._pass_tokens = min(int(llm.context_params.n_ubatch), llm.n_batch)
        resident = llm.session is None or llm.plan.resident
        self._step_tokens = step_tokens or (
            min(MIXED_STEP_TOKENS, self._pass_tokens) if resident else self._pass_tokens
        )
        self._has_row_steps = step_tokens is None and resident and llm.plan.device is None

    def parts(self, chosen: Sequence[BatchedAnswer], n_step: int) -> list[Part]:
        """The next token of every sequence that decodes, and tokens of prompts up to the budget. `n_step` counts steps:
        where a step has too few tokens for all, they take turns."""
        by_rows, most = self._attends_by_rows(chosen), self._llm.n_batch
        n_turn = min(most, ROW_SEQUENCES) if by_rows else most
        if len(chosen) > n_turn:  # as many in each turn
            n_turn = -(-len(chosen) // -(-len(chosen) // n_turn))
            first = n_step * n_turn % len(chosen)
            chosen = (*chosen[first:], *chosen[:first])[:n_turn]
        parts = [(answer, 1) for answer in chosen if answer.decodes]
        budget = most if chosen[0].alone or len(self._slots) == 1 else self._pass_tokens
        if parts:
            budget = min(self._step_tokens, ROW_STEP_TOKENS) if by_rows else self._step_tokens
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

    def _attends_by_rows(self, chosen: Sequence[BatchedAnswer]) -> bool:
        """Whether steps below tiles of attention pay: each of `chosen` has few of the cells."""
        n_longest = max((len(answer.context) for answer in chosen if not answer.decodes), default=0)
        return self._has_row_steps and self._slots.n_tokens >= ROWS_PAY_CELLS * n_longest

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
