"""Keeps the hit rates that answers reached on this machine, for later plans of the same
model."""

from __future__ import annotations

from contextlib import suppress

from moegguf.engine.known_facts import KnownFact
from moegguf.engine.stats import Stats
from moegguf.gguf.experts import ExpertLayout

LEAST_PASSES = 32  # answers with fewer passes are ignored


class RunHits:
    """Adds up the statistics of one load's answers, separately for each share of
    experts that had a slot. `save` writes the hit rate of each share."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        self._answers = dict[float, Stats]()

    def add(self, answer: Stats) -> None:
        """Adds an answer's statistics. Ignores the answer if it is short, if slots were
        still empty, or if every expert had a slot."""
        if (
            answer.passes >= LEAST_PASSES
            and answer.slots_used == answer.n_slots < answer.n_experts
        ):
            share = round(answer.n_slots / answer.n_experts, 2)
            before = self._answers.get(share)
            self._answers[share] = before + answer if before else answer

    def save(self) -> None:
        """Saves the hit rate of each share of slots. This overwrites the rate that an
        earlier load saved for the same share. Saves nothing if the model's files can no
        longer be read."""
        if self._answers:
            rates = {
                share: answers.hit_rate for share, answers in self._answers.items()
            }
            _fact(self._layout).write([*(read_run_hits(self._layout) | rates).items()])


def read_run_hits(layout: ExpertLayout) -> dict[float, float]:
    """Returns {share of experts with a slot: hit rate} of earlier loads; {} if the file
    is damaged or missing."""
    with suppress(ValueError, TypeError):
        return {
            float(share): min(1.0, float(rate))
            for share, rate in _fact(layout).read(list) or ()
        }
    return {}


def _fact(layout: ExpertLayout) -> KnownFact:
    return KnownFact("hit_rates", layout, None)
