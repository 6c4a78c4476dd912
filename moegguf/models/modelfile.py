"""Reads and writes Modelfiles: a line is `INSTRUCTION arguments`, in Ollama's grammar (parser/parser.go).

Instructions in any case: FROM (once), PARAMETER name value, SYSTEM, TEMPLATE, MESSAGE role text, LICENSE, ADAPTER path
(once). A value goes to the end of its line, or is in quotes, or in triple quotes; a quote at the end of a line ends the
value. Ours: DRAFT model (once), and a line of four quotes or more encloses lines that may have such quotes (`render`
writes it where nothing else reads back). `#` starts a comment line. LICENSE may be repeated. REQUIRES has no effect.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from moegguf.errors import OptionError
from moegguf.models.entry import ModelEntry
from moegguf.models.recipe import ROLES, Recipe, check_text, parse_parameter

MAX_MODELFILE = 4 << 20  # characters
MOST_SHOWN_WHOLE = 1_000_000  # smaller whole numbers are written without a fraction, as Ollama does

_LINE = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|$)")
_WORD = re.compile(r"[ \t]*([A-Za-z]+)(?:[ \t]+|(?=\n|$|\"))")
_FENCED = r'(?P<fence>"{4,})\n(?P<fenced>.*?)\n(?P=fence)[ \t]*(?:\n|$)'
_BLOCK = r'"""(?P<block>.*?)"""[ \t]*(?:\n|$)'
_QUOTED = r'(?!""")"(?P<quoted>.*?)"[ \t]*(?:\n|$)'
_BARE = r'(?!")(?P<bare>[^\n]*)(?:\n|$)'
_VALUE = re.compile(f"[ \t]*(?:{_FENCED}|{_BLOCK}|{_QUOTED}|{_BARE})", re.DOTALL)
_FIRST_WORD = re.compile(r"[ \t]*([^\s\"]+)[ \t]*")
_OLLAMAS_OWN = ("RENDERER", "PARSER")
_ONCE = {"FROM": "from_", "ADAPTER": "adapter", "DRAFT": "draft"}
_INSTRUCTIONS = (*_ONCE, "PARAMETER", "SYSTEM", "TEMPLATE", "MESSAGE", "LICENSE", "REQUIRES", *_OLLAMAS_OWN)


def parse(text: str) -> Recipe:
    """The recipe in a Modelfile.

    Raises OptionError, naming the line, for anything that is not supported.
    """
    if len(text) > MAX_MODELFILE:
        raise OptionError(f"a Modelfile has at most {MAX_MODELFILE} characters, but this one {len(text)}.")
    found: dict[str, Any] = {"parameters": {}, "messages": []}
    for number, instruction, word, value in _instructions(text.replace("\r\n", "\n")):
        try:
            _apply(found, instruction, word, value)
        except OptionError as error:
            raise OptionError(f"Modelfile, line {number}: {error}") from None
    if "from_" not in found:
        raise OptionError("a Modelfile needs a line `FROM name`, or FROM and the path of a GGUF file.")
    return Recipe(**{**found, "messages": tuple(found["messages"])})


def render(entry: ModelEntry, base: str) -> str:
    """The Modelfile that creates the same model from `base`, the origin of its files; `parse` reads it back."""
    lines = [f"FROM {_bare(base)}"]
    beside = {"ADAPTER": entry.adapter, "DRAFT": entry.draft}
    lines += [f"{word} {_bare(str(path))}" for word, path in beside.items() if path]
    if entry.template is not None:
        lines.append(f"TEMPLATE {_quoted(entry.template)}")
    if entry.system is not None:
        lines.append(f"SYSTEM {_quoted(entry.system)}")
    lines += [f"PARAMETER {name} {value}" for name, value in _parameter_texts(entry.parameters)]
    lines += [f"MESSAGE {message['role']} {_quoted(str(message['content']))}" for message in entry.messages]
    if entry.license is not None:
        lines.append(f"LICENSE {_quoted(entry.license)}")
    return "\n".join(lines) + "\n"


def _bare(text: str) -> str:
    """`text` without quotes where it reads back so."""
    bare = _VALUE.match(text)
    return text if bare and _content(bare) == text else _quoted(text)


def parameter_lines(parameters: Mapping[str, Any]) -> list[str]:
    """Parameters as `ollama show` prints them: a padded name and a value per line; `stop` may have many."""
    return [f"{name:<30} {value}" for name, value in _parameter_texts(parameters)]


def _parameter_texts(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(parameters.items()):
        for one in value if isinstance(value, list | tuple) else [value]:
            yield name, _format_value(one)


def _instructions(text: str) -> Iterator[tuple[int, str, str, str]]:
    """(line number, instruction, the word before its value in PARAMETER and MESSAGE, its value)."""
    at = 0
    while at < len(text):
        blank = _LINE.match(text, at)
        if blank and blank.end() > at:
            at = blank.end()
            continue
        number = text.count("\n", 0, at) + 1
        line = f"Modelfile, line {number}:"
        found = _WORD.match(text, at)
        instruction = found[1].upper() if found else ""
        if found is None or instruction not in _INSTRUCTIONS:
            start = text[at:].split("\n", 1)[0]
            raise OptionError(f"{line} {start!r:.60} starts with none of {', '.join(_INSTRUCTIONS)}.")
        at, word = found.end(), ""
        if instruction in ("PARAMETER", "MESSAGE"):
            first = _FIRST_WORD.match(text, at)
            if first is None:
                raise OptionError(f"{line} there must be a word and a value.")
            at, word = first.end(), first[1]
        value = _VALUE.match(text, at)
        if value is None:
            raise OptionError(f"{line} a quote is not closed at the end of a line.")
        at = value.end()
        yield number, instruction, word, _content(value)


def _apply(found: dict[str, Any], instruction: str, word: str, value: str) -> None:
    if instruction in _ONCE:
        field = _ONCE[instruction]
        if field in found:
            raise OptionError(f"{instruction} is given twice; a model has one.")
        found[field] = value.strip()
        if not found[field]:
            raise OptionError(f"{instruction} needs {'a path' if instruction == 'ADAPTER' else 'a name or a path'}.")
    elif instruction == "PARAMETER":
        name = word.lower()
        parsed = parse_parameter(name, value)
        found["parameters"][name] = [*found["parameters"].get(name, ()), parsed] if name == "stop" else parsed
    elif instruction == "MESSAGE":
        if word.lower() not in ROLES:
            raise OptionError(f"a message's role is one of {', '.join(ROLES)}, but is {word!r:.40}.")
        found["messages"].append({"role": word.lower(), "content": check_text("a message", value)})
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
    """The value that _VALUE found, without its quotes."""
    found = (match[group] for group in ("fenced", "block", "quoted"))
    return next((text for text in found if text is not None), (match["bare"] or "").strip())


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < MOST_SHOWN_WHOLE:
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _quoted(text: str) -> str:
    """`text` in quotes from which `parse` reads it back."""
    longest = max((len(run) for run in re.findall('"+', text)), default=0)
    fence = '"' * max(4, longest + 1)
    for quoted in (f'"{text}"', f'"""{text}"""'):
        match = _VALUE.match(quoted)
        if quoted.startswith('""""'):
            continue  # may be read as a fence
        if match and match.end() == len(quoted) and _content(match) == text and text[:1] != "\n":
            return quoted
    return f"{fence}\n{text}\n{fence}"
