"""The recipe of a new model: the model or files that it is based on, and its own
settings and messages. This module defines the recipe, checks its values, and reads and
writes it as a Modelfile.

A Modelfile is a text in Ollama's grammar (parser/parser.go), with lines of the form
`INSTRUCTION arguments`. The instructions, in upper or lower case, are FROM (once),
PARAMETER name value, SYSTEM, TEMPLATE, MESSAGE role text, LICENSE, ADAPTER path (once).
A value extends to the end of its line, or is in quotes, or in triple quotes; a quote at
the end of a line ends the value. `#` starts a comment line. Repeated licenses are
joined. REQUIRES has no effect. RENDERER and PARSER only cause a warning.

moegguf adds two things to the grammar. DRAFT (once) takes the name or path of a draft
model, or a value of the option `draft`. Four or more quotes at the end of an
instruction's line begin a value, which ends at a line with equally many quotes. Such a
value may contain triple quotes; `render` uses this form if no other form can be read
back.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moegguf.errors import OptionError
from moegguf.models.entry import ModelEntry, Overrides
from moegguf.options import BUDGETS, DRAFTS, LOAD_PARAMETERS, OPTIONS
from moegguf.quantities import parse_expert_cache, shown
from moegguf.text import without_surrogates

# Maximum number of characters in a system message, template, license or message.
MAX_TEXT = 1 << 20
ROLES = ("system", "user", "assistant", "tool")

_OPTIONS = {
    option.name: option for option in OPTIONS.values() if option.scope == "request"
} | {name: OPTIONS[option] for name, option in LOAD_PARAMETERS.items()}
_TYPES = {"whole": int, "threads": int, "number": float, "paths": list}
_SWITCHES = "use_mmap use_mlock numa low_vram f16_kv logits_all vocab_only embedding_only penalize_newline".split()
PARAMETERS: dict[str, type] = {
    **{name: _TYPES.get(option.kind, str) for name, option in _OPTIONS.items()},
    "stop": list,
    # Ollama's options that have no effect here.
    **dict.fromkeys(("main_gpu", "draft_num_predict", "num_gqa"), int),
    **dict.fromkeys(_SWITCHES, bool),
    "tfs_z": float,
}
"""{parameter: type of its value}, for Ollama's options (api/types.go) and moegguf's
own. A parameter with the type list may be given several times."""

RANGES = {
    name: (option.least, option.most)
    for name, option in _OPTIONS.items()
    if option.least is not None and option.most is not None
}
"""{parameter: (smallest value, largest value)}, without parameters that lack one of
these limits."""

_GO_ACTION = re.compile(
    r"\{\{-?\s*(\.|\$|if\b|range\b(?!\()|else\b|end\b|with\b|block\b|define\b|template\b|or\b|and\b|eq\b|not\b)"
)


MAX_MODELFILE = 4 << 20  # maximum number of characters in a Modelfile
# A whole float with a smaller absolute value is written as "12", not "12.0", as in
# Ollama.
MOST_SHOWN_WHOLE = 1_000_000

_HEX_NUMBER = re.compile(
    r"[+-]?0x(?:_?{0}(?:\.{0}?)?|\.{0})p[+-]?\d+(?:_\d+)*".replace(
        "{0}", "(?:[0-9a-f]+(?:_[0-9a-f]+)*)"
    ),
    re.ASCII | re.IGNORECASE,
)
# Blank lines and comment lines.
_BLANK = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*(?:[ \t]*(?:#[^\n]*)?\Z)?")
_WORD = re.compile(r"[ \t]*([A-Za-z]+)(?:[ \t]+|(?=\n|$|\"))")
_FENCED = r'(?P<fence>"{4,})\n(?P<fenced>.*?)\n(?P=fence)[ \t]*(?:\n|$)'
_BLOCK = r'"""(?P<block>.*?)"""[ \t]*(?:\n|$)'
_QUOTED = r'(?!""")"(?P<quoted>.*?)"[ \t]*(?:\n|$)'
_BARE = r'(?!")(?P<bare>[^\n]*)(?:\n|$)'
_VALUE = re.compile(f"[ \t]*(?:{_FENCED}|{_BLOCK}|{_QUOTED}|{_BARE})", re.DOTALL)
_FIRST_WORD = re.compile(r"[ \t]*([^\s\"]+)[ \t]*")
_OLLAMAS_OWN = ("RENDERER", "PARSER")
_ONCE = {"FROM": "from_", "ADAPTER": "adapter", "DRAFT": "draft"}
_INSTRUCTIONS = (
    *_ONCE,
    "PARAMETER",
    "SYSTEM",
    "TEMPLATE",
    "MESSAGE",
    "LICENSE",
    "REQUIRES",
    *_OLLAMAS_OWN,
)


