"""Converts the numbers that a JSON schema allows to terminals of a grammar.

The regular expressions compare numbers with bounds digit by digit, so that bounds of
any size are exact. (Multiples of most numbers are left to llguidance, which compares
doubles.) Without a limit some models write digits until the token limit. So a number
has up to MAX_DIGITS digits before and after its point, as in llama.cpp, or more if its
bounds need more. Only a number without any restriction may have an exponent, which is
limited so that no number is too large for a double.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from moegguf.errors import SchemaError

MAX_DIGITS = 16
# Limit for the bounds of multiples, which llguidance represents as doubles.
MAX_EXACT = 2**53

_EXPONENT = r"(?:[eE](?:-[0-9]{1,3}|\+?(?:[0-9]{1,2}|1[0-9]{2}|2[0-8][0-9])))?"


Bound = tuple[Decimal, bool]
"""A bound of numbers, and a flag. A lower bound has the flag True if the number itself
is not allowed, and an upper bound if it is allowed. So the greater of two lower bounds
and the smaller of two upper bounds is the stricter one."""
NO_LEAST: Bound = (Decimal("-Infinity"), False)
NO_MOST: Bound = (Decimal("Infinity"), True)


@dataclass
class Numbers:
    """The numbers that a schema allows: multiples of `step`, between `least` and
    `most`. `whole`: True if only integers are allowed. `fractional`: True if integers
    are not allowed. `step`: None allows any number."""

    whole: bool = False
    fractional: bool = False
    least: Bound = NO_LEAST
    most: Bound = NO_MOST
    step: Fraction | None = None
    excluded: list[Decimal] = field(default_factory=list)

    def restrict(self, keyword: str, value: float | Decimal) -> None:
        """Adds the restriction of a keyword of JSON Schema, such as "minimum" or
        "multipleOf"."""
        number = decimal_of(value)
        if keyword == "multipleOf":
            step = abs(Fraction(number))
            self.step = step if self.step is None else _common_multiple(self.step, step)
        elif keyword in ("minimum", "exclusiveMinimum"):
            self.least = max(self.least, (number, keyword == "exclusiveMinimum"))
        else:
            self.most = min(self.most, (number, keyword == "maximum"))

    def allows(self, value: float | Decimal) -> bool:
        """Returns True if the number satisfies all restrictions."""
        number = decimal_of(value)
        is_whole = number == number.to_integral_value()
        if (
            (self.whole and not is_whole)
            or (self.fractional and is_whole)
            or number in self.excluded
            or (number, False) < self.least
            or (number, True) > self.most
        ):
            return False
        return self.step is None or Fraction(number) % self.step == 0

    def is_empty(self) -> bool:
        """Returns True if the bounds exclude every number, or every integer (`whole`),
        or every multiple of `step`. `excluded` and `fractional` are ignored."""
        (least, is_above), (most, is_up_to) = self.least, self.most
        if self.least == NO_LEAST or self.most == NO_MOST:
            return False
        if self.whole or self.step is not None:
            step = self._whole_step()
            first = math.ceil(Fraction(least) / step) * step
            if is_above and first == least:
                first += step
            return first > most or (first == most and not is_up_to)
        return least > most or (least == most and (is_above or not is_up_to))

    def _whole_step(self) -> Fraction:
        step = self.step or Fraction(1)
        return _common_multiple(step, Fraction(1)) if self.whole else step

    def expressions(self) -> list[str | dict[str, Any]]:
        """Returns the expression of a terminal that matches the allowed numbers, as a
        list of one.

        For multiples of a number that is not a power of ten, returns JSON schemas for
        llguidance instead, one for each range between excluded numbers. These schemas
        ignore `fractional`. Raises SchemaError for such multiples if the absolute value
        of a bound exceeds 2^53.
        """
        n_behind, zeros = self._n_behind(), 0
        if self.step is not None:
            step = self._whole_step()
            exponent = _power_of_ten(step)
            if exponent is None:
                return [part._multiples(step) for part in self._parts(step)]
            n_behind, zeros = min(n_behind, max(-exponent, 0)), max(exponent, 0)
        has_exponent = (
            not (self.whole or self.fractional or self.excluded or self.step)
            and not self._bounds()
        )
        behind = rf"(?:\.[0-9]{{1,{n_behind}}})?" if n_behind and not self.whole else ""
        before = rf"-?(?:0|[1-9][0-9]{{0,{self._n_before() - 1}}})"
        terms = [f"/{before}{behind}{_EXPONENT if has_exponent else ''}/"]
        if zeros:
            terms.append(rf"/-?(?:0|[0-9]*0{{{zeros}}})/")
        if self.fractional:
            terms.append(r"/-?[0-9]+\.[0-9]*[1-9][0-9]*/")
        if self.least != NO_LEAST:
            terms.append(f"/{_at_least(*self.least)}/")
        if self.most != NO_MOST:
            terms.append(f"/{_at_most(*self.most)}/")
        terms += [f"~/{_equal_to(number)}/" for number in self.excluded]
        return [" & ".join(terms)]

    def _bounds(self) -> list[Decimal]:
        """Returns the numbers of the lower bound and the upper bound, if they exist."""
        return [number for number, _ in (self.least, self.most) if number.is_finite()]

    def _n_before(self) -> int:
        """Returns the maximum number of digits before the decimal point: MAX_DIGITS, or
        more if a bound has more."""
        return max([MAX_DIGITS, *(len(_digits(bound)[0]) for bound in self._bounds())])

    def _n_behind(self) -> int:
        """Returns the maximum number of digits after the decimal point: one more than
        any bound has, but at least MAX_DIGITS."""
        return max(
            [MAX_DIGITS, *(len(_digits(bound)[1]) + 1 for bound in self._bounds())]
        )

    def _parts(self, step: Fraction) -> Iterator[Numbers]:
        """Yields the ranges between excluded numbers that have multiples of `step`.
        Each range has two bounds."""
        if any(abs(bound) > MAX_EXACT for bound in self._bounds()):
            number = Decimal(step.numerator) / step.denominator
            raise SchemaError(
                f"a JSON schema with multipleOf {number:.6g} may have bounds from -2^53 to 2^53 only; leave out"
                " multipleOf, or choose such bounds."
            )
        limit = Decimal(10**MAX_DIGITS // 10)
        least = (-limit, False) if self.least == NO_LEAST else self.least
        most = (limit, True) if self.most == NO_MOST else self.most
        rest = replace(self, least=least, most=most, excluded=[])
        for number in sorted(filter(rest.allows, self.excluded)):
            part = replace(rest)
            part.restrict("exclusiveMaximum", number)
            rest.restrict("exclusiveMinimum", number)
            if not part.is_empty():
                yield part
        if not rest.is_empty():
            yield rest

    def _multiples(self, step: Fraction) -> dict[str, Any]:
        (least, is_above), (most, is_up_to) = self.least, self.most
        return {
            "type": "integer" if self.whole else "number",
            "multipleOf": _json_number(step),
            "exclusiveMinimum" if is_above else "minimum": _json_number(least),
            "maximum" if is_up_to else "exclusiveMaximum": _json_number(most),
        }


def decimal_of(value: float | Decimal) -> Decimal:
    """Returns the exact decimal value of the JSON text of `value`."""
    return value if isinstance(value, Decimal) else Decimal(repr(value))


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(
        math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator)
    )


def _power_of_ten(number: Fraction) -> int | None:
    """Returns the exponent n if the number is 10**n, otherwise None."""
    digits = str(number.numerator * number.denominator)
    if 1 not in (number.numerator, number.denominator) or digits.strip("0") != "1":
        return None
    return len(digits) - 1 if number.denominator == 1 else 1 - len(digits)


def _json_number(number: Decimal | Fraction) -> int | float:
    return int(number) if number == int(number) else float(number)


def _digits(number: Decimal) -> tuple[str, str]:
    """Returns the digits before the decimal point without leading zeros ("0" if none
    are left), and the digits after it without trailing zeros. The sign is left out."""
    before, _, behind = f"{number.copy_abs():f}".partition(".")
    return before.lstrip("0") or "0", behind.rstrip("0")


def _equal_to(number: Decimal) -> str:
    before, behind = _digits(number)
    sign = "-" if number < 0 else "-?" if number == 0 else ""
    return sign + before + (rf"\.{behind}0*" if behind else r"(?:\.0+)?")


def _at_least(bound: Decimal, is_strict: bool) -> str:
    """Returns a regular expression for decimal numbers that are at least `bound`, or
    greater if `is_strict`."""
    if bound >= 0:
        return _larger(*_digits(bound), is_strict)
    return f"(?:[0-9.]+|-{_smaller(*_digits(bound), is_strict)})"


def _at_most(bound: Decimal, is_allowed: bool) -> str:
    """Returns a regular expression for decimal numbers that are less than `bound`. If
    `is_allowed`, the expression also matches `bound` itself."""
    if bound < 0 or not (bound or is_allowed):
        return f"-{_larger(*_digits(bound), not is_allowed)}"
    return f"(?:-[0-9.]+|{_smaller(*_digits(bound), not is_allowed)})"


def _larger(before: str, behind: str, is_strict: bool) -> str:
    """Returns a regular expression for unsigned numbers greater than `before`.`behind`.
    If `is_strict` is False, the expression also matches this number itself."""
    any_behind = r"(?:\.[0-9]+)?"
    options = [rf"[1-9][0-9]{{{len(before)},}}{any_behind}"]
    for n, digit in enumerate(before):
        if digit != "9":
            options.append(
                f"{before[:n]}[{int(digit) + 1}-9][0-9]{{{len(before) - n - 1}}}{any_behind}"
            )
    more = "[0-9]*[1-9][0-9]*" if is_strict else "[0-9]*"
    if behind:
        options.append(rf"{before}\.{behind}{more}")
    else:
        options.append(rf"{before}\.{more}" if is_strict else before + any_behind)
    for n, digit in enumerate(behind):
        if digit != "9":
            options.append(rf"{before}\.{behind[:n]}[{int(digit) + 1}-9][0-9]*")
    return f"(?:{'|'.join(options)})"


def _smaller(before: str, behind: str, is_strict: bool) -> str:
    """Returns a regular expression for unsigned numbers less than `before`.`behind`. If
    `is_strict` is False, the expression also matches this number itself. If `is_strict`
    is True, this number must not be 0."""
    any_behind = r"(?:\.[0-9]+)?"
    options = (
        [rf"(?:0|[1-9][0-9]{{0,{len(before) - 2}}}){any_behind}"]
        if len(before) > 1
        else []
    )
    for n, digit in enumerate(before):
        least = 0 if n or len(before) == 1 else 1
        if int(digit) > least:
            options.append(
                f"{before[:n]}[{least}-{int(digit) - 1}][0-9]{{{len(before) - n - 1}}}{any_behind}"
            )
    for n, digit in enumerate(behind):
        if digit != "0":
            options.append(rf"{before}\.{behind[:n]}[0-{int(digit) - 1}][0-9]*")
        options.append(rf"{before}\.{behind[:n]}" if n else before)
    if not is_strict:
        options.append(rf"{before}\.{behind}0*" if behind else rf"{before}(?:\.0+)?")
    return f"(?:{'|'.join(options)})"
