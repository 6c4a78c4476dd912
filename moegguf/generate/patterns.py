"""A JSON schema's `pattern` becomes a rule for the inside of a JSON string.

Python's own parser reads the regular expression; only what a grammar can say is taken. Characters that JSON escapes
are left out of classes.
"""

from __future__ import annotations

import re
from re import _constants as sre  # type: ignore[attr-defined]  # not public, but the only one in the standard library
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from moegguf.errors import SchemaError
from moegguf.generate.gbnf import Rules, character_class, literal
from moegguf.generate.json_texts import ESCAPED

MAX_CHARACTERS = 500
MAX_REPEATS = 500  # all counts of a pattern together
CATEGORIES = {
    sre.CATEGORY_DIGIT: ["09"],
    sre.CATEGORY_WORD: ["az", "AZ", "09", "_"],
    sre.CATEGORY_SPACE: [" "],
}
NEGATIONS = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
}


def pattern_rule(rules: Rules, pattern: str) -> str:
    """A body for the texts that `pattern` matches anywhere, without the quotes.

    Raises SchemaError when a grammar cannot say it, or when it is too large.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_CHARACTERS:
        raise SchemaError(f"a pattern of a JSON schema is a text of up to {MAX_CHARACTERS} characters.")
    try:
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SchemaError(f"the pattern {pattern[:80]!r} of the JSON schema cannot be read: {error}") from error
    return _Pattern(rules, pattern).whole(list(tree))


class _Pattern:
    def __init__(self, rules: Rules, pattern: str) -> None:
        self._rules = rules
        self._pattern = pattern
        self._n_repeats = 0

    def whole(self, parts: list[Any]) -> str:
        anything = f"{character_class(ESCAPED, negate=True)}*"
        begins = bool(parts) and parts[0] in ((sre.AT, sre.AT_BEGINNING), (sre.AT, sre.AT_BEGINNING_STRING))
        ends = bool(parts) and parts[-1] in ((sre.AT, sre.AT_END), (sre.AT, sre.AT_END_STRING))
        inside = self._sequence(parts[begins : len(parts) - ends if len(parts) > begins else None])
        return f"{'' if begins else anything} {inside} {'' if ends else anything}".strip()

    def _sequence(self, parts: Any) -> str:
        return " ".join(self._part(kind, value) for kind, value in parts) or '""'

    def _part(self, kind: Any, value: Any) -> str:
        if kind is sre.LITERAL:
            return literal(_escaped(chr(value)))
        if kind is sre.NOT_LITERAL:
            return character_class([*ESCAPED, chr(value)], negate=True)
        if kind is sre.ANY:
            return character_class(ESCAPED, negate=True)
        if kind is sre.IN:
            return self._class(value)
        if kind is sre.SUBPATTERN:
            return f"({self._sequence(value[3])})"
        if kind is sre.BRANCH:
            return "(" + " | ".join(self._sequence(way) for way in value[1]) + ")"
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(*value)
        raise self._refusal(str(kind).lower().replace("_", " "))

    def _repeat(self, least: int, most: Any, item: Any) -> str:
        unbounded = most is sre.MAXREPEAT
        if item.getwidth()[0] == 0 and (unbounded or most > 1):
            raise self._refusal("repeating what may be empty")
        self._n_repeats += least if unbounded else int(most)
        if self._n_repeats > MAX_REPEATS:
            raise self._refusal(f"more than {MAX_REPEATS} repetitions")
        return self._rules.repeat("pattern", self._sequence(item), least, None if unbounded else int(most))

    def _class(self, members: Any) -> str:
        negate = members[0][0] is sre.NEGATE
        out: list[str] = []
        for kind, value in members[negate:]:
            if kind is sre.LITERAL:
                out.append(chr(value))
            elif kind is sre.RANGE:
                out.append(chr(value[0]) + chr(value[1]))
            elif value in CATEGORIES:
                out += CATEGORIES[value]
            elif value in NEGATIONS and len(members) == 1:
                return character_class([*ESCAPED, *CATEGORIES[NEGATIONS[value]]], negate=True)
            else:
                raise self._refusal("a class with a negated class in it")
        if negate:
            return character_class([*ESCAPED, *out], negate=True)
        return self._plain_class(out)

    def _plain_class(self, members: list[str]) -> str:
        """Without the characters that JSON writes otherwise, but for quotes and backslashes, which it escapes."""
        plain, escaped = [], []
        for member in members:
            first, last = member[0], member[-1]
            for character in '"\\':
                if first <= character <= last:
                    escaped.append(literal(_escaped(character)))
            plain += _without(max(first, " "), last, '"\\\x7f')
        ways = [*([character_class(plain)] if plain else []), *dict.fromkeys(escaped)]
        if not ways:
            raise self._refusal("a class of control characters")
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def _refusal(self, what: str) -> SchemaError:
        return SchemaError(f"the pattern {self._pattern[:80]!r} of the JSON schema cannot be followed: {what}.")


def _escaped(character: str) -> str:
    """As it stands in a JSON string."""
    if character in '"\\':
        return "\\" + character
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(
        character, character if character >= " " else f"\\u{ord(character):04x}"
    )


def _without(first: str, last: str, holes: str) -> list[str]:
    """The range from `first` to `last` without some characters, as ranges."""
    out, begin = [], ord(first)
    for hole in [*sorted(ord(h) for h in holes if first <= h <= last), ord(last) + 1]:
        if hole - 1 > begin:
            out.append(chr(begin) + chr(hole - 1))
        elif hole - 1 == begin:
            out.append(chr(begin))
        begin = hole + 1
    return out
