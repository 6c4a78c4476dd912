"""Drafts for the answers of a loop: proposes tokens that may come next, and learns which of them did.

The pass that decodes evaluates them beside the token that was sampled last. The loop then samples after each one that
is the sampled token, as if it had been evaluated then, with the same random numbers, and drops the others from the KV
cache: where the model is batch-invariant an answer is the same, token for token.

Whether and how wide to draft is decided by measured time. An accepted token is worth what a token costs without drafts;
a drafted one costs what it makes the pass longer, which has in it whatever it does there, such as fetching experts that
nobody else uses. A draft goes on as long as the chance that its next token is reached and accepted is worth more than
that token costs. Where that is not so of the first, one is tried again now and then, narrow, from an allowance: a share
of the time of passes. When drafts have lost the allowance and what they had saved before, they pause until there is
some again. Looking for drafts costs time, too: a text is asked for n-grams only where its last tokens have occurred
before, and when passes were in vain, some go by until the next one is looked at.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moegguf.generate.answer import BatchedAnswer, Slot
from moegguf.native.drafts import Drafts, Source

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

SUPPOSED_COST = 0.1  # of a drafted token, in undrafted passes, until it was measured
LEAST_COST = 0.01


MAX_DRAFT = 24  # tokens of a draft
LOSS = 0.005  # share of the time that drafts, and looking for them, may lose
PATIENCE = 4  # passes in vain, one after the other, until twice as many go by before the next is looked at,
REST = 3  # at most 2**REST - 1
MARGIN = 0.03  # share of a token's time that a pass must save
BASE_PASSES = 9  # undrafted ones whose median is their time
RENEW_PASSES = 32  # drafted ones until an undrafted pass measures it again
TRIAL_TOKENS = 3  # of a draft that is tried from the allowance
MEMORY = 0.9  # of measured costs, and of acceptance, the weight that stays with each new one
PRIOR = (0.8, 0.5, 0.6)  # chance of a token of each source to be accepted, before any was seen


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

    n_drafted: int = 0  # passes since the last undrafted one
    widest: int = 0  # tokens drafted in a pass
    _undrafted_s: deque[float] = field(default_factory=lambda: deque(maxlen=BASE_PASSES))
    _median_s: float | None = None  # of these, once it was asked for
    _tokens: float = 1.0  # drafted, recent ones count more
    _cost: float = SUPPOSED_COST  # of these together, in undrafted passes

    @property
    def is_known(self) -> bool:
        """Whether the time of an undrafted pass is known, by enough of them, and of late."""
        return len(self._undrafted_s) == BASE_PASSES and self.n_drafted < RENEW_PASSES

    @property
    def base_s(self) -> float | None:
        """The time of an undrafted pass, if it is known."""
        if not self.is_known:
            return None
        if self._median_s is None:  # a pass may be short enough to notice that it is computed
            self._median_s = sorted(self._undrafted_s)[len(self._undrafted_s) // 2]
        return self._median_s

    @property
    def cost(self) -> float:
        """What a drafted token adds to a pass, in undrafted passes."""
        return max(self._cost / self._tokens, LEAST_COST)

    def note_undrafted(self, seconds: float) -> None:
        """A pass without drafts took so long."""
        self._undrafted_s.append(seconds)
        self._median_s, self.n_drafted = None, 0

    def note_drafted(self, n_tokens: int, seconds: float, base_s: float) -> float:
        """A pass with so many drafted tokens took so long; what they have added, in seconds."""
        added_s = min(seconds - base_s, n_tokens * base_s)  # more, and it was something else that took the time
        if self.widest:  # the first one allocates what wide passes need
            self._tokens = MEMORY * self._tokens + n_tokens
            self._cost = MEMORY * self._cost + added_s / base_s
        self.n_drafted, self.widest = self.n_drafted + 1, max(self.widest, n_tokens)
        return added_s


class DraftGate:
    """Widths of a model's next pass, from what passes have taken. `acceptance`: of each source. A draft risks
    what drafts have saved, up to `n_max / 2` passes, and one more pass. `n_max`: tokens of a draft at most."""

    def __init__(self, n_max: int = MAX_DRAFT) -> None:
        self.acceptance = [Acceptance(prior, 0.98) for prior in PRIOR]
        self._n_max = n_max
        self._times = defaultdict[int, PassTimes](PassTimes)  # by number of sequences
        self._balance_s = 0.0  # saved, and allowed to be lost
        self._allowance_s = 0.0  # for trials
        self._tries = False  # in the next pass
        self._n_vain = 0  # passes that were due since one had an accepted token
        self._n_rested = self._n_resting = 0  # passes that go by between two that are due; that still do

    def of_answer(self) -> list[Acceptance]:
        """Acceptance of each source in one answer."""
        return [Acceptance(0.5, MEMORY, base) for base in self.acceptance]

    def is_due(self) -> bool:
        """Called once before each pass: whether it may have drafts, and `ran` is to hear of it."""
        self._n_resting -= 1
        return self._n_resting < 0

    def widths(self, answers: Sequence[Sequence[Acceptance]]) -> list[list[int]]:
        """The most tokens that each source may draft for each of the answers that decode in the next pass."""
        times = self._times[len(answers)]
        base_s, cost = times.base_s, times.cost
        nothing = [[0] * len(of_answer) for of_answer in answers]
        if base_s is None or self._balance_s < 0:
            return nothing
        self._balance_s = min(self._balance_s, self._n_max / 2 * base_s)
        self._allowance_s = min(self._allowance_s, TRIAL_TOKENS * base_s)  # the most that a trial can cost
        worth = 1 / len(answers)  # of a token, in undrafted passes
        known = max(TRIAL_TOKENS, 2 * times.widest)  # what wider passes cost is not
        risk = int((self._balance_s / base_s + 1) / cost)
        most = min(self._n_max, known, risk)
        widths = [[min(most, _width(source.chance, cost / worth)) for source in of_answer] for of_answer in answers]
        gains = [
            max(_gain(source.chance, n, worth, cost) for source, n in zip(of_answer, of_widths, strict=True))
            for of_answer, of_widths in zip(answers, widths, strict=True)
        ]
        self._tries = sum(gains) <= MARGIN * worth
        if not self._tries:
            return widths
        if min(self._balance_s, self._allowance_s) < TRIAL_TOKENS * cost * base_s:
            return nothing
        return [[TRIAL_TOKENS] * len(answers[0]), *nothing[1:]]

    def ran(self, n_sequences: int, n_drafted: int, n_accepted: int, seconds: float, spent_s: float = 0.0) -> None:
        """A pass that was due, and in which so many sequences decode, was computed. spent_s: the part of it that looked
        for drafts; it is lost where there were none."""
        times = self._times[n_sequences]
        allowed_s = LOSS * seconds * (1 + self._n_rested)
        self._balance_s += allowed_s
        self._allowance_s += allowed_s
        self._n_vain = 0 if n_accepted or not times.is_known else self._n_vain + 1
        self._n_rested = self._n_resting = (1 << min(self._n_vain // PATIENCE, REST)) - 1
        if n_drafted == 0:
            times.note_undrafted(seconds - spent_s)
            self._balance_s -= spent_s
        elif (base_s := times.base_s) is not None:
            saved_s = n_accepted * base_s / n_sequences - times.note_drafted(n_drafted, seconds, base_s)
            self._balance_s += saved_s
            self._allowance_s += min(0, saved_s) * self._tries


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
    n_hashed: int = 0  # tokens that begin an n-gram of `hashes`
    hashes: set[int] = field(default_factory=set)
    repeats: bool = True  # its last tokens occurred before, or may have: hashes collide

    def note_tokens(self, n_key: int) -> bool:
        """Sets and returns `repeats`, of so many tokens, in a microsecond: a pass of text that repeats nothing costs no
        more. 0: any text may have drafts."""
        context = self.answer.context
        if n_key:
            for i in range(self.n_hashed, len(context) - n_key + 1):
                key = hash(tuple(context[i : i + n_key]))
                self.repeats = key in self.hashes
                self.hashes.add(key)
            self.n_hashed = max(0, len(context) - n_key + 1)
        return self.repeats


class Drafter:
    """The drafts of one loop. `gate` decides how many tokens are drafted."""

    def __init__(self, llm: Llama, drafts: Drafts, gate: DraftGate) -> None:
        self.gate = gate
        self._llm, self._drafts = llm, drafts
        self._spent_s = 0.0  # in this pass, looking for drafts
        self._begins = False  # in this pass, a text: drafts of it need something once, which takes long
        self._texts: dict[int, _Text] = {}  # by sequence
        self._verified: list[tuple[int, int]] = []  # of this pass: tokens drafted, and accepted

    def propose(self, answers: Sequence[BatchedAnswer]) -> None:
        """Sets the drafts of answers that decode together in the next pass; nobody else takes part in it."""
        texts = [self._text_of(answer) for answer in answers]
        repeat = [text.note_tokens(self._drafts.least_key) for text in texts]
        if not any(repeat):
            return
        start_s = time.thread_time()  # others may take the processor meanwhile
        widths = self.gate.widths([text.acceptance for text in texts])
        if any(map(any, widths)):
            self._draft(texts, widths)
            self._spent_s = time.thread_time() - start_s

    def _draft(self, texts: Sequence[_Text], widths: Sequence[Sequence[int]]) -> None:
        wanted = [
            (self._told(text), [min(width, self._room(text)) for width in of_answer])
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
        if not self._begins:
            self.gate.ran(n_sequences, n_drafted, n_accepted, seconds, self._spent_s)
        self._begins, self._spent_s = False, 0.0

    def _text_of(self, answer: BatchedAnswer) -> _Text:
        """What is known of an answer; nothing, when it is new, or has lost a part of its context."""
        sequence, n_shifts = answer.held.sequence, answer.timing.n_shifts
        text = self._texts.get(sequence)
        if text is None or text.answer is not answer or text.n_shifts != n_shifts:
            text = self._texts[sequence] = _Text(answer, self.gate.of_answer(), n_shifts)
        return text

    def _told(self, text: _Text) -> int:
        """The sequence of a text, whose new tokens `Drafts` knows then."""
        sequence, n_known = text.answer.held.sequence, text.n_tokens
        self._drafts.set_tokens(sequence, n_known, text.answer.context[n_known:])
        self._begins |= n_known == 0
        text.n_tokens = len(text.answer.context)
        return sequence

    def _room(self, text: _Text) -> int:
        """Tokens that a draft may have: the context is full, and the answer ends, in the same pass as without."""
        answer = text.answer
        if not text.repeats or answer.prompt.images is not None:
            return 0
        return max(0, min(answer.n_left, self._llm.n_ctx() - len(answer.context)) - 1)


def make_drafter(llm: Llama) -> Drafter | None:
    """What drafts for a loop over this model, if anything is to."""
    return Drafter(llm, llm.drafts, DraftGate(llm.drafts.n_max)) if llm.drafts else None
