"""Parses and formats sizes in bytes, budgets for experts, links, durations and times.

Functions whose names begin with `human` imitate Ollama's formats. engine/solver.py
applies a budget to a model and a machine.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from moegguf.errors import BudgetError, OptionError
from moegguf.options import BUDGETS

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
MAX_BYTES = 1 << 60

ACCEPTED_BUDGETS = (
    'accepted: "auto", a share of all experts above 0% and up to 100%, such as "50%", or a size of 1 byte to'
    ' 2^60 bytes, such as "4GiB", "512MiB" or "2.5 GB"'
)

_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_NAMES = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)\s*([a-z]{0,3})", re.ASCII | re.IGNORECASE)
_SIZE_RULE = 'a size must be from 1 byte to 2^60 bytes, as a whole number or with a unit, such as "4GiB"'
_LONGEST_S = float(2**63 // 10**9)  # Go's longest duration, 292 years
_UNITS_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_NUMBER = r"(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(
    rf"([+-]?)((?:{_NUMBER}(?:ns|us|µs|μs|ms|s|m|h)){{1,16}}|{_NUMBER})", re.ASCII
)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
_UP_TO_100 = re.compile(r"(?:[1-9]\d?(?:\.\d{1,9})?|100)", re.ASCII)


def shown(value: object) -> str:
    """Returns the repr of a value for a message, truncated to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an int with thousands of digits
        text = "a number with thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def parse_size(value: str | int) -> int:
    """Returns the number of bytes in a size such as "4GiB", "2.5 GB" or "512M", or in a
    whole number. K, M, G and T alone are powers of 1024. Raises ValueError for anything
    else, and for sizes that are not positive or above 2^60 bytes."""
    n_bytes = -1
    if isinstance(value, int) and not isinstance(value, bool):
        n_bytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        from decimal import Decimal  # loads slowly, and most commands parse no size

        unit = _UNITS.get(match[2].lower(), 0)
        if not ("." in match[1] and unit == 1):
            n_bytes = int(Decimal(match[1]) * unit)
    if not 0 < n_bytes <= MAX_BYTES:
        raise ValueError(f"{_SIZE_RULE}, but is {shown(value)}")
    return n_bytes


def parse_store_size(value: str | int) -> int | None:
    """Returns 0 for 0 or "0", None for "auto", and otherwise the number of bytes from
    `parse_size`. Raises ValueError for anything that `parse_size` rejects."""
    text = str(value).strip().lower()
    if text == "auto":
        return None
    try:
        return 0 if text == "0" else parse_size(value)
    except ValueError:
        raise ValueError(
            f'{_SIZE_RULE}, or "auto" or 0, but is {shown(value)}'
        ) from None


def format_bytes(n_bytes: int) -> str:
    """Formats a number of bytes with a unit and about three digits: "0 B", "900 B",
    "22.3MiB", "7.52GiB"."""
    sign, size = ("-", -n_bytes) if n_bytes < 0 else ("", n_bytes)
    if size < KIB:
        return f"{sign}{size} B"
    unit, name = next(pair for pair in _NAMES if size >= pair[0])
    number = size / unit
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{sign}{number:.{digits}f}{name}"


def format_bytes_up(n_bytes: int) -> str:
    """Formats a positive number of bytes, rounded up to a tenth of a MiB: "22.4MiB".
    `parse_size` therefore returns at least `n_bytes` for the text."""
    tenths = -(-n_bytes * 10 // MIB)
    return f"{tenths // 10}.{tenths % 10}MiB"


@dataclass(frozen=True)
class ExpertCache:
    """A budget for experts in fast memory: the free memory ("auto"), a share of all
    experts, or a number of bytes."""

    mode: Literal["auto", "fraction", "bytes"]
    # Share of all experts' bytes, in (0, 1]; only for mode "fraction".
    fraction: float = 0.0
    # The budget in mode "bytes"; the limit in mode "auto", 0: no limit.
    n_bytes: int = 0
    # The tier that the budget is for, a key of BUDGETS.
    tier: str = field(default="RAM", compare=False)

    @property
    def option(self) -> str:
        """The name of the option that sets this budget."""
        return BUDGETS[self.tier]

    @property
    def as_given(self) -> str:
        """The option and its value, for messages, in the form NAME='50%'."""
        return f"{self.option}={str(self)!r}"

    def __str__(self) -> str:
        if self.mode == "auto":
            return "auto"
        return (
            f"{self.fraction * 100:g}%"
            if self.mode == "fraction"
            else format_bytes(self.n_bytes)
        )


def parse_expert_cache(
    value: str | int | float | ExpertCache, tier: str = "RAM"
) -> ExpertCache:
    """Parses a budget for the experts in `tier`, which is a key of BUDGETS. A whole
    number is in bytes.

    Raises BudgetError, which lists the accepted forms, for anything else and for
    numbers that are not positive. A string from "1" to "100" is an error, too, since it
    probably means percent.
    """
    hint = ""
    if isinstance(value, ExpertCache):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return ExpertCache("auto", tier=tier)
        if match := _PERCENT.fullmatch(text):
            fraction = float(match[1]) / 100
            if 0 < fraction <= 1:
                return ExpertCache("fraction", fraction=fraction, tier=tier)
        if _UP_TO_100.fullmatch(text):
            hint = f'did you mean "{text}%"? '
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, float) and not hint:
        try:
            return ExpertCache("bytes", n_bytes=parse_size(value), tier=tier)
        except ValueError:
            pass
    raise BudgetError(
        f"{BUDGETS[tier]} is {shown(value)}, which is not a budget; {hint}{ACCEPTED_BUDGETS}."
    )


