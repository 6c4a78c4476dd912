"""How models write tool calls: the marks around them, and parsers of what stands between.

The formats of a model follow from its template's text. A parser takes what stands between the marks and returns the
calls, or None when that is no call.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.generate.request import ToolCall

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""

Types = Mapping[tuple[str, str], str]
"""(tool, parameter) to the JSON type in its schema, for formats that write every value as text."""


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def ends_within_string(text: str) -> bool:
    """Whether the text begins JSON and ends within one of its strings."""
    return text.lstrip().startswith(("{", "[")) and '"' in _STRING.sub("", text)


def call_of(value: Any) -> Call | None:
    """A call in one of the usual JSON objects: {"name", "arguments"} or {"function": {...}}, or variants of them."""
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
    """Calls in one or more objects, or lists of them, separated by blanks, commas and semicolons only."""
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
    """The value of a JSON text, None when it is not JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _parameter_value(text: str, kind: str | None) -> Any:
    """A parameter's value from its text. Without a type, text that is valid JSON is read as JSON."""
    if kind == "string":
        return text
    value = json_value(text.strip())
    return text if value is None and text.strip() != "null" else value


# <tool_call>: JSON (Hermes, Qwen), <function=...> (Qwen3-Coder), or a name and <arg_key> (GLM)

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)


def parse_tool_call(text: str, types: Types) -> list[Call] | None:
    """The calls in one <tool_call> block."""
    body = text.strip()
    if body.startswith(("{", "[")):
        return json_calls(body)
    if "<function=" in body:
        return parse_functions(body, types)
    name = re.split(r"\s|<arg_key>", body, maxsplit=1)[0]
    if not name or "<" in name or (body != name and "<arg_key>" not in body):
        return None
    pairs = ((key.strip(), value) for key, value in _ARGUMENT.findall(body))
    return [(name, {key: _parameter_value(value, types.get((name, key))) for key, value in pairs})]


def parse_functions(text: str, types: Types) -> list[Call] | None:
    """The calls in <function=...> blocks."""
    calls = []
    for name, body in _FUNCTION.findall(text):
        name = name.strip()
        if body.strip().startswith("{"):
            arguments = json_value(body)
            if not isinstance(arguments, dict):
                return None
        else:
            found = _PARAMETER.findall(body)
            pairs = ((key.strip(), value.removeprefix("\n").removesuffix("\n")) for key, value in found)
            arguments = {key: _parameter_value(value, types.get((name, key))) for key, value in pairs}
        calls.append((name, arguments))
    return calls or None


# <invoke name="..."><parameter name="...">: MiniMax, DeepSeek V3.2

_INVOKE = re.compile(r"<(?:｜DSML｜)?invoke name=\"([^\"]+)\">(.*?)</(?:｜DSML｜)?invoke>", re.DOTALL)
_NAMED = re.compile(
    r"<(?:｜DSML｜)?parameter name=\"([^\"]+)\"(?: string=\"(true|false)\")?>(.*?)</(?:｜DSML｜)?parameter>", re.DOTALL
)


def parse_invokes(text: str, types: Types) -> list[Call] | None:
    """The calls in a block of <invoke> elements, or of JSON."""
    if text.lstrip().startswith("{"):
        return json_calls(text)
    calls = []
    for name, body in _INVOKE.findall(text):
        arguments = {}
        for key, is_text, value in _NAMED.findall(body):
            kind = "string" if is_text == "true" else types.get((name, key))
            arguments[key] = _parameter_value(value, kind)
        calls.append((name, arguments))
    return calls or None


# [TOOL_CALLS]: a JSON list, or name[ARGS]{...} (Mistral)

_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")


def parse_mistral(text: str, types: Types) -> list[Call] | None:
    """The calls after a [TOOL_CALLS] mark, and after others between them."""
    calls: list[Call] = []
    for body in text.split("[TOOL_CALLS]"):
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


# Marks that are control tokens: DeepSeek, Kimi

