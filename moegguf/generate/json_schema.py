"""Converts JSON schemas to grammars in llguidance's Lark dialect.

Schemas are untrusted. They are read as JSON Schema 2020-12, with these exceptions:
- If a schema names properties, an object may have no others, unless the schema also has `additionalProperties`,
  `patternProperties` or `unevaluatedProperties`.
- Properties are written in the order of the schema.
- A schema without `type`, `enum` and `const` has the type to which its other keywords apply. If they apply to several
  types, it is the first of object, array, string and number.
- `prefixItems` without `items` allows no other items. If `minItems` is also missing, all of its items are required.
- Numbers have up to 16 digits before and after the point, unless their bounds need more. Whitespace is limited.
- If an object has more than MAX_MATCHES `patternProperties` with different schemas, a name may match the patterns of
  at most one of these schemas.
- Unknown keywords and formats are ignored. The few keywords that no grammar can enforce are also ignored, unless the
  request is strict.
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

# Maximum length of a request's grammar, including the schemas of tools.
MAX_GRAMMAR_CHARS = 1 << 20
# Maximum number of subschemas in a request; a subschema is counted each time it is
# used.
MAX_SUBSCHEMAS = 10_000
# Maximum number of steps to split all schemas of a request into alternatives.
MAX_STEPS = 100_000
# Maximum number of grammar states that count the properties of an object or the items
# of an array.
MAX_STATES = 5_000
# If more patternProperties have different schemas, a name may match the patterns of
# only one schema.
MAX_MATCHES = 3
# Maximum number of patternProperties of one object that have different schemas.
MAX_PATTERNS = 100
# Maximum number of values for the items of a `uniqueItems` array: one bit each in a
# grammar parameter.
MAX_UNIQUE = 63

WHITESPACE = r" |\n[ \t]{0,20}"
"""Regular expression for the whitespace that may occur once between the parts of JSON.
Whitespace is limited, because otherwise some models write whitespace until the token
limit."""

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
"""Terminals of all grammars of JSON. J_NAME matches a property name or string value
that has no unnecessary escapes. With such escapes, an excluded name could be written in
a form that the grammar does not recognize."""


ANY = "(?s:.*)"


class Rule(str):
    """The name of a rule, as a symbol in another rule."""


class Repeat(NamedTuple):
    """A repetition of a comma and a match of `rule`, from `least` to `most` times.
    `most` is None if there is no limit."""

    rule: Rule
    least: int
    most: int | None

    def __str__(self) -> str:
        most = "" if self.most is None else self.most
        return f"(J_COMMA {self.rule}){{{self.least},{most}}}"


Symbol = str | Repeat
"""A `Rule`, a `Repeat`, or the name or expression of a terminal."""
Symbols = Sequence[Symbol]


class Schemas:
    """Collects the grammar rules for all JSON schemas of one request. The grammar also
    needs SHARED_RULES."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._n_parts = self._n_steps = 0
        self._numbers = itertools.count()

    def grammar(self, schema: Any, strict: bool = False, root: Any = None) -> str:
        """Adds the rules for a schema. Returns the name of the rule for JSON that
        satisfies the schema. `root`: the document in which `$ref` is looked up; None:
        the schema itself. Raises SchemaError for a schema that is invalid or too large,
        or that nothing matches, and for a strict schema with keywords that no grammar
        can enforce."""
        try:
            json.dumps(schema, allow_nan=False)
            document = Document(schema if root is None else root, self._count_steps)
            writer = _Writer(document, self._numbers, self._count_part)
            rule = writer.rule(document.goal(schema))
            self.rules += writer.rules(rule, schema)
        except RecursionError:
            raise SchemaError(
                "the JSON schema or its references are nested too deeply; simplify it."
            ) from None
        except SchemaError:
            raise
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"the JSON schema is not JSON ({error}); correct it."
            ) from error
        if strict and document.ignored:
            raise SchemaError(
                "a strict JSON schema may have only keywords that a grammar can enforce, but this one has"
                f" {', '.join(sorted(document.ignored))}; leave them out, or set strict to false."
            )
        return rule

    def _count_part(self) -> None:
        self._n_parts += 1
        if self._n_parts > MAX_SUBSCHEMAS:
            raise SchemaError(
                f"the JSON schemas of a request may have up to {MAX_SUBSCHEMAS} parts, including repetitions, but these"
                " have more; simplify them."
            )

    def _count_steps(self, n: int) -> None:
        self._n_steps += n
        if self._n_steps > MAX_STEPS:
            raise SchemaError(
                f"the JSON schemas of a request or their combinations may take up to {MAX_STEPS} steps to read, but"
                " these take more; simplify them."
            )


