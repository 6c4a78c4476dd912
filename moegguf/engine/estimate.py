"""Estimates for a pool of a given size, before any run: hit rate, bytes per token, tokens per second.

Hit rates are ranges. Where the model's own routing was measured (`Measured`), 49 in 50 of its requests lie in the
range; elsewhere it reaches from the lowest to the highest that was published, for models of this shape where there are
any.
"""

from __future__ import annotations

from dataclasses import dataclass

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.measured import Measured
from moegguf.controller.published import HitRange, published_range, share_of
from moegguf.gguf.experts import ExpertLayout

LAYER_S = 0.1e-3  # a layer's graph nodes and barriers, on small models
SPEED_SPREAD = 0.7  # reads and computation share processors and memory; runs reach this share of the bound, or more


@dataclass(frozen=True)
class Speeds:
    """Bytes per second: of random reads of this model's experts from its disk, and of reading main memory."""

    disk_bytes_per_s: float
    memory_bytes_per_s: float


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
        """The estimate for `n_slots` slots; with speeds also tokens per second."""
        hits, cycle = self.range_at(n_slots), self.layout.token_cycle_bytes
        most, least = round(cycle * (1 - hits.low)), round(cycle * (1 - hits.high))
        slow = fast = None
        if speeds is not None:
            slow, fast = SPEED_SPREAD / self._token_s(most, speeds), 1 / self._token_s(least, speeds)
        return Expected(hits.low, hits.high, least, most, slow, fast, hits.basis)

    def _token_s(self, missed_bytes: int, speeds: Speeds) -> float:
        """Seconds of a token: what it misses comes from the disk, all that it uses from memory."""
        used_bytes = self.layout.dense_bytes + self.layout.token_cycle_bytes
        compute_s = used_bytes / speeds.memory_bytes_per_s + self.layout.n_layer * LAYER_S
        return compute_s + missed_bytes / speeds.disk_bytes_per_s
