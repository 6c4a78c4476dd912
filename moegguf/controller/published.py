"""Hit rates that others published for text, by the share of a model's experts in fast memory.

All are of decoding with least-recent-use eviction, each on its author's own text; `source` is a GitHub thread or
repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moegguf.controller.measured import interpolate
from moegguf.gguf.experts import ExpertLayout


@dataclass(frozen=True)
class HitRange:
    """The ends between which the hit rate of an answer's tokens is expected, and what they rest on."""

    low: float
    high: float
    basis: str


@dataclass(frozen=True)
class PublishedCurve:
    """Hit rates of one model: `rates` are {share of all experts in memory: hit rate}."""

    model: str
    n_expert: int
    n_expert_used: int
    source: str
    rates: Mapping[float, float]


PUBLISHED = (
    PublishedCurve(
        "Qwen3-30B-A3B", 128, 8, "kekzl/imp#1359",
        {0.03: 0.0, 0.06: 0.37, 0.18: 0.706, 0.24: 0.803, 0.26: 0.84, 0.38: 0.89, 0.40: 0.95, 0.64: 0.96},
    ),
    PublishedCurve(
        "Qwen3.8-Flash-Next", 512, 10, "kekzl/imp#2061",
        {0.06: 0.435, 0.12: 0.62, 0.18: 0.72, 0.24: 0.789, 0.33: 0.85},
    ),
    PublishedCurve(
        "Qwen3.8-Flash-Next", 512, 10, "BigCherry",
        {0.042: 0.45, 0.083: 0.61, 0.167: 0.79, 0.25: 0.88, 0.29: 0.90},
    ),
    PublishedCurve("Qwen3.6-35B-A3B", 256, 8, "FreeToken#231, lucebox", {0.22: 0.741, 0.49: 0.79}),
    PublishedCurve("GLM-5.3-Flash", 288, 8, "neurall/llama.cpp", {0.22: 0.67, 0.44: 0.88, 0.66: 0.95, 0.88: 0.94}),
    PublishedCurve("OLMoE", 64, 8, "colibri#1092", {0.25: 0.51}),
    PublishedCurve(
        "random weights", 0, 0, "tools/make_model.py --locality none",  # of no shape: text is reused more
        {0.083: 0.24, 0.167: 0.46, 0.25: 0.60, 0.375: 0.75, 0.5: 0.85, 0.75: 0.98},
    ),
)  # fmt: skip


def share_of(layout: ExpertLayout, n_slots: int) -> float:
    """The share of all experts that so many slots hold."""
    return n_slots / max(1, layout.n_expert_total)


def published_range(layout: ExpertLayout, n_slots: int) -> HitRange:
    """From the lowest to the highest hit rate published for text: of models of this shape, else of all. Below one
    token's experts over all layers, least-recent-use eviction hits next to nothing.
    """
    share, shape = share_of(layout, n_slots), (layout.n_expert, layout.n_expert_used)
    curves = [curve for curve in PUBLISHED if curve.n_expert]
    same = [curve for curve in curves if (curve.n_expert, curve.n_expert_used) == shape]
    rates = sorted((interpolate(curve.rates, share), f"{curve.model}, {curve.source}") for curve in same or curves)
    (low, lowest), (high, highest) = rates[0], rates[-1]
    sources = lowest if lowest == highest else f"{lowest}, to {highest}"
    of = "of its shape" if same else "of other shapes"
    basis = f"not measured on this model; published for models {of}: {sources}"
    return HitRange(low if n_slots >= layout.token_cycle_slots else 0.0, high, basis)


def typical_hit_rate(layout: ExpertLayout, n_slots: int) -> float:
    """One figure between the ends of the published range: for comparing plans, not for promising anything."""
    found = published_range(layout, n_slots)
    return (found.low + found.high) / 2
