"""Hit rates that answers reached on this machine, kept for later plans of the same model."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from moegguf.controller.hit_rates import NEAR_SHARE
from moegguf.engine.known_facts import KnownFact
from moegguf.engine.stats import Stats
from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import ExpertLayout

LEAST_PASSES = 32  # of an answer whose hit rate says something


class RunHits:
    """Look-ups of one load's answers, by the share of experts that had a slot. They are kept by `save`."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        self._hits = Counter[float]()
        self._lookups = Counter[float]()

    def add(self, answer: Stats) -> None:
        """Counts an answer. A short one does not count, nor one with slots that were still empty."""
        if answer.passes < LEAST_PASSES or not answer.slots_used == answer.n_slots < answer.n_experts:
            return
        share = round(answer.n_slots / answer.n_experts / NEAR_SHARE) * NEAR_SHARE
        self._hits[share] += answer.hits
        self._lookups[share] += answer.lookups

    def save(self) -> None:
        """Keeps the hit rates, in place of those that earlier loads had with the same shares."""
        if self._lookups:
            rates = {share: self._hits[share] / n for share, n in self._lookups.items()}
            with suppress(ExpertIOError):
                fact = _fact(self._layout)
                fact.write((fact.read(dict) or {}) | {f"{share:.2f}": rate for share, rate in rates.items()})


def read_run_hits(layout: ExpertLayout) -> dict[float, float]:
    """Returns {share of experts with a slot: hit rate} of earlier loads; empty where the file is damaged."""
    with suppress(ExpertIOError, ValueError, TypeError):
        known = {float(share): float(rate) for share, rate in (_fact(layout).read(dict) or {}).items()}
        if all(0 <= number <= 1 for pair in known.items() for number in pair):
            return known
    return {}


def _fact(layout: ExpertLayout) -> KnownFact:
    return KnownFact("hit_rates", layout, None)
