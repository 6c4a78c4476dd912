"""Tests that moegguf learns from a chat template how its model writes thinking, text
and tool calls.

Tests render answers with the templates that the pinned llama.cpp ships, and parse them
again. Other tests check that a forced call has the template's form.
"""

import functools
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from llguidance import LLTokenizer

from moegguf.errors import TemplateError
from moegguf.generate.call_format import answer_format
from moegguf.generate.constraint import constraint_for
from moegguf.generate.parsing import answer_parser
from moegguf.generate.request import Request
from moegguf.generate.sampler import Matcher, MatcherTokens
from moegguf.generate.template import render
from moegguf.gguf.chat_template import capabilities_of
from tools.vendor import VENDOR

FOLDER = VENDOR / "llama.cpp" / "models" / "templates"
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.glob("*.jinja"))
}
WITH_TOOLS = [
    name for name, text in TEMPLATES.items() if "tools" in capabilities_of(text)
]
NO_CALLS = {  # templates that list tools but do not render calls
    "ibm-granite-granite-3.3-2B-Instruct",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
}
# Templates that reject a second call in a message, or render only the first.
ONE_CALL = {
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "openai-gpt-oss-120b",
}
# The template rejects a tool with an object parameter that has named properties.
NO_OBJECTS = {"CohereForAI-c4ai-command-r-plus-tool_use"}

PLACE = {
    "type": "object",
    "properties": {
        "at": {"type": "array", "items": {"type": "number"}},
        "name": {"type": "string"},
    },
}
PARAMETERS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "code": {"type": "string"},
    "detailed": {"type": "boolean"},
    "places": {"type": "array", "items": {"type": "string"}},
    "where": PLACE,
}
CODE = "if (a < b && c > \"d'e\") {\n\treturn `<b>é日本🙂</b>` + 'x\\n'; // \"quote's\" [1]\n}"
CALLS = {
    "one": [("get_weather", {"city": "Oslo", "days": 3})],
    "two": [("get_weather", {"city": "Oslo", "days": 3}), ("find_it", {"city": "x y"})],
    "nested": [
        (
            "find_it",
            {
                "where": {"at": [1, 2.5], "name": "n"},
                "places": ["p", "q"],
                "detailed": True,
            },
        )
    ],
    "code": [("get_weather", {"code": CODE, "city": "Zürich"})],
    "empty": [("get_weather", {})],
}
QUESTION = {"role": "user", "content": "A question"}
TEXT, THOUGHT = "The text.", "Some thought."


def tools_for(name: str) -> list[dict[str, Any]]:
    known = {
        key: {**schema, "description": "A value."}
        for key, schema in PARAMETERS.items()
        if name not in NO_OBJECTS or key != "where"
    }
    parameters = {"type": "object", "properties": known, "required": []}
    return [
        {
            "type": "function",
            "function": {
                "name": each,
                "description": "Does it.",
                "parameters": parameters,
            },
        }
        for each in ("get_weather", "find_it")
    ]


def message_of(
    calls: Sequence[tuple[str, Mapping[str, Any]]], text: str = "", thinking: str = ""
) -> dict[str, Any]:
    functions = [
        {"name": name, "arguments": dict(arguments)} for name, arguments in calls
    ]
    listed = [
        {"id": f"call0000{n}", "type": "function", "function": each}
        for n, each in enumerate(functions)
    ]
    return {
        "role": "assistant",
        "content": text,
        **({"tool_calls": listed} if listed else {}),
        **({"thinking": thinking} if thinking else {}),
    }


@functools.cache
def _rendered(name: str, conversation: str) -> str:
    return render(
        TEMPLATES[name],
        [QUESTION, *json.loads(conversation)],
        tools=tools_for(name),
        think=True,
    )


def rendered(name: str, *messages: Mapping[str, Any]) -> str:
    return _rendered(name, json.dumps(messages))


def mark_begin(text: str, at: int) -> int:
    cut = re.search(r"[<\[][^<>\[\]\s]*$", text[:at])
    return cut.start() if cut else at


def mark_end(text: str, at: int) -> int:
    rest = re.compile(r"[^<>\[\]\s]*[>\]]?").match(text, at)
    return rest.end() if rest and mark_begin(text, at) < at else at


