"""Trials of prefetching against the stall: kept when it pays, stopped when it does not, tried again later and later."""

from dataclasses import replace

import numpy as np
import pytest

from moegguf.controller.watchdog import Watchdog, WatchdogOptions

SHORT = WatchdogOptions(off_tokens=8, on_tokens=8, periods=4, warm_tokens=0, pause_tokens=100, max_pause_tokens=400)
TRIAL = SHORT.periods * (SHORT.off_tokens + SHORT.on_tokens)


class Run:
    """Tokens whose stall is `off` ns without prefetching and `on` ns with it."""

    def __init__(self, off: float, on: float, options: WatchdogOptions = SHORT) -> None:
        self.dog = Watchdog(options)
        self.off, self.on = off, on
        self.stall_ns = 0
        self.was_on: list[bool] = []
        self.dog.token(0)

    def tokens(self, n: int) -> None:
        for _ in range(n):
            self.was_on.append(self.dog.on)
            self.stall_ns += round(self.on if self.dog.on else self.off)
            self.dog.token(self.stall_ns)


def test_the_tokens_before_the_first_trial_prefetch_and_do_not_count() -> None:
    warm = replace(SHORT, warm_tokens=10)
    run = Run(1000, 5000, options=warm)
    run.tokens(10)
    assert run.was_on == [True] * 10
    run.on = 500
    run.tokens(TRIAL + SHORT.pause_tokens)
    assert run.dog.last_gain == pytest.approx(0.5)
    run.tokens(1)
    assert run.was_on[-1] is False, "the second trial begins with a period that counts"


@pytest.mark.parametrize(("off", "on"), [(1000, 1000), (1000, 980), (0, 0), (0, 500)])
def test_prefetching_that_saves_too_little_is_stopped(off: int, on: int) -> None:
    run = Run(off, on)
    run.tokens(TRIAL)
    assert not run.dog.on


def test_first_tokens_outliers_prompts_and_passes_of_other_numbers_of_sequences_do_not_count() -> None:
    dog, stall_ns = Watchdog(SHORT), 0
    dog.token(0)
    for n in range(TRIAL):
        first = n % SHORT.off_tokens == 0
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
    for _ in range(TRIAL + TRIAL // 5):  # requests of five tokens
        run.dog.pause()
        run.stall_ns += 10**9
        run.dog.token(run.stall_ns)
        run.tokens(5)
        if run.dog.trials:
            break
    assert run.dog.last_gain == pytest.approx(0.1)
    run = Run(1000, 900)
    while not run.dog.trials:
        for n_sequences, took_ns in ((8, 10**6), (7, 10**6)):  # between single tokens
            run.dog.token(run.stall_ns, n_sequences)
            run.stall_ns += took_ns
        run.dog.token(run.stall_ns)
        run.tokens(3)
    assert run.dog.last_gain == pytest.approx(0.1)


def test_a_trial_begins_anew_when_the_number_of_sequences_stays_another() -> None:
    run = Run(1000, 2000)
    run.tokens(TRIAL - 2)
    n_passes = 0
    while not run.dog.trials:
        n_passes += 1
        run.stall_ns += 4500 if run.dog.on else 5000
        run.dog.token(run.stall_ns, 8)
    assert n_passes == SHORT.off_tokens + 1 + TRIAL
    assert run.dog.on and run.dog.last_gain == pytest.approx(0.1)


def test_it_tries_again_after_rests_that_grow_up_to_the_longest() -> None:
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
    """Tokens during which a link is busy for a share of the time, `busy`, and between which there are prompts."""

    def __init__(self, busy: float) -> None:
        super().__init__(1000, 500)
        self.busy, self.link_ns = busy, 0
        self.dog = Watchdog(SHORT, lambda: self.link_ns)
        self.dog.token(0)

    def tokens(self, n: int) -> None:
        for _ in range(n):
            self.link_ns += round(self.busy * self.off)
            super().tokens(1)
            self.dog.pause()
            self.link_ns += 10**6
            self.dog.token(self.stall_ns)


def test_a_link_that_is_hardly_busy_begins_no_trial_and_is_asked_again_after_rests_that_grow() -> None:
    run = Watched(SHORT.busy - 0.01)
    for rest in (100, 200, 400, 400):
        run.tokens(SHORT.weighed_tokens)
        assert run.dog.resting
        run.busy = SHORT.busy + 0.01
        run.tokens(rest)
        run.busy = SHORT.busy - 0.01
    assert not any(run.was_on) and run.dog.trials == 0


def test_a_link_that_is_busy_begins_a_trial_without_tokens_that_do_not_count() -> None:
    run = Watched(SHORT.busy)
    run.tokens(SHORT.weighed_tokens)
    assert not any(run.was_on) and not run.dog.resting
    run.tokens(TRIAL)
    assert run.dog.trials == 1 and run.dog.on
    run.tokens(SHORT.pause_tokens)
    assert run.dog.resting and not run.dog.on, "before the next trial the link is watched without prefetching"
