"""JSON schemas as grammars in llguidance's Lark dialect.

JSON schemas, which are untrusted, follow JSON Schema 2020-12, except that
- an object that names its properties has no others, unless `additionalProperties` or `patternProperties` allow them;
- properties come in the order of the schema;
- a schema without `type` has the type that its other keywords apply to;
- `prefixItems` without `items` and `minItems` is a tuple: all of its items and no others;
- numbers have up to 16 digits before and behind the point, unless their bounds need more, and blanks are few;
- a name matches at most one of more than MAX_MATCHES `patternProperties`;
- unknown keywords and formats are ignored, and the few that no grammar follows, unless the request is strict.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moegguf.errors import SchemaError
from moegguf.generate.json_document import STRING_KEYWORDS, Document, Facts, Goal, Json

MAX_GRAMMAR_BYTES = 1 << 20  # rules for all schemas of a request, its tools included
MAX_SUBSCHEMAS = 10_000  # subschemas of a request, each counted as often as it is used
MAX_STEPS = 100_000  # steps of taking the schemas of a request apart
MAX_STATES = 5_000  # states of counting the properties of an object or the items of an array
MAX_MATCHES = 3  # patterns of names that a name may match together
MAX_PATTERNS = 100  # patterns of names of properties, with schemas that differ
MAX_UNIQUE = 63  # values that the items of an array with uniqueItems may have: bits of llguidance's parameters

WHITESPACE = r" |\n[ \t]{0,20}"
"""Allowed once between the parts of JSON: without a bound some models write blanks until the token limit."""

SHARED_RULES = (
    rf"J_OPEN: /\{{(?:{WHITESPACE})?/",
    rf"J_CLOSE: /(?:{WHITESPACE})?\}}/",
    rf"J_BEGIN: /\[(?:{WHITESPACE})?/",
    rf"J_END: /(?:{WHITESPACE})?\]/",
    rf"J_COMMA: /(?:{WHITESPACE})?,(?:{WHITESPACE})?/",
    rf"J_COLON: /(?:{WHITESPACE})?:(?:{WHITESPACE})?/",
    r'J_PLAIN: /"[^"\\\x00-\x1F\x7F]*"/',
    r'J_NAME: /"(?:[^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/',
)
"""Terminals of all grammars of JSON. J_NAME: the name of a property that the schema does not name, without escapes that
it does not need, so that no other property's name can be written in another way."""


ANY = "(?s:.*)"


class Rule(str):
    """A reference to a rule, in the alternatives of another one."""


class Repeat(NamedTuple):
    """Symbols that occur several times. `most`: None for no limit."""

    body: Sequence[Symbol]
    least: int
    most: int | None


Symbol = str | Repeat
"""A `Rule`, a `Repeat`, or the text of a terminal."""


