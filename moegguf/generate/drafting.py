"""Drafts for the answers of a loop: proposes tokens that may come next, and learns which of them were right.

A decoding pass evaluates the drafted tokens beside the token that was sampled last. The loop then samples after each
drafted token that equals the sampled one, with the random numbers that it would have used without drafts. It drops the
other drafted tokens from the KV cache. If the model is batch-invariant, an answer is the same, token for token.

Measured time decides whether to draft, and how many tokens. An accepted token saves the time of a token without
drafts. A drafted token costs the time by which it makes the pass longer, which includes the reading of experts that no
other token uses. A draft goes on while the chance that its next token is reached and accepted is worth more than the
token's cost. If even the first token is not worth its cost, a narrow draft is tried now and then. Such trials take
their time from an allowance, a share of the time of passes. When drafts have lost the allowance and all earlier
savings, they pause until there is some allowance again.

The search for drafts costs time, too. n-grams of a text are looked up only where its last tokens have occurred before.
After passes in vain, some passes go by without a search.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moegguf.decisions import log_decision
from moegguf.engine.drafts import N_MAX, Draft, Drafts, Source
from moegguf.generate.sequence import KvSequence, Sequence

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

SUPPOSED_COST = 0.1  # cost of a drafted token before it was measured, in undrafted passes
LEAST_COST = 0.01  # least cost of a drafted token
LOSS = 0.005  # share of the time that drafts, and looking for them, may lose
PATIENCE = 4  # passes in vain in a row after which the number of passes without a search doubles
REST = 3  # up to 2**REST - 1 passes go by without a search
MARGIN = 0.03  # share of a token's time that a pass must save
BASE_PASSES = 9  # undrafted ones whose median is their time
RENEW_PASSES = 32  # drafted ones until an undrafted pass measures it again
TRIAL_TOKENS = 3  # tokens of a draft that is tried from the allowance
MEMORY = 0.9  # weight of earlier costs and acceptances when a new one is measured
PRIOR = (0.8, 0.5, 0.6)  # chance of a token of each source to be accepted, before any was seen


@dataclass
class Acceptance:
    """The chance that a drafted token is accepted when the tokens before it are. Recent drafts count more."""

    prior: float
    memory: float
    base: Acceptance | None = None  # acceptance of all answers: used before an answer has drafts of its own
    accepted: float = 0.0
    refused: float = 0.0

    @property
    def chance(self) -> float:
        """The chance that a drafted token is accepted, between 0 and 1, exclusive."""
        prior = self.prior if self.base is None else self.base.chance
        return (self.accepted + 2 * prior) / (self.accepted + self.refused + 2)

    def note(self, n_drafted: int, n_accepted: int) -> None:
        """Notes a draft that was verified."""
        if self.base is not None:
            self.base.note(n_drafted, n_accepted)
        self.accepted = self.memory * self.accepted + n_accepted
        self.refused = self.memory * self.refused + (n_accepted < n_drafted)


class PassTimes:
    """Times of passes with one number of sequences: the time without drafts, and the time that drafted tokens add."""

    def __init__(self) -> None:
        self.widest = 0  # tokens drafted in a pass
        self._undrafted_s = deque[float](maxlen=BASE_PASSES)
        self._n_drafted = 0  # passes since the last undrafted one
        # Sums in which older passes fade: drafted tokens, and the cost of these tokens in undrafted passes.
        self._tokens, self._cost = 1.0, SUPPOSED_COST

    @property
    def base_s(self) -> float | None:
        """The time of an undrafted pass; None where it is not known by enough of them, or not of late."""
        is_known = len(self._undrafted_s) == BASE_PASSES and self._n_drafted < RENEW_PASSES
        return sorted(self._undrafted_s)[BASE_PASSES // 2] if is_known else None

    @property
    def cost(self) -> float:
        """The time that a drafted token adds to a pass, in undrafted passes."""
        return max(self._cost / self._tokens, LEAST_COST)

    def note(self, n_tokens: int, seconds: float, base_s: float) -> float:
        """Notes the time of a pass with `n_tokens` drafted tokens. Returns the seconds that these tokens have added."""
        if n_tokens == 0:
            self._undrafted_s.append(seconds)
            self._n_drafted = 0
            return 0.0
        added_s = min(seconds - base_s, n_tokens * base_s)  # more, and it was something else that took the time
        if self.widest:  # the first one allocates what wide passes need
            self._tokens = MEMORY * self._tokens + n_tokens
            self._cost = MEMORY * self._cost + added_s / base_s
        self._n_drafted, self.widest = self._n_drafted + 1, max(self.widest, n_tokens)
        return added_s


class DraftGate:
    """Widths of a model's next pass, from what passes have taken. `acceptance`: of each source. A draft risks
    what drafts have saved, up to `N_MAX / 2` passes, and one more pass."""

    def __init__(self) -> None:
        self.acceptance = [Acceptance(prior, 0.98) for prior in PRIOR]
        self._times = defaultdict[int, PassTimes](PassTimes)  # keys: number of sequences
        self._balance_s = 0.0  # saved, and allowed to be lost
        self._allowance_s = 0.0  # time that trials may cost
        self._tries = False  # whether the next pass has a trial
        self._n_vain = 0  # passes that were due since one had an accepted token
        self._n_rested = self._n_resting = 0  # passes that go by between two that are due; that still do
        self._pays = True

    def of_answer(self) -> list[Acceptance]:
        """Acceptance of each source in one answer."""
        return [Acceptance(0.5, MEMORY, base) for base in self.acceptance]

    def is_due(self) -> bool:
        """Returns whether the next pass may have drafts, which `note_pass` follows. Called once before each pass."""
        self._n_resting -= 1
        return self._n_resting < 0

    def widths(self, answers: list[list[Acceptance]]) -> list[list[int]]:
        """The most tokens that each source may draft for each of the answers that decode in the next pass."""
        times = self._times[len(answers)]
        base_s, cost = times.base_s, times.cost
        nothing = [[0] * len(of_answer) for of_answer in answers]
        if base_s is None or self._balance_s < 0:
            return nothing
        self._balance_s = min(self._balance_s, N_MAX / 2 * base_s)
        self._allowance_s = min(self._allowance_s, TRIAL_TOKENS * base_s)  # the most that a trial can cost
        worth = 1 / len(answers)  # worth of a token, in undrafted passes
        known = max(TRIAL_TOKENS, 2 * times.widest)  # the cost of wider passes is not known
        most = min(N_MAX, known, int((self._balance_s / base_s + 1) / cost))
        widths, gain = list[list[int]](), 0.0
        for of_answer in answers:
            chances = [source.chance for source in of_answer]
            # Tokens whose chance to be reached and accepted is above what they cost.
            paying = [int(math.log(cost / worth) / math.log(p)) if cost / worth < p else 0 for p in chances]
            widths.append([min(most, n) for n in paying])
            gain += max(worth * p * (1 - p**n) / (1 - p) - n * cost for p, n in zip(chances, widths[-1], strict=True))
        self._tries = gain <= MARGIN * worth
        if not self._tries:
            return widths
        if min(self._balance_s, self._allowance_s) < TRIAL_TOKENS * cost * base_s:
            return nothing
        return [[TRIAL_TOKENS] * len(answers[0]), *nothing[1:]]

    def note_pass(
        self, n_sequences: int, n_drafted: int, n_accepted: int, seconds: float, spent_s: float = 0.0
    ) -> None:
        """Notes a pass in which a search for drafts was due and `n_sequences` decode.

        spent_s: the part of the pass that looked for drafts. It is lost where there were none.
        """
        times = self._times[n_sequences]
        base_s, allowed_s = times.base_s, LOSS * seconds * (1 + self._n_rested)
        self._balance_s += allowed_s
        self._allowance_s += allowed_s
        self._n_vain = 0 if n_accepted or base_s is None else self._n_vain + 1
        self._n_rested = self._n_resting = (1 << min(self._n_vain // PATIENCE, REST)) - 1
        if n_drafted == 0:
            times.note(0, seconds - spent_s, 0.0)
            self._balance_s -= spent_s
        elif base_s is not None:
            saved_s = n_accepted * base_s / n_sequences - times.note(n_drafted, seconds, base_s)
            self._balance_s += saved_s
            self._allowance_s += min(0, saved_s) * self._tries
        pays = not self._n_rested and self._balance_s >= 0
        if pays != self._pays:
            self._pays = pays
            log_decision("drafts_switched", on=pays, n_vain=self._n_vain, balance_s=round(self._balance_s, 4))


@dataclass
class _Text:
    """The tokens of a sequence so far, and how often its drafts were accepted."""

    sequence: Sequence
    acceptance: list[Acceptance]
    n_shifts: int
    n_tokens: int = 0
    source: Source = Source.NONE  # source of the last draft
    n_hashed: int = 0  # tokens that begin an n-gram of `hashes`
    hashes: set[int] = field(default_factory=set)
    repeats: bool = True  # the last tokens occurred before, or may have: hashes collide

    def note_tokens(self, n_key: int) -> None:
        """Sets `repeats` by the last `n_key` tokens; with 0 any text may have drafts.

        This takes a microsecond, and is all that a pass costs while its text repeats nothing.
        """
        context = self.sequence.context
        for i in range(self.n_hashed, len(context) - n_key + 1 if n_key else 0):
            key = hash(tuple(context[i : i + n_key]))
            self.repeats = key in self.hashes
            self.hashes.add(key)
        self.n_hashed = max(0, len(context) - n_key + 1)


class Drafter:
    """The drafts of one loop. `gate` decides how many tokens are drafted."""

    def __init__(self, llm: Llama, drafts: Drafts) -> None:
        self.gate = DraftGate()
        self._llm, self._drafts = llm, drafts
        self._spent_s = 0.0  # time of this pass spent on looking for drafts
        self._begins = False  # whether a text begins in this pass: its first draft takes longer than others
        self._texts: dict[int, _Text] = {}  # keys: seq_id
        self._n_drafted = self._n_accepted = 0  # tokens of this pass

    def propose(self, sequences: list[Sequence]) -> None:
        """Sets the drafts of the sequences that decode in the next pass, in which no others take part. Sequences with
        drafts are last then where a recurrent state has to go back."""
        texts = list[_Text]()
        for sequence in sequences:
            seq_id = sequence.place.seq_id
            n_shifts = sequence.summary.n_shifts
            text = self._texts.get(seq_id)
            if (
                text is None or text.sequence is not sequence or text.n_shifts != n_shifts
            ):  # it has lost a part of its text
                text = self._texts[seq_id] = _Text(sequence, self.gate.of_answer(), n_shifts)
            text.note_tokens(self._drafts.least_key)
            texts.append(text)
        if not any(text.repeats for text in texts):
            return
        start_s = time.thread_time()  # others may take the processor meanwhile
        widths = self.gate.widths([text.acceptance for text in texts])
        if not any(map(any, widths)):
            return
        wanted = list[tuple[int, list[int]]]()
        for text, of_answer in zip(texts, widths, strict=True):
            sequence = text.sequence
            room = 0
            if text.repeats and sequence.prompt.images is None:  # the context is full, and it ends, as without drafts
                room = max(
                    0, min(sequence.limit - sequence.summary.answer_tokens, sequence.n_ctx - len(sequence.context)) - 1
                )
            self._drafts.set_tokens(sequence.place.seq_id, text.n_tokens, sequence.context[text.n_tokens :])
            self._begins |= text.n_tokens == 0
            text.n_tokens = len(sequence.context)
            wanted.append((sequence.place.seq_id, [min(width, room, self._drafts.n_max) for width in of_answer]))
        drafts = self._drafts.draft(wanted)
        for text, draft, n in zip(texts, drafts, self._lengths(sequences, drafts), strict=True):
            text.sequence.draft, text.source = draft.tokens[:n], draft.source
        if self._llm._is_stateful:
            sequences.sort(key=lambda sequence: len(sequence.draft))
        self._spent_s = time.thread_time() - start_s

    def _lengths(self, sequences: list[Sequence], drafts: list[Draft]) -> list[int]:
        """Returns how many tokens of each draft the pass has room for. Where a recurrent state has to go back
        (`Rollback.most_lost`), drafts have one length, the one with which they have most tokens together; shorter
        drafts get none."""
        wanted = [len(draft.tokens) for draft in drafts]
        n_left = min(self._llm.n_batch, self._llm.context.n_logits) - len(drafts)
        best = [0] * len(drafts)
        if not self._llm._is_stateful:
            for row, n in enumerate(wanted):
                best[row] = min(n, n_left)
                n_left -= best[row]
            return best
        for n in set(wanted):
            chosen = [each.place.seq_id for each, n_wanted in zip(sequences, wanted, strict=True) if n_wanted >= n]
            n_each = min(n, n_left // len(chosen), self._llm.context.most_lost(chosen))
            if n_each * len(chosen) > sum(best):
                best = [n_each * (n_wanted >= n) for n_wanted in wanted]
        return best

    def note_verified(self, sequence: Sequence, kv: KvSequence, n_accepted: int) -> None:
        """Notes how many tokens of a draft were sampled, too."""
        text, n_drafted = self._texts[kv.seq_id], len(sequence.draft)
        self._llm.context.drafted.update(draft_passes=1, drafted_tokens=n_drafted, accepted_tokens=n_accepted)
        text.acceptance[text.source].note(n_drafted, n_accepted)
        self._drafts.accept(kv.seq_id, n_accepted)
        self._n_drafted += n_drafted
        self._n_accepted += n_accepted

    def note_pass(self, n_sequences: int, seconds: float) -> None:
        """Notes the time of a pass in which this number of sequences decoded, and nothing else was computed."""
        if not self._begins:
            self.gate.note_pass(n_sequences, self._n_drafted, self._n_accepted, seconds, self._spent_s)
        self._begins, self._spent_s, self._n_drafted, self._n_accepted = False, 0.0, 0, 0
