"""Drafts for the answers of a loop: proposes tokens that may come next, and learns which of them did.

The pass that decodes evaluates them beside the token that was sampled last. The loop then samples after each one that
is the sampled token, as if it had been evaluated then, with the same random numbers, and drops the others from the KV
cache: where the model is batch-invariant an answer is the same, token for token.

Whether and how wide to draft is decided by measured time. An accepted token is worth what a token costs without drafts;
a drafted one costs what it makes the pass longer, which has in it whatever it does there, such as fetching experts that
nobody else uses. A draft goes on as long as the chance that its next token is reached and accepted is worth more than
that token costs. Where that is not so of the first, one is tried again now and then, narrow, from an allowance: a share
of the time of passes. When drafts have lost the allowance and what they had saved before, they pause until there is
some again. Looking for drafts costs time, too: when that has found nothing for some passes, it is done as seldom as
keeps within that share.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moegguf.generate.answer import BatchedAnswer, Slot
from moegguf.native.drafts import Drafts, Source

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

SUPPOSED_COST = 0.1  # of a drafted token, in undrafted passes, until it was measured
LEAST_COST = 0.01


@dataclass(frozen=True)
class GateOptions:
    """n_max: tokens of a draft at most. loss: share of the time that drafts may lose, and that looking for them in vain
    may take. patience: passes in which that is done in vain, one after the other, before it is done seldom. margin:
    share of a token's time that a pass must save. base_passes: undrafted ones whose median is their time. renew_passes:
    drafted ones until an undrafted pass measures it again. trial_tokens: of a draft that is tried from the allowance.
    memory: of measured costs, and of acceptance, the weight that stays with each new one. prior: chance of a token of
    each source to be accepted, before any was seen."""

    n_max: int = 24
    loss: float = 0.005
    patience: int = 8
    margin: float = 0.03
    base_passes: int = 9
    renew_passes: int = 32
    trial_tokens: int = 3
    memory: float = 0.9
    prior: tuple[float, ...] = (0.8, 0.5, 0.6)


class Acceptance:
    """How likely a drafted token is accepted when those before it are: recent drafts count more. `base`: of a model,
    what is true of an answer before it has drafts of its own."""

    def __init__(self, prior: float, memory: float, base: Acceptance | None = None) -> None:
        self._prior, self._memory, self._base = prior, memory, base
        self._accepted = self._refused = 0.0

    @property
    def chance(self) -> float:
        """From 0 to 1, exclusive."""
        prior = self._prior if self._base is None else self._base.chance
        return (self._accepted + 2 * prior) / (self._accepted + self._refused + 2)

    def note(self, n_drafted: int, n_accepted: int) -> None:
        """A draft was verified."""
        if self._base is not None:
            self._base.note(n_drafted, n_accepted)
        self._accepted = self._memory * self._accepted + n_accepted
        self._refused = self._memory * self._refused + (n_accepted < n_drafted)


@dataclass
class PassTimes:
    """Times of passes of equally many sequences: without drafts, and how much longer with so many drafted tokens."""

    options: GateOptions
    n_drafted: int = 0  # passes since the last undrafted one
    widest: int = 0  # tokens drafted in a pass
    _undrafted_s: deque[float] = field(init=False)
    _median_s: float = field(init=False, default=0.0)  # of these: a pass may be short enough to notice a `median`
    _tokens: float = field(init=False, default=1.0)  # drafted, recent ones count more
    _cost: float = field(init=False, default=SUPPOSED_COST)  # of these together, in undrafted passes

    def __post_init__(self) -> None:
        self._undrafted_s = deque(maxlen=self.options.base_passes)

    @property
    def base_s(self) -> float | None:
        """The time of an undrafted pass; None while too few are known, or none was for long."""
        if len(self._undrafted_s) < self.options.base_passes or self.n_drafted >= self.options.renew_passes:
            return None
        return self._median_s

    @property
    def cost(self) -> float:
        """What a drafted token adds to a pass, in undrafted passes."""
        return max(self._cost / self._tokens, LEAST_COST)

    def note(self, n_drafted: int, seconds: float) -> float:
        """A pass with so many drafted tokens took so long; what drafts have added, in seconds."""
        if n_drafted == 0:
            self._undrafted_s.append(seconds)
            self._median_s = sorted(self._undrafted_s)[len(self._undrafted_s) // 2]
            self.n_drafted = 0
            return 0.0
        self.n_drafted += 1
        self.widest = max(self.widest, n_drafted)
        base_s, kept = self._median_s, self.options.memory
        added_s = min(seconds - base_s, n_drafted * base_s)  # more, and it was something else that took the time
        self._tokens = kept * self._tokens + n_drafted
        self._cost = kept * self._cost + added_s / base_s
        return added_s


class DraftGate:
    """Widths of a model's next pass, from what passes have taken. `acceptance`: of each source. A draft risks
    what drafts have saved, up to `n_max / 2` passes, and one more pass."""

    def __init__(self, options: GateOptions | None = None) -> None:
        self.options = options or GateOptions()
        self.acceptance = [Acceptance(prior, 0.98) for prior in self.options.prior]
        self._times: dict[int, PassTimes] = {}
        self._balance_s = 0.0  # saved, and allowed to be lost
        self._allowance_s = 0.0  # for trials
        self._tries = False  # in the next pass
        self._n_vain = self._n_unlooked = 0  # passes since one had an accepted token, and since one looked for drafts
        self._look_s = 0.0  # what looking takes

    def of_answer(self) -> list[Acceptance]:
        """Acceptance of each source in one answer."""
        return [Acceptance(0.5, self.options.memory, base) for base in self.acceptance]

    def pauses(self, n_sequences: int) -> bool:
        """Whether nothing is drafted in the next pass, in which so many sequences decode, whatever they are."""
        base_s = self._of(n_sequences).base_s
        if self._balance_s < 0 or base_s is None:
            return True
        is_seldom = self._n_vain >= self.options.patience
        return is_seldom and self._look_s > self.options.loss * base_s * (self._n_unlooked + 1)

    def widths(self, answers: Sequence[Sequence[Acceptance]]) -> list[list[int]]:
        """The most tokens that each source may draft for each of the answers that decode in the next pass."""
        times = self._of(len(answers))
        base_s, cost = times.base_s, times.cost
        nothing = [[0] * len(of_answer) for of_answer in answers]
        if base_s is None or self.pauses(len(answers)):
            return nothing
        worth = 1 / len(answers)  # of a token, in undrafted passes
        known = max(self.options.trial_tokens, 2 * times.widest)  # what wider passes cost is not
        risk = int((self._balance_s / base_s + 1) / cost)
        most = min(self.options.n_max, known, risk)
        widths = [[min(most, _width(source.chance, cost / worth)) for source in of_answer] for of_answer in answers]
        gains = [
            max(_gain(source.chance, n, worth, cost) for source, n in zip(of_answer, of_widths, strict=True))
            for of_answer, of_widths in zip(answers, widths, strict=True)
        ]
        self._tries = sum(gains) <= self.options.margin * worth
        if not self._tries:
            return widths
        tried = self.options.trial_tokens
        if min(self._balance_s, self._allowance_s) < tried * cost * base_s:
            return nothing
        return [[tried] * len(answers[0]), *nothing[1:]]

    def ran(self, n_sequences: int, n_drafted: int, n_accepted: int, seconds: float, spent_s: float = 0.0) -> None:
        """A pass in which so many sequences decode was computed. spent_s: the part of it that looked for drafts; it is
        lost where there were none."""
        times = self._of(n_sequences)
        if spent_s:
            self._look_s, self._n_unlooked = spent_s, 0
            self._n_vain = 0 if n_accepted else self._n_vain + 1
        else:
            self._n_unlooked += 1
        if n_drafted == 0:
            seconds -= spent_s
            self._balance_s -= spent_s
        base_s, added_s = times.base_s, times.note(n_drafted, seconds)
        self._balance_s += self.options.loss * seconds
        self._allowance_s += self.options.loss * seconds
        if base_s is not None:
            saved_s = n_accepted * base_s / n_sequences - added_s
            self._balance_s = min(self._balance_s + saved_s, (self.options.n_max / 2) * base_s)
            self._allowance_s = min(self._allowance_s + min(0, saved_s) * self._tries, base_s)

    def _of(self, n_sequences: int) -> PassTimes:
        if n_sequences not in self._times:
            self._times[n_sequences] = PassTimes(self.options)
        return self._times[n_sequences]


def _width(chance: float, cost: float) -> int:
    """Tokens whose chance to be reached and accepted is above what they cost."""
    return int(math.log(cost) / math.log(chance)) if cost < chance else 0


def _gain(chance: float, n: int, worth: float, cost: float) -> float:
    """What a draft of n tokens is expected to save, in undrafted passes."""
    return worth * chance * (1 - chance**n) / (1 - chance) - n * cost


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
