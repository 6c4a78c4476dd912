"""Hit rates that others published for text, by the share of a model's experts in fast memory. Data only.

All are of decoding with least-recent-use eviction, each on its author's own text; `source` is a GitHub thread or
repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
