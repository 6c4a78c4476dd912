"""Sizes, times and shares as text; the first four as Ollama formats them: "4.7 GB", "3 days ago"."""

from __future__ import annotations

import math
from datetime import UTC, datetime

_SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
_HOUR_S = 3600.0
_DAY_H, _WEEK_H, _MONTH_H, _YEAR_H = 24, 24 * 7, 24 * 30, 24 * 365


def human_bytes(n_bytes: float) -> str:
    """Decimal units, one decimal below ten: "4.7 GB", "17 GB", "274 MB", "12 B"."""
    for unit, name in _SIZES:
        if n_bytes >= unit:
            value = n_bytes / unit
            whole = value >= 10 or value == int(value)
            return f"{int(value) if whole else f'{value:.1f}'} {name}"
    return f"{int(n_bytes)} B"


def human_duration(seconds: float) -> str:
    """A rounded duration: "12 seconds", "About an hour", "3 weeks"."""
    if seconds < 1:
        return "Less than a second"
    if seconds < 60:
        return _count(int(seconds), "second")
    if seconds < _HOUR_S:
        minutes = int(seconds / 60)
        return "About a minute" if minutes == 1 else f"{minutes} minutes"
    hours = round(seconds / _HOUR_S)
    if hours == 1:
        return "About an hour"
    for least_h, unit_h, name in (
        (2 * _YEAR_H, _YEAR_H, "year"),
        (2 * _MONTH_H, _MONTH_H, "month"),
        (2 * _WEEK_H, _WEEK_H, "week"),
        (2 * _DAY_H, _DAY_H, "day"),
    ):
        if hours >= least_h:
            return _count(hours // unit_h, name)
    return f"{hours} hours"


def _count(n: int, name: str) -> str:
    return f"{n} {name}{'s' * (n != 1)}"


def human_time(when: datetime | None, now: datetime | None = None) -> str:
    """`when` relative to `now`: "3 days ago", "4 minutes from now"; None is "Forever"."""
    if when is None:
        return "Forever"
    seconds = (when - (now or datetime.now(UTC))).total_seconds()
    return f"{human_duration(-seconds)} ago" if seconds <= 0 else f"{human_duration(seconds)} from now"


def processor_split(size_bytes: int, vram_bytes: int) -> str:
    """Where a loaded model's bytes are, as in `ollama ps`: "100% CPU", "48%/52% CPU/GPU"."""
    if vram_bytes == 0:
        return "100% CPU"
    if size_bytes == 0 or vram_bytes > size_bytes:
        return "Unknown"
    if vram_bytes == size_bytes:
        return "100% GPU"
    cpu = round((size_bytes - vram_bytes) / size_bytes * 100)
    return f"{cpu}%/{100 - cpu}% CPU/GPU"


def percent(share: float | None, unknown: str = "-") -> str:
    """ "47.1%" for 0.471; `unknown` for None and NaN."""
    return unknown if share is None or math.isnan(share) else f"{share:.1%}"
