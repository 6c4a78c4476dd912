"""How models write tool calls: the marks around them and what stands between.

The template's text tells which formats a model knows. A parser gets the whole block with its marks and gives the
calls, or None when it is no call after all. Does not know streams.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.generate.request import ToolCall
from moegguf.generate.tool_calls import (
    DEEPSEEK,
    KIMI,
    Call,
    Types,
    functions,
    invoked,
    json_calls,
    listed,
    matched,
    mistral,
    tagged,
)


@dataclass(frozen=True)
class ToolFormat:
    """`sign`: what in a template gives it away. A call's text begins with `open` and ends with `close`. An empty
    `open`: the answer is nothing but the call; an empty `close`: it goes on to the end of the answer. `forms`: a call
    as a model is made to write it, with NAME and ARGUMENTS; the first whose sign a template has."""

    name: str
    sign: str
    open: str
    close: str
    parse: Callable[[str, Types], list[Call] | None]
    forms: tuple[tuple[str, str], ...]

    def written(self, template: str) -> tuple[str, str, str]:
        """What stands before a call's name, between name and arguments, and after them."""
        form = next(form for sign, form in self.forms if sign in template)
        before, _, rest = form.partition("NAME")
        between, _, after = rest.partition("ARGUMENTS")
        return before, between, after


def types_of(tools: Sequence[Mapping[str, Any]]) -> Types:
    """For formats that write every value as text."""
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
    """The formats a model with this template may use, at least one."""
    found = tuple(form for form in FORMATS if form.sign in template)
    return found or (JSON_ONLY,)


def tool_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """With an id of its own."""
    return ToolCall(f"call_{uuid.uuid4().hex[:8]}", name, arguments)


_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'
_JSON_PARAMETERS = '{"name": "NAME", "parameters": ARGUMENTS}'

JSON_ONLY = ToolFormat(
    "json", '"parameters"', "", "", lambda text, types: json_calls(text),
    (('"parameters"', _JSON_PARAMETERS), ("", _JSON)),
)  # fmt: skip

FORMATS = (
    ToolFormat(
        "tool_call", "<tool_call>", "<tool_call>", "</tool_call>", tagged,
        (("", f"<tool_call>\n{_JSON}\n</tool_call>"),),
    ),
    ToolFormat(
        "function", "<function=", "<function=", "</function>", functions,
        (("", "<function=NAME>ARGUMENTS</function>"),),
    ),
    ToolFormat(
        "minimax", "<minimax:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>", invoked,
        (("", f"<minimax:tool_call>{_JSON}</minimax:tool_call>"),),
    ),
    ToolFormat(
        "dsml", "｜DSML｜", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", invoked,
        (("", f"<｜DSML｜function_calls>{_JSON}</｜DSML｜function_calls>"),),
    ),
    ToolFormat(
        "mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", mistral,
        (("[ARGS]", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS"), ("", f"[TOOL_CALLS][{_JSON}]")),
    ),
    ToolFormat(
        "deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        matched(DEEPSEEK, "<｜tool▁calls▁end｜>"),
        (
            (
                "```json",
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
            (
                "",
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
        ),
    ),
    ToolFormat(
        "kimi", "<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        matched(KIMI, "<|tool_calls_section_end|>"),
        (
            (
                "",
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
                "<|tool_call_end|><|tool_calls_section_end|>",
            ),
        ),
    ),
    ToolFormat(
        "command", "<|START_ACTION|>", "<|START_ACTION|>", "<|END_ACTION|>",
        listed("<|START_ACTION|>", "<|END_ACTION|>"),
        (
            (
                "",
                '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}]<|END_ACTION|>',
            ),
        ),
    ),
    ToolFormat(
        "nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>", listed("<TOOLCALL>", "</TOOLCALL>"),
        (("", f"<TOOLCALL>[{_JSON}]</TOOLCALL>"),),
    ),
    ToolFormat(
        "granite", "<|tool_call|>", "<|tool_call|>", "", listed("<|tool_call|>", ""),
        (("", f"<|tool_call|>[{_JSON}]"),),
    ),
    ToolFormat(
        "llama", "<|python_tag|>", "<|python_tag|>", "", listed("<|python_tag|>", ""),
        (('"parameters"', _JSON_PARAMETERS), ("", f"<|python_tag|>{_JSON_PARAMETERS}")),
    ),
    JSON_ONLY,
)  # fmt: skip
