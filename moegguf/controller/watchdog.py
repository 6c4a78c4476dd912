"""Compares the time per token with and without prefetching, and switches prefetching
off when it does not save enough time."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np

from moegguf.decisions import log_decision

OFF_TOKENS = 8  # tokens in a period without prefetching
ON_TOKENS = 16  # tokens in a period with prefetching
# Maximum number of periods of each kind (with and without prefetching) in a trial.
PERIODS = 8
# A trial may end early only after this many periods of each kind, at the end of a pair.
LEAST_PERIODS = 2
# A trial may end early only if the rank sum deviates from its expectation by at least
# this many standard errors. A larger number makes it less likely that a trial ends
# early by chance.
CERTAINTY = 3.4
# Number of initial tokens, which fill the slots and are not compared. Prefetching is on
# for them, except with a `link_ns`.
WARM_TOKENS = 16
# Share of a token's time that prefetching must save in a trial to stay on.
GAIN = 0.03
# Length of the first pause between trials, in tokens. Each further pause is twice as
# long, up to MAX_PAUSE_TOKENS.
PAUSE_TOKENS = 1024
MAX_PAUSE_TOKENS = 1 << 16
# Number of tokens before a trial over which the link's busy share is measured (median).
WEIGHED_TOKENS = 16
# Minimum share of a token's time during which the link must be busy before a trial
# begins.
BUSY = 0.25


class Watchdog:
    """Switches prefetching on or off, according to the time that each decoded token
    takes.

    The criterion is time, which includes both the stall and the cost of moving bytes.
    On a machine with few cores, prefetching can cost more compute time than it saves in
    stall. The controller observes, counts and predicts in all periods of a trial, so
    the periods differ only in prefetching.

    A trial alternates periods without and with prefetching. Periods without prefetching
    are shorter by default, because prefetching usually saves time. The first token of a
    period is left out, because the preceding period affects it.

    A trial ends early if the difference is clear. For this test, token times with
    prefetching are first divided by 1 - GAIN. A rank test must then find them shorter
    or longer than the times without prefetching by at least CERTAINTY standard
    errors, and the medians of the periods must agree. Ranks are used so that a few slow
    tokens do not decide the result.

    At the end of a trial the medians of the periods decide whether prefetching stays on
    until the next trial.

    If a pass decodes one token for each of several sequences, these count as a single
    token. A trial compares passes with the same number of sequences. Other passes are
    ignored. After more than OFF_TOKENS other passes in a row, the trial restarts with
    the last pass's number of sequences.

    Prefetching can save at most the time that the link spends copying. `link_ns`
    returns the link's busy time so far in ns. With a `link_ns`, a trial begins only if
    the link was busy for at least the share BUSY of a token's time (median over
    tokens). Prefetching is off until the first trial, and while this share is measured
    before a later trial. If the share is too small, prefetching stays off, and the
    share is measured again after a pause. The first WARM_TOKENS tokens fill slots and
    are not counted.
    """

    def __init__(self, link_ns: Callable[[], int] | None = None) -> None:
        self.on = WARM_TOKENS > 0 and link_ns is None
        self.trials = 0
        # Share of a token's time that prefetching saved in the last trial; None: no
        # trial has ended
        self.last_gain: float | None = None
        self._link_ns = link_ns
        self._link_before_ns = 0
        # Share of each measured token's time during which the link was busy.
        self._busy_shares: list[float] = []
        self._weighs = link_ns is not None
        self._warm_tokens = WARM_TOKENS
        self._pause_tokens = 0
        self._next_pause_tokens = PAUSE_TOKENS
        self._period_ns: list[int] = []
        self._periods_ns: dict[bool, list[list[int]]] = {False: [], True: []}
        self._previous_ns: int | None = None
        # Number of sequences in each pass that the trial compares.
        self._n_sequences = 1
        self._n_last_sequences = 1  # number of sequences in the last pass
        # Number of consecutive passes with a different number of sequences.
        self._n_others = 0

    @property
    def resting(self) -> bool:
        """Returns True while the watchdog waits for the next trial, or measures how
        busy the link is before a trial."""
        return self._pause_tokens > 0 or self._weighs

    def token(self, now_ns: int, n_sequences: int = 1) -> None:
        """Records that `n_sequences` sequences begin to decode one token each at
        `now_ns`.

        `now_ns` may come from any monotonic clock that runs while the model computes,
        but always from the same one.
        """
        previous = self._previous_ns
        self._previous_ns = now_ns
        n_last = self._n_last_sequences
        self._n_last_sequences = n_sequences
        link_before_ns = self._link_before_ns
        if self._weighs and self._link_ns is not None:
            self._link_before_ns = self._link_ns()
        if previous is None:
            return
        if self._warm_tokens > 0:
            self._warm_tokens -= 1
            self.on = self._warm_tokens > 0 and not self._weighs
        elif self._weighs:
            self._weigh(
                (self._link_before_ns - link_before_ns) / max(1, now_ns - previous)
            )
        elif self._pause_tokens > 0:
            self._pause_tokens -= 1
            self.on = self.on and self._pause_tokens > 0
            self._weighs = self._pause_tokens == 0 and self._link_ns is not None
        else:
            self._note_sequences(n_last)
            if not self._n_others:
                self._period_ns.append(now_ns - previous)
                if len(self._period_ns) == (ON_TOKENS if self.on else OFF_TOKENS):
                    self._end_period()

    def pause(self) -> None:
        """Records that the next pass processes a prompt. The time between the last call
        of `token` and the next one is not counted."""
        self._previous_ns = None

    def _weigh(self, busy_share: float) -> None:
        self._busy_shares.append(busy_share)
        if len(self._busy_shares) < WEIGHED_TOKENS:
            return
        busy = median(self._busy_shares)
        self._busy_shares = []
        self._weighs = False
        if busy < BUSY:
            self._rest()
            log_decision("prefetch_not_tried", link_busy=round(busy, 3), needed=BUSY)

    def _rest(self) -> None:
        self._pause_tokens = self._next_pause_tokens
        self._next_pause_tokens = min(2 * self._next_pause_tokens, MAX_PAUSE_TOKENS)

    def _note_sequences(self, n_sequences: int) -> None:
        """Counts consecutive passes with another number of sequences than the trial
        compares. After more than OFF_TOKENS such passes, restarts the trial with
        `n_sequences`."""
        self._n_others = self._n_others + 1 if n_sequences != self._n_sequences else 0
        if self._n_others > OFF_TOKENS:
            self._n_sequences = n_sequences
            self._n_others = 0
            self.on = False
            self._period_ns = []
            self._periods_ns = {False: [], True: []}

    def _end_period(self) -> None:
        self._periods_ns[self.on].append(self._period_ns[1:])
        self._period_ns = []
        ended_pair = self.on
        self.on = not self.on
        n = len(self._periods_ns[True])
        if ended_pair and (n == PERIODS or (n >= LEAST_PERIODS and self._is_clear())):
            self._decide()

    def _is_clear(self) -> bool:
        """Returns True if the trial can end early. A rank test (Mann-Whitney) of the
        times of all counted tokens must be certain, and the medians of the periods must
        agree with the test."""
        without, with_ = (
            np.concatenate(self._periods_ns[on]).astype(np.float64)
            for on in (False, True)
        )
        with_ /= 1 - GAIN
        # -1 to 1; 1: every token with prefetching was faster than every token without
        wins = np.sign(without[:, np.newaxis] - with_).mean()
        n = len(without)
        m = len(with_)
        errors = wins * np.sqrt(3 * n * m / (n + m + 1))
        return bool(abs(errors) >= CERTAINTY) and (errors > 0) == (self._gain() >= GAIN)

    def _gain(self) -> float:
        without = self._token_ns(False)
        return 1 - self._token_ns(True) / without if without > 0 else 0.0

    def _token_ns(self, on: bool) -> float:
        """Returns the median, over the periods, of a period's mean time per token in
        ns. `on` selects the periods with prefetching."""
        return median(sum(period) / len(period) for period in self._periods_ns[on])

    def _decide(self) -> None:
        self.last_gain = self._gain()
        self._periods_ns = {False: [], True: []}
        self._rest()
        self.trials += 1
        self.on = self.last_gain >= GAIN
        log_decision(
            "prefetch_switched",
            on=self.on,
            gain=round(self.last_gain, 3),
            needed=GAIN,
            trial=self.trials,
        )