@dataclass(frozen=True)
class Recipe(Overrides):
    """The recipe of a new model: either `from_` or `files`, and what the new model adds
    to them."""

    from_: str = ""  # name or path of the base model
    # {file name: digest of a blob}.
    files: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""  # path of a LoRA adapter
    # A LoRA adapter in a blob: {file name: digest}.
    adapters: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""  # name or path of a draft model, or a value of the option `draft`


def is_go_template(text: str) -> bool:
    """Returns True if a template has an action of Go's template language, which
    Ollama's templates use, and no `{%` of Jinja."""
    return bool(_GO_ACTION.search(text)) and "{%" not in text


def jinja_or_none(template: str | None) -> str | None:
    """Returns `template`. Returns None for an empty template, and for a Go template,
    because moegguf cannot use it."""
    return None if not template or is_go_template(template) else template


def left_out(recipe: Recipe) -> list[str]:
    """Returns a sentence for each unknown parameter in `recipe`, and one for a Go
    template. These are left out when a model is created."""
    found = [
        f"there is no parameter {name!r:.60}; it is left out."
        for name in recipe.parameters.keys() - PARAMETERS
    ]
    if recipe.template and is_go_template(recipe.template):
        found.append(
            "the template is in Go's language and is left out: the model's own is used, or one in Jinja."
        )
    return sorted(found)


