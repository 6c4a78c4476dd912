"""Stops what does not pay: compares time per token with and without prefetching, in turns, on the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class WatchdogOptions:
    """How long it tries and how sure it must be.

    turn_tokens: length of a turn. turns: pairs of turns per decision. gain: share of a token's time that
    prefetching must save to stay on. rest_tokens: tokens until the next trial, doubled after each up to
    `longest_rest_tokens`.
    """

    turn_tokens: int = 24
    turns: int = 4
    gain: float = 0.03
    rest_tokens: int = 1024
    longest_rest_tokens: int = 1 << 16


class Watchdog:
    """Whether prefetching is on now. Told of every decoded token.

    It judges by time, in which the stall is, and what predicting costs: on a machine of few cores a smaller stall may
    be bought too dear.

    A trial alternates turns without and with prefetching; the first token of a turn does not count, because it pays
    for the turn before. After `turns` pairs the medians decide, until the next trial.
    """

    def __init__(self, options: WatchdogOptions | None = None) -> None:
        self.options = options or WatchdogOptions()
        self.on = False
        self.trials = 0
        self.last_gain: float | None = None  # share of a token's time saved in the last trial
        self._rest = 0
        self._rest_next = self.options.rest_tokens
        self._turn: list[int] = []
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._before_ns: int | None = None

    def token(self, now_ns: int) -> None:
        """A token is decoded from now on, the one before is done; `now_ns` by any clock that goes with the model."""
        previous, self._before_ns = self._before_ns, now_ns
        if previous is None:
            return
        if self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self.on = False
            return
        self._turn.append(now_ns - previous)
        if len(self._turn) == self.options.turn_tokens:
            self._end_turn()

    def pause(self) -> None:
        """Something else than a token is computed next: a prompt, whose stall is nobody's."""
        self._before_ns = None

    def _end_turn(self) -> None:
        counted = self._turn[1:]
        self._times[self.on].append(sum(counted) / len(counted))
        self._turn = []
        self.on = not self.on
        if len(self._times[True]) == self.options.turns:
            self._decide()

    def _decide(self) -> None:
        without, with_ = median(self._times[False]), median(self._times[True])
        self._times = {False: [], True: []}
        self.last_gain = 1 - with_ / without if without > 0 else 0.0
        verdict = self.last_gain >= self.options.gain
        self._rest = self._rest_next
        self._rest_next = min(2 * self._rest_next, self.options.longest_rest_tokens)
        self.trials += 1
        self.on = verdict
