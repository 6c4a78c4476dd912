"""Sizes and times in the words that users of Ollama know: "4.7 GB", "3 days ago", "4 minutes from now"."""

from __future__ import annotations

from datetime import UTC, datetime

_SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
_HOUR_S = 3600.0
_DAY_H, _WEEK_H, _MONTH_H, _YEAR_H = 24, 24 * 7, 24 * 30, 24 * 365


def size(n_bytes: float) -> str:
    """Decimal units, one digit after the point below ten: "4.7 GB", "17 GB", "274 MB", "12 B"."""
    for unit, name in _SIZES:
        if n_bytes >= unit:
            value = n_bytes / unit
            whole = value >= 10 or value == int(value)
            return f"{int(value) if whole else f'{value:.1f}'} {name}"
    return f"{int(n_bytes)} B"


def span(seconds: float) -> str:
    """A length of time, roughly: "12 seconds", "About an hour", "3 weeks"."""
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


def moment(when: datetime | None, now: datetime | None = None) -> str:
    """When, seen from now: "3 days ago", "4 minutes from now"; None is "Forever"."""
    if when is None:
        return "Forever"
    seconds = (when - (now or datetime.now(UTC))).total_seconds()
    return f"{span(-seconds)} ago" if seconds <= 0 else f"{span(seconds)} from now"


def processor(size_bytes: int, vram_bytes: int) -> str:
    """Which processor holds a loaded model, as `ollama ps` says it."""
    if vram_bytes == 0:
        return "100% CPU"
    if size_bytes == 0 or vram_bytes > size_bytes:
        return "Unknown"
    if vram_bytes == size_bytes:
        return "100% GPU"
    cpu = round((size_bytes - vram_bytes) / size_bytes * 100)
    return f"{cpu}%/{100 - cpu}% CPU/GPU"
