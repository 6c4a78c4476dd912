"""The sequences of a context, each a slot for one answer: what the KV cache holds of it, shared prefixes, and room.

Slots keep the tokens of answers that have ended, for prompts that begin with them. Of one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moegguf.generate.batched_answer import BatchedAnswer, Slot

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


class KvSlots:
    """The sequences of a model's context."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._slots = [Slot(sequence) for sequence in range(llm.n_seq_max)]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences; one that is in several counts in each."""
        return sum(len(slot.tokens) for slot in self._slots)

    @property
    def has_free(self) -> bool:
        """Whether a slot has no answer."""
        return any(slot.answer is None for slot in self._slots)

    def place(self, answer: BatchedAnswer) -> None:
        """Gives it the free slot whose tokens are the least loss, of equal ones the least recently used. There must be
        one."""
        free = [slot for slot in self._slots if slot.answer is None]
        if len(self._slots) == 1:  # the model's own methods use it, too
            free[0].tokens = self._llm.input_ids[: self._llm.n_tokens].tolist()
        shared = {slot.sequence: self._common_prefix(slot, answer) for slot in free}
        slot = min(free, key=lambda slot: (len(slot.tokens) - shared[slot.sequence], slot.n_used))
        self.truncate(slot, shared[slot.sequence])
        slot.n_clean = None
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

    def share(self, answer: BatchedAnswer) -> None:
        """Copies the longest prefix of its prompt that a sequence holds into its own, unless that has as much."""
        own = answer.slot
        assert own is not None
        source = max(self._slots, key=lambda slot: self._common_prefix(slot, answer))
        n_shared = self._common_prefix(source, answer)
        if n_shared > len(own.tokens) and self._llm.context.copy(source.sequence, own.sequence, n_shared):
            own.tokens = source.tokens[:n_shared]

    def shift(self, answer: BatchedAnswer) -> None:
        """Drops the older half of a context that is about to be full, where the request allows it. Of an answer alone
        the rest moves up; among others it is evaluated again: its cells may belong to other sequences, too, whose
        positions stay."""
        state, slot = answer.sequence, answer.slot
        if slot is None or not state.shifts or len(slot.tokens) < self._llm.n_ctx() - 1:
            return
        n_keep = state.n_kept
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
        slot, answer.slot = answer.slot, None
        if slot is not None:
            slot.answer = None
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
        if not answer.sequence.reuses_prefix:
            return 0
        n, images = common_tokens(slot.tokens, answer.context[:-1]), answer.sequence.prompt.images
        return self._llm.context.images.common_prefix(n, images.spans if images else ()) if slot.sequence == 0 else n


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Equal tokens at the beginning of both."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.intc) != np.asarray(b[:n], np.intc))
    return int(differ[0]) if differ.size else n
