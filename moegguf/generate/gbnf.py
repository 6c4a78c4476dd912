"""Converts grammars in GBNF, llama.cpp's format, into rules of llguidance's Lark
dialect.

Each character, and each class of characters, becomes a separate terminal. GBNF has no
lexer: a text matches if any division into parts matches, whereas llguidance's lexer
always takes the longest match. A rule that ends with itself becomes a repetition, which
llguidance parses in less time than recursion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

from moegguf.errors import SchemaError

_PIECE = re.compile(
    r"""(?P<blank>[ \t]+|\#[^\r\n]*)|(?P<newline>\r\n?|\n)|(?P<name>[A-Za-z0-9-]+)|(?P<define>::=)
    |"(?P<literal>(?:\\.|[^"\\])*)"|\[(?P<class>\^?(?:\\.|[^\]\\])*)\]|(?P<token>!?<(?:\[[0-9]+\]|[^>\r\n]*)>)
    |(?P<repeat>\{\s*(?P<least>[0-9]+)\s*(?P<has_most>,\s*(?P<most>[0-9]*)\s*)?\})|(?P<mark>[|().*+?])""",
    re.VERBOSE | re.DOTALL,
)
# Begins a negated class, which never matches the NUL character, as in llama.cpp.
NONE_OF = r"^\x{0}"
_CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([^\\])",
    re.DOTALL,
)
_ESCAPES = {
    "t": "\t",
    "r": "\r",
    "n": "\n",
    **{character: character for character in '\\"[]-'},
}


class _Symbol(NamedTuple):
    """A symbol of a Lark rule. `repeat` is "", "*", "+", "?", "{m,n}" or "{m,}".
    `rule`: name of the rule that the symbol refers to; "" for terminals."""

    text: str
    repeat: str = ""
    rule: str = ""

    def __str__(self) -> str:
        return self.text + self.repeat


_Alternatives = list[list[_Symbol]]


def lark_rules(
    grammar: str, token_of: Callable[[str], int | None]
) -> tuple[str, list[str]]:
    """Converts a GBNF grammar to Lark. Returns the Lark name of GBNF's rule `root`, and
    all rules as lines. `token_of` returns the id of the token with a given text, or
    None if the text is not a single token. Raises SchemaError for an invalid
    grammar."""
    parser = _Parser(grammar, token_of)
    try:
        return parser.rules()
    except RecursionError:
        depth = max(
            accumulate((piece[0] == "(") - (piece[0] == ")") for piece in parser.pieces)
        )
        raise SchemaError(
            f"parentheses in the grammar are nested {depth} deep, which is too deep to read; move inner groups"
            " into rules of their own."
        ) from None


class _Parser:
    def __init__(self, grammar: str, token_of: Callable[[str], int | None]) -> None:
        self._grammar = grammar
        self._token_of = token_of
        self.pieces = list(self._read())
        self._position = 0
        self._rules: dict[str, _Alternatives] = {}  # key: name in Lark
        self._names: dict[str, str] = {}  # name in GBNF -> name in Lark
        self._n_rules = 0

    def _read(self) -> Iterator[re.Match[str]]:
        begin = 0
        while begin < len(self._grammar):
            found = _PIECE.match(self._grammar, begin)
            if found is None:
                raise self._error(
                    begin, "a rule, a text, a class of characters or a repetition"
                )
            if found.lastgroup != "blank":
                yield found
            begin = found.end()

    def _error(self, position: int, wanted: str) -> SchemaError:
        line = self._grammar.count("\n", 0, position) + 1
        text = self._grammar[position : position + 30]
        found = f"has {text!r}" if text else "the grammar ends there"
        return SchemaError(
            f"line {line} of the grammar needs {wanted}, but {found}; correct it."
        )

    def rules(self) -> tuple[str, list[str]]:
        """Parses the grammar. Returns the Lark name of the rule `root`, and all rules
        as lines. Raises SchemaError if a rule is used but not defined, or if the
        grammar has no rule `root`."""
        self._skip_newlines()
        while self._position < len(self.pieces):
            self._read_rule()
            self._skip_newlines()
        for name, lark_name in [("root", self._name("root")), *self._names.items()]:
            if lark_name not in self._rules:
                raise SchemaError(
                    f"the grammar uses the rule {name[:80]!r}, but does not define it; add the rule."
                )
        lines = [
            f"{name}: {' | '.join(' '.join(map(str, symbols)) for symbols in alternatives)}"
            for name, alternatives in self._repeated().items()
        ]
        return self._names["root"], lines

    # Reading

    def _next(self, *kinds: str) -> str | None:
        """Consumes the next piece of the grammar and returns its text, if `kinds`
        contains the kind of this piece. A punctuation mark such as "|" is its own kind.
        Otherwise consumes nothing and returns None."""
        if self._position == len(self.pieces):
            return None
        piece = self.pieces[self._position]
        group = piece.lastgroup or ""
        if (piece.group() if group == "mark" else group) not in kinds:
            return None
        self._position += 1
        return piece[group]

    def _expect(self, kind: str, wanted: str) -> str:
        if (found := self._next(kind)) is None:
            is_end = self._position == len(self.pieces)
            raise self._error(
                len(self._grammar) if is_end else self.pieces[self._position].start(),
                wanted,
            )
        return found

    def _skip_newlines(self) -> None:
        while self._next("newline"):
            pass

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"gbnf_{len(self._names)}")

    def _read_rule(self) -> None:
        name = self._name(self._expect("name", "the name of a rule"))
        self._expect("define", "::=")
        self._skip_newlines()
        self._rules[name] = self._read_alternatives(is_nested=False)
        if self._position < len(self.pieces):
            self._expect("newline", "a symbol or the end of the line")

    def _read_alternatives(self, is_nested: bool) -> _Alternatives:
        alternatives = [self._read_sequence(is_nested)]
        while self._next("|"):
            self._skip_newlines()
            alternatives.append(self._read_sequence(is_nested))
        return alternatives

    def _read_sequence(self, is_nested: bool) -> list[_Symbol]:
        symbols: list[_Symbol] = []
        while True:
            if is_nested:
                self._skip_newlines()
            if symbol := self._read_symbol():
                symbols.append(symbol)
            elif symbols and (repeat := self._read_repeat()):
                if symbols[-1].repeat:
                    symbols[-1] = self._new_rule([[symbols[-1]]])
                symbols[-1] = symbols[-1]._replace(repeat=repeat)
            else:
                return symbols

    def _read_symbol(self) -> _Symbol | None:
        if (name := self._next("name")) is not None:
            rule = self._name(name)
            return _Symbol(rule, rule=rule)
        if (text := self._next("literal")) is not None:
            characters = [
                json.dumps(character) for character, _ in self._characters(text)
            ] or ['""']
            return _Symbol(
                f"({' '.join(characters)})" if len(characters) != 1 else characters[0]
            )
        if (text := self._next("class")) is not None:
            return _Symbol(f"/{self._class(text)}/")
        if (text := self._next("token")) is not None:
            return _Symbol(self._token(text))
        if self._next("."):
            return _Symbol(f"/[{NONE_OF}]/")
        if self._next("("):
            self._skip_newlines()
            group = self._new_rule(self._read_alternatives(is_nested=True))
            self._expect(")", "a closing parenthesis")
            return group
        return None

    def _new_rule(self, alternatives: _Alternatives) -> _Symbol:
        self._n_rules += 1
        name = f"gbnf_group_{self._n_rules}"
        self._rules[name] = alternatives
        return _Symbol(name, rule=name)

    def _read_repeat(self) -> str:
        if (mark := self._next("*", "+", "?")) is not None:
            return mark
        if self._next("repeat") is None:
            return ""
        piece = self.pieces[self._position - 1]
        return f"{{{piece['least']},{piece['most'] if piece['has_most'] else piece['least']}}}"

    # Characters

    def _characters(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields each character of a literal or class, with True if the character was
        written as an escape, otherwise with False. Raises SchemaError for an unknown
        escape, or one that is not a Unicode character."""
        begin = 0
        while begin < len(text):
            found = _CHARACTER.match(text, begin)
            if found is None or (found[4] and found[4] not in _ESCAPES):
                raise SchemaError(
                    f"the grammar has the unknown escape {text[begin : begin + 10]!r}; correct it."
                )
            code = found[1] or found[2] or found[3]
            if code and int(code, 16) > 0x10FFFF:
                raise SchemaError(
                    f"the grammar has {found[0]!r}, which is not a character; correct it."
                )
            yield (
                chr(int(code, 16)) if code else found[5] or _ESCAPES[found[4]],
                not found[5],
            )
            begin = found.end()

    def _class(self, text: str) -> str:
        """Returns the regular expression for a character class such as [a-z]. `text` is
        the class without its brackets. Raises SchemaError for an empty class."""
        negated = text.startswith("^")
        characters = list(self._characters(text[negated:]))
        if not characters:
            raise SchemaError(
                f"the grammar has the empty class [{text}]; put characters into it."
            )
        parts, n = [], 0
        while n < len(characters):
            first = last = characters[n][0]
            n += 1
            if n + 1 < len(characters) and characters[n] == ("-", False):
                last = characters[n + 1][0]
                n += 2
            parts.append(rf"\x{{{ord(first):x}}}-\x{{{ord(last):x}}}")
        return f"[{''.join([NONE_OF, *parts] if negated else parts)}]"

    def _token(self, text: str) -> str:
        """Returns the Lark symbol for a token, which GBNF writes by its id or its text.
        With "!" before it, the symbol matches every token except this one. Raises
        SchemaError if no token has this text."""
        mark = text.removeprefix("!")
        number = int(mark[2:-2]) if mark.startswith("<[") else self._token_of(mark)
        if number is None:
            raise SchemaError(
                f"the grammar has {mark[:80]!r}, which is not a token of this model; write it as text in quotes."
            )
        return f"<[{'^' if text != mark else ''}{number}]>"

    # Right recursion

    def _repeated(self) -> dict[str, _Alternatives]:
        """Returns the rules with direct right recursion replaced: a rule that ends with
        itself becomes a repetition. A rule in which every alternative ends with the
        rule itself stays unchanged."""
        rules = {}
        for name, alternatives in self._rules.items():
            options = [
                option for symbols in alternatives for option in self._expanded(symbols)
            ]
            again = [
                symbols[:-1]
                for symbols in options
                if symbols[1:] and symbols[-1] == _Symbol(name, rule=name)
            ]
            ends = [
                symbols
                for symbols in options
                if not symbols or symbols[-1] != _Symbol(name, rule=name)
            ]
            if again and ends:
                rules[f"{name}_again"] = again
                rules[f"{name}_end"] = ends
                rules[name] = [[_Symbol(f"{name}_again", "*"), _Symbol(f"{name}_end")]]
            else:
                rules[name] = alternatives
        return rules

    def _expanded(self, symbols: list[_Symbol]) -> Iterator[list[_Symbol]]:
        """Yields the alternatives of a sequence that ends with an optional group:
        without the group, and with each alternative of the group. Yields any other
        sequence unchanged."""
        if (
            symbols
            and symbols[-1].repeat == "?"
            and symbols[-1].rule.startswith("gbnf_group_")
        ):
            yield symbols[:-1]
            for option in self._rules[symbols[-1].rule]:
                yield [*symbols[:-1], *option]
        else:
            yield symbols
