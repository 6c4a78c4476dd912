"""Sizes, times and shares as text; the first four as Ollama formats them: "4.7 GB", "3 days ago"."""

from __future__ import annotations

import math
from datetime import UTC, datetime

_SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
_LONG_H = ((24 * 365, "year"), (24 * 30, "month"), (24 * 7, "week"), (24, "day"))


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
        return f"{int(seconds)} second{'s' * (int(seconds) != 1)}"
    if seconds < 3600:
        return "About a minute" if seconds < 120 else f"{int(seconds / 60)} minutes"
    hours = round(seconds / 3600)
    if hours == 1:
        return "About an hour"
    n, name = next(((hours // unit, name) for unit, name in _LONG_H if hours >= 2 * unit), (hours, "hour"))
    return f"{n} {name}s"


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