class Schemas:
    """The JSON schemas of one request as rules of a grammar; SHARED_RULES belong to them."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._n_parts = self._n_steps = 0
        self._numbers = itertools.count()

    def grammar(self, schema: Any, strict: bool = False, root: Any = None) -> str:
        """Returns the name of the rule for JSON that follows `schema`. `root`: the document in which `$ref` is looked
        up, if `schema` is only a part of it. Raises SchemaError for a schema that is invalid or too large, and for a
        strict one with keywords that cannot be followed."""
        try:
            json.dumps(schema, allow_nan=False)
            document = Document(schema if root is None else root, self._count_steps)
            writer = _Writer(document, self._numbers, self._count_part)
            rule = writer.rule(document.goal(schema))
            self.rules += writer.rules(rule, schema)
        except RecursionError:
            raise SchemaError("the JSON schema nests too deep, or its references do; simplify it.") from None
        except SchemaError:
            raise
        except (TypeError, ValueError) as error:
            raise SchemaError(f"the JSON schema is not JSON ({error}).") from error
        if strict and document.ignored:
            raise SchemaError(
                "a strict JSON schema has only keywords that can be followed, but this one has"
                f" {', '.join(sorted(document.ignored))}; leave it out, or set strict to false."
            )
        return rule

    def _count_part(self) -> None:
        self._n_parts += 1
        if self._n_parts > MAX_SUBSCHEMAS:
            raise SchemaError(f"the JSON schemas of a request have up to {MAX_SUBSCHEMAS} parts, counting repetitions.")

    def _count_steps(self, n: int) -> None:
        self._n_steps += n
        if self._n_steps > MAX_STEPS:
            raise SchemaError("the JSON schemas of a request are too large, or their combinations are; simplify them.")


@dataclass
class _Writer:
    """Writes the rules of one document."""

    document: Document
    numbers: Iterator[int]
    count_part: Callable[[], None]

    def __post_init__(self) -> None:
        self._goals: dict[Goal, Rule] = {}
        self._todo: list[Goal] = []
        self._rules: dict[str, list[Sequence[Symbol]]] = {}
        self._names: dict[str, str] = {}  # names of terminals and of rules without alternatives, by what they are
        self._patterns: dict[str, str] = {}  # names of terminals by patterns of names
        self._lines: list[str] = []

    def rule(self, goal: Goal) -> Rule:
        """Returns the rule of values that follow a goal; it is written later."""
        self.count_part()
        if goal not in self._goals:
            self._goals[goal] = self._new_rule()
            self._todo.append(goal)
        return self._goals[goal]

    def rules(self, first: Rule, schema: Any) -> list[str]:
        """Returns the lines of all rules. Raises SchemaError where `first` matches nothing."""
        while self._todo:
            goal = self._todo.pop()
            rule = self._goals[goal]
            for facts in self.document.alternatives(goal):
                self._rules[rule] += self._values(facts)
        possible = _productive(self._rules)
        if first not in possible:
            raise SchemaError(f"nothing matches the JSON schema {json.dumps(schema)[:80]}; change it.")
        lines = []
        for name in possible:
            texts = [_text_of(symbols, possible) for symbols in self._rules[name]]
            lines.append(f"{name}: {' | '.join(dict.fromkeys(text for text in texts if text is not None))}")
        return lines + self._lines

    def _new_rule(self, *alternatives: Sequence[Symbol]) -> Rule:
        name = Rule(f"json_{next(self.numbers)}")
        self._rules[name] = list(alternatives)
        return name

    def _terminal(self, expression: str) -> str:
        """Returns the name of a terminal, which is defined once."""
        if expression not in self._names:
            self._names[expression] = name = f"J_{next(self.numbers)}"
            self._lines.append(f"{name}: {expression}")
        return self._names[expression]

    def _leaf(self, form: Json) -> str:
        """Returns the name of a rule for a value without parts, which llguidance reads."""
        expression = f"%json {json.dumps({**form, 'x-guidance': _leaf_options()})}"
        if expression not in self._names:
            self._names[expression] = name = f"json_{next(self.numbers)}"
            self._lines.append(f"{name}: {expression}")
        return self._names[expression]

    def _literals(self, values: Sequence[Any]) -> list[Sequence[Symbol]]:
        return [(self._terminal(_literal(values)),)] if values else []

    # Values

    def _values(self, facts: Facts) -> Iterator[Sequence[Symbol]]:
        """Yields the alternatives of the grammar for the values that these facts allow."""
        for kind in facts.types:
            if kind == "object" and facts.values is None:
                yield from self._object(facts)
            elif kind == "array" and facts.values is None:
                yield from self._array(facts)
            elif kind == "string":
                yield from self._string(facts)
            elif (values := self._scalars(facts, kind)) is not None:
                yield from self._literals(values)
            elif kind == "number":
                yield from self._number(facts)

    def _scalars(self, facts: Facts, kind: str) -> list[Any] | None:
        """Returns the values of a type that has few of them, None for others."""
        if facts.values is not None:
            return facts.values_of(kind)
        few: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
        return [value for value in few[kind] if (kind, value) not in facts.excluded] if kind in few else None

    def _number(self, facts: Facts) -> Iterator[Sequence[Symbol]]:
        numbers = facts.numbers
        if not numbers.is_empty():
            expression = numbers.expression()
            yield (self._leaf(expression) if isinstance(expression, dict) else self._terminal(expression),)

    def _string(self, facts: Facts) -> Iterator[Sequence[Symbol]]:
        forms = [{key: part[key] for key in STRING_KEYWORDS if key in part} for part in facts.parts]
        forms = [form for form in forms if form]
        values, most = facts.values_of("string"), facts.most("maxLength")
        if values is not None and not forms:
            yield from self._literals(values)
        elif values is None and any(kind == "string" for kind, _ in facts.excluded):
            yield (self._terminal(self._texts(facts)),)
        elif values != [] and (most is None or facts.least("minLength") <= most):
            forms += [] if values is None else [{"enum": values}]
            yield (self._leaf({"type": "string", "allOf": forms} if forms else {"type": "string"}),)

    # Arrays

    def _array(self, facts: Facts) -> Iterator[Sequence[Symbol]]:
        least, most = facts.fewest_items, facts.most("maxItems")
        if most is not None and least > most:
            return
        contained = list(facts.each("contains"))
        if any(facts.each("uniqueItems")) and (most is None or most > 1):
            found = None if contained else self._unique_items(facts, least, most)
            if found is not None:
                yield from found
                return
            self.document.ignored.add("uniqueItems")
        if contained:
            counted = self._containing_items(facts, least, most, contained)
            if counted is not None:
                yield "J_BEGIN", counted
                return
            self.document.ignored.add("contains")
        n_prefix = facts.n_prefix if most is None else min(facts.n_prefix, most)
        items = [self._item(facts, n) for n in range(n_prefix + 1)]
        rest = self._rest(items[n_prefix], n_prefix, least, most, "J_END")
        for n in reversed(range(n_prefix)):
            end: list[Sequence[Symbol]] = [("J_END",)] if n >= least else []
            item = items[n]
            rest = self._new_rule(*([(*_comma(n), item, rest)] if item else ()), *end)
        yield "J_BEGIN", rest

    def _item(self, facts: Facts, n: int, *schemas: Any) -> Rule | None:
        """Returns the rule of an array's item, which follows further `schemas`; None where it is not allowed."""
        goal = self.document.item_goal(facts, n)
        return None if goal is None else self.rule(self.document.together(goal, *schemas))

    def _rest(self, one: Rule | None, n: int, least: int, most: int | None, end: str) -> Rule:
        """Items, or properties, after the first `n`, and the end."""
        alternatives: list[Sequence[Symbol]] = [(end,)] if n >= least else []
        room = None if most is None else most - n
        if one and (room is None or room > 0):
            if n:
                alternatives.append((Repeat(("J_COMMA", one), max(least - n, 1), room), end))
            else:
                more = Repeat(("J_COMMA", one), max(least - 1, 0), None if room is None else room - 1)
                alternatives.append((one, more, end))
        return self._new_rule(*alternatives)

    def _containing_items(self, facts: Facts, least: int, most: int | None, contained: list[Any]) -> Rule | None:
        """Returns items, some with the schema of `contains`, and the end; None for too many states."""
        fewest, limit = facts.least("minContains", 1), facts.most("maxContains")
        n_items = max(facts.n_prefix, least, most or 0, 1)  # items that are counted
        n_found = max(fewest, limit or 0)
        if len(contained) > 1 or (n_items + 1) * (n_found + 1) > MAX_STATES:
            return None
        without = [] if limit is None else [{"not": contained[0]}]
        states = {key: self._new_rule() for key in itertools.product(range(n_items + 1), range(n_found + 1))}
        for (n, found), state in states.items():
            alternatives = self._rules[state]
            if n >= least and found >= fewest:
                alternatives.append(("J_END",))
            one, other = self._item(facts, n, contained[0]), self._item(facts, n, *without)
            if one is None or other is None or (most is not None and n >= most):
                continue
            after = min(n + 1, n_items)
            if limit is None or found < limit:
                alternatives.append((*_comma(n), one, states[after, min(found + 1, n_found)]))
            alternatives.append((*_comma(n), other, states[after, found]))
        return states[0, 0]

    def _unique_items(self, facts: Facts, least: int, most: int | None) -> list[Sequence[Symbol]] | None:
        """Returns items that differ, as a rule whose parameter has a bit for each value that was there; None where the
        values of the items are not few."""
        goal = self.document.item_goal(facts, 0)
        values = None if goal is None or facts.n_prefix else self._few(goal)
        if values is None or len(values) > MAX_UNIQUE:
            return None
        most = len(values) if most is None else min(most, len(values))
        if least > most:
            return []  # there are too few values
        first, more = (f"json_{next(self.numbers)}" for _ in range(2))
        end = [f"J_END %if bit_count_ge(_, {least})"]
        begun, going = [end[0]], [end[0]]
        for bit, value in enumerate(values):
            item = self._terminal(json.dumps(value))
            begun.append(f"{item} {more}::set_bit({bit})")
            going.append(f"J_COMMA {item} {more}::set_bit({bit}) %if and(bit_clear({bit}), bit_count_lt(_, {most}))")
        self._lines += [f"{first}::_: {' | '.join(begun)}", f"{more}::_: {' | '.join(going)}"]
        return [("J_BEGIN", f"{first}::0x0")]

    def _few(self, goal: Goal) -> list[str] | None:
        """Returns the texts of all values of a goal that has only a few scalars, None for another one."""
        texts = list[str]()
        for facts in self.document.alternatives(goal):
            for kind in facts.types:
                values = self._scalars(facts, kind)
                if values is None or (
                    kind == "string" and any(part.keys() & {*STRING_KEYWORDS} for part in facts.parts)
                ):
                    return None
                texts += [_texts_of(value)[0] for value in values]
        return list(dict.fromkeys(texts))

    # Objects

    def _object(self, facts: Facts) -> Iterator[Sequence[Symbol]]:
        least, most = facts.least("minProperties"), facts.most("maxProperties")
        if most is not None and least > most:
            return
        names = facts.property_names
        n_counted = max(least, most or 0, 1)
        if n_counted > 1 and (len(names) + 1) * (min(len(names), n_counted) + 1) > MAX_STATES:
            self.document.ignored |= {"minProperties", "maxProperties"}
            least, most, n_counted = 0, None, 1
        filters = [self._name_filter(schema) for schema in facts.each("propertyNames")]
        other = self._new_rule(*self._pairs(facts, None, [*names, *facts.absent], filters))
        after = [self._rest(other, n, least, most, "J_CLOSE") for n in range(min(len(names), n_counted) + 1)]
        for position, name in reversed(list(enumerate(names))):
            pairs = self._pairs(facts, name, (), filters)
            states = list[Rule]()
            for n in range(min(position, n_counted) + 1):
                skipped: list[Sequence[Symbol]] = [] if name in facts.required else [(after[n],)]
                following = after[min(n + 1, n_counted)]
                fits = most is None or n < most
                present = [(*_comma(n), *pair, following) for pair in pairs if fits]
                states.append(self._new_rule(*present, *skipped))
            after = states
        yield "J_OPEN", after[0]

    def _pairs(
        self, facts: Facts, name: str | None, taken: Sequence[str], filters: list[str]
    ) -> list[Sequence[Symbol]]:
        """Returns a property and its value, for each choice of the patterns that its name matches. `name`: None for one
        other than `taken`."""
        others = ["J_NAME", *([f"~{_literal(taken)}"] if taken else ())]
        key = others if name is None else [_literal([name])]
        pairs = list[Sequence[Symbol]]()
        groups = self._pattern_groups(facts)
        sizes = range((len(groups) if len(groups) <= MAX_MATCHES else 1) + 1)
        for matched in itertools.chain.from_iterable(itertools.combinations(groups, n) for n in sizes):
            goal = self.document.property_goal(facts, name, [group[0] for group in matched])
            if goal is None:
                continue
            terms = [*key, *filters]
            for group in groups:
                one_of = f"({' | '.join(map(self._name_pattern, group))})"
                terms.append(one_of if group in matched else f"~{one_of}")
            if groups:
                terms.append("J_PLAIN")
            text = terms[0] if len(terms) == 1 else self._terminal(" & ".join(terms))
            pairs.append((text, "J_COLON", self.rule(goal)))
        return pairs

    def _pattern_groups(self, facts: Facts) -> list[list[str]]:
        """Returns the patterns of names. Patterns of one schema with equal goals are together."""
        is_one = len(list(facts.each("patternProperties"))) == 1
        groups: dict[Any, list[str]] = {}
        for pattern in facts.patterns:
            key = self.document.property_goal(facts, None, (pattern,)) if is_one else pattern
            groups.setdefault(key, []).append(pattern)
        if len(groups) > MAX_PATTERNS:
            raise SchemaError(
                f"an object has up to {MAX_PATTERNS} patternProperties that differ, but this one has {len(groups)};"
                " leave some out."
            )
        return list(groups.values())

    def _name_pattern(self, pattern: str) -> str:
        """Returns the terminal of names without escapes that a pattern matches somewhere."""
        if pattern not in self._patterns:
            self._patterns[pattern] = self._terminal(rf'/"(?:{_search(pattern)})"/')
        return self._patterns[pattern]

    def _name_filter(self, schema: Any) -> str:
        """Returns the names that follow a schema, as a terminal."""
        alternatives = self.document.alternatives(self.document.goal(schema))
        expressions = [f"({self._texts(facts)})" for facts in alternatives if "string" in facts.types]
        return self._terminal(" | ".join(expressions) or "J_NAME & ~J_NAME")

    def _texts(self, facts: Facts) -> str:
        """Returns texts that follow some facts, without escapes that they do not need, as an expression of a
        terminal."""
        terms = ["J_NAME"]
        if (values := facts.values_of("string")) is not None:
            terms.append(_literal(values) if values else "~J_NAME")
        if excluded := [value for kind, value in facts.excluded if kind == "string"]:
            terms.append(f"~{_literal(excluded)}")
        least, most = facts.least("minLength"), facts.most("maxLength")
        if least or most is not None:
            terms.append(rf'/"(?:[^"\\]|\\.){{{least},{"" if most is None else most}}}"/')
        for pattern in facts.each("pattern"):
            terms += ["J_PLAIN", self._name_pattern(pattern)]
        if any(facts.each("format")):
            self.document.ignored.add("format beside excluded texts or inside propertyNames")
        return " & ".join(terms)


