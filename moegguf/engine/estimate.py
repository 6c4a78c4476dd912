"""Estimates for a pool of a given size, before any run: hit rate, bytes per token, tokens per second.

Hit rates are ranges. Where the model's own routing was measured (`Measured`), 49 in 50 of its requests lie in the
range; elsewhere it reaches from routing without any locality to the best that was published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moegguf.controller.measured import Measured, interpolate
from moegguf.engine.published import PUBLISHED, PublishedCurve
from moegguf.gguf.experts import ExpertLayout

COARSE_FACTOR = 0.8  # Mixtral's published hit rates begin there: 40 % with half of 8 experts per layer
COARSE_EXPERTS = 16  # of a layer: at most
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


def hit_range(layout: ExpertLayout, n_slots: int, measured: Measured | None = None) -> HitRange:
    """The range for `n_slots` slots, from this model's own measurement where it has one."""
    share = n_slots / max(1, layout.n_expert_total)
    if share >= 1:
        return HitRange(1.0, 1.0, "every expert is in memory")
    found = measured.range_at(share) if measured else None
    if measured and found:
        n = measured.about.get("ranges", measured.about.get("requests", "some"))
        return HitRange(*found, f"measured on this model: {n} requests of text")
    return _published_range(layout, n_slots, share)


def _published_range(layout: ExpertLayout, n_slots: int, share: float) -> HitRange:
    """From the hit rate of routing without locality, which is the share, to the best published.

    Below one token's experts over all layers, least-recent-use eviction hits next to nothing.
    """
    coarse = layout.n_expert <= COARSE_EXPERTS
    low = share * (COARSE_FACTOR if coarse else 1.0) if n_slots >= layout.token_cycle_slots else 0.0
    best = max(interpolate(curve.rates, share) for curve in PUBLISHED)
    return HitRange(low, best, "not measured on this model; from routing without locality to the best published")


def typical_hit_rate(layout: ExpertLayout, n_slots: int) -> float:
    """One figure between the ends of the published range: for comparing plans, not for promising anything."""
    published = _published_range(layout, n_slots, n_slots / max(1, layout.n_expert_total))
    return (published.low + published.high) / 2


def nearest_published(layout: ExpertLayout, n_slots: int) -> str:
    """What was published for a model with as many experts per layer and per token; "" when nothing was."""
    share = n_slots / max(1, layout.n_expert_total)
    for curve in PUBLISHED:
        if (curve.n_expert, curve.n_expert_used) == (layout.n_expert, layout.n_expert_used) and _covers(curve, share):
            return f"about {interpolate(curve.rates, share):.0%} for {curve.model} ({curve.source})"
    return ""


def _covers(curve: PublishedCurve, share: float) -> bool:
    return min(curve.rates) <= share <= max(curve.rates)


def expect(
    layout: ExpertLayout, n_slots: int, measured: Measured | None = None, speeds: Speeds | None = None
) -> Expected:
    """The estimate for `n_slots` slots; with speeds also tokens per second."""
    hits, cycle = hit_range(layout, n_slots, measured), layout.token_cycle_bytes
    most, least = round(cycle * (1 - hits.low)), round(cycle * (1 - hits.high))
    slow = fast = None
    if speeds is not None:
        token_s = _token_seconds(layout, speeds)
        slow, fast = SPEED_SPREAD / token_s(most), 1 / token_s(least)
    nearest = "" if measured and measured.range_at(n_slots / max(1, layout.n_expert_total)) else nearest_published(layout, n_slots)
    return Expected(hits.low, hits.high, least, most, slow, fast, hits.basis, nearest)


def _token_seconds(layout: ExpertLayout, speeds: Speeds) -> Callable[[int], float]:
    """Seconds of a token by the bytes it misses: these from the disk, all that it uses from memory."""
    used = layout.dense_bytes + layout.token_cycle_bytes
    compute_s = used / speeds.memory_bytes_per_s + layout.n_layer * LAYER_S
    return lambda missed_bytes: compute_s + missed_bytes / speeds.disk_bytes_per_s
