"""Stops what does not pay: compares stall per token with and without prefetching, in turns, on the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class WatchdogOptions:
    """How long it tries and how sure it must be.

    turn_tokens: length of a turn. turns: pairs of turns per decision. gain: share of the stall that prefetching must
    save to stay on. rest_tokens: tokens until the next trial, doubled after each up to `longest_rest_tokens`.
    """

    turn_tokens: int = 24
    turns: int = 4
    gain: float = 0.03
    rest_tokens: int = 1024
    longest_rest_tokens: int = 1 << 16


class Watchdog:
    """Whether prefetching is on now. Fed once per decoded token with the store's cumulative stall.

    A trial alternates turns without and with prefetching; the first token of a turn does not count, because it pays
    for the turn before. After `turns` pairs the medians decide, until the next trial.
    """

    def __init__(self, options: WatchdogOptions | None = None) -> None:
        self.options = options or WatchdogOptions()
        self.on = False
        self.trials = 0
        self.last_gain: float | None = None  # share of stall saved in the last trial
        self._rest = 0
        self._rest_next = self.options.rest_tokens
        self._turn: list[int] = []
        self._stalls: dict[bool, list[float]] = {False: [], True: []}
        self._before_ns: int | None = None

    def token(self, stall_ns: int) -> None:
        """A token was decoded; `stall_ns` is the stall of all tokens so far."""
        previous, self._before_ns = self._before_ns, stall_ns
        if previous is None:
            return
        if self._rest > 0:
            self._rest -= 1
            if self._rest == 0:
                self.on = False
            return
        self._turn.append(stall_ns - previous)
        if len(self._turn) == self.options.turn_tokens:
            self._end_turn()

    @property
    def resting(self) -> bool:
        """Whether prefetching was found not to pay, and nothing is to be measured for a while."""
        return not self.on and self._rest > 0

    def rest(self, n_tokens: int) -> bool:
        """So many tokens went by unmeasured; True when the rest is over."""
        self._rest = max(0, self._rest - n_tokens)
        self._before_ns = None
        return self._rest == 0

    def pause(self) -> None:
        """Something else than a token is computed next: a prompt, whose stall is nobody's."""
        self._before_ns = None

    def _end_turn(self) -> None:
        counted = self._turn[1:]
        self._stalls[self.on].append(sum(counted) / len(counted))
        self._turn = []
        self.on = not self.on
        if len(self._stalls[True]) == self.options.turns:
            self._decide()

    def _decide(self) -> None:
        without, with_ = median(self._stalls[False]), median(self._stalls[True])
        self._stalls = {False: [], True: []}
        self.last_gain = 1 - with_ / without if without > 0 else 0.0
        verdict = self.last_gain >= self.options.gain
        self._rest = self._rest_next
        self._rest_next = min(2 * self._rest_next, self.options.longest_rest_tokens)
        self.trials += 1
        self.on = verdict