def check_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values` as keyword arguments of `Overrides`. Parameters that are unknown
    or out of range are left out.

    Raises OptionError for a value of the wrong type, a text that is too long, or an
    invalid message.
    """
    return {
        **{
            name: check_text(name, values.get(name))
            for name in ("system", "template", "license")
        },
        "parameters": usable_parameters(values.get("parameters") or {}),
        "messages": check_messages(list(values.get("messages") or ())),
    }


def check_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the known parameters, with values converted to the right types. Raises
    OptionError for a value that cannot be converted."""
    return {
        name: _convert(name, value)
        for name, value in values.items()
        if name in PARAMETERS
    }


def usable_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the known parameters whose values are in range, converted to the right
    types. Raises OptionError for a value that cannot be converted."""
    return {
        name: value
        for name, value in check_parameters(values).items()
        if _is_in_range(name, value)
    }


def check_ranges(parameters: Mapping[str, Any]) -> None:
    """Raises OptionError for a parameter that is out of range, and BudgetError for a
    budget for experts that cannot be parsed."""
    for name, value in parameters.items():
        if not _is_in_range(name, value):
            least, most = RANGES[name]
            raise OptionError(
                f"{name} must be from {least:,} to {most:,}, but is {value:,}"
            )
        if name in BUDGETS.values():
            parse_expert_cache(value)


def _is_in_range(name: str, value: Any) -> bool:
    if name not in RANGES:
        return True
    least, most = RANGES[name]
    return least <= value <= most


def check_messages(messages: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages with only their keys `role` and `content` (default: "").
    Raises OptionError if `messages` is not a list, a role is unknown, or a message's
    content is too long or not a string."""
    if not isinstance(messages, list | tuple):
        raise OptionError(f"messages must be a list, but is {messages!r:.40}.")
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES or not isinstance(message.get("content", ""), str):
            raise OptionError(
                f"a message must have a role ({', '.join(ROLES)}), and its content must be text,"
                f" but this one is {message!r:.60}."
            )
        check_text("a message", message.get("content", ""))
    return tuple({"role": m["role"], "content": m.get("content", "")} for m in messages)


def check_text(what: str, text: str | None) -> str | None:
    """Returns `text` without surrogates, or None for None. Raises OptionError if `text`
    is not a string or is longer than MAX_TEXT."""
    if text is None:
        return None
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise OptionError(
            f"{what} must be a text of at most {MAX_TEXT} characters, but is {text!r:.40}."
        )
    return without_surrogates(text)


def parse_parameter(name: str, text: str) -> Any:
    """Parses the value of the parameter `name` in a Modelfile or in `/set parameter`.
    For a parameter of type str, or for an item of a list, returns `text` itself.

    Raises OptionError if the name is unknown, or if `text` is not the number or switch
    that the parameter requires.
    """
    kind = PARAMETERS.get(name)
    if kind is None:
        listed = f"known parameters: {', '.join(sorted(PARAMETERS))}."
        raise OptionError.unknown(name, PARAMETERS, listed, "parameter")
    if kind in (str, list):
        return text
    try:
        return _convert(name, _READ[kind](text))
    except (KeyError, ValueError, OverflowError):
        raise _wrong(name, text) from None


_SWITCH = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}


def _read_whole(text: str) -> int:
    """Parses a whole number in decimal digits, which may have a sign. Raises ValueError
    for any other text."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return int(text)


def _read_number(text: str) -> float:
    """Parses a number in decimal, or in hexadecimal with a binary exponent, or the text
    of infinity or NaN. Raises ValueError for any other text, and OverflowError for a
    hexadecimal number that is too large."""
    if _HEX_NUMBER.fullmatch(text):
        return float.fromhex(text.replace("_", ""))
    if not text.isascii():
        raise ValueError(text)
    return float(text)


_READ: dict[type, Callable[[str], Any]] = {
    int: _read_whole,
    float: _read_number,
    bool: _SWITCH.__getitem__,
}
"""{type: function that parses a value in a Modelfile}. The functions follow the syntax
of Go's ParseInt, ParseFloat and ParseBool."""


def _convert(name: str, value: Any) -> Any:
    kind = PARAMETERS[name]
    if kind is list:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list | tuple) and all(
            isinstance(text, str) for text in values
        ):
            return list(values)
    elif kind is str:
        # Any other text would be the path of a draft model.
        if isinstance(value, str) and (name != "draft" or value in DRAFTS):
            return value
    elif kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
    elif kind is float:
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        if -(1 << 63) <= value < 1 << 63:
            return int(value)
    raise _wrong(name, value)


def _wrong(name: str, value: Any) -> OptionError:
    kinds = {
        int: "a 64-bit integer",
        float: "a finite number",
        bool: "true or false",
        list: "texts",
    }
    kind = kinds.get(PARAMETERS[name]) or (
        f"one of {', '.join(DRAFTS)}" if name == "draft" else "a text"
    )
    return OptionError(
        f"the parameter {name!r} must be {kind}, but is {shown(value)}; correct it, or leave it out."
    )


def parse(text: str) -> Recipe:
    """Parses a Modelfile into a recipe.

    Raises OptionError if the Modelfile is too long, has no FROM, or has an instruction
    or value that is not allowed. In the last case the message contains the line number.
    """
    if len(text) > MAX_MODELFILE:
        raise OptionError(
            f"a Modelfile may have at most {MAX_MODELFILE} characters, but this one has {len(text)}; shorten it."
        )
    found: dict[str, Any] = {"parameters": {}, "messages": []}
    text = text.replace("\r\n", "\n")
    at = _after_blank(text, 0)
    while at < len(text):
        try:
            end = _read_instruction(found, text, at)
        except OptionError as error:
            number = text.count("\n", 0, at) + 1
            raise OptionError(f"Modelfile, line {number}: {error}") from None
        at = _after_blank(text, end)
    if "from_" not in found:
        raise OptionError(
            "a Modelfile needs a line `FROM name`, or FROM and the path of a GGUF file."
        )
    return Recipe(**found | {"messages": tuple(found["messages"])})


def render(entry: ModelEntry, base: str) -> str:
    """Returns a Modelfile that `parse` can read and that creates the entry's model from
    `base`. `base` is the name or path of the model that has the entry's files."""
    lines = [f"FROM {_bare(base)}"]
    beside = {"ADAPTER": entry.adapter, "DRAFT": entry.draft}
    lines += [f"{word} {_bare(str(path))}" for word, path in beside.items() if path]
    if entry.template is not None:
        lines.append(f"TEMPLATE {_quoted(entry.template)}")
    if entry.system is not None:
        lines.append(f"SYSTEM {_quoted(entry.system)}")
    lines += [
        f"PARAMETER {name} {value}"
        for name, value in _parameter_texts(entry.parameters)
    ]
    lines += [
        f"MESSAGE {message['role']} {_quoted(str(message['content']))}"
        for message in entry.messages
    ]
    if entry.license is not None:
        lines.append(f"LICENSE {_quoted(entry.license)}")
    # Paths may contain surrogates, which are replaced (see to_utf8).
    return without_surrogates("\n".join(lines) + "\n")


def _bare(text: str) -> str:
    """Returns `text` without quotes if `parse` reads it back unchanged, otherwise in
    quotes."""
    bare = _VALUE.match(text)
    return text if bare and _content(bare) == text else _quoted(text)


def parameter_lines(parameters: Mapping[str, Any]) -> list[str]:
    """Returns parameters as `ollama show` prints them: a padded name and a value on
    each line. A list has one line for each item."""
    return [f"{name:<30} {value}" for name, value in _parameter_texts(parameters)]


def _parameter_texts(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, values in sorted(parameters.items()):
        for value in values if isinstance(values, list | tuple) else [values]:
            is_whole = (
                isinstance(value, float)
                and value.is_integer()
                and abs(value) < MOST_SHOWN_WHOLE
            )
            if isinstance(value, str):
                yield name, _quoted(value)
            elif isinstance(value, bool):
                yield name, str(value).lower()
            else:
                yield name, repr(int(value) if is_whole else value)


def _after_blank(text: str, at: int) -> int:
    """Returns the position of the next instruction from `at` on, or the end of `text`.
    Skips blank lines and comment lines."""
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _read_instruction(found: dict[str, Any], text: str, at: int) -> int:
    """Reads the instruction at position `at` into `found`, the keyword arguments of a
    recipe. Returns the position after the instruction. Raises OptionError if the
    instruction is not allowed."""
    start = _WORD.match(text, at)
    instruction = start[1].upper() if start else ""
    if start is None or instruction not in _INSTRUCTIONS:
        line = text[at:].split("\n", 1)[0]
        raise OptionError(
            f"{line!r:.60} must start with one of {', '.join(_INSTRUCTIONS)} and a space; correct the line, or enclose"
            " a value of several lines in three quotation marks."
        )
    first = (
        _FIRST_WORD.match(text, start.end())
        if instruction in ("PARAMETER", "MESSAGE")
        else start
    )
    if first is None:
        raise OptionError(
            f"{instruction} needs a {'role' if instruction == 'MESSAGE' else 'name'} and a value; add them."
        )
    matched = _VALUE.match(text, first.end())
    if matched is None:
        raise OptionError(
            f"the opening quotation mark after {instruction} needs a closing one at the end of a line; add it."
        )
    _apply(found, instruction, first[1], _content(matched))
    return matched.end()


def _apply(found: dict[str, Any], instruction: str, word: str, value: str) -> None:
    if instruction in _ONCE:
        field = _ONCE[instruction]
        if field in found:
            raise OptionError(f"{instruction} is given twice; leave one of them out.")
        found[field] = value.strip()
        if not found[field]:
            raise OptionError(
                f"{instruction} needs {'a path' if instruction == 'ADAPTER' else 'a name or a path'}."
            )
    elif instruction == "PARAMETER":
        name = word.lower()
        parsed = parse_parameter(name, value)
        found["parameters"][name] = (
            [*found["parameters"].get(name, ()), parsed]
            if PARAMETERS[name] is list
            else parsed
        )
    elif instruction == "MESSAGE":
        if word.lower() not in ROLES:
            raise OptionError(
                f"a message's role must be one of {', '.join(ROLES)}, but is {word!r:.40}."
            )
        found["messages"].append(
            {"role": word.lower(), "content": check_text("a message", value)}
        )
    elif instruction == "LICENSE":
        parts = [part for part in (found.get("license"), value) if part is not None]
        found["license"] = check_text("LICENSE", "\n".join(parts))
    elif instruction in ("SYSTEM", "TEMPLATE"):
        found[instruction.lower()] = check_text(instruction, value)
    elif instruction in _OLLAMAS_OWN:
        warnings.warn(
            f"{instruction} {value} names a part of Ollama and is left out: the model's own template is used.",
            stacklevel=2,
        )


def _content(match: re.Match[str]) -> str:
    """Returns the value that _VALUE matched, without its quotes. A value without quotes
    is returned without surrounding whitespace."""
    found = (match[group] for group in ("fenced", "block", "quoted"))
    return next(
        (text for text in found if text is not None), (match["bare"] or "").strip()
    )


def _quoted(text: str) -> str:
    """Returns `text` in quotes, so that `parse` reads it back unchanged, except that a
    CR LF becomes an LF."""
    longest = max((len(run) for run in re.findall('"+', text)), default=0)
    fence = '"' * max(4, longest + 1)
    for quoted in (f'"{text}"', f'"""{text}"""'):
        match = _VALUE.match(quoted)
        # `parse` could read four quotes at the start as a line that begins a value.
        if (
            match
            and match.end() == len(quoted)
            and _content(match) == text
            and text[:1] != "\n"
            and not quoted.startswith('""""')
        ):
            return quoted
    return f"{fence}\n{text}\n{fence}"
