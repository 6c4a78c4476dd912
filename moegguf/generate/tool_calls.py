"""Reading what stands in a model's tool calls. A parser gets a whole block with its marks; None: it is no call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""

Types = Mapping[tuple[str, str], str]
"""(tool, parameter) to the JSON type its schema names."""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def within_string(text: str) -> bool:
    """The text begins JSON and ends in the middle of one of its strings."""
    return text.lstrip().startswith(("{", "[")) and '"' in _STRING.sub("", text)


def call_of(value: Any) -> Call | None:
    """A call as most models write it in JSON."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("tool_name", value.get("function")))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments


def json_calls(text: str) -> list[Call] | None:
    """One or more objects, or lists of them, with nothing but blanks, commas and semicolons between."""
    at, calls = 0, list[Call]()
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        for item in value if isinstance(value, list) else [value]:
            call = call_of(item)
            if call is None:
                return None
            calls.append(call)
    return calls or None


def json_value(text: str) -> Any:
    """What the JSON says, None when it is none."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _typed(text: str, kind: str | None) -> Any:
    """A value that a format writes as text. Without a type, what reads as JSON is JSON, but for texts."""
    if kind == "string":
        return text
    value = json_value(text.strip())
    return text if value is None and text.strip() != "null" else value


def _inside(text: str, open: str, close: str) -> str:
    return text.removeprefix(open).removesuffix(close)


# <tool_call>: JSON (Hermes, Qwen), <function=...> (Qwen3-Coder), or a name and <arg_key> (GLM)

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)


def tagged(text: str, types: Types) -> list[Call] | None:
    body = _inside(text, "<tool_call>", "</tool_call>").strip()
    if body.startswith(("{", "[")):
        return json_calls(body)
    if "<function=" in body:
        return functions(body, types)
    name = re.split(r"\s|<arg_key>", body, maxsplit=1)[0]
    if not name or "<" in name or (body != name and "<arg_key>" not in body):
        return None
    pairs = ((key.strip(), value) for key, value in _ARGUMENT.findall(body))
    return [(name, {key: _typed(value, types.get((name, key))) for key, value in pairs})]


def functions(text: str, types: Types) -> list[Call] | None:
    calls = []
    for name, body in _FUNCTION.findall(text):
        name = name.strip()
        if body.strip().startswith("{"):
            arguments = json_value(body)
            if not isinstance(arguments, dict):
                return None
        else:
            pairs = ((key.strip(), _one_line_off(value)) for key, value in _PARAMETER.findall(body))
            arguments = {key: _typed(value, types.get((name, key))) for key, value in pairs}
        calls.append((name, arguments))
    return calls or None


def _one_line_off(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


# <invoke name="..."><parameter name="...">: MiniMax, DeepSeek V3.2

_INVOKE = re.compile(r"<(?:｜DSML｜)?invoke name=\"([^\"]+)\">(.*?)</(?:｜DSML｜)?invoke>", re.DOTALL)
_NAMED = re.compile(
    r"<(?:｜DSML｜)?parameter name=\"([^\"]+)\"(?: string=\"(true|false)\")?>(.*?)</(?:｜DSML｜)?parameter>", re.DOTALL
)


def invoked(text: str, types: Types) -> list[Call] | None:
    body = text.partition(">")[2].rpartition("</")[0]
    if body.lstrip().startswith("{"):
        return json_calls(body)
    calls = []
    for name, body in _INVOKE.findall(text):
        arguments = {}
        for key, is_text, value in _NAMED.findall(body):
            kind = "string" if is_text == "true" else types.get((name, key))
            arguments[key] = _typed(value, kind)
        calls.append((name, arguments))
    return calls or None


# [TOOL_CALLS]: a JSON list, or name[ARGS]{...} (Mistral)

_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(text: str, types: Types) -> list[Call] | None:
    calls: list[Call] = []
    for body in text.split("[TOOL_CALLS]")[1:]:
        body = body.strip()
        if body.startswith(("[", "{")):
            found = json_calls(body)
            if found is None:
                return None
            calls += found
            continue
        match = _MISTRAL.match(body)
        arguments = json_value(body[match.end() :]) if match else None
        if match is None or not isinstance(arguments, dict):
            return None
        calls.append((match[1], arguments))
    return calls or None


# Marks that are tokens of their own: DeepSeek, Kimi

DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?\s*([^\n<]+?)\s*(?:<｜tool▁sep｜>|\n)\s*(?:```json\s*)?"
    r"(.*?)(?:```\s*)?(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)
KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?(.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
    r"(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)


def matched(pattern: re.Pattern[str], close: str) -> Callable[[str, Types], list[Call] | None]:
    def parse(text: str, types: Types) -> list[Call] | None:
        found = [(name, json_value(arguments)) for name, arguments in pattern.findall(text.removesuffix(close))]
        if not found or not all(isinstance(arguments, dict) for _, arguments in found):
            return None
        return found

    return parse


def listed(open: str, close: str) -> Callable[[str, Types], list[Call] | None]:
    """JSON between marks."""
    return lambda text, types: json_calls(_inside(text, open, close))
