"""The required format of an answer (JSON, a JSON schema, a GBNF grammar, a tool call)
as a grammar in llguidance's Lark dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moegguf.errors import CapabilityError, OptionError, SchemaError
from moegguf.generate.call_format import (
    HARMONY_CALL,
    AnswerFormat,
    Written,
    answer_format,
)
from moegguf.generate.call_grammar import CallGrammar, quoted, until
from moegguf.generate.continuation import Continuation
from moegguf.generate.gbnf import lark_rules
from moegguf.generate.json_schema import MAX_GRAMMAR_CHARS, SHARED_RULES, Schemas
from moegguf.generate.request import Request, Tool

MAX_TOOLS = 128

_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Constraint:
    """The required format of an answer. `lark`: a grammar in llguidance's Lark dialect
    with the start rule "start". `begun`: the text of the message that the answer
    continues, which the grammar must match first; "" for a new message."""

    lark: str
    begun: str = ""


def constraint_for(
    request: Request,
    template: str | None,
    prompt_end: str = "",
    continuation: Continuation | None = None,
    token_of: Callable[[str], int | None] = lambda text: None,
) -> Constraint | None:
    """Returns the required format of an answer to `request`; None if any text is
    allowed. `Matcher` compiles the grammar.

    If the request requires a tool call, the answer is exactly one call, possibly after
    thinking.

    template: the model's chat template. It determines the format of calls and the
    thinking delimiters; None: a call is plain JSON, and there are no delimiters.

    prompt_end: the end of the prompt. It may already contain the opening delimiter of
    thinking.

    continuation: given for an answer that continues a message. The grammar then covers
    the message's text and the answer together.

    token_of: returns the token id of a string, or None for a string that is not a
    single token.

    Raises SchemaError for an invalid or too large schema or grammar, and for a strict
    schema that cannot be enforced. Also raises SchemaError for invalid tools or too
    many, and for a grammar together with a format or tools. Raises CapabilityError if
    `tool_choice` names no tool of the request. Raises OptionError if a call is required
    but the answer continues a message with text.
    """
    forced = bool(request.tools) and request.tool_choice != "auto"
    if request.grammar is not None and (request.format is not None or request.tools):
        raise SchemaError(
            "a grammar cannot be combined with a JSON schema, JSON or tools; send one of them."
        )
    begun = continuation.content if continuation else ""
    is_strict = (
        _check_strict(request.tools)
        and not forced
        and template is not None
        and not begun
    )
    if request.format is None and request.grammar is None and not (forced or is_strict):
        return None
    if begun and forced:
        raise OptionError(
            "an answer that continues a message cannot be a tool call; leave out tool_choice, or the assistant's"
            " last message."
        )
    form = answer_format(template or "")
    schemas, bodies, rules = Schemas(), list[str](), list[str]()
    if request.format is not None and not forced:
        if isinstance(request.format, str) and request.format != "json":
            raise SchemaError(
                f'a format must be "json" or a JSON schema, but is {request.format[:50]!r}; send one of them.'
            )
        schema = {"type": "object"} if request.format == "json" else request.format
        bodies.append(schemas.grammar(schema, request.strict))
    if request.grammar is not None:
        body, rules = lark_rules(request.grammar, token_of)
        bodies.append(body)
    alternatives = [body if begun else _text(form, prompt_end, body) for body in bodies]
    free = is_strict and request.format is None
    if request.tools:
        written = _written_call(form, prompt_end, behind_mark=free)
        calls = CallGrammar(written, schemas.grammar)
        for tool in _allowed_tools(request.tools, request.tool_choice):
            alternatives.append(calls.call(*_name_and_parameters(tool)))
        rules += calls.rules
    rules += [
        f"alternative_{n}: {alternative}" for n, alternative in enumerate(alternatives)
    ]
    rules.append(
        f"{'call' if free else 'answer'}: "
        + " | ".join(f"alternative_{n}" for n in range(len(alternatives)))
    )
    rules += _free_text(form, prompt_end) if free else []
    start = (
        ["start: answer"]
        if begun
        else _start(form, request.think, prompt_end, continuation)
    )
    rules += [*SHARED_RULES, *schemas.rules] if schemas.rules else []
    lark = "\n".join([*start, *rules]) + "\n"
    if len(lark) > MAX_GRAMMAR_CHARS:
        raise SchemaError(
            f"the grammar built from a request's JSON schemas, tools or grammar may have up to {MAX_GRAMMAR_CHARS}"
            f" characters, but has {len(lark)}; send fewer or smaller ones."
        )
    return Constraint(lark, begun)


def _check_strict(tools: Sequence[Tool]) -> bool:
    """Returns True if any of the tools is strict. Raises SchemaError for a strict tool
    if its schema is invalid, too large, or has keywords that no grammar can enforce."""
    functions = [
        function
        for tool in tools
        if (function := tool.get("function", tool)).get("strict") is True
    ]
    for function in functions:
        if isinstance(function.get("parameters"), Mapping):
            Schemas().grammar({"type": "object", **function["parameters"]}, strict=True)
    return bool(functions)


def _free_text(form: AnswerFormat, prompt_end: str) -> list[str]:
    """Returns the rules of an answer that may contain text and calls. As soon as the
    model begins a call, the call must be valid."""
    if form.is_harmony:
        return ['answer: call | "<|channel|>final<|message|>" /(?s:.*)/']
    mark = form.tools[0].open
    if not mark:
        return [r"answer: call | /([^\s{\[](?s:.)*)?/"]
    pattern = re.escape(mark).replace("/", r"\/").replace("\n", r"\n")
    return [
        f"answer: {'call? ' if form.begun(prompt_end) else ''}(text_before_call call)* TEXT",
        f"text_before_call[lazy]: {until(mark)}",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/",
    ]


def _text(form: AnswerFormat, prompt_end: str, body: str) -> str:
    """Returns the grammar `body` between the model's delimiters around text. If the
    prompt already ends with an opening delimiter, the grammar leaves this delimiter
    out."""
    if form.is_harmony:
        return f'"<|channel|>final" " <|constrain|>json"? "<|message|>" {body}'
    opened = form.text_open.removeprefix(form.begun(prompt_end))
    begun = bool(opened) and prompt_end.rstrip().endswith(opened.strip())
    return " ".join(
        filter(None, ["" if begun else quoted(opened), body, quoted(form.text_close)])
    )


def _allowed_tools(tools: Sequence[Tool], choice: str) -> list[Tool]:
    functions = [tool.get("function", tool) for tool in tools]
    if len(functions) > MAX_TOOLS:
        raise SchemaError(
            f"a request may have up to {MAX_TOOLS} tools, but this one has {len(functions)}; leave some out."
        )
    if choice in ("auto", "required"):
        return functions
    named = [function for function in functions if function.get("name") == choice]
    if not named:
        raise CapabilityError(
            f"tool_choice names {choice!r}, which is not among the tools of the request; name one of them."
        )
    return named


def _written_call(form: AnswerFormat, prompt_end: str, *, behind_mark: bool) -> Written:
    """Returns the text of a call in a model's format. If the prompt already ends with
    an opening delimiter, the text begins after this delimiter. `behind_mark`: True if
    the text begins after the delimiter that begins a call."""
    written = HARMONY_CALL if form.is_harmony else form.tools[0].written
    mark = form.tools[0].open
    before = written.before.lstrip("\n").removeprefix(form.begun(prompt_end))
    if behind_mark and mark:
        before = before.partition(mark)[2]
    elif form.empties_text and not behind_mark:
        # The template writes the delimiters around the text even before a call without
        # text.
        begun = prompt_end.rstrip().endswith(form.text_open.strip())
        before = ("" if begun else form.text_open) + form.text_close + before
    return replace(written, before=before)


def _name_and_parameters(function: Tool) -> tuple[str, Mapping[str, Any]]:
    """Returns the name of a tool and the JSON schema of its parameters. Raises
    SchemaError for a tool without a usable name or schema."""
    name = function.get("name")
    parameters = function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise SchemaError(
            f"a tool's name must be 1 to 128 letters, digits or _.:/-, but is {str(name)[:50]!r}; rename the tool."
        )
    if not isinstance(parameters, Mapping):
        raise SchemaError(
            f"the parameters of the tool {name!r} must be a JSON schema that is an object, but are"
            f" {str(parameters)[:50]!r}; correct them."
        )
    return name, parameters


def _start(
    form: AnswerFormat,
    think: bool | str | None,
    prompt_end: str,
    continuation: Continuation | None,
) -> list[str]:
    """Returns the rules from `start` to the rule `answer`. If the model has thinking
    delimiters, thinking may come before the answer. `think` False forbids thinking,
    unless the prompt has already begun it or the model is gpt-oss."""
    in_thinking = continuation is not None and continuation.in_thinking
    if form.is_harmony:
        first = 'thought "<|start|>assistant"'
        if not in_thinking:
            first = f'("<|channel|>analysis<|message|>" {first})?'
        return [f"start: {first} answer", f"thought[lazy]: {until('<|end|>')}"]
    marks = form.think
    begun = in_thinking or (marks is not None and marks.begun_by(prompt_end))
    if marks is None or (think is False and not begun):
        return ["start: answer"]
    thought = r"thought /[ \n]{0,4}/"
    first = thought if begun else f"({quoted(marks.open)} {thought})?"
    return [f"start: {first} answer", f"thought[lazy]: {until(marks.close)}"]
