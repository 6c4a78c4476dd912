"""Rules in llama.cpp's notation for grammars (GBNF), under names of their own. Knows no JSON and no models."""

from __future__ import annotations

from moegguf.errors import SchemaError

MAX_RULES = 8_000
MAX_CHARACTERS = 1 << 20
MAX_REPEATS = 1_000  # llama.cpp refuses a grammar with more than 2,000


class Rules:
    """A grammar that grows. A body is GBNF text; `add` gives it a name, which is a body, too."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._n_characters = 0

    def add(self, hint: str, body: str) -> str:
        """The name of a rule with this body; the same body has one rule."""
        if body in self._names:
            return self._names[body]
        name = self.reserve(hint)
        self.define(name, body)
        self._names[body] = name
        return name

    def reserve(self, hint: str) -> str:
        """A name for a rule that may use itself; `define` it later."""
        if len(self._bodies) >= MAX_RULES:
            raise SchemaError(f"the schema needs more than {MAX_RULES} grammar rules; give a smaller one.")
        name = f"{hint}-{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._n_characters += len(body)
        if self._n_characters > MAX_CHARACTERS:
            raise SchemaError("the schema makes a grammar of more than a megabyte; give a smaller one.")
        self._bodies[name] = body

    def repeat(self, hint: str, item: str, least: int, most: int | None, separator: str = "") -> str:
        """`item` from `least` to `most` times; None for any number."""
        if least > MAX_REPEATS or (most or 0) > MAX_REPEATS:
            raise SchemaError(
                f"a schema repeats up to {MAX_REPEATS} times (lengths, items, patterns), not {most or least}."
            )
        if most is not None and most < least:
            raise SchemaError(f"a schema asks for at least {least} and at most {most} of something; nothing fits that.")
        if most == 0:
            return '""'
        item = self.add(hint, item)
        if most == 1:
            return item if least else f"{item}?"
        if not separator:
            return f"{item}{{{least},{'' if most is None else most}}}"
        more = self.add(hint, f"{separator} {item}")
        tail = f"{item} {more}{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return tail if least else f"({tail})?"

    def until(self, mark: str) -> str:
        """Any text up to the first `mark`, with it: the automaton of Knuth, Morris and Pratt, a rule per state."""
        states = [self.reserve("until") for _ in mark]
        for at, name in enumerate(states):
            ways: dict[str, int] = {}
            for character in dict.fromkeys(mark[: at + 1]):
                reached = _longest_border(mark[:at] + character, mark)
                if reached:
                    ways[character] = reached
            others = f"{character_class(list(ways), negate=True)} {states[0]}"
            told = [literal(c) + (f" {states[n]}" if n < len(mark) else "") for c, n in ways.items()]
            self.define(name, " | ".join([others, *told]))
        return states[0]

    def text(self, root: str) -> str:
        """The grammar with this root."""
        rules = {"root": root, **self._bodies}
        return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def _longest_border(text: str, mark: str) -> int:
    """How much of `mark`'s beginning the text ends with."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if text.endswith(mark[:n])), 0)


def literal(text: str) -> str:
    """The text itself."""
    return '"' + "".join(_in_literal(character) for character in text) + '"'


def _in_literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else _hex(character)


def character_class(members: list[str], *, negate: bool = False) -> str:
    """One character of `members`: single ones, or ranges as two characters."""
    inside = "".join("-".join(map(_in_class, member)) for member in members)
    return f"[{'^' if negate else ''}{inside}]"


def _in_class(character: str) -> str:
    return character if character.isascii() and character.isalnum() else _hex(character)


def _hex(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02X}" if code < 256 else f"\\u{code:04X}" if code < 65536 else f"\\U{code:08X}"
