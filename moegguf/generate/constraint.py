"""The required format of an answer (JSON, a JSON schema, a tool call) as a grammar in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.errors import CapabilityError, OptionError, SchemaError
from moegguf.generate.json_schema import MAX_GRAMMAR_BYTES, SHARED_RULES, Schemas
from moegguf.generate.request import GenerationRequest
from moegguf.generate.template import Continuation
from moegguf.generate.tool_calls import formats_of
from moegguf.gguf.chat_template import HARMONY, think_marks_of

MAX_TOOLS = 128

_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Constraint:
    """The required format of an answer. `lark`: a grammar in llguidance's Lark dialect, start rule "start". `begun`: a
    part of the answer that is there already, in the message that it continues."""

    lark: str
    begun: str = ""


def constraint_for(
    request: GenerationRequest, template: str | None, prompt_end: str = "", continuation: Continuation | None = None
) -> Constraint | None:
    """The required format of an answer to `request`, None for none. The grammar is compiled by `Matcher`.

    `template`: the model's; it determines the marks of thinking, which may come first, and the format of tool calls. A
    named or required tool is called once. `prompt_end`: the end of the prompt, which may have begun the thinking;
    `continuation`: of an answer that continues a message, whose text then begins the format.

    Raises SchemaError for an invalid or too large schema, CapabilityError when `tool_choice` names none of the tools,
    OptionError when a call would have to begin within a text.
    """
    forced = bool(request.tools) and request.tool_choice not in ("auto", "none")
    if request.format is None and not forced:
        return None
    text, begun = template or "", continuation.content if continuation else ""
    if begun and forced:
        raise OptionError(
            "an answer that continues a message cannot be a tool call; leave out tool_choice or the text."
        )
    schemas, alternatives = Schemas(), list[str]()
    if request.format is not None and not forced:
        if isinstance(request.format, str) and request.format != "json":
            raise SchemaError(f'a format is "json" or a JSON schema, but is {request.format[:50]!r}.')
        body = schemas.grammar({"type": "object"} if request.format == "json" else request.format)
        final = '"<|channel|>final" " <|constrain|>json"? "<|message|>" ' if HARMONY in text and not begun else ""
        alternatives.append(final + body)
    if request.tools and request.tool_choice != "none":
        alternatives += [_call(tool, text, schemas) for tool in _allowed_tools(request.tools, request.tool_choice)]
    rules = [f"alternative_{n}: {alternative}" for n, alternative in enumerate(alternatives)]
    rules.append("answer: " + " | ".join(f"alternative_{n}" for n in range(len(alternatives))))
    start = ["start: answer"] if begun else _start(request.think, text, prompt_end, continuation)
    lark = "\n".join([*start, *rules, *SHARED_RULES, *schemas.rules]) + "\n"
    if len(lark) > MAX_GRAMMAR_BYTES:
        raise SchemaError(
            f"the JSON schemas of a request have up to {MAX_GRAMMAR_BYTES} bytes; send fewer, or smaller."
        )
    return Constraint(lark, begun)


def _allowed_tools(tools: Sequence[Mapping[str, Any]], choice: str) -> list[Mapping[str, Any]]:
    functions = [tool.get("function", tool) for tool in tools]
    if len(functions) > MAX_TOOLS:
        raise SchemaError(f"a request has up to {MAX_TOOLS} tools, but this one has {len(functions)}.")
    if choice in ("auto", "required"):
        return functions
    named = [function for function in functions if function.get("name") == choice]
    if not named:
        raise CapabilityError(f"tool_choice names {choice!r}, which is not among the tools of the request.")
    return named


def _call(function: Mapping[str, Any], template: str, schemas: Schemas) -> str:
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise SchemaError(f"a tool has a name of up to 128 letters, digits and _.:/-, not {str(name)[:50]!r}.")
    if not isinstance(parameters, Mapping):
        raise SchemaError(f"the parameters of the tool {name!r} are no JSON schema.")
    before, between, after = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""
    if HARMONY not in template:
        before, between, after = formats_of(template)[0].call_parts(template)
    body = schemas.grammar({"type": "object", **parameters})
    return " ".join([_quoted(before + name + between), body, _quoted(after)])


def _start(think: bool | str | None, template: str, prompt_end: str, continuation: Continuation | None) -> list[str]:
    """The rules before `answer`: thinking may come first, unless it is switched off."""
    in_thinking = continuation is not None and continuation.in_thinking
    if HARMONY in template:
        if in_thinking:
            return ['start: thought "<|start|>assistant" answer', _until("<|end|>")]
        return ['start: ("<|channel|>analysis<|message|>" thought "<|start|>assistant")? answer', _until("<|end|>")]
    marks = think_marks_of(template)
    begun = in_thinking or (marks is not None and marks.begun_by(prompt_end))
    if marks is None or (think is False and not begun):
        return ["start: answer"]
    thought = r"thought /[ \n]{0,4}/"
    first = thought if begun else f"({_quoted(marks.open)} {thought})?"
    return [f"start: {first} answer", _until(marks.close)]


def _until(mark: str) -> str:
    """Any text up to the first `mark`, with it."""
    return f"thought[lazy]: /(?s:.*)/ {_quoted(mark)}"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