# Texts


@functools.cache
def _leaf_options() -> Json:
    """Returns options of %json for a value without parts."""
    from importlib.metadata import version  # the import takes a while, and only requests with a schema need it

    major, minor, *_ = version("llguidance").split(".")
    is_new = (int(major), int(minor)) >= (1, 9)
    escapes = {"json_allow_general_unicode_escapes": True} if is_new else {}
    return {"whitespace_flexible": False, "lenient": True, **escapes}


def _literal(values: Iterable[Any]) -> str:
    """Returns one of some scalars, as an expression of a terminal."""
    texts = list(map(json.dumps, itertools.chain.from_iterable(map(_texts_of, values))))
    return f"({' | '.join(texts)})" if len(texts) > 1 else texts[0]


def _comma(n: int) -> tuple[str, ...]:
    """Returns what stands before an item or a property after `n` others."""
    return ("J_COMMA",) if n else ()


def _texts_of(value: Any) -> list[str]:
    """Returns the texts of a scalar in JSON."""
    texts = [json.dumps(value, ensure_ascii=False)]
    return [*texts, str(int(value))] if isinstance(value, float) and value.is_integer() else texts


def _productive(rules: dict[str, list[Sequence[Symbol]]]) -> dict[str, None]:
    """Returns the rules that match something, in their order."""
    users: dict[str, list[str]] = {}
    for name, alternatives in rules.items():
        for symbol in itertools.chain.from_iterable(map(_rules_in, alternatives)):
            users.setdefault(symbol, []).append(name)
    possible: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in possible and any(_text_of(symbols, possible) is not None for symbols in rules[name]):
            possible.add(name)
            todo += users.get(name, ())
    return {name: None for name in rules if name in possible}


