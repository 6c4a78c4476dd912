"""The sequences of a context, each a slot for one answer: what the KV cache holds of it, shared prefixes, and room; and
how many tokens of which answers a step computes: one of each that decodes, and of prompts what the budget leaves, of
all, or of those that a schedule chooses.

Slots keep the tokens of answers that have ended, for prompts that begin with them. For one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moegguf.engine.sequences import common_tokens
from moegguf.generate.answer import BatchedAnswer, Slot

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

MIN_SHARED_TOKENS = 32  # of a prefix that another prompt is about to compute, to wait for it
MIN_SHIFTED = 4  # tokens at the end of the context that a shift may drop; llama.cpp's number
MAX_LOGITS_BYTES = 64 << 20  # of the tokens of prompts in a pass, where those of each are wanted
MIXED_STEP_TOKENS = 128  # of a step in which sequences decode, where experts need not be read for it

Part = tuple[BatchedAnswer, int]  # of a step: how many tokens of which answer


@dataclass(frozen=True)
class Step:
    """A step that was computed: the sequences that took part, their tokens together, and how long it took."""

    answers: tuple[BatchedAnswer, ...]
    n_tokens: int
    seconds: float


class Schedule(Protocol):
    """Chooses who computes. Both methods are called on the loop's thread, and must not take long."""

    def choose(self, running: Sequence[BatchedAnswer]) -> Sequence[BatchedAnswer]:
        """Those of `running` (never empty, oldest first) that compute in the next step, in the order in which prompts
        share the step's budget. Who is left out keeps its place in the KV cache. Where none is chosen, all compute."""

    def ran(self, step: Step) -> None:
        """A step was computed."""


