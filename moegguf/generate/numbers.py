"""Numbers between two bounds, as rules of a grammar over their decimal digits."""

from __future__ import annotations

import math

from moegguf.errors import SchemaError
from moegguf.generate.json_texts import NUMBER, WHOLE

MAX_DIGITS = 15  # whole numbers up to here are exact in a double


def integers_between(low: float | None, high: float | None) -> str:
    """Whole numbers from `low` to `high`; None for no bound."""
    if low is None and high is None:
        return WHOLE
    least = None if low is None else math.ceil(low)
    most = None if high is None else math.floor(high)
    ways = [way for way in (_up(least, most), _down(least, most)) if way]
    if not ways:
        raise SchemaError(f"no whole number is between {low} and {high}, as the JSON schema asks.")
    return " | ".join(ways)


def numbers_between(low: float | None, high: float | None) -> str:
    """Numbers from `low` to `high`: of those with a fraction, the ones whose whole part may have any."""
    if low is None and high is None:
        return NUMBER
    ways = [_with_fractions(low, high, "")]
    if low is None or low < 0:
        ways.append(_with_fractions(_negative(high), _negative(low), '"-"'))
    ways = [way for way in ways if way]
    if not ways:
        raise SchemaError(f"there is no room for a number between {low} and {high}; give the schema wider bounds.")
    return " | ".join(ways)


def _negative(bound: float | None) -> float | None:
    return None if bound is None else -bound


def _with_fractions(low: float | None, high: float | None, sign: str) -> str:
    first = max(math.ceil(low or 0), 0)
    if high is None:
        return f'{sign} ({_digits(first, None)}) ("." [0-9]{{1,{MAX_DIGITS}}})?'
    last = math.floor(high)
    ways = [f"{sign} ({_digits(last, last)})"] if last >= first else []
    if last - 1 >= first:
        ways.append(f'{sign} ({_digits(first, last - 1)}) ("." [0-9]{{1,{MAX_DIGITS}}})?')
    return " | ".join(ways)


def _up(low: int | None, high: int | None) -> str:
    """Those from 0 on."""
    first = max(low or 0, 0)
    return "" if high is not None and high < first else _digits(first, high)


def _down(low: int | None, high: int | None) -> str:
    """Those below 0."""
    first = max(-high, 1) if high is not None else 1
    return "" if low is not None and -low < first else f'"-" ({_digits(first, None if low is None else -low)})'


def _digits(low: int, high: int | None) -> str:
    """From `low` (not negative) to `high`, without leading zeros."""
    ways = []
    if high is None:
        n = len(str(low))
        if n < MAX_DIGITS:
            ways.append(f"[1-9] [0-9]{{{n},{MAX_DIGITS}}}")
        high = 10**n - 1
    for n in range(len(str(low)), len(str(high)) + 1):
        ways.append(_same_length(str(max(low, 10 ** (n - 1) if n > 1 else 0)), str(min(high, 10**n - 1))))
    return " | ".join(ways)


def _same_length(low: str, high: str) -> str:
    """Digits from `low` to `high`, which have as many."""
    if not low:
        return ""
    rest = len(low) - 1
    if low[0] == high[0]:
        return f'"{low[0]}" {_grouped(_same_length(low[1:], high[1:]))}'.rstrip()
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{low[0]}-{high[0]}]" + _any_digits(rest)
    ways = [f'"{low[0]}" {_grouped(_same_length(low[1:], "9" * rest))}']
    if int(high[0]) - int(low[0]) > 1:
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]" + _any_digits(rest))
    ways.append(f'"{high[0]}" {_grouped(_same_length("0" * rest, high[1:]))}')
    return " | ".join(ways)


def _grouped(ways: str) -> str:
    return f"({ways})" if ways else ""


def _any_digits(n: int) -> str:
    return f" [0-9]{{{n}}}" if n else ""
