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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from moegguf.errors import SchemaError

MAX_DIGITS = 16
# Limit for the bounds of multiples, which llguidance represents as doubles.
MAX_EXACT = 2**53

_EXPONENT = r"(?:[eE](?:-[0-9]{1,3}|\+?(?:[0-9]{1,2}|1[0-9]{2}|2[0-8][0-9])))?"


@dataclass
class Numbers:
    """The numbers that a schema allows. `least`, `most` and `step` restrict nothing if
    they are None. `step`: allowed numbers are multiples of `step`. `whole`: True if
    only integers are allowed. `fractional`: True if integers are not allowed."""

    whole: bool = False
    fractional: bool = False
    least: Decimal | None = None
    above: bool = False  # True if `least` itself is not allowed
    most: Decimal | None = None
    below: bool = False  # True if `most` itself is not allowed
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
            if self.least is None or (number, keyword != "minimum") > (
                self.least,
                self.above,
            ):
                self.least, self.above = number, keyword != "minimum"
        elif self.most is None or (-number, keyword != "maximum") > (
            -self.most,
            self.below,
        ):
            self.most, self.below = number, keyword != "maximum"

    def allows(self, value: float | Decimal) -> bool:
        """Returns True if the number satisfies all restrictions."""
        number = decimal_of(value)
        is_whole = number == number.to_integral_value()
        if (
            (self.whole and not is_whole)
            or (self.fractional and is_whole)
            or number in self.excluded
        ):
            return False
        if self.least is not None and (
            number < self.least or (self.above and number == self.least)
        ):
            return False
        if self.most is not None and (
            number > self.most or (self.below and number == self.most)
        ):
            return False
        return self.step is None or Fraction(number) % self.step == 0

    def is_empty(self) -> bool:
        """Returns True if the bounds exclude every number, or every integer (`whole`),
        or every multiple of `step`. `excluded` and `fractional` are ignored."""
        if self.least is None or self.most is None:
            return False
        if self.whole or self.step is not None:
            step = Fraction(1) if self.step is None else self._whole_step()
            first = math.ceil(Fraction(self.least) / step) * step
            if self.above and first == self.least:
                first += step
            return first > self.most or (self.below and first == self.most)
        return self.least > self.most or (
            self.least == self.most and (self.above or self.below)
        )

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
            and self._has_no_bounds()
        )
        behind = rf"(?:\.[0-9]{{1,{n_behind}}})?" if n_behind and not self.whole else ""
        before = rf"-?(?:0|[1-9][0-9]{{0,{self._n_before() - 1}}})"
        terms = [f"/{before}{behind}{_EXPONENT if has_exponent else ''}/"]
        if zeros:
            terms.append(rf"/-?(?:0|[0-9]*0{{{zeros}}})/")
        if self.fractional:
            terms.append(r"/-?[0-9]+\.[0-9]*[1-9][0-9]*/")
        if self.least is not None:
            terms.append(f"/{_at_least(self.least, self.above)}/")
        if self.most is not None:
            terms.append(f"/{_at_most(self.most, self.below)}/")
        terms += [f"~/{_equal_to(number)}/" for number in self.excluded]
        return [" & ".join(terms)]

    def _has_no_bounds(self) -> bool:
        return self.least is None and self.most is None

    def _bounds(self) -> Iterable[Decimal]:
        return (bound for bound in (self.least, self.most) if bound is not None)

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
            raise SchemaError(
                f"multiples of {Decimal(step.numerator) / step.denominator:.6g} can be followed only between bounds"
                " from -2^53 to 2^53; leave out multipleOf or choose such bounds."
            )
        limit = Decimal(10**MAX_DIGITS // 10)
        least, most = (
            -limit if self.least is None else self.least,
            limit if self.most is None else self.most,
        )
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
        assert self.least is not None
        assert self.most is not None
        return {
            "type": "integer" if self.whole else "number",
            "multipleOf": _json_number(step),
            "exclusiveMinimum" if self.above else "minimum": _json_number(self.least),
            "exclusiveMaximum" if self.below else "maximum": _json_number(self.most),
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


def _at_most(bound: Decimal, is_strict: bool) -> str:
    if bound < 0 or (is_strict and not bound):
        return f"-{_larger(*_digits(bound), is_strict)}"
    return f"(?:-[0-9.]+|{_smaller(*_digits(bound), is_strict)})"


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