class KvSlots:
    """The sequences of a model's context. `step_tokens`: of a step in which some decode; None: a whole pass where
    experts have to be read for it, else MIXED_STEP_TOKENS."""

    def __init__(self, llm: Llama, step_tokens: int | None = None) -> None:
        self._llm = llm
        self._slots = [Slot(sequence) for sequence in range(llm.n_seq_max)]
        self._pass_tokens = min(int(llm.context_params.n_ubatch), llm.n_batch)
        resident = llm.session is None or llm.plan.resident
        mixed = min(MIXED_STEP_TOKENS, self._pass_tokens) if resident else self._pass_tokens
        self._step_tokens = step_tokens or mixed

    def __len__(self) -> int:
        return len(self._slots)

    def place(self, answer: BatchedAnswer) -> None:
        """Gives it the free slot whose tokens are the least loss, of equal ones the least recently used. There must be
        one."""
        free = [slot for slot in self._slots if slot.answer is None]
        if len(self._slots) == 1:  # the model's own methods use it, too
            free[0].tokens = self._llm.input_ids[: self._llm.n_tokens].tolist()
        if answer.prompt.images is not None:
            free = self._slots[:1]  # the sequence that images are evaluated in; it computes alone
        shared = {slot.sequence: self._common_prefix(slot, answer) for slot in free}
        slot = min(free, key=lambda slot: (len(slot.tokens) - shared[slot.sequence], slot.n_used))
        self.truncate(slot, shared[slot.sequence])
        slot.n_clean, slot.owner = None, answer.request.owner
        slot.answer, answer.slot, answer.has_begun = answer, slot, False

    def truncate(self, slot: Slot, n_tokens: int) -> None:
        """Keeps the first tokens of a sequence, or none where the model's state cannot be truncated."""
        if not self._llm.context.truncate(n_tokens, slot.sequence):
            n_tokens = 0
        del slot.tokens[n_tokens:]

    def clear(self) -> None:
        """Empties a context of several sequences."""
        if len(self._slots) > 1:
            self._llm.context.clear()
            for slot in self._slots:
                slot.tokens.clear()

    def keep(self, answer: BatchedAnswer, n_new: int, goes_on: bool = True) -> None:
        """Has what its sequence holds written to disk, after a step with `n_new` tokens of it. goes_on: False at the
        end of the prompt or the answer."""
        contexts, slot = self._llm.contexts, answer.slot
        if contexts is not None and slot is not None and slot.n_clean is None:
            contexts.keep(slot.sequence, slot.tokens, n_new, slot.owner, goes_on)

    def keep_unused(self) -> bool:
        """Has more written of sequences that nobody uses, where too much was waiting before; whether that is so
        again."""
        contexts = self._llm.contexts
        if contexts is None or not contexts.behind:
            return False
        for slot in self._slots:
            if slot.answer is None and slot.sequence in contexts.behind:
                contexts.keep(slot.sequence, slot.tokens, 1, slot.owner, goes_on=False)
        return bool(contexts.behind)

    def _make_room(self, n_tokens: int) -> None:
        """Empties slots that nobody uses, until the context has so many cells that are free."""
        n_cells = self._llm.plan.kv_tokens or self._llm.n_ctx()
        while sum(len(slot.tokens) for slot in self._slots) + n_tokens > n_cells:
            if len(self._slots) == 1 or not self.drop_unused():
                return

    def shift(self, answer: BatchedAnswer) -> None:
        """Drops the older half of a context that is about to be full, where the request allows it. Of an answer alone
        the rest moves up; among others it is evaluated again: its cells may belong to other sequences, too, whose
        positions stay."""
        slot, n_ctx = answer.held, answer.n_ctx
        if not answer.shifts or len(slot.tokens) < n_ctx - 1:
            return
        n_keep = answer.request.sampling.num_keep
        n_keep = len(answer.prompt.tokens) if n_keep < 0 else n_keep + len(self._llm.vocabulary.bos_tokens)
        n_keep = min(n_keep, n_ctx - MIN_SHIFTED)
        n_dropped = (len(slot.tokens) - n_keep) // 2
        del answer.context[n_keep : n_keep + n_dropped]
        if answer.alone or len(self._slots) == 1:
            self._llm.context.shift(n_keep, n_dropped)
            del slot.tokens[n_keep : n_keep + n_dropped]
            slot.n_clean = n_keep
        else:
            self.truncate(slot, n_keep)
        answer.timing.n_shifts += 1

    def release(self, answer: BatchedAnswer) -> None:
        """Takes the slot from an answer. It keeps the tokens, for prompts that begin with them, but what was computed
        with tokens that a shift has dropped."""
        slot = answer.held
        if answer.draft:  # what was not accepted yet is none of its tokens
            self.truncate(slot, len(slot.tokens))
        self.keep(answer, 1, goes_on=False)
        answer.slot = slot.answer = None
        if slot.n_clean is not None:
            self.truncate(slot, slot.n_clean)

    def drop_unused(self) -> bool:
        """Empties the least recently used slot that nobody uses; False when none of these holds any token."""
        unused = [slot for slot in self._slots if slot.answer is None and slot.tokens]
        if unused:
            self.truncate(min(unused, key=lambda slot: slot.n_used), 0)
        return bool(unused)

    def _common_prefix(self, slot: Slot, answer: BatchedAnswer) -> int:
        """Tokens of the slot that the answer can begin with; one at least is left to evaluate."""
        if slot.owner != answer.request.owner or not answer.reuses_prefix:
            return 0
        n, images = common_tokens(slot.tokens, answer.context[:-1]), answer.prompt.images
        return self._llm.context.images.common_prefix(n, images.spans if images else ()) if slot.sequence == 0 else n

    def parts(self, chosen: Sequence[BatchedAnswer], n_step: int) -> list[Part]:
        """The next token of every sequence that decodes, and tokens of prompts up to the budget of a step. `n_step`
        counts steps: where a step has too few tokens for all, they take turns."""
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
        n_rows = max(1, MAX_LOGITS_BYTES // (4 * self._llm.n_vocab()))
        prompts = list[BatchedAnswer]()
        for answer in chosen:
            if answer.decodes or n_left <= 0 or not self._begins(answer, prompts):
                continue
            n, image = min(answer.n_pending, n_left), answer.image
            if image is not None:  # a whole one, or the tokens before it
                n = min(image.begin - answer.n_evaluated, n_left) or image.n_tokens
            if answer.request.prompt_logprobs:
                if not (n := min(n, n_rows)):
                    continue
                n_rows -= n
            n_left -= n
            prompts.append(answer)
            parts.append((answer, n))
        return parts

    def _begins(self, answer: BatchedAnswer, prompts: Sequence[BatchedAnswer]) -> bool:
        """Whether a prompt is evaluated in this step, after it got the longest prefix that another sequence or the disk
        has; not when one of `prompts`, which are in the step, is about to compute more of it."""
        if answer.has_begun or not answer.reuses_prefix:
            answer.has_begun = True
            return True
        slot, context = answer.held, self._llm.context
        source = max(self._slots, key=lambda other: self._common_prefix(other, answer))
        n_shared = self._common_prefix(source, answer)
        if n_shared > len(slot.tokens) and context.copy(source.sequence, slot.sequence, n_shared):
            slot.tokens = source.tokens[:n_shared]
        n_held = len(slot.tokens)
        own = (other.context for other in prompts if other.request.owner == slot.owner)
        if any(common_tokens(other, answer.context[:-1]) >= n_held + MIN_SHARED_TOKENS for other in own):
            return False
        if self._llm.contexts is not None:
            spans = answer.prompt.images.spans if answer.prompt.images else ()
            n_now = self._llm.contexts.restore(
                slot.sequence, answer.context, n_held, slot.owner, self._make_room, spans
            )
            slot.tokens = answer.context[:n_now]
            answer.timing.disk_tokens = max(0, n_now - n_held)
        answer.has_begun = True
        if not answer.timing.prompt_tokens:
            answer.timing.cached_tokens = len(slot.tokens)
        return True