@dataclass
class _Writer:
    """Writes the grammar rules for one document."""

    document: Document
    numbers: Iterator[int]
    count_part: Callable[[], None]

    def __post_init__(self) -> None:
        self._goals: dict[Goal, Rule] = {}
        self._todo: list[Goal] = []
        self._rules: dict[str, list[Symbols]] = {}
        # Content -> name, of terminals and of %json rules.
        self._names: dict[str, str] = {}
        # Pattern of property names -> name of the terminal.
        self._patterns: dict[str, str] = {}
        self._lines: list[str] = []

    def rule(self, goal: Goal) -> Rule:
        """Returns the name of the rule for values that satisfy a goal. `rules` writes
        the rule later."""
        self.count_part()
        if goal not in self._goals:
            self._goals[goal] = self._new_rule()
            self._todo.append(goal)
        return self._goals[goal]

    def rules(self, first: Rule, schema: Any) -> list[str]:
        """Writes all rules and returns their lines. Raises SchemaError if the rule
        `first` matches nothing."""
        while self._todo:
            goal = self._todo.pop()
            rule = self._goals[goal]
            for facts in self.document.alternatives(goal):
                self._rules[rule] += self._values(facts)
        possible = _productive(self._rules)
        if first not in possible:
            raise SchemaError(
                f"nothing matches the JSON schema {json.dumps(schema)[:80]}; change it."
            )
        lines = []
        for name in possible:
            texts = [_text_of(symbols, possible) for symbols in self._rules[name]]
            lines.append(
                f"{name}: {' | '.join(dict.fromkeys(text for text in texts if text is not None))}"
            )
        return lines + self._lines

    def _new_rule(self, *alternatives: Symbols) -> Rule:
        name = Rule(f"json_{next(self.numbers)}")
        self._rules[name] = list(alternatives)
        return name

    def _terminal(self, expression: str, prefix: str = "J") -> str:
        """Returns the name of the terminal for an expression, which begins with
        `prefix`. Equal expressions share one terminal."""
        if expression not in self._names:
            self._names[expression] = name = f"{prefix}_{next(self.numbers)}"
            self._lines.append(f"{name}: {expression}")
        return self._names[expression]

    def _leaf(self, form: Json) -> str:
        """Returns the name of a rule for a number or string. llguidance itself converts
        the schema `form`."""
        options = {**form, "x-guidance": _leaf_options()}
        return self._terminal(f"%json {json.dumps(options)}", "json")

    def _literals(self, values: Sequence[Any]) -> list[Symbols]:
        return [(self._terminal(_literal(values)),)] if values else []

    # Values

    def _values(self, facts: Facts) -> Iterator[Symbols]:
        """Yields the alternatives of a rule for the values that `facts` allow."""
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
        """Returns all allowed values of the type `kind` if there are few (null,
        booleans, listed values), otherwise None."""
        if facts.values is not None:
            return facts.values_of(kind)
        few: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
        return (
            [value for value in few[kind] if (kind, value) not in facts.excluded]
            if kind in few
            else None
        )

    def _number(self, facts: Facts) -> Iterator[Symbols]:
        numbers = facts.numbers
        for n, expression in enumerate(
            [] if numbers.is_empty() else numbers.expressions()
        ):
            if n:  # `rule` has already counted the first one
                self.count_part()
            if isinstance(expression, str):
                yield (self._terminal(expression),)
                continue
            if numbers.fractional:
                self.document.ignored.add("type integer inside not, beside multipleOf")
            yield (self._leaf(expression),)

    def _string(self, facts: Facts) -> Iterator[Symbols]:
        forms = [
            {key: part[key] for key in STRING_KEYWORDS if key in part}
            for part in facts.parts
        ]
        forms = [form for form in forms if form]
        values, most = facts.values_of("string"), facts.most("maxLength")
        if values is not None and not forms:
            yield from self._literals(values)
        elif values is None and any(kind == "string" for kind, _ in facts.excluded):
            yield (self._terminal(self._texts(facts)),)
        elif values != [] and (most is None or facts.least("minLength") <= most):
            forms += [] if values is None else [{"enum": values}]
            yield (
                self._leaf(
                    {"type": "string", "allOf": forms} if forms else {"type": "string"}
                ),
            )

    # Arrays

    def _array(self, facts: Facts) -> Iterator[Symbols]:
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
            end: list[Symbols] = [("J_END",)] if n >= least else []
            item = items[n]
            rest = self._new_rule(*([(*_comma(n), item, rest)] if item else ()), *end)
        yield "J_BEGIN", rest

    def _item(self, facts: Facts, n: int, *schemas: Any) -> Rule | None:
        """Returns the rule for an array's item with index `n`, which must also satisfy
        `schemas`. Returns None if such an item is not allowed."""
        goal = self.document.item_goal(facts, n)
        return (
            None if goal is None else self.rule(self.document.together(goal, *schemas))
        )

    def _rest(
        self, one: Rule | None, n: int, least: int, most: int | None, end: str
    ) -> Rule:
        """Returns the rule for the remainder of an array or object after its first `n`
        items or properties. The remainder consists of more items or properties, which
        match the rule `one`, and the closing terminal `end`. If `one` is None, no more
        are allowed. `least` and `most` limit the total number; None: no limit."""
        alternatives: list[Symbols] = [(end,)] if n >= least else []
        room = None if most is None else most - n
        if one and (room is None or room > 0):
            if n:
                more = Repeat(one, max(least - n, 1), room)
                alternatives.append((more, end))
            else:
                n_more = None if room is None else room - 1
                more = Repeat(one, max(least - 1, 0), n_more)
                alternatives.append((one, more, end))
        return self._new_rule(*alternatives)

    def _containing_items(
        self, facts: Facts, least: int, most: int | None, contained: list[Any]
    ) -> Rule | None:
        """Returns the rule for an array after its opening bracket, if some items must
        satisfy the schema of `contains`. Returns None if there are several `contains`,
        or if counting would need more than MAX_STATES states."""
        fewest, limit = facts.least("minContains", 1), facts.most("maxContains")
        # The states count up to this number of items.
        n_items = max(facts.n_prefix, least, most or 0, 1)
        n_found = max(fewest, limit or 0)
        if len(contained) > 1 or (n_items + 1) * (n_found + 1) > MAX_STATES:
            return None
        without = [] if limit is None else [{"not": contained[0]}]
        states = {
            key: self._new_rule()
            for key in itertools.product(range(n_items + 1), range(n_found + 1))
        }
        for (n, found), state in states.items():
            alternatives = self._rules[state]
            if n >= least and found >= fewest:
                alternatives.append(("J_END",))
            one, other = (
                self._item(facts, n, contained[0]),
                self._item(facts, n, *without),
            )
            if one is None or other is None or (most is not None and n >= most):
                continue
            after = min(n + 1, n_items)
            if limit is None or found < limit:
                alternatives.append(
                    (*_comma(n), one, states[after, min(found + 1, n_found)])
                )
            alternatives.append((*_comma(n), other, states[after, found]))
        return states[0, 0]

    def _unique_items(
        self, facts: Facts, least: int, most: int | None
    ) -> list[Symbols] | None:
        """Returns the alternatives for an array whose items all differ. The rule has a
        parameter with one bit for each value, which is set if the value already
        occurred. Returns None if the items are not scalars from a list of at most
        MAX_UNIQUE values, or if there is `prefixItems`."""
        goal = self.document.item_goal(facts, 0)
        values = None if goal is None or facts.n_prefix else self._few(goal)
        if values is None or len(values) > MAX_UNIQUE:
            return None
        most = len(values) if most is None else min(most, len(values))
        if least > most:
            return []  # there are fewer values than required items
        first, more = (f"json_{next(self.numbers)}" for _ in range(2))
        end = [f"J_END %if bit_count_ge(_, {least})"]
        begun, going = [end[0]], [end[0]]
        for bit, value in enumerate(values):
            item = self._terminal(json.dumps(value))
            begun.append(f"{item} {more}::set_bit({bit})")
            going.append(
                f"J_COMMA {item} {more}::set_bit({bit}) %if and(bit_clear({bit}), bit_count_lt(_, {most}))"
            )
        self._lines += [
            f"{first}::_: {' | '.join(begun)}",
            f"{more}::_: {' | '.join(going)}",
        ]
        return [("J_BEGIN", f"{first}::0x0")]

    def _few(self, goal: Goal) -> list[str] | None:
        """Returns the JSON texts of all values of a goal if it allows only null,
        booleans and listed scalars, otherwise None. Also returns None if strings must
        also satisfy other keywords such as `pattern`."""
        texts = list[str]()
        for facts in self.document.alternatives(goal):
            for kind in facts.types:
                values = self._scalars(facts, kind)
                if values is None or (
                    kind == "string"
                    and any(part.keys() & {*STRING_KEYWORDS} for part in facts.parts)
                ):
                    return None
                texts += [_texts_of(value)[0] for value in values]
        return list(dict.fromkeys(texts))

    # Objects

    def _object(self, facts: Facts) -> Iterator[Symbols]:
        least, most = facts.least("minProperties"), facts.most("maxProperties")
        if most is not None and least > most:
            return
        names = facts.property_names
        n_counted = max(least, most or 0, 1)
        if (
            n_counted > 1
            and (len(names) + 1) * (min(len(names), n_counted) + 1) > MAX_STATES
        ):
            self.document.ignored |= {"minProperties", "maxProperties"}
            least, most, n_counted = 0, None, 1
        filters = [self._name_filter(schema) for schema in facts.each("propertyNames")]
        other = self._new_rule(*self._pairs(facts, None, names, filters))
        after = [
            self._rest(other, n, least, most, "J_CLOSE")
            for n in range(min(len(names), n_counted) + 1)
        ]
        for position, name in reversed(list(enumerate(names))):
            pairs = self._pairs(facts, name, (), filters)
            states = list[Rule]()
            for n in range(min(position, n_counted) + 1):
                skipped: list[Symbols] = [] if name in facts.required else [(after[n],)]
                following = after[min(n + 1, n_counted)]
                fits = most is None or n < most
                present = [(*_comma(n), *pair, following) for pair in pairs if fits]
                states.append(self._new_rule(*present, *skipped))
            after = states
        yield "J_OPEN", after[0]

    def _pairs(
        self, facts: Facts, name: str | None, taken: Sequence[str], filters: list[str]
    ) -> list[Symbols]:
        """Returns the alternatives for a property and its value, one for each set of
        patterns that the name may match. `name` is None for any name that is not in
        `taken`."""
        others = ["J_NAME", *([f"~{_literal(taken)}"] if taken else ())]
        key = others if name is None else [_literal([name])]
        pairs = list[Symbols]()
        groups = self._pattern_groups(facts)
        sizes = range((len(groups) if len(groups) <= MAX_MATCHES else 1) + 1)
        for matched in itertools.chain.from_iterable(
            itertools.combinations(groups, n) for n in sizes
        ):
            goal = self.document.property_goal(
                facts, name, [group[0] for group in matched]
            )
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
        """Returns the patterns of `patternProperties` in groups. If a single part has
        this keyword, patterns whose values must satisfy the same goal are in one group;
        otherwise each pattern is a group. Raises SchemaError for too many groups."""
        is_one = len(list(facts.each("patternProperties"))) == 1
        groups: dict[Any, list[str]] = {}
        for pattern in facts.patterns:
            key = (
                self.document.property_goal(facts, None, (pattern,))
                if is_one
                else pattern
            )
            groups.setdefault(key, []).append(pattern)
        if len(groups) > MAX_PATTERNS:
            raise SchemaError(
                f"an object may have up to {MAX_PATTERNS} patternProperties with different schemas, but this one has"
                f" {len(groups)}; leave some out."
            )
        return list(groups.values())

    def _name_pattern(self, pattern: str) -> str:
        """Returns the terminal for property names or other strings in which `pattern`
        matches any part. The strings are written without escapes."""
        if pattern not in self._patterns:
            self._patterns[pattern] = self._terminal(rf'/"(?:{_search(pattern)})"/')
        return self._patterns[pattern]

    def _name_filter(self, schema: Any) -> str:
        """Returns the terminal for property names that satisfy the schema of
        `propertyNames`."""
        alternatives = self.document.alternatives(self.document.goal(schema))
        expressions = [
            f"({self._texts(facts)})"
            for facts in alternatives
            if "string" in facts.types
        ]
        return self._terminal(" | ".join(expressions) or "J_NAME & ~J_NAME")

    def _texts(self, facts: Facts) -> str:
        """Returns the expression of a terminal for strings that `facts` allow, written
        without unnecessary escapes."""
        terms = ["J_NAME"]
        if (values := facts.values_of("string")) is not None:
            terms.append(_literal(values) if values else "~J_NAME")
        if excluded := [value for kind, value in facts.excluded if kind == "string"]:
            terms.append(f"~{_literal(excluded)}")
        least, most = facts.least("minLength"), facts.most("maxLength")
        if least or most is not None:
            terms.append(
                rf'/"(?:[^"\\]|\\.){{{least},{"" if most is None else most}}}"/'
            )
        for pattern in facts.each("pattern"):
            terms += ["J_PLAIN", self._name_pattern(pattern)]
        if any(facts.each("format")):
            self.document.ignored.add(
                "format together with excluded texts, or inside propertyNames"
            )
        return " & ".join(terms)


