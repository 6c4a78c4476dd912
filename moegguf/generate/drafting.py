"""Makes drafts for the answers of a batch loop: proposes tokens that may come next, and
learns which were accepted.

A decoding pass evaluates the drafted tokens together with the token that was sampled
last. The loop then samples the next token. If it equals the first drafted token, the
loop samples again after that token, and so on. Sampling uses the random numbers that it
would have used without drafts. Drafted tokens that were not accepted are then dropped
from the KV cache. If the model is batch-invariant, an answer is the same with and
without drafts, token for token.

Measured times decide whether to draft, and how many tokens. An accepted token saves the
time of a pass without drafts, divided by the number of sequences in the pass. The cost
of a drafted token is the time that it adds to the pass, including the time to read
experts that no other token uses. A draft is extended as long as the chance that its
next token is reached and accepted is worth more than the token's cost. If drafts are
expected to save next to nothing, a short draft of one answer is tried now and then.
Such trials use an allowance, which is a fraction of the total pass time. When drafts
have lost the allowance and all earlier savings, they pause until some new allowance has
accumulated.

A recurrent state that llama.cpp cannot roll back returns to the state before the pass
if a token is rejected. The next pass then evaluates the accepted tokens again, without
a draft. The time that this pass takes longer than a pass without drafts is part of the
drafts' cost.

The search for drafts also takes time. Unless a draft model or prediction heads make
drafts, a sequence is searched only if its last tokens have occurred in the sequence
before. After some passes without an accepted token, the next passes skip the search.
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

# Assumed cost of a drafted token before it is measured, as a fraction of a pass without
# drafts.
SUPPOSED_COST = 0.1
# Lower limit of the cost of a drafted token, as a fraction of a pass without drafts.
LEAST_COST = 0.01
# Fraction of the total pass time that drafts and their search may lose, in addition to
# earlier savings.
LOSS = 0.005
# Passes without an accepted token before the number of skipped passes grows (0, 1, 3,
# 7).
PATIENCE = 4
REST = 3  # up to 2**REST - 1 passes in a row skip the search
# Drafts with a smaller expected gain are trials; the unit is the time that one accepted
# token saves.
MARGIN = 0.03
# Number of most recent passes without drafts whose median is used as the time of such a
# pass.
BASE_PASSES = 9
# Number of passes with drafts after which one pass without drafts is measured.
RENEW_PASSES = 32
TRIAL_TOKENS = 3  # maximum number of tokens in a trial draft
# Factor applied to older sums at each new measurement, for costs and for one answer's
# acceptances.
MEMORY = 0.9
# Assumed chance that a token is accepted, for each `Source`, before any draft was
# verified.
PRIOR = (0.8, 0.5, 0.6)


@dataclass
class Acceptance:
    """Estimates the chance that a drafted token is accepted if all earlier tokens of
    its draft were accepted. Recent drafts count more."""

    prior: float
    memory: float
    # Estimate over all answers, which replaces `prior` in an estimate for one answer.
    base: Acceptance | None = None
    accepted: float = 0.0
    refused: float = 0.0

    @property
    def chance(self) -> float:
        """The estimated chance. It is greater than 0 and less than 1."""
        prior = self.prior if self.base is None else self.base.chance
        return (self.accepted + 2 * prior) / (self.accepted + self.refused + 2)

    def note(self, n_drafted: int, n_accepted: int) -> None:
        """Updates the estimate, and `base`, with a verified draft: `n_accepted` of its
        `n_drafted` tokens were accepted."""
        if self.base is not None:
            self.base.note(n_drafted, n_accepted)
        self.accepted = self.memory * self.accepted + n_accepted
        self.refused = self.memory * self.refused + (n_accepted < n_drafted)


class PassTimes:
    """Measured times of passes with a certain number of sequences: the time of a pass
    without drafts, and the time that each drafted token adds."""

    def __init__(self) -> None:
        self.widest = 0  # largest number of tokens drafted in one pass so far
        self._undrafted_s = deque[float](maxlen=BASE_PASSES)
        self._n_drafted = 0  # passes with drafts since the last pass without drafts
        # Decaying sums over passes: the drafted tokens, and their cost as a multiple of
        # a pass without drafts.
        self._tokens, self._cost = 1.0, SUPPOSED_COST
        # Decaying sums over rejected drafts whose accepted tokens were evaluated again:
        # the number, and the cost.
        self._n_repeated, self._repeat_cost = 0.0, 0.0

    @property
    def base_s(self) -> float | None:
        """The median time of a pass without drafts, in seconds. None if fewer than
        BASE_PASSES such passes were measured, or if at least RENEW_PASSES passes with
        drafts followed the last one."""
        is_known = (
            len(self._undrafted_s) == BASE_PASSES and self._n_drafted < RENEW_PASSES
        )
        return sorted(self._undrafted_s)[BASE_PASSES // 2] if is_known else None

    @property
    def cost(self) -> float:
        """The time that one drafted token adds to a pass, as a fraction of the time of
        a pass without drafts. It is at least LEAST_COST."""
        return max(self._cost / self._tokens, LEAST_COST)

    @property
    def repeat_cost(self) -> float:
        """The time that the repeated evaluation of accepted tokens adds to a pass, as a
        fraction of the time of a pass without drafts. 0 if a rejected draft causes no
        repeated evaluation, or before the first one."""
        return self._repeat_cost / max(1.0, self._n_repeated)

    def note(self, n_tokens: int, seconds: float, base_s: float) -> float:
        """Records the time of a pass with `n_tokens` drafted tokens. Returns the
        seconds that these tokens added to the pass, at most `base_s` for each token."""
        if n_tokens == 0:
            self._undrafted_s.append(seconds)
            self._n_drafted = 0
            return 0.0
        # A longer delay has other causes.
        added_s = min(seconds - base_s, n_tokens * base_s)
        # The first pass with drafts is not counted: it allocates memory for wide
        # passes.
        if self.widest:
            self._tokens = MEMORY * self._tokens + n_tokens
            self._cost = MEMORY * self._cost + added_s / base_s
        self._n_drafted, self.widest = self._n_drafted + 1, max(self.widest, n_tokens)
        return added_s

    def note_repeated(self, seconds: float, base_s: float) -> float:
        """Records the time of a pass that evaluated accepted tokens again. Returns the
        seconds beyond a pass without drafts, at most `base_s`."""
        # A longer delay has other causes.
        added_s = min(max(0.0, seconds - base_s), base_s)
        self._n_repeated = MEMORY * self._n_repeated + 1
        self._repeat_cost = MEMORY * self._repeat_cost + added_s / base_s
        return added_s


def paying_tokens(chance: float, worth: float, cost: float, repeat_cost: float) -> int:
    """Returns the number of leading draft tokens whose chance of being reached and
    accepted is worth their cost.

    chance: chance that a token is accepted if the tokens before it were. worth: value
    of an accepted token. cost: cost of a drafted token. repeat_cost: cost of a rejected
    draft. The unit of the last three is a pass without drafts.
    """
    # Each further token is another chance that the draft is rejected.
    worth -= repeat_cost * (1 - chance) / chance
    return (
        int(math.log(cost / worth) / math.log(chance))
        if 0 < cost < worth * chance
        else 0
    )


class DraftGate:
    """Decides from measured times how many tokens to draft in a model's next pass.
    `acceptance` has one estimate for each source of drafts.

    Drafts may lose the time that earlier drafts saved plus an allowance, which is the
    fraction LOSS of the total pass time. Savings and allowance together are limited to
    the time of N_MAX / 2 passes. The drafts of one pass may exceed this limit by about
    the time of one pass.
    """

    def __init__(self) -> None:
        self.acceptance = [Acceptance(prior, 0.98) for prior in PRIOR]
        # Key: number of sequences in the pass.
        self._times = defaultdict[int, PassTimes](PassTimes)
        # Seconds that drafts may still lose: saved time plus allowance.
        self._balance_s = 0.0
        self._allowance_s = 0.0  # seconds that trial drafts may cost
        self._tries = False  # True if the drafts of the next pass are trials
        # Consecutive passes that could have drafts but accepted no token; 0 while
        # `base_s` is None.
        self._n_vain = 0
        # Passes to skip after the last search; passes still to skip.
        self._n_rested = self._n_resting = 0
        self._pays = True

    def of_answer(self) -> list[Acceptance]:
        """Returns new estimates for one answer, one for each source of drafts."""
        return [Acceptance(0.5, MEMORY, base) for base in self.acceptance]

    def begin_pass(self) -> bool:
        """Counts down the passes to skip. Returns True if none is left, so that the
        next pass may have drafts. Must be called once before each pass."""
        self._n_resting -= 1
        return self._n_resting < 0

    def widths(self, answers: list[list[Acceptance]]) -> list[list[int]]:
        """Returns the maximum number of tokens to draft in the next pass, as
        [answer][source of drafts]."""
        times = self._times[len(answers)]
        base_s, cost, repeat_cost = times.base_s, times.cost, times.repeat_cost
        nothing = [[0] * len(of_answer) for of_answer in answers]
        if base_s is None or self._balance_s < 0:
            return nothing
        self._balance_s = min(self._balance_s, N_MAX / 2 * base_s)
        # Limited because a trial cannot cost more.
        self._allowance_s = min(self._allowance_s, TRIAL_TOKENS * base_s)
        # Value of an accepted token, as a fraction of a pass without drafts.
        worth = 1 / len(answers)
        # Limited because the cost of much wider passes is still unknown.
        known = max(TRIAL_TOKENS, 2 * times.widest)
        most = min(N_MAX, known, int((self._balance_s / base_s + 1) / cost))
        widths, gain = list[list[int]](), 0.0
        for of_answer in answers:
            chances = [source.chance for source in of_answer]
            # A source whose drafts this answer has not accepted yet may add the time of
            # one pass without drafts.
            trusted = [int(1 / cost + 2 * source.accepted) for source in of_answer]
            paying = [paying_tokens(p, worth, cost, repeat_cost) for p in chances]
            widths.append(
                [min(most, *each) for each in zip(trusted, paying, strict=True)]
            )
            gain += max(
                worth * p * (1 - p**n) / (1 - p) - n * cost - repeat_cost * (1 - p**n)
                for p, n in zip(chances, widths[-1], strict=True)
            )
        self._tries = gain <= MARGIN * worth
        if not self._tries:
            return widths
        if min(self._balance_s, self._allowance_s) < TRIAL_TOKENS * cost * base_s:
            return nothing
        return [[TRIAL_TOKENS] * len(answers[0]), *nothing[1:]]

    def note_pass(
        self,
        n_sequences: int,
        n_drafted: int,
        n_accepted: int,
        seconds: float,
        spent_s: float = 0.0,
    ) -> None:
        """Records the time of a pass with `n_sequences` decoding sequences, after
        `begin_pass` returned True.

        spent_s: CPU time of the search for drafts, which is included in `seconds`. If
        nothing was drafted, `spent_s` is treated as lost time, not as part of a pass
        without drafts.
        """
        times = self._times[n_sequences]
        base_s, allowed_s = times.base_s, LOSS * seconds * (1 + self._n_rested)
        self._balance_s += allowed_s
        self._allowance_s += allowed_s
        self._n_vain = 0 if n_accepted or base_s is None else self._n_vain + 1
        self._n_rested = self._n_resting = (
            1 << min(self._n_vain // PATIENCE, REST)
        ) - 1
        if n_drafted == 0:
            times.note(0, seconds - spent_s, 0.0)
            self._balance_s -= spent_s
        elif base_s is not None:
            saved_s = n_accepted * base_s / n_sequences - times.note(
                n_drafted, seconds, base_s
            )
            self._balance_s += saved_s
            self._allowance_s += min(0, saved_s) * self._tries
        pays = not self._n_rested and self._balance_s >= 0
        if pays != self._pays:
            self._pays = pays
            log_decision(
                "drafts_switched",
                on=pays,
                n_vain=self._n_vain,
                balance_s=round(self._balance_s, 4),
            )

    def note_repeated(self, n_sequences: int, seconds: float) -> None:
        """Records the time of a pass with `n_sequences` sequences that evaluated
        accepted tokens again, because the states of these sequences had returned to the
        beginning of the draft."""
        times = self._times[n_sequences]
        if (base_s := times.base_s) is not None:
            self._balance_s -= times.note_repeated(seconds, base_s)


@dataclass
class _Text:
    """The drafting state of one sequence: the tokens known so far, and the acceptance
    of its drafts."""

    sequence: Sequence
    acceptance: list[Acceptance]
    n_shifts: int
    n_tokens: int = 0
    source: Source = Source.NONE  # source of the last draft
    n_hashed: int = 0  # number of positions in the text whose n-gram is in `hashes`
    hashes: set[int] = field(default_factory=set)
    # True if the last tokens occurred before, or if their hash collides.
    repeats: bool = True

    def note_tokens(self, n_key: int) -> None:
        """Adds the n-grams that end in new tokens to `hashes`. Sets `repeats` to True
        if the last `n_key` tokens have occurred before, otherwise to False. If `n_key`
        is 0, `repeats` stays True.

        Each new token takes about a microsecond. As long as no text repeats itself,
        drafting has no other cost.
        """
        context = self.sequence.context
        for i in range(self.n_hashed, len(context) - n_key + 1 if n_key else 0):
            key = hash(tuple(context[i : i + n_key]))
            self.repeats = key in self.hashes
            self.hashes.add(key)
        self.n_hashed = max(0, len(context) - n_key + 1)


class Drafter:
    """Makes the drafts for all sequences of one batch loop. `gate` decides how many
    tokens are drafted."""

    def __init__(self, llm: Llama, drafts: Drafts) -> None:
        self.gate = DraftGate()
        self._llm, self._drafts = llm, drafts
        self._spent_s = 0.0  # CPU seconds spent on the search for drafts in this pass
        # True if a text is searched for the first time: the time of such a pass is
        # ignored.
        self._begins = False
        self._texts: dict[int, _Text] = {}  # key: seq_id
        # Drafted and accepted tokens of this pass.
        self._n_drafted = self._n_accepted = 0

    def propose(self, sequences: list[Sequence]) -> None:
        """Sets the drafts of `sequences`. The list must contain every sequence of the
        next pass, and each must be decoding. For a model with a recurrent state, also
        sorts the list by the length of the drafts, longest last."""
        texts = list[_Text]()
        for sequence in sequences:
            seq_id = sequence.place.seq_id
            n_shifts = sequence.summary.n_shifts
            text = self._texts.get(seq_id)
            # The place belongs to a new sequence, or the sequence's context was
            # shortened.
            if (
                text is None
                or text.sequence is not sequence
                or text.n_shifts != n_shifts
            ):
                text = self._texts[seq_id] = _Text(
                    sequence, self.gate.of_answer(), n_shifts
                )
            text.note_tokens(self._drafts.least_key)
            texts.append(text)
        if not any(text.repeats for text in texts):
            return
        # CPU time of this thread only: other threads may use the CPU meanwhile.
        start_s = time.thread_time()
        widths = self.gate.widths([text.acceptance for text in texts])
        if not any(map(any, widths)):
            return
        wanted = list[tuple[int, list[int]]]()
        for text, of_answer in zip(texts, widths, strict=True):
            sequence = text.sequence
            room = 0
            # Drafts obey the limits of the answer and the context.
            if text.repeats and sequence.prompt.images is None:
                room = max(
                    0,
                    min(
                        sequence.limit - sequence.summary.answer_tokens,
                        sequence.n_ctx - len(sequence.context),
                    )
                    - 1,
                )
            self._drafts.set_tokens(
                sequence.place.seq_id, text.n_tokens, sequence.context[text.n_tokens :]
            )
            self._begins |= text.n_tokens == 0
            text.n_tokens = len(sequence.context)
            wanted.append(
                (
                    sequence.place.seq_id,
                    [min(width, room, self._drafts.n_max) for width in of_answer],
                )
            )
        drafts = self._drafts.draft(wanted)
        for text, draft, n in zip(
            texts, drafts, self._lengths(sequences, drafts), strict=True
        ):
            text.sequence.draft, text.source = draft.tokens[:n], draft.source
        if self._llm._is_stateful:
            sequences.sort(key=lambda sequence: len(sequence.draft))
        self._spent_s = time.thread_time() - start_s

    def _lengths(self, sequences: list[Sequence], drafts: list[Draft]) -> list[int]:
        """Returns the number of tokens to use from each draft, so that all fit into the
        pass. 0 means that a draft is not used.

        If llama.cpp rolls back the recurrent states of the model, it does so only by a
        limited number of tokens. All used drafts then get one length, chosen to use as
        many tokens as possible in total. Shorter drafts are not used.
        """
        wanted = [len(draft.tokens) for draft in drafts]
        n_left = min(self._llm.n_batch, self._llm.context.n_logits) - len(drafts)
        best = [0] * len(drafts)
        if not self._llm._is_stateful or self._llm.context.returns_to_checkpoints:
            for row, n in enumerate(wanted):
                best[row] = min(n, n_left)
                n_left -= best[row]
            return best
        for n in set(wanted):
            chosen = [
                each.place.seq_id
                for each, n_wanted in zip(sequences, wanted, strict=True)
                if n_wanted >= n
            ]
            n_each = min(
                n, n_left // len(chosen), self._llm.context.rollback.most_lost(chosen)
            )
            if n_each * len(chosen) > sum(best):
                best = [n_each * (n_wanted >= n) for n_wanted in wanted]
        return best

    def note_verified(
        self, sequence: Sequence, kv: KvSequence, n_accepted: int
    ) -> None:
        """Records how many tokens of a sequence's draft were accepted."""
        text, n_drafted = self._texts[kv.seq_id], len(sequence.draft)
        self._llm.context.drafted.update(
            draft_passes=1, drafted_tokens=n_drafted, accepted_tokens=n_accepted
        )
        text.acceptance[text.source].note(n_drafted, n_accepted)
        self._drafts.accept(kv.seq_id, n_accepted)
        self._n_drafted += n_drafted
        self._n_accepted += n_accepted

    def note_pass(self, n_sequences: int, seconds: float) -> None:
        """Records the time of a pass in which `n_sequences` sequences decoded and no
        prompt was evaluated. Ignores the time if a text was searched for the first
        time."""
        if not self._begins:
            self.gate.note_pass(
                n_sequences, self._n_drafted, self._n_accepted, seconds, self._spent_s
            )
        self._begins, self._spent_s, self._n_drafted, self._n_accepted = (
            False,
            0.0,
            0,
            0,
        )
