"""Figures of an answer in the form that more than one API gives them."""

from __future__ import annotations

from typing import Any

from moegguf.engine.stats import Stats

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON cannot hold


def ns(seconds: float) -> int:
    """Ollama's durations are whole nanoseconds."""
    return round(seconds * 1e9)


def moe_object(stats: Stats) -> dict[str, Any]:
    """What the experts cost; ours, beside Ollama's figures."""
    return {
        "hit_rate": round(stats.hit_rate, 6),
        "lookups": stats.lookups,
        "bytes_read": stats.bytes_read,
        "bytes_per_token": round(stats.bytes_per_token),
        "stall_duration": ns(stats.stall_s),
    }