_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?\s*([^\n<]+?)\s*(?:<｜tool▁sep｜>|\n)\s*(?:```json\s*)?"
    r"(.*?)(?:```\s*)?(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?(.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
    r"(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)


Parse = Callable[[str, Types], list[Call] | None]


def pattern_parser(pattern: re.Pattern[str]) -> Parse:
    """A parser for the groups (name, arguments in JSON) of `pattern`."""

    def parse(text: str, types: Types) -> list[Call] | None:
        found = [(name, json_value(arguments)) for name, arguments in pattern.findall(text)]
        return found if found and all(isinstance(arguments, dict) for _, arguments in found) else None

    return parse


@dataclass(frozen=True)
class ToolFormat:
    """A call begins with `open` and ends with `close`. Without `open` the answer is only the call; without `close` the
    call extends to the end of the answer. `forms`: {sign: a forced call between the marks, with NAME and ARGUMENTS};
    the first whose sign the template contains applies. `sign`: text that a template of this format contains, where
    that is not `open`."""

    open: str
    close: str
    forms: Mapping[str, str]
    parse: Parse = lambda text, types: json_calls(text)
    sign: str = ""

    def calls(self, block: str, types: Types) -> list[Call] | None:
        """The calls in a block with its marks, the last of which may be missing; None when it is no call."""
        return self.parse(block.removeprefix(self.open).removesuffix(self.close), types)

    def call_parts(self, template: str) -> tuple[str, str, str]:
        """The text before a forced call's name, between name and arguments, and after them."""
        form = next(form for sign, form in self.forms.items() if sign in template)
        before, _, rest = f"{self.open}{form}{self.close}".partition("NAME")
        between, _, after = rest.partition("ARGUMENTS")
        return before, between, after


def types_of(tools: Sequence[Mapping[str, Any]]) -> Types:
    """The JSON types that the tools' schemas declare."""
    types = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(schema, Mapping) and isinstance(schema.get("type"), str):
                types[str(function.get("name")), str(name)] = schema["type"]
    return types


def formats_of(template: str) -> tuple[ToolFormat, ...]:
    """The formats that a model with this template may use, at least one."""
    return tuple(form for form in FORMATS if (form.sign or form.open) in template) or (JSON_ONLY,)


def tool_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """A call with a new id."""
    return ToolCall(f"call_{uuid.uuid4().hex[:8]}", name, arguments)


_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'
_JSON_PARAMETERS = '{"name": "NAME", "parameters": ARGUMENTS}'

JSON_ONLY = ToolFormat("", "", {'"parameters"': _JSON_PARAMETERS, "": _JSON}, sign='"parameters"')

FORMATS = (
    ToolFormat("<tool_call>", "</tool_call>", {"": f"\n{_JSON}\n"}, parse_tool_call),
    ToolFormat(
        "<function=", "</function>", {"": "NAME>ARGUMENTS"},
        lambda text, types: parse_functions(f"<function={text}", types),
    ),
    ToolFormat("<minimax:tool_call>", "</minimax:tool_call>", {"": _JSON}, parse_invokes),
    ToolFormat("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", {"": _JSON}, parse_invokes, sign="｜DSML｜"),
    ToolFormat("[TOOL_CALLS]", "", {"[ARGS]": "NAME[ARGS]ARGUMENTS", "": f"[{_JSON}]"}, parse_mistral),
    ToolFormat(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        {
            "```json": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            "": "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        },
        pattern_parser(_DEEPSEEK),
    ),
    ToolFormat(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        {"": "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"},
        pattern_parser(_KIMI),
    ),
    ToolFormat(
        "<|START_ACTION|>", "<|END_ACTION|>",
        {"": '[{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}]'},
    ),
    ToolFormat("<TOOLCALL>", "</TOOLCALL>", {"": f"[{_JSON}]"}),
    ToolFormat("<|tool_call|>", "", {"": f"[{_JSON}]"}),
    JSON_ONLY,
    ToolFormat("<|python_tag|>", "", {"": _JSON_PARAMETERS}),
)  # fmt: skip
"""The first that a template has is the one of a forced call."""
