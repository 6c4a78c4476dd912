"""The choice between two schedules: by time per token, twice in a row, and trials that cost next to nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from moegguf.generate.answer import BatchedAnswer
from moegguf.generate.schedule import LOST_STEPS, PERIOD_STEPS, TRIAL_STEPS, Auto, ExpertFlow, Fifo, Step


class Grouped:
    """A schedule of half of those that run."""

    def __init__(self) -> None:
        self.n_closed = 0

    def choose(self, running: Any) -> Any:
        return running[: len(running) // 2]

    def close(self) -> None:
        self.n_closed += 1


RUNNING = cast("list[BatchedAnswer]", list(range(8)))


def run(auto: Auto, n_steps: int, fifo_s: float, grouped_s: float) -> tuple[float, int]:
    """Seconds and tokens of so many steps, which take so long for a token."""
    total_s, n_tokens = 0.0, 0
    for _ in range(n_steps):
        chosen = tuple(auto.choose(RUNNING))
        seconds = len(chosen) * (fifo_s if len(chosen) == len(RUNNING) else grouped_s)
        auto.ran(Step(chosen, len(chosen), seconds))
        total_s, n_tokens = total_s + seconds, n_tokens + len(chosen)
    return total_s, n_tokens


def new() -> tuple[Auto, Fifo, Grouped]:
    fifo, grouped = Fifo(), Grouped()
    return Auto(fifo, cast(ExpertFlow, grouped)), fifo, grouped


@pytest.mark.parametrize("slower", [1.2, 2.0, 3.0, 6.0])
def test_what_is_slower_is_tried_and_left(slower: float) -> None:
    auto, fifo, grouped = new()
    seconds, tokens = run(auto, 5000, 1.0, slower)
    assert auto.current is fifo
    assert tokens / seconds > 0.98  # of fifo's speed
    assert grouped.n_closed >= 5000 // (PERIOD_STEPS + TRIAL_STEPS)


@pytest.mark.parametrize(("slower", "n_steps"), [(2.0, TRIAL_STEPS), (2.1, LOST_STEPS)])
def test_a_trial_ends_as_soon_as_it_is_lost(slower: float, n_steps: int) -> None:
    auto, _, grouped = new()
    run(auto, PERIOD_STEPS, 1.0, slower)
    for _ in range(n_steps):
        assert cast(object, auto.current) is grouped
        run(auto, 1, 1.0, slower)
    assert cast(object, auto.current) is not grouped


def test_what_is_faster_twice_in_a_row_is_taken_and_left_again() -> None:
    auto, fifo, grouped = new()
    run(auto, PERIOD_STEPS + TRIAL_STEPS, 1.0, 0.8)
    assert auto.current is fifo
    run(auto, PERIOD_STEPS + TRIAL_STEPS, 1.0, 0.8)
    assert cast(object, auto.current) is grouped
    run(auto, 2 * (PERIOD_STEPS + TRIAL_STEPS), 1.0, 1.3)
    assert auto.current is fifo


def test_a_gain_too_small_to_be_sure_of_changes_nothing() -> None:
    auto, fifo, _ = new()
    run(auto, 3000, 1.0, 0.98)
    assert auto.current is fifo


def test_steps_with_prompts_do_not_count() -> None:
    auto, fifo, _ = new()
    for _ in range(10 * PERIOD_STEPS):
        auto.ran(Step(tuple(auto.choose(RUNNING)), 100, 1.0))
    assert auto.current is fifo and auto.choose(RUNNING) is RUNNING
