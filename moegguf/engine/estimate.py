"""What to expect of a pool of a given size, before any run: hit rate, bytes per token, tokens per second.

Hit rates are ranges. Where the model's own routing was measured (`Measured`), 49 in 50 of its requests lie in the
range; elsewhere it reaches from the lowest to the highest that was published, for models of this shape where there are
any. Placements are compared by one curve of hit rates (`known_hits`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.measured import Measured
from moegguf.controller.published import HitRange, published_range, share_of
from moegguf.controller.shape import MoeShape
from moegguf.engine.cost import HitCurve, ModelBytes, Speeds, cpu_s, published_curve
from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import ExpertLayout

SPEED_SPREAD = 0.7  # reads and computation share processors and memory; runs reach this share of the bound, or more
LEAST_TOKENS = 256  # of runs whose counts say something


@dataclass(frozen=True)
class Expected:
    """Low and high ends of an estimate while answering. Bytes are per token. Tokens per second are None where no speed
    was measured.
    """

    hit_low: float
    hit_high: float
    missed_bytes_low: int
    missed_bytes_high: int
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    basis: str


@dataclass(frozen=True)
class HitRates:
    """What is known of a model's hit rates. measured: None for a model whose routing was not recorded."""

    layout: ExpertLayout
    measured: Measured | None = None

    @classmethod
    def of(cls, layout: ExpertLayout) -> HitRates:
        """With the nearest measurement of this very model, which its routers identify."""
        return cls(layout, Artifacts(layout).measured() if layout.is_moe else None)

    def range_at(self, n_slots: int) -> HitRange:
        """The range for `n_slots` slots."""
        share = share_of(self.layout, n_slots)
        if share >= 1:
            return HitRange(1.0, 1.0, "every expert is in memory")
        if self.measured and (found := self.measured.range_at(share)):
            n = self.measured.about.get("ranges", self.measured.about.get("requests", "some"))
            return HitRange(*found, f"measured on this model: {n} requests of text")
        return published_range(self.layout, n_slots)

    def expect(self, n_slots: int, speeds: Speeds | None = None) -> Expected:
        """The estimate for `n_slots` slots in RAM; with speeds also tokens per second where the CPU computes."""
        hits, cycle, model = self.range_at(n_slots), self.layout.token_cycle_bytes, ModelBytes.of(self.layout)
        most, least = round(cycle * (1 - hits.low)), round(cycle * (1 - hits.high))
        slow = fast = None
        if speeds is not None:
            slow, fast = SPEED_SPREAD / cpu_s(model, speeds, 1 - hits.low), 1 / cpu_s(model, speeds, 1 - hits.high)
        return Expected(hits.low, hits.high, least, most, slow, fast, hits.basis)


def known_hits(layout: ExpertLayout) -> HitCurve:
    """Hit rates to expect of this model's slots: measured on its routing, of its saved counts, or published."""
    with suppress(ExpertIOError):  # of a model of which only the headers are here
        if found := _measured_hits(layout) or _hits_of_counts(layout):
            return found
    return published_curve(layout.n_expert, layout.n_expert_used)


def _measured_hits(layout: ExpertLayout) -> HitCurve | None:
    measured = Artifacts(layout).measured()
    if measured is None or not measured.hit_rates:
        return None
    policy, n = measured.choose(0.5).policy, measured.about.get("requests", "some")
    return HitCurve(measured.hit_rates[policy], f"measured on this model: {n} requests, {policy}")


def _hits_of_counts(layout: ExpertLayout) -> HitCurve | None:
    """What the experts that earlier runs used most would hit, if they stayed: caches of recent use hit more."""
    uses = Artifacts(layout).uses(MoeShape.of(layout))
    if uses is None or uses.sum() < LEAST_TOKENS * layout.token_cycle_slots:
        return None
    ordered, total = np.sort(uses, axis=None)[::-1], layout.n_expert_total
    rates = {n / 10: float(ordered[: n * total // 10].sum() / ordered.sum()) for n in range(1, 10)}
    return HitCurve(rates, "from this model's saved counts: those used most would stay")
