"""Drafts for the answers of a loop: proposes tokens that may come next, and learns which of them did.

The pass that decodes evaluates them beside the token that was sampled last. The loop then samples after each one that
is the sampled token, as if it had been evaluated then, with the same random numbers, and drops the others from the KV
cache: where the model is batch-invariant an answer is the same, token for token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moegguf.generate.answer import BatchedAnswer, Slot
from moegguf.generate.draft_gate import Acceptance, DraftGate, GateOptions
from moegguf.native.drafts import Drafts, Source

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama


@dataclass
class _Text:
    """What drafts know of a sequence: the answer there, its tokens so far, and how often they were accepted."""

    answer: BatchedAnswer
    acceptance: list[Acceptance]
    n_shifts: int
    n_tokens: int = 0
    source: Source = Source.NONE  # of the last draft


class Drafter:
    """The drafts of one loop. `gate` decides how many tokens are drafted."""

    def __init__(self, llm: Llama, drafts: Drafts, gate: DraftGate) -> None:
        self.gate = gate
        self._llm, self._drafts = llm, drafts
        self._spent_s = 0.0  # in this pass, looking for drafts
        self._once_s = 0.0  # in this pass, for what drafts of a text need once
        self._texts: dict[int, _Text] = {}  # by sequence
        self._verified: list[tuple[int, int]] = []  # of this pass: tokens drafted, and accepted

    def propose(self, answers: Sequence[BatchedAnswer]) -> None:
        """Sets the drafts of answers that decode together in the next pass; nobody else takes part in it."""
        if self.gate.pauses(len(answers)):
            return
        start_s = time.thread_time()  # others may take the processor meanwhile
        texts = [self._text_of(answer) for answer in answers]
        widths = self.gate.widths([text.acceptance for text in texts])
        if any(map(any, widths)):
            self._draft(texts, widths)
            self._spent_s = time.thread_time() - start_s - self._once_s

    def _draft(self, texts: Sequence[_Text], widths: Sequence[Sequence[int]]) -> None:
        wanted = [
            (self._told(text), [min(width, self._room(text.answer)) for width in of_answer])
            for text, of_answer in zip(texts, widths, strict=True)
        ]
        n_left = self._llm.n_batch - len(texts)
        for text, draft in zip(texts, self._drafts.draft(wanted), strict=True):
            text.answer.draft, text.source = draft.tokens[:n_left], draft.source
            n_left -= len(text.answer.draft)

    def verified(self, answer: BatchedAnswer, slot: Slot, n_accepted: int) -> None:
        """The first tokens of its draft were sampled, too."""
        counts, text, n_drafted = self._llm.context.drafted, self._texts[slot.sequence], len(answer.draft)
        counts.draft_passes += 1
        counts.drafted_tokens += n_drafted
        counts.accepted_tokens += n_accepted
        text.acceptance[text.source].note(n_drafted, n_accepted)
        self._drafts.accept(slot.sequence, n_accepted)
        self._verified.append((n_drafted, n_accepted))

    def ran(self, n_sequences: int, seconds: float) -> None:
        """A pass took so long in which so many sequences decoded, and nothing else."""
        n_drafted = n_accepted = 0
        if self._verified:
            n_drafted, n_accepted = map(sum, zip(*self._verified, strict=True))
            self._verified.clear()
        self.gate.ran(n_sequences, n_drafted, n_accepted, seconds - self._once_s, self._spent_s)
        self._spent_s = self._once_s = 0.0

    def _text_of(self, answer: BatchedAnswer) -> _Text:
        """What is known of an answer; nothing, when it is new, or has lost a part of its context."""
        sequence, n_shifts = sequence_of(answer), answer.timing.n_shifts
        text = self._texts.get(sequence)
        if text is None or text.answer is not answer or text.n_shifts != n_shifts:
            text = self._texts[sequence] = _Text(answer, self.gate.of_answer(), n_shifts)
        return text

    def _told(self, text: _Text) -> int:
        """The sequence of a text, whose new tokens `Drafts` knows then."""
        sequence, start_s, n_known = sequence_of(text.answer), time.thread_time(), text.n_tokens
        self._drafts.set_tokens(sequence, n_known, text.answer.context[n_known:])
        text.n_tokens = len(text.answer.context)
        if n_known == 0:
            self._drafts.follow(sequence)
            self._once_s += time.thread_time() - start_s
        return sequence

    def _room(self, answer: BatchedAnswer) -> int:
        """Tokens that a draft may have: the context is full, and the answer ends, in the same pass as without."""
        if answer.sequence.prompt.images is not None:
            return 0
        return max(0, min(answer.sequence.n_left, self._llm.n_ctx() - len(answer.context)) - 1)


def sequence_of(answer: BatchedAnswer) -> int:
    """The sequence of an answer that has a slot."""
    assert answer.slot is not None
    return answer.slot.sequence


def make_drafter(llm: Llama) -> Drafter | None:
    """What drafts for a loop over this model, if anything is to."""
    return Drafter(llm, llm.drafts, DraftGate(GateOptions(n_max=llm.drafts.n_max))) if llm.drafts else None
