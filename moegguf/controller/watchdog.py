"""Switches prefetching off when it costs time: compares time per token with and without it, in alternating periods."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class WatchdogOptions:
    """Length of a trial and its threshold.

    period_tokens: length of a period. periods: pairs of periods per decision. gain: share of a token's time that
    prefetching must save to stay on. pause_tokens: tokens until the next trial, doubled after each up to
    `max_pause_tokens`.
    """

    period_tokens: int = 24
    periods: int = 4
    gain: float = 0.03
    pause_tokens: int = 1024
    max_pause_tokens: int = 1 << 16


class Watchdog:
    """Whether prefetching is on now. Takes the time of every decoded token.

    The criterion is time, which includes both the stall and the cost of moving bytes: on a machine of few cores a
    smaller stall can cost more compute than it saves. Turns with and without differ in that alone: the controller
    listens, counts and predicts in both.

    A trial alternates periods without and with prefetching; the first token of a period is left out, because it bears
    the effects of the period before. After `periods` pairs the medians decide, until the next trial.
    """

    def __init__(self, options: WatchdogOptions | None = None) -> None:
        self.options = options or WatchdogOptions()
        self.on = False
        self.trials = 0
        self.last_gain: float | None = None  # share of a token's time saved in the last trial
        self._pause_tokens = 0
        self._next_pause_tokens = self.options.pause_tokens
        self._period: list[int] = []
        self._times_ns: dict[bool, list[float]] = {False: [], True: []}
        self._previous_ns: int | None = None

    @property
    def resting(self) -> bool:
        """Whether it has decided, and the next trial has not begun."""
        return self._pause_tokens > 0

    def token(self, now_ns: int) -> None:
        """Decoding of a token begins at `now_ns`, by any monotonic clock that runs while the model computes."""
        previous, self._previous_ns = self._previous_ns, now_ns
        if previous is None:
            return
        if self._pause_tokens > 0:
            self._pause_tokens -= 1
            if self._pause_tokens == 0:
                self.on = False
            return
        self._period.append(now_ns - previous)
        if len(self._period) == self.options.period_tokens:
            self._end_period()

    def pause(self) -> None:
        """A prompt is computed next; its time is not counted."""
        self._previous_ns = None

    def _end_period(self) -> None:
        times_ns = self._period[1:]
        self._times_ns[self.on].append(sum(times_ns) / len(times_ns))
        self._period = []
        self.on = not self.on
        if len(self._times_ns[True]) == self.options.periods:
            self._decide()

    def _decide(self) -> None:
        without, with_ = median(self._times_ns[False]), median(self._times_ns[True])
        self._times_ns = {False: [], True: []}
        self.last_gain = 1 - with_ / without if without > 0 else 0.0
        self._pause_tokens = self._next_pause_tokens
        self._next_pause_tokens = min(2 * self._next_pause_tokens, self.options.max_pause_tokens)
        self.trials += 1
        self.on = self.last_gain >= self.options.gain
