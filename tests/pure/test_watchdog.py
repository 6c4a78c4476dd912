"""Tests the prefetching watchdog.

A trial compares stalls with and without prefetching. If prefetching saves too little,
the watchdog stops it, and tries again after increasingly long pauses.
"""

import numpy as np
import pytest
from watchdog_trials import set_trials

from moegguf.controller import watchdog
from moegguf.controller.watchdog import Watchdog

TRIAL = 4 * (8 + 8)  # tokens in a trial with the lengths that `short_trials` sets


def trial_tokens() -> int:
    return watchdog.PERIODS * (watchdog.OFF_TOKENS + watchdog.ON_TOKENS)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets short trials that never end early. A test that calls `monkeypatch.undo`
    compares with the default lengths."""
    set_trials(
        monkeypatch,
        off_tokens=8,
        on_tokens=8,
        periods=4,
        certainty=float("inf"),
        warm_tokens=0,
        pause_tokens=100,
        max_pause_tokens=400,
    )


class Run:
    """Feeds tokens to a watchdog. A token stalls for `off` ns without prefetching, and
    for `on` ns with prefetching.

    `noise` makes the stalls random.
    """

    def __init__(
        self, off: float, on: float, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.dog = Watchdog()
        self.off, self.on, self.noise = off, on, noise
        self.random = np.random.default_rng(seed)
        self.stall_ns = 0
        self.was_on: list[bool] = []
        self.dog.token(0)

    def tokens(self, n: int) -> None:
        for _ in range(n):
            self.was_on.append(self.dog.on)
            mean = self.on if self.dog.on else self.off
            self.stall_ns += round(
                mean * self.random.lognormal(0, self.noise) if self.noise else mean
            )
            self.dog.token(self.stall_ns)


def test_watchdog_prefetches_during_warm_up_without_counting_these_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_trials(monkeypatch, warm_tokens=10)
    run = Run(1000, 5000)
    run.tokens(10)
    assert run.was_on == [True] * 10
    run.on = 500
    run.tokens(TRIAL + watchdog.PAUSE_TOKENS)
    assert run.dog.last_gain == pytest.approx(0.5)
    run.tokens(1)
    assert run.was_on[-1] is False, "the second trial begins with a period that counts"


@pytest.mark.parametrize(
    ("on", "stays"), [(0.7e6, True), (0.8e6, True), (1.1e6, False), (1.3e6, False)]
)
def test_clear_difference_ends_a_trial_early(
    on: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    whole = trial_tokens() + watchdog.WARM_TOKENS
    lengths = []
    for seed in range(20):
        run = Run(1e6, on, noise=0.1, seed=seed)
        while not run.dog.trials:
            run.tokens(1)
        lengths.append(len(run.was_on))
        assert run.dog.on == stays
    assert np.median(lengths) < whole / 2


def test_equal_stalls_rarely_end_a_trial_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    set_trials(monkeypatch, warm_tokens=0)
    whole, early = trial_tokens(), 0
    for seed in range(100):  # prefetching saves about the required minimum
        run = Run(1e6, 0.97e6, noise=0.3, seed=seed)
        run.tokens(whole - 1)
        early += run.dog.trials
    assert early <= 3


@pytest.mark.parametrize(("off", "on"), [(1000, 1000), (1000, 980), (0, 0), (0, 500)])
def test_watchdog_stops_prefetching_that_saves_too_little(off: int, on: int) -> None:
    run = Run(off, on)
    run.tokens(TRIAL)
    assert not run.dog.on


def test_watchdog_ignores_first_tokens_outliers_prompts_and_odd_batches() -> None:
    dog, stall_ns = Watchdog(), 0
    dog.token(0)
    for n in range(TRIAL):
        first = n % watchdog.OFF_TOKENS == 0
        stall_ns += 1_000_000 if first and dog.on else 900 if dog.on else 1000
        dog.token(stall_ns)
    assert dog.last_gain == pytest.approx(0.1)
    assert dog.on
    run = Run(1000, 500)
    run.tokens(10)
    run.stall_ns += 10**9
    run.tokens(TRIAL - 10)
    assert run.dog.last_gain == pytest.approx(0.5)
    run = Run(1000, 900)
    for _ in range(TRIAL + TRIAL // 5):  # each request has five tokens after a prompt
        run.dog.pause()
        run.stall_ns += 10**9
        run.dog.token(run.stall_ns)
        run.tokens(5)
        if run.dog.trials:
            break
    assert run.dog.last_gain == pytest.approx(0.1)
    run = Run(1000, 900)
    while not run.dog.trials:
        # Passes of 8 and 7 sequences come between passes of one sequence.
        for n_sequences, took_ns in ((8, 10**6), (7, 10**6)):
            run.dog.token(run.stall_ns, n_sequences)
            run.stall_ns += took_ns
        run.dog.token(run.stall_ns)
        run.tokens(3)
    assert run.dog.last_gain == pytest.approx(0.1)


def test_trial_restarts_after_a_lasting_change_of_the_number_of_sequences() -> None:
    run = Run(1000, 2000)
    run.tokens(TRIAL - 2)
    n_passes = 0
    while not run.dog.trials:
        n_passes += 1
        run.stall_ns += 4500 if run.dog.on else 5000
        run.dog.token(run.stall_ns, 8)
    assert n_passes == watchdog.OFF_TOKENS + 1 + TRIAL
    assert run.dog.on and run.dog.last_gain == pytest.approx(0.1)


def test_rest_between_trials_doubles_up_to_a_limit() -> None:
    run = Run(1000, 2000)
    begun = []
    for n in range(4 * TRIAL + 100 + 200 + 400 + 400):
        trials = run.dog.trials
        run.tokens(1)
        if run.dog.trials > trials:
            begun.append(n + 1)
    rests = (np.diff(begun) - TRIAL).tolist()
    assert rests == [100, 200, 400]
    assert begun[0] == TRIAL


class Watched(Run):
    """A Run with a prompt after each token.

    For each token, the link is busy for `busy` times the stall without prefetching.
    """

    def __init__(self, busy: float) -> None:
        super().__init__(1000, 500)
        self.busy, self.link_ns = busy, 0
        self.dog = Watchdog(lambda: self.link_ns)
        self.dog.token(0)

    def tokens(self, n: int) -> None:
        for _ in range(n):
            self.link_ns += round(self.busy * self.off)
            super().tokens(1)
            self.dog.pause()
            self.link_ns += 10**6
            self.dog.token(self.stall_ns)


def test_idle_link_starts_no_trial_and_is_checked_after_ever_longer_rests() -> None:
    run = Watched(watchdog.BUSY - 0.01)
    for rest in (100, 200, 400, 400):
        run.tokens(watchdog.WEIGHED_TOKENS)
        assert run.dog.resting
        run.busy = watchdog.BUSY + 0.01
        run.tokens(rest)
        run.busy = watchdog.BUSY - 0.01
    assert not any(run.was_on) and run.dog.trials == 0


def test_busy_link_starts_a_trial_without_warm_up() -> None:
    run = Watched(watchdog.BUSY)
    run.tokens(watchdog.WEIGHED_TOKENS)
    assert not any(run.was_on) and not run.dog.resting
    run.tokens(TRIAL)
    assert run.dog.trials == 1 and run.dog.on
    run.tokens(watchdog.PAUSE_TOKENS)
    assert run.dog.resting and not run.dog.on, (
        "before the next trial the link is watched without prefetching"
    )