def written(name: str, message: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the prompt up to the answer, and the rendered answer up to the point
    where the model would stop."""
    prompt, whole = rendered(name), rendered(name, message)
    other = rendered(name, message_of([], "ϰ"))
    begin = mark_begin(whole, len(os.path.commonprefix([prompt, whole])))
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    # The template renders a call only before the call's result.
    if calls and calls[0] not in whole[begin:]:
        whole = rendered(
            name,
            message,
            {"role": "tool", "tool_call_id": "call00000", "content": "ϰresult"},
        )
        other = rendered(name, message_of([], "ϰ"), QUESTION)
        begin = mark_begin(whole, len(os.path.commonprefix([prompt, whole])))
        return prompt[:begin], whole[
            begin : whole.rindex("</TOOLCALL>") + len("</TOOLCALL>")
        ]
    n_end = len(os.path.commonprefix([whole[begin:][::-1], other[::-1]]))
    # True if the prompt ends with an unclosed thinking section, which the answer
    # continues.
    goes_on = THOUGHT in whole and "</" not in prompt[begin:]
    prompt_end = prompt if goes_on else prompt[:begin]
    answer = whole[begin : mark_end(whole, len(whole) - n_end)]
    ends = [
        answer[:n]
        for n in range(1, len(answer))
        if prompt.endswith(answer[:n]) and answer[n - 1] == ">"
    ]
    return prompt_end, answer.removeprefix(max(ends, key=len, default=""))


def parsed(
    name: str, chunks: Sequence[str], prompt_end: str = "", cut: bool = False
) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    parser = answer_parser(TEMPLATES[name], tools_for(name), prompt_end=prompt_end)
    deltas = [*map(parser.feed, chunks), parser.end(cut=cut)]
    calls = [
        (call.name, dict(call.arguments))
        for delta in deltas
        for call in delta.tool_calls
    ]
    return "".join(d.text for d in deltas), "".join(d.thinking for d in deltas), calls


def test_templates_that_take_tools_include_every_listed_exception() -> None:
    assert len(WITH_TOOLS) >= 66 and set(WITH_TOOLS) >= NO_CALLS | ONE_CALL | NO_OBJECTS


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in NO_CALLS])
def test_rendered_call_is_parsed_back_for_every_cut_of_the_answer(
    name: str, kind: str
) -> None:
    calls = CALLS[kind]
    if kind == "two" and name in ONE_CALL:
        calls = calls[:1]
    if name in NO_OBJECTS:
        calls = [
            (called, {key: value for key, value in given.items() if key != "where"})
            for called, given in calls
        ]
    prompt_end, answer = written(name, message_of(calls))
    expected = ("", "", calls)
    for n in range(1, len(answer)):
        text, thinking, found = parsed(name, [answer[:n], answer[n:]], prompt_end)
        assert (text.strip(), thinking.strip(), found) == expected, (n, answer)
    text, thinking, found = parsed(name, list(answer), prompt_end)
    assert (text.strip(), thinking.strip(), found) == expected, answer


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_thinking_and_text_are_parsed_back(name: str) -> None:
    prompt_end, answer = written(name, message_of([], TEXT, THOUGHT))
    if THOUGHT not in answer:  # the template leaves the thinking out of earlier answers
        prompt_end = ""
    expected = (TEXT, THOUGHT if THOUGHT in answer else "")
    for chunks in ([answer], list(answer)):
        text, thinking, calls = parsed(name, chunks, prompt_end)
        assert (text.strip(), thinking.strip(), calls) == (*expected, []), answer


BYTES = MatcherTokens(LLTokenizer("byte"), 256, frozenset())
TEMPLATES_OF_CALLS = [name for name in WITH_TOOLS if name not in NO_CALLS]


def forced(
    name: str, tools: Sequence[Mapping[str, Any]], prompt_end: str = ""
) -> Matcher:
    request = Request(
        messages=(), tools=tuple(tools), tool_choice="required", think=False
    )
    found = constraint_for(request, TEMPLATES[name], prompt_end)
    assert found is not None
    return Matcher(found, BYTES)


def accepted(matcher: Matcher, text: str) -> str:
    """Feeds `text` to a matcher. Returns the longest prefix that the matcher
    accepts."""
    data = text.encode()
    for n, byte in enumerate(data):
        if not matcher.allows(byte):
            return data[:n].decode(errors="replace")
        matcher.accept(byte)
    return text


@pytest.mark.parametrize("name", TEMPLATES_OF_CALLS)
def test_forced_call_accepts_the_form_that_the_template_renders(name: str) -> None:
    prompt_end, answer = written(
        name, message_of([("get_weather", {"city": "Oslo", "days": 3})])
    )
    form = answer_format(TEMPLATES[name])
    if form.think and form.think.close in answer:
        head, _, answer = answer.partition(form.think.close)
        prompt_end += head + form.think.close
    tools = tools_for(name)
    answer = answer.strip("\n").replace("call00000", "call00001")
    if form.is_harmony:  # a forced call names the channel first, as gpt-oss does
        answer = (
            "<|channel|>commentary to=functions.get_weather <|constrain|>json"
            '<|message|>{"city": "Oslo", "days": 3}'
        )
    matcher = forced(name, tools, prompt_end)
    begun = accepted(matcher, answer)
    assert matcher.finished and (
        begun == answer or answer[len(begun) :] in form.endings
    ), (begun, answer)
    assert parsed(name, [begun], prompt_end)[2] == [
        ("get_weather", {"city": "Oslo", "days": 3})
    ]


def test_forced_arguments_in_marks_follow_the_schema() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F", ""]},
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "at": {"$ref": "#/$defs/place"},
        },
        "required": ["unit"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}},
                "required": ["x"],
            }
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    def call(*arguments: str) -> str:
        return (
            f"<tool_call>\n<function=f>{''.join(arguments)}\n</function>\n</tool_call>"
        )

    unit, n = "\n<parameter=unit>\nC\n</parameter>", "\n<parameter=n>\n{}\n</parameter>"
    at = '\n<parameter=at>\n{"x": 1}\n</parameter>'
    for arguments, is_valid in {
        (unit,): True,
        (unit, n.format("12"), at): True,
        (unit, at): True,
        (unit, n.format("null")): True,
        (): False,
        (n.format("12"),): False,
        (unit.replace("C", "K"),): False,
        (unit.replace("C", ""),): True,
        (unit, n.format("a")): False,
        (unit, at.replace("1", '"1"')): False,
        (at, unit): False,
    }.items():
        text = call(*arguments)
        assert (accepted(forced("Qwen3-Coder", tools), text) == text) is is_valid, text


MARKS = [
    '{"name": "f", "arguments": {}}',
    "{",
    "}",
    '"',
    "[",
    "]",
    "'",
    "\n",
    " ",
    "<",
    "</",
    "get_weather",
    "ä",
    "\\",
    "(",
    ")",
    "=",
]


def random_answers(name: str, n: int) -> list[str]:
    """Returns n answers made of random delimiters. If the template renders calls, adds
    n damaged calls.

    Each damaged call is cut short, or has a delimiter inserted.
    """
    form, rng = answer_format(TEMPLATES[name]), random.Random(name)
    marks = [form.text_open, form.text_close, *form.endings, *MARKS]
    marks += [form.think.open, form.think.close] if form.think else []
    for each in form.tools:
        parts = each.written
        marks += [
            each.open,
            each.close,
            parts.before,
            parts.between,
            parts.after,
            parts.key_open,
            parts.value_close,
        ]
    answers = ["".join(rng.choices(marks, k=rng.randrange(1, 14))) for _ in range(n)]
    calls = (
        []
        if name in NO_CALLS or name not in WITH_TOOLS
        else [written(name, message_of(CALLS["one"]))[1]]
    )
    for call in calls * n:
        at = rng.randrange(len(call))
        answers.append(call[:at] + rng.choice(["", rng.choice(marks) + call[at:]]))
    return answers


@pytest.mark.parametrize("name", TEMPLATES)
def test_parser_reads_random_marks_without_an_error_for_every_cut(name: str) -> None:
    for answer in random_answers(name, 12):
        for cut in (False, True):
            text, thinking, calls = whole = parsed(name, [answer], cut=cut)
            assert parsed(name, list(answer), cut=cut) == whole
            json.dumps(calls, allow_nan=False)
            assert calls or set(text + thinking) <= set(answer)


@pytest.mark.parametrize("name", TEMPLATES_OF_CALLS)
def test_text_with_a_call_mark_but_no_call_is_parsed_as_text(name: str) -> None:
    format_of = answer_format(TEMPLATES[name])
    form = format_of.tools[0]
    # The closing delimiter is not tested in templates whose messages have headers,
    # because there it is a control token that ends a message.
    for mark in filter(None, (form.open, "" if format_of.channels else form.close)):
        answer = f"It writes {mark} before a call, and this is none."
        assert parsed(name, list(answer)) == (answer, "", [])


def test_call_cut_by_the_token_limit_has_its_arguments_so_far() -> None:
    for name, whole in {
        "Qwen-Qwen3-0.6B": '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": [1, {"c": "yes',
        "Qwen3-Coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\nyes",
        "Kimi-K2-Instruct": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "x", "b": "yes',
        "google-gemma-4-31B-it": '<|tool_call>call:f{a:<|"|>x<|"|>,b:<|"|>yes',
        "LFM2.5-8B-A1B": "<|tool_call_start|>[f(a='x', b='yes",
        "openai-gpt-oss-120b": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x", "b": "yes',
    }.items():
        text, _, calls = parsed(name, [whole], cut=True)
        assert (text, [called for called, _ in calls], calls[0][1]["a"]) == (
            "",
            ["f"],
            "x",
        ), name
        assert "yes" in json.dumps(calls[0][1]["b"])
        assert parsed(name, [whole])[2] in ([], calls)


def test_template_that_cannot_be_rendered_gets_the_known_formats() -> None:
    with pytest.raises(TemplateError):
        render("{{ 1 / 0 }}<tool_call>", [QUESTION])
    assert [form.open for form in answer_format("{{ 1 / 0 }}<tool_call>").tools] == [
        "<tool_call>"
    ]


@pytest.mark.parametrize("name", TEMPLATES_OF_CALLS)
def test_strict_tool_restricts_calls_and_no_text(name: str) -> None:
    form = answer_format(TEMPLATES[name])
    tools = [
        {"type": "function", "function": {**tool["function"], "strict": True}}
        for tool in tools_for(name)
    ]
    request = Request(messages=(), tools=tuple(tools), think=False)
    found = constraint_for(request, TEMPLATES[name])
    assert found is not None
    text = (
        '<|channel|>final<|message|>A <b> & "c".' if form.is_harmony else 'A <b> & "c".'
    )
    matcher = Matcher(found, BYTES)
    assert accepted(matcher, text) == text and matcher.finished
    mark = form.tools[0].open
    if not mark or form.is_harmony:
        return
    matcher = Matcher(found, BYTES)
    begun = accepted(matcher, f"{text}{mark} is a mark")
    assert text + mark == begun.rstrip() and not matcher.finished
    answer = written(name, message_of(CALLS["one"]))[1]
    # The rendered answer lacks the delimiter if the prompt already ends with it.
    answer = answer[answer.index(mark) :] if mark in answer else mark + answer
    whole = text + answer.replace("call00000", "call00001").rstrip()
    begun = accepted(Matcher(found, BYTES), whole)
    assert begun == whole or whole[len(begun) :] in form.endings


@pytest.mark.parametrize("role", ["[{}]", "<{}>", "<|{}|>"])
def test_answer_format_takes_no_text_mark_from_tools_before_the_answer(
    role: str,
) -> None:
    head = role.format("{{ m.role }}")
    template = f"{{% for m in messages %}}{head}{{{{ m.content }}}}{{% endfor %}}{{{{ tools or '' }}}}"
    form = answer_format(template + role.format("assistant") + "{# </think> #}")
    assert (form.text_open, form.text_close) == ("", "")


CALLED = "{% for c in m.tool_calls or [] %}"
ARGUMENTS = "{% for k, v in c.function.arguments.items() %}"
PIECES = [
    *(
        "{{ m.content }}",
        "{{ m.role }}",
        "{{ m }}",
        "{{ tools }}",
        "{{ m.tool_calls }}",
        "{{ m.reasoning_content }}",
    ),
    *(
        "<a>",
        "</a>",
        "[B]",
        "(",
        ")",
        "{",
        "}",
        "\n",
        "<think>",
        "</think>",
        ":",
        "=",
        "'",
        "x" * 5000,
    ),
    f"{CALLED}{{{{ c.function.name }}}}{{% endfor %}}",
    f"{CALLED}<{{{{ c.function.name }}}}>{{{{ c.function.arguments }}}}{{% endfor %}}",
    f"{CALLED}{ARGUMENTS}{{{{ k }}}}({{{{ v }}}}{{% endfor %}}{{% endfor %}}",
    f"{CALLED}{{{{ c.function.name }}}}({ARGUMENTS}{{{{ k }}}}='{{{{ v }}}}'{{% endfor %}}{{% endfor %}}",
]


@pytest.mark.parametrize("seed", range(40))
def test_random_template_has_a_format_and_a_parser(seed: int) -> None:
    rng = random.Random(seed)
    body = "".join(rng.choices(PIECES, k=rng.randrange(1, 8)))
    template = f"{{% for m in messages %}}{body}{{% endfor %}}{''.join(rng.choices(PIECES[6:16], k=2))}"
    form = answer_format(template)
    form.learn()
    parser = answer_parser(template, tools_for(""), prompt_end="<a>")
    assert parser.feed("text") is not None and parser.end(cut=True) is not None
    request = Request(messages=(), tools=tuple(tools_for("")), tool_choice="required")
    assert constraint_for(request, template) is not None