# Texts


@functools.cache
def _leaf_options() -> Json:
    """Returns the options of llguidance's %json for a number or string."""
    # A slow import, which only requests with a schema need.
    from importlib.metadata import version

    major, minor, *_ = version("llguidance").split(".")
    is_new = (int(major), int(minor)) >= (1, 9)
    escapes = {"json_allow_general_unicode_escapes": True} if is_new else {}
    return {"whitespace_flexible": False, "lenient": True, **escapes}


def _literal(values: Iterable[Any]) -> str:
    """Returns the expression of a terminal that matches any of these scalars."""
    texts = list(map(json.dumps, itertools.chain.from_iterable(map(_texts_of, values))))
    return f"({' | '.join(texts)})" if len(texts) > 1 else texts[0]


def _comma(n: int) -> tuple[str, ...]:
    """Returns the comma before an item or property that follows `n` others, or nothing
    if `n` is 0."""
    return ("J_COMMA",) if n else ()


def _texts_of(value: Any) -> list[str]:
    """Returns the JSON texts of a scalar. A float that is an integer has two, such as
    "1.0" and "1"."""
    texts = [json.dumps(value, ensure_ascii=False)]
    return (
        [*texts, str(int(value))]
        if isinstance(value, float) and value.is_integer()
        else texts
    )