def _rules_in(symbols: Sequence[Symbol]) -> Iterator[Rule]:
    for symbol in symbols:
        if isinstance(symbol, Repeat):
            yield from _rules_in(symbol.body)
        elif isinstance(symbol, Rule):
            yield symbol


def _text_of(symbols: Sequence[Symbol], possible: Container[str]) -> str | None:
    """Returns an alternative as text, None where one of its rules is not among the `possible` ones."""
    texts = []
    for symbol in symbols:
        if isinstance(symbol, Repeat):
            inner = _text_of(symbol.body, possible)
            if inner is None and symbol.least:
                return None
            if inner is not None and symbol.most != 0:
                texts.append(f"({inner}){{{symbol.least},{'' if symbol.most is None else symbol.most}}}")
        elif isinstance(symbol, Rule) and symbol not in possible:
            return None
        else:
            texts.append(symbol)
    return " ".join(texts)


def _search(pattern: str) -> str:
    """Returns a regular expression of the whole names that a pattern matches somewhere."""
    alternatives, part, depth = list[str](), "", 0
    for piece in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            alternatives.append(part)
            part = ""
        else:
            part += (
                piece.replace("\n", r"\n")
                if piece[0] == "\\"
                else re.sub(r"(?<!\\)/", r"\/", piece).replace("\n", r"\n")
            )
    texts = []
    for each in [*alternatives, part]:
        begin, end = each.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", each)
        texts.append(f"{'' if begin else ANY}(?:{each[begin : -1 if end else None]}){'' if end else ANY}")
    return "|".join(texts)
