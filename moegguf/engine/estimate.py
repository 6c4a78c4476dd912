"""Estimates for a pool of a given size, before any run: hit rate, bytes per token, tokens per second.

Hit rates are ranges. Where the model's own routing was measured (`Measured`), 49 in 50 of its requests lie in the
range; elsewhere it reaches from routing without any locality to the best that was published.
"""

from __future__ import annotations

from dataclasses import dataclass

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.measured import Measured, interpolate
from moegguf.engine.published import PUBLISHED
from moegguf.gguf.experts import ExpertLayout

NO_LOCALITY = 0.7  # hit rate over share where any expert is as likely as another: 0.75 to 1.1 on random weights
NOT_MEASURED = "not measured on this model: from routing without locality to the best published"
LAYER_S = 0.1e-3  # a layer's graph nodes and barriers, on small models
SPEED_SPREAD = 0.7  # reads and computation share processors and memory; runs reach this share of the bound, or more


@dataclass(frozen=True)
class HitRange:
    """The ends between which the hit rate of an answer's tokens is expected, and what they rest on."""

    low: float
    high: float
    basis: str


@dataclass(frozen=True)
class Speeds:
    """Bytes per second: of random reads of this model's experts from its disk, and of reading main memory."""

    disk_bytes_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Expected:
    """Low and high ends of an estimate while answering. Bytes are per token. Tokens per second are None where no speed
    was measured. `nearest`: a published hit rate of a model of this shape, with its source; "" without one.
    """

    hit_low: float
    hit_high: float
    missed_bytes_low: int
    missed_bytes_high: int
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    basis: str
    nearest: str


def typical_hit_rate(layout: ExpertLayout, n_slots: int) -> float:
    """One figure between the ends of the published range: for comparing plans, not for promising anything."""
    return sum(_published_ends(layout, n_slots)) / 2


def _share(layout: ExpertLayout, n_slots: int) -> float:
    return n_slots / max(1, layout.n_expert_total)


def _published_ends(layout: ExpertLayout, n_slots: int) -> tuple[float, float]:
    """From the hit rate of routing without locality to the best published. Below one token's experts over all layers,
    least-recent-use eviction hits next to nothing.
    """
    share = _share(layout, n_slots)
    low = NO_LOCALITY * share if n_slots >= layout.token_cycle_slots else 0.0
    return (low, max(interpolate(curve.rates, share) for curve in PUBLISHED)) if share < 1 else (1.0, 1.0)


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
        share = _share(self.layout, n_slots)
        if share >= 1:
            return HitRange(1.0, 1.0, "every expert is in memory")
        if self.measured and (found := self.measured.range_at(share)):
            n = self.measured.about.get("ranges", self.measured.about.get("requests", "some"))
            return HitRange(*found, f"measured on this model: {n} requests of text")
        return HitRange(*_published_ends(self.layout, n_slots), NOT_MEASURED)

    def nearest_published(self, n_slots: int) -> str:
        """What was published for a model with as many experts per layer and per token; "" when nothing was."""
        share, shape = _share(self.layout, n_slots), (self.layout.n_expert, self.layout.n_expert_used)
        for curve in PUBLISHED:
            if (curve.n_expert, curve.n_expert_used) == shape and min(curve.rates) <= share <= max(curve.rates):
                return f"about {interpolate(curve.rates, share):.0%} for {curve.model} ({curve.source})"
        return ""

    def expect(self, n_slots: int, speeds: Speeds | None = None) -> Expected:
        """The estimate for `n_slots` slots; with speeds also tokens per second."""
        hits, cycle = self.range_at(n_slots), self.layout.token_cycle_bytes
        most, least = round(cycle * (1 - hits.low)), round(cycle * (1 - hits.high))
        slow = fast = None
        if speeds is not None:
            slow, fast = SPEED_SPREAD / self._token_s(most, speeds), 1 / self._token_s(least, speeds)
        nearest = self.nearest_published(n_slots) if hits.basis == NOT_MEASURED else ""
        return Expected(hits.low, hits.high, least, most, slow, fast, hits.basis, nearest)

    def _token_s(self, missed_bytes: int, speeds: Speeds) -> float:
        """Seconds of a token: what it misses comes from the disk, all that it uses from memory."""
        used_bytes = self.layout.dense_bytes + self.layout.token_cycle_bytes
        compute_s = used_bytes / speeds.memory_bytes_per_s + self.layout.n_layer * LAYER_S
        return compute_s + missed_bytes / speeds.disk_bytes_per_s
