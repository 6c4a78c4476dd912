"""The operators, filters and methods that templates may use, each of which pays for what it does before it does it.

Only those that chat templates use are here. Knows no templates.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from moegguf.generate.purse import ITEM, LimitError, left, pay, room_for, weigh, weigh_length

MAX_INTEGER_BITS = 4096


def _multiply(left: Any, right: Any) -> Any:
    for sized, times in ((left, right), (right, left)):
        if hasattr(sized, "__len__") and isinstance(times, int):
            room_for(len(sized) * max(times, 0) * (1 if isinstance(sized, str) else ITEM))
            return left * right
    _bounded_integers(left, right)
    return left * right


def _bounded_integers(*values: Any) -> None:
    pay(1)
    for value in values:
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise LimitError("it computes with huge numbers")


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        room_for(len(left) + len(right))
    elif hasattr(left, "__len__") and hasattr(right, "__len__"):
        room_for((len(left) + len(right)) * ITEM)
    return left + right


def _power(left: Any, right: Any) -> Any:
    _bounded_integers(left, right)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INTEGER_BITS:
        raise LimitError("it computes with huge numbers")
    return left**right


_WIDE = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # a field of 1000 characters or more, or one whose width is computed


def pay_for_format(pattern: str, values: Iterable[Any]) -> None:
    """For `%`, `format` and the filter: fields may repeat a value, and pad it."""
    if _WIDE.search(pattern):
        raise LimitError("it pads a text to more than 999 characters")
    before = left()
    weigh(list(values))
    widest = before - left()
    room_for(len(pattern) + (pattern.count("%") + pattern.count("{")) * (widest + 999))


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        pay_for_format(left, right if isinstance(right, tuple) else (right,))
    else:
        _bounded_integers(left, right)
    return left % right


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": _add,
    "*": _multiply,
    "**": _power,
    "%": _modulo,
    "-": operator.sub,
    "/": operator.truediv,
    "//": operator.floordiv,
}


def concatenate(values: Sequence[Any]) -> str:
    """`a ~ b ~ c`."""
    texts = [value if isinstance(value, str) else str(weigh(value)) for value in values]
    room_for(sum(map(len, texts)))
    return "".join(texts)


# Filters


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(weigh(text)), str(old), str(new)
    pay_for_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def pay_for_replace(text: str, old: str, new: str) -> None:
    room_for(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    texts: list[str] = []
    for value in values:
        item = value if attribute is None else value[attribute]
        pay(ITEM)
        texts.append(item if isinstance(item, str) else str(weigh(item)))
    room_for(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': without escapes for HTML, keys in their order."""
    weigh(value)
    if indent is not None and (not isinstance(indent, int) or indent > 16):
        raise LimitError("it indents JSON by more than 16")
    if isinstance(value, Undefined):
        return json.dumps(str(value))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_list
    )


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, 64)
    room_for((len(text) + 1) * (1 + len(margin)))
    lines = str(text).split("\n")
    body = [line and margin + line if not blank else margin + line for line in lines[1:]]
    return "\n".join([margin + lines[0] if first else lines[0], *body])


def _list(values: Iterable[Any]) -> list[Any]:
    return list(_items(values))


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    _bounded_integers(value)
    return round(float(value), max(-15, min(precision, 15)))


def _format(pattern: str, *args: Any, **named: Any) -> str:
    pay_for_format(pattern, [*args, *named.values()])
    return pattern % (named or args)


def _from_json(text: str) -> Any:
    pay(len(text) * ITEM)
    return json.loads(text)


def _pay_in_passing(cost: int) -> str:
    """Pays and is false."""
    pay(cost)
    return ""


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "replace": _replace, "join": _join, "tojson": _to_json, "indent": _indent, "list": _list, "round": _round,
    "format": _format, "from_json": _from_json, "safe": lambda text: str(weigh(text)),
    "string": lambda value: str(weigh(value)), "%weigh": weigh, "%length": weigh_length, "%concat": concatenate,
    "%pay": _pay_in_passing,
}  # fmt: skip
PAID_FILTERS = "capitalize dictsort e escape float int lower max min sort title trim unique upper".split()
COPYING_FILTERS = "items reverse".split()
LAZY_FILTERS = "map reject rejectattr select selectattr".split()
FREE_FILTERS = "abs attr count d default first last length".split()
COMPARING_TESTS = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne".split()
COSTLY = {"sort": 20, "dictsort": 20, "unique": 20, "e": 6, "escape": 6}
STRING_METHODS = frozenset(
    "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isnumeric"
    " isspace isupper join lower lstrip partition removeprefix removesuffix replace rfind rpartition rsplit rstrip"
    " split splitlines startswith strip swapcase title upper".split()
)


def paid(name: str, function: Callable[..., Any], how: Callable[[Any], Any] = weigh) -> Callable[..., Any]:
    """The filter, with its value (which it gets after its context) paid for."""
    times, at = COSTLY.get(name, 1), 1 if hasattr(function, "jinja_pass_arg") else 0

    def filtered(*args: Any, **named: Any) -> Any:
        value: Any = args[at] if len(args) > at else None
        if not isinstance(value, str | dict | Sequence | Undefined) and hasattr(value, "__iter__"):
            value = _list(value)
            args = (*args[:at], value, *args[at + 1 :])
        for _ in range(times):
            how(value)
        weigh(args[at + 1 :])
        return function(*args, **named)

    if at:
        filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return filtered


def paid_as_it_goes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of a sequence that takes its context first, and does nothing before it is asked."""

    def filtered(context: Any, values: Any, *args: Any, **named: Any) -> Any:
        weigh(args)
        return function(context, _items(values), *args, **named)

    filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return filtered


def _items(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        pay(ITEM)
        yield value


def weighing(test: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: test(*map(weigh, values))


def pay_for_string_method(name: str, text: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    if name not in STRING_METHODS:
        raise SecurityError(f"the method {name!r} of texts is not allowed in templates")
    pay(len(text))
    if name == "format":
        pay_for_format(text, [*args, *named.values()])
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        pay_for_replace(text, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], Sequence):
        room_for(sum(len(part) for part in args[0] if isinstance(part, str)) + len(text) * len(args[0]))
    elif name in ("split", "rsplit", "splitlines"):
        pay(ITEM * (text.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(text) // 2))
