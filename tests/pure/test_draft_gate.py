"""Tests DraftGate, which decides how many tokens are drafted. The time of passes is
simulated."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from moegguf.generate import drafting
from moegguf.generate.drafting import DraftGate

SOURCE = 1


class Simulation:
    """Decodes with a gate. A pass takes 1 s, and each drafted token adds `cost`
    seconds.

    `chance` maps the number of decoded tokens to the probability that a drafted token
    is right. Nothing is drafted while this probability is 0. A pass takes up to `noise`
    (a fraction) more or less time, at random.
    """

    def __init__(
        self, gate: DraftGate, cost: float, n_sequences: int = 1, noise: float = 0.02
    ) -> None:
        self.gate, self._cost, self._n_sequences, self._noise = (
            gate,
            cost,
            n_sequences,
            noise,
        )
        self._random = random.Random(0)
        # Number of tokens drafted for the first sequence in each pass.
        self.widths: list[int] = []

    def speed(self, n_tokens: int, chance: Callable[[int], float]) -> float:
        """Decodes at least `n_tokens` tokens of each sequence. Returns the mean speed
        of a sequence in tokens per second."""
        answers, seconds, n_done = (
            [self.gate.of_answer() for _ in range(self._n_sequences)],
            0.0,
            0,
        )
        while n_done < n_tokens:
            if not self.gate.begin_pass():
                seconds, n_done = seconds + 1, n_done + 1
                self.widths.append(0)
                continue
            widths = [of_answer[SOURCE] for of_answer in self.gate.widths(answers)]
            n_drafted = [n if chance(n_done) else 0 for n in widths]
            n_accepted = [self._accepted(n, chance(n_done)) for n in n_drafted]
            for answer, n, right in zip(answers, n_drafted, n_accepted, strict=True):
                if n:
                    answer[SOURCE].note(n, right)
            pass_s = (1 + self._cost * sum(n_drafted)) * self._random.uniform(
                1 - self._noise, 1 + self._noise
            )
            self.gate.note_pass(
                self._n_sequences, sum(n_drafted), sum(n_accepted), pass_s
            )
            seconds += pass_s
            n_done += 1 + sum(n_accepted) // self._n_sequences
            self.widths.append(n_drafted[0])
        return n_done / seconds

    def _accepted(self, n: int, chance: float) -> int:
        return next((i for i in range(n) if self._random.random() >= chance), n)


def measured(gate: DraftGate, cost: float) -> DraftGate:
    """Returns the gate after passes without drafts, and passes with drafts that were
    all accepted."""
    for n_drafted in [0] * 9 + [3, 6] * 4:
        gate.note_pass(1, n_drafted, n_drafted, 1 + cost * n_drafted)
        for each in gate.acceptance:
            each.note(n_drafted, n_drafted)
    return gate


def test_the_first_drafts_of_an_answer_add_at_most_the_time_of_one_pass() -> None:
    gate = measured(DraftGate(), 0.25)
    answer = gate.of_answer()
    assert gate.widths([answer])[0][SOURCE] == 4
    answer[SOURCE].note(4, 4)
    assert gate.widths([answer])[0][SOURCE] == 12


def test_repeated_tokens_shorten_drafts_until_none_pay() -> None:
    widths = []
    for seconds in (None, 1.3, 1.9):
        gate = measured(DraftGate(), 0.05)
        if seconds is not None:
            gate.note_repeated(1, seconds)
        answer = gate.of_answer()
        answer[SOURCE].note(3, 1)
        widths.append(gate.widths([answer])[0][SOURCE])
    assert widths[0] > widths[1] > widths[2]


@pytest.mark.parametrize("n_sequences", [1, 4])
def test_gate_drafts_widely_if_drafts_are_likely(n_sequences: int) -> None:
    simulation = Simulation(DraftGate(), 0.06 / n_sequences, n_sequences)
    assert simulation.speed(600, lambda _: 0.95) > 2
    assert max(simulation.widths) > 8


@pytest.mark.parametrize("cost", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("chance", [0.02, 0.2])
def test_gate_loses_less_than_one_percent_on_bad_drafts(
    cost: float, chance: float
) -> None:
    gate = DraftGate()
    speeds = [Simulation(gate, cost).speed(256, lambda _: chance) for _ in range(8)]
    assert sum(speeds) / len(speeds) > 0.99


@pytest.mark.parametrize(
    "steps",
    [[(1000, 0.05, 0.99), (400, 0.95, 1.5)], [(400, 0.95, 2), (400, 0.05, 0.95)]],
)
def test_gate_adapts_when_a_text_starts_or_stops_repeating(
    steps: list[tuple[int, float, float]],
) -> None:
    simulation = Simulation(DraftGate(), 0.06)
    for n_tokens, chance, least in steps:
        assert simulation.speed(n_tokens, lambda _, chance=chance: chance) > least


def test_gate_does_not_draft_if_drafts_are_likely_but_too_costly() -> None:
    simulation = Simulation(DraftGate(), 0.97)
    assert simulation.speed(600, lambda _: 0.9) > 0.99
    assert sum(1 for width in simulation.widths if width) < 30


def test_gate_measures_passes_without_drafts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "RENEW_PASSES", 8)
    simulation = Simulation(DraftGate(), 0.05)
    simulation.speed(600, lambda _: 1.0)
    drafted = "".join("d" if width else "." for width in simulation.widths[20:])
    assert "d" * 8 in drafted and "d" * 9 not in drafted


def seconds_in_vain(gate: DraftGate, n_passes: int, look_s: float) -> float:
    """Returns the simulated seconds of passes that find no draft. A pass takes 1 s.

    A pass takes `look_s` longer if the gate lets the model look for drafts.
    """
    seconds = 0.0
    for _ in range(n_passes):
        seconds += 1
        if gate.begin_pass():
            spent_s = look_s * any(map(any, gate.widths([gate.of_answer()])))
            seconds += spent_s
            gate.note_pass(1, 0, 0, 1 + spent_s, spent_s)
    return seconds


def test_gate_loses_less_than_one_percent_on_searches_without_drafts() -> None:
    assert seconds_in_vain(DraftGate(), 2000, 0.08) < 1.006 * 2000


def test_gate_searches_little_after_a_repeating_text_has_ended() -> None:
    gate = DraftGate()
    Simulation(gate, 0.06).speed(400, lambda _: 0.95)
    assert seconds_in_vain(gate, 160, 0.05) < 1.01 * 160
