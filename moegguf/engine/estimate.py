"""Estimates for a pool of a given size, before any run: hit rate, bytes per token, tokens per second.

The hit rates were measured with LRU and random routing over 24 layers of 60 experts. Real text repeats experts more
often and hits more, so a range is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from moegguf.gguf.experts import ExpertLayout

NOTE = "rough guess, from random routing"

# (share of all experts that have a slot, LRU hit rate)
_HITS = (
    (0.0, 0.0),
    (0.083, 0.24),
    (0.167, 0.46),
    (0.25, 0.60),
    (0.375, 0.75),
    (0.5, 0.85),
    (0.75, 0.98),
    (1.0, 1.0),
)
_TEXT_GAIN = 0.4  # share of the misses that text may save over random routing


@dataclass(frozen=True)
class Expected:
    """Low and high ends of an estimate. Bytes are per token. Tokens per second are the link's bound: None without a
    disk speed, or when nothing has to be read and the processor is the bound.
    """

    hit_low: float
    hit_high: float
    missed_bytes_low: int
    missed_bytes_high: int
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    note: str = NOTE


def guess_hit_rate(share: float) -> float:
    """LRU hit rate when `share` of all experts have a slot: linear interpolation between the measured points."""
    share = min(max(share, 0.0), 1.0)
    for (x0, y0), (x1, y1) in pairwise(_HITS):
        if share <= x1:
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return 1.0


def expect(layout: ExpertLayout, n_slots: int, disk_bytes_per_s: float | None = None) -> Expected:
    """The estimate for `n_slots` slots, with a bound in tokens per second when the disk speed is given."""
    cycle = layout.token_cycle_bytes
    if not layout.is_moe or n_slots >= layout.n_expert_total:
        return Expected(1.0, 1.0, 0, 0, None, None)
    guess = guess_hit_rate(n_slots / layout.n_expert_total)
    low = guess if n_slots >= layout.token_cycle_slots else 0.0
    high = guess + (1 - guess) * _TEXT_GAIN
    most, least = round(cycle * (1 - low)), round(cycle * (1 - high))

    def bound(n_bytes: int) -> float | None:
        return disk_bytes_per_s / n_bytes if disk_bytes_per_s and n_bytes else None

    return Expected(low, high, least, most, bound(most), bound(least))
