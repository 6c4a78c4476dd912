"""What a request demands of an answer's form becomes a grammar: JSON, a JSON schema, a tool call in the model's form.

Does not run grammars; llama.cpp does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moegguf.errors import CapabilityError, SchemaError
from moegguf.generate.gbnf import Rules, literal
from moegguf.generate.request import GenerationRequest
from moegguf.generate.schema import Converter
from moegguf.generate.tool_formats import formats_of
from moegguf.gguf.chat_template import HARMONY, think_marks_of

MAX_TOOLS = 128
_NAME = re.compile(r"[\w.:/-]{1,128}")


def grammar_for(request: GenerationRequest, template: str | None, prompt_end: str = "") -> str | None:
    """The grammar (GBNF) an answer to `ask` has to follow, None for none.

    `template`: the model's; it tells how the model thinks, which it may do first, and how it calls tools. A named or
    required tool is called once. `prompt_end`: the end of the prompt, which may have begun the thinking.

    Raises SchemaError when a schema cannot be followed or is too large, CapabilityError when the tool that
    `tool_choice` names is not among the tools.
    """
    try:
        return _grammar(request, template or "", prompt_end)
    except RecursionError:
        raise SchemaError("the JSON schema goes too deep, with what it refers to; simplify it.") from None


def _grammar(request: GenerationRequest, text: str, prompt_end: str) -> str | None:
    forced = bool(request.tools) and request.tool_choice not in ("auto", "none")
    if request.format is None and not forced:
        return None
    rules = Rules()
    ways = [] if forced or request.format is None else [_in_form(rules, request.format, text)]
    if request.tools and request.tool_choice != "none":
        ways += [_call(rules, tool, text) for tool in _chosen(request.tools, request.tool_choice)]
    answer = rules.add("answer", " | ".join(ways))
    return rules.text(_with_thinking(rules, answer, request.think, text, prompt_end))


def _in_form(rules: Rules, form: str | Mapping[str, Any], template: str) -> str:
    if isinstance(form, str) and form != "json":
        raise SchemaError(f'a format is "json" or a JSON schema, but is {form[:50]!r}.')
    body = Converter(rules, {}).any_object() if form == "json" else Converter(rules, form).convert()
    body = rules.add("form", body)
    return f'"<|channel|>final" " <|constrain|>json"? "<|message|>" {body}' if HARMONY in template else body


def _chosen(tools: Sequence[Mapping[str, Any]], choice: str) -> list[Mapping[str, Any]]:
    functions = [tool.get("function", tool) for tool in tools]
    if len(functions) > MAX_TOOLS:
        raise SchemaError(f"a request has up to {MAX_TOOLS} tools, but this one has {len(functions)}.")
    if choice in ("auto", "required"):
        return functions
    named = [function for function in functions if function.get("name") == choice]
    if not named:
        raise CapabilityError(f"tool_choice names {choice!r}, which is not among the tools of the request.")
    return named


def _call(rules: Rules, function: Mapping[str, Any], template: str) -> str:
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SchemaError(f"a tool has a name of up to 128 letters, digits and _.:/-, not {str(name)[:50]!r}.")
    if not isinstance(parameters, Mapping):
        raise SchemaError(f"the parameters of the tool {name!r} are no JSON schema.")
    arguments = rules.add("arguments", Converter(rules, {"type": "object", **parameters}).convert())
    before, between, after = _written(template)
    return f"{literal(before + name + between)} {arguments} {literal(after)}"


def _written(template: str) -> tuple[str, str, str]:
    """What the model writes before the name, before the arguments, and after them."""
    if HARMONY in template:
        return "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""
    return formats_of(template)[0].written(template)


def _with_thinking(rules: Rules, answer: str, think: bool | str | None, template: str, prompt_end: str) -> str:
    """The answer may come after thinking, unless that is switched off."""
    if HARMONY in template:
        thought = f'"<|channel|>analysis<|message|>" {rules.until("<|end|>")} "<|start|>assistant"'
        return f"({thought})? {answer}"
    marks = think_marks_of(template)
    if marks is None:
        return answer
    blank = rules.add("blank", "[ \\n]{0,4}")
    thought = f"{rules.until(marks.close)} {blank}"
    if marks.begun_by(prompt_end):
        return f"{thought} {answer}"
    return answer if think is False else f"({literal(marks.open)} {thought})? {answer}"