def _productive(rules: dict[str, list[Symbols]]) -> dict[str, None]:
    """Returns the names of the rules that match some text, in the order of `rules`. A
    match of any other rule could never end."""
    users: dict[str, list[str]] = {}
    for name, alternatives in rules.items():
        for symbol in itertools.chain.from_iterable(map(_rules_in, alternatives)):
            users.setdefault(symbol, []).append(name)
    possible: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in possible and any(
            _text_of(symbols, possible) is not None for symbols in rules[name]
        ):
            possible.add(name)
            todo += users.get(name, ())
    return {name: None for name in rules if name in possible}


def _rules_in(symbols: Symbols) -> Iterator[Rule]:
    for symbol in symbols:
        if isinstance(symbol, Repeat):
            yield symbol.rule
        elif isinstance(symbol, Rule):
            yield symbol


def _text_of(symbols: Symbols, possible: Container[str]) -> str | None:
    """Returns the text of an alternative for the grammar. Leaves out an optional
    repetition of a rule that is not in `possible`. Returns None if any other part needs
    such a rule."""
    texts = []
    for symbol in symbols:
        if isinstance(symbol, Repeat):
            is_possible = symbol.rule in possible
            if symbol.least and not is_possible:
                return None
            if is_possible and symbol.most != 0:
                texts.append(str(symbol))
        elif isinstance(symbol, Rule) and symbol not in possible:
            return None
        else:
            texts.append(symbol)
    return " ".join(texts)


def _search(pattern: str) -> str:
    """Returns a regular expression that matches a whole name if `pattern` matches any
    part of the name."""
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
        texts.append(
            f"{'' if begin else ANY}(?:{each[begin : -1 if end else None]}){'' if end else ANY}"
        )
    return "|".join(texts)