@dataclass(frozen=True)
class Link:
    """A link between two memories, such as RAM and VRAM."""

    bytes_per_s: float  # bandwidth
    # Seconds that each copy takes in addition to n_bytes / bytes_per_s.
    latency_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:g}GB/s,{self.latency_s * 1e6:g}us"

    def seconds(self, n_bytes: float, n_copies: float = 1) -> float:
        """Returns the total duration in seconds of `n_copies` successive copies, which
        together copy `n_bytes`."""
        return n_bytes / self.bytes_per_s + n_copies * self.latency_s


def parse_link(text: str) -> Link:
    """Parses a link: a bandwidth and, after a comma, an optional latency, as in
    "24GB/s,35us" or "12.5 GB/s". Raises OptionError for anything else."""
    bandwidth, _, latency = text.partition(",")
    size, _, unit = bandwidth.strip().rpartition("/")
    try:
        if unit.strip().lower() != "s":
            raise ValueError
        link = Link(float(parse_size(size)), parse_duration(latency.strip() or 0))
        if not math.isfinite(link.latency_s):
            raise ValueError
    except (ValueError, OptionError):
        raise OptionError(
            f"{shown(text)} is not a link; give a bandwidth above 0, and optionally a latency of 0 or more, such as"
            " '24GB/s' or '24GB/s,35us'."
        ) from None
    return link


def parse_duration(value: str | int | float) -> float:
    """Parses a number of seconds (a number or its text), or a Go duration such as
    "1h30m" or "300ms". Returns seconds, and `math.inf` for negative values and for more
    than Go's maximum. Raises OptionError for anything else and for NaN."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = (
            float(min(max(value, -1), _LONGEST_S + 1)) if value == value else math.nan
        )
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        parts = _PART.findall(match[2])
        seconds = (
            sum(float(number) * _UNITS_S[unit] for number, unit in parts)
            if parts
            else float(match[2])
        )
        seconds = -seconds if match[1] == "-" else seconds
    if math.isnan(seconds):
        raise OptionError(
            f"{shown(value)} is not a duration; accepted: seconds, or a value such as '5m', '1h30m' or '300ms';"
            " a negative duration means forever."
        )
    return math.inf if seconds < 0 or seconds > _LONGEST_S else seconds


def human_number(n: int) -> str:
    """Abbreviates a number of parameters: "30.5B", "23.4M", "800K"."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            text = f"{n / unit:.1f}"
            return text.removesuffix(".0") + name
    return str(n)


_LAST_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_SIZES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
_LONG_H = ((24 * 365, "year"), (24 * 30, "month"), (24 * 7, "week"), (24, "day"))


def human_bytes(n_bytes: float) -> str:
    """Formats a number of bytes with a decimal unit: "4.7 GB", "17 GB", "274 MB", "12
    B". Numbers of ten or more have no decimal places."""
    for unit, name in _SIZES:
        if n_bytes >= unit:
            value = n_bytes / unit
            whole = value >= 10 or value == int(value)
            return f"{int(value) if whole else f'{value:.1f}'} {name}"
    return f"{int(n_bytes)} B"


def human_duration(seconds: float) -> str:
    """Formats an approximate duration: "12 seconds", "About an hour", "3 weeks"."""
    if seconds < 1:
        return "Less than a second"
    if seconds < 60:
        return f"{int(seconds)} second{'s' * (int(seconds) != 1)}"
    if seconds < 3600:
        return "About a minute" if seconds < 120 else f"{int(seconds / 60)} minutes"
    hours = round(seconds / 3600)
    if hours == 1:
        return "About an hour"
    n, name = next(
        ((hours // unit, name) for unit, name in _LONG_H if hours >= 2 * unit),
        (hours, "hour"),
    )
    return f"{n} {name}s"


def utc_time(seconds: float) -> datetime:
    """Converts a file's time (seconds since 1970) to a datetime in UTC. Times outside
    the years 1970 to 9998 are clamped to this range, since datetime cannot express
    every time that a file may have."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_S), UTC)


def human_time(when: datetime | None, now: datetime | None = None) -> str:
    """Formats a time relative to `now`: "3 days ago", "4 minutes from now". None
    becomes "Forever"."""
    if when is None:
        return "Forever"
    seconds = (when - (now or datetime.now(UTC))).total_seconds()
    return (
        f"{human_duration(-seconds)} ago"
        if seconds <= 0
        else f"{human_duration(seconds)} from now"
    )


def processor_split(size_bytes: int, vram_bytes: int) -> str:
    """Returns how a loaded model's bytes are divided between CPU and GPU, as in `ollama
    ps`: "48%/52% CPU/GPU". Returns "Unknown" if `vram_bytes` exceeds `size_bytes`."""
    if vram_bytes == 0:
        return "100% CPU"
    if size_bytes == 0 or vram_bytes > size_bytes:
        return "Unknown"
    if vram_bytes == size_bytes:
        return "100% GPU"
    cpu = round((size_bytes - vram_bytes) / size_bytes * 100)
    return f"{cpu}%/{100 - cpu}% CPU/GPU"


def percent(share: float | None, unknown: str = "-") -> str:
    """Formats a share as a percentage: "47.1%" for 0.471. Returns `unknown` for None
    and NaN."""
    return unknown if share is None or math.isnan(share) else f"{share:.1%}"
