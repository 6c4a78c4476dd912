"""Tests the rendering of conversations, and the sandbox for untrusted templates."""

import contextlib
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import templates
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from waiting import until

from moegguf.child import child_command
from moegguf.errors import TemplateError
from moegguf.generate import sandbox_pool
from moegguf.generate.sandbox_pool import MAX_S
from moegguf.generate.template import render
from moegguf.gguf.chat_template import capabilities_of

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a <city>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call_0a1b2c3d",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "thinking": "I call.", "tool_calls": [CALL]},
    {
        "role": "tool",
        "content": "sunny",
        "tool_name": "get_weather",
        "tool_call_id": "call_0a1b2c3d",
    },
]


TEXT_CALL = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
Q, QUESTION = templates.QWEN, CHAT[1:2]
RENDERED: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], str]] = {
    "tools, without escapes for HTML": (Q, CHAT, {"tools": [TOOL]}, '"description": "The weather of a <city>"'),
    "calls": (
        Q, CHAT, {}, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    ),
    "thinking": (Q, CHAT, {}, "<think>\nI call.\n</think>"),
    "results": (Q, CHAT, {}, "<tool_response>\nsunny\n</tool_response>"),
    "arguments that are text": (
        Q, [*QUESTION, {"role": "assistant", "tool_calls": [TEXT_CALL]}], {}, '{"name": "f", "arguments": {"a": 1}}'
    ),
    "a template that joins texts": (
        templates.DEEPSEEK, CHAT, {}, '<｜tool▁sep｜>{"city": "Zürich"}<｜tool▁call▁end｜>'
    ),
    "short ids for Mistral": (
        templates.MISTRAL, CHAT[:3], {"bos": "<s>", "eos": "</s>"},
        "^<s>[INST]Weather?[/INST]"
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": "l0a1b2c3d"}]</s>$',
    ),
    "thinking is left to the template": (Q, CHAT[:2], {}, "assistant\n$"),
    "thinking is switched on": (Q, CHAT[:2], {"think": True}, "assistant\n$"),
    "no thinking": (Q, CHAT[:2], {"think": False}, "<think>\n\n</think>\n\n$"),
    "high": (templates.HARMONY, QUESTION, {"think": "high"}, "Reasoning: high"),
    "no level": (templates.HARMONY, QUESTION, {}, "Reasoning: medium"),
    "a level where there is none": (templates.DEEPSEEK, QUESTION, {"think": "low"}, "<think>\n$"),
    "options": (templates.LLAMA, QUESTION, {"options": {"date_string": "1 May"}}, "Today Date: 1 May"),
    "a model without a system role": (
        NO_SYSTEM + templates.PLAIN, CHAT[:2], {}, "^<|im_start|>user\nBe brief.\n\nWeather?<|im_end|>"
    ),
    "tags of transformers": (GENERATION, CHAT, {}, "^Be brief.$"),
    "a model that thinks only when it is told to": ("{{ '<think>' if enable_thinking }}", QUESTION, {}, "^<think>$"),
    "thinking that options switch off": (
        "{{ '<think>' if enable_thinking }}", QUESTION, {"options": {"enable_thinking": False}}, "^$"
    ),
    "no thinking by its other names": (
        "{{ thinking_budget }}{{ thinking_mode }}", QUESTION, {"think": False}, "^0disabled$"
    ),
    "a level by its other name": ("{{ reasoning_strength }}", QUESTION, {"think": "low"}, "^low$"),
    "earlier thinking is kept": (
        "{{ [preserve_thinking, clear_thinking, drop_thinking, truncate_history_thinking] }}", QUESTION,
        {"options": {"preserve_reasoning": True}}, "^[True, False, False, False]$",
    ),
    "tools by another name": (
        "{{ '' + functions }}{{ functions[0].name }}", QUESTION, {"tools": [TOOL]}, '"required": ["city"]}}]get_weather'
    ),
    "functions of the request": ("{{ functions }}", QUESTION, {"tools": [TOOL], "options": {"functions": "f"}}, "^f$"),
    "no beginning of an answer": (Q, QUESTION, {"begins_answer": False}, "Weather?<|im_end|>\n$"),
    "a tool without a description": ("{{ 'x' + tools[0].text.more + 'y' }}", QUESTION, {"tools": [TOOL]}, "^xy$"),
    "a missing variable": ("{{ 'x' + nothing }}", QUESTION, {}, "^x$"),
    "no content beside calls": (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments }}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}", CHAT, {}, 'Weather?{"city": "Zürich"}sunny',
    ),
    "results where only turns are known": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
        "{% endif %}{{ m.role }}: {{ m.content }};{% endfor %}", CHAT[1:], {},
        "^user: Weather?;assistant: ;user: sunny;$",
    ),
    "system messages where only turns are known": (
        NO_SYSTEM + templates.PLAIN, [*CHAT[:2], CHAT[0], CHAT[0]], {}, "user\nBe brief.\n\nBe brief.<|im_end|>"
    ),
}  # fmt: skip


PARTS = {
    "loop": "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    "first": "{{ m.content[0].text }}",
    "first by name": "{{ m['content'][0]['text'] }}",
    "filters": "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "macro": "{% macro f(c) %}{% for p in c %}{{ p['text'] if p['type'] }}{% endfor %}{% endmacro %}{{ f(m.content) }}",
    "no texts": "{% if m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    "refused texts": "{% if m.content is string %}{{ raise_exception('a list') }}{% endif %}{{ m.content[0].text }}",
    "joined": "{% set t = m.content | map(attribute='text') | list %}{{ t[0] + '' }}",
}  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")


@pytest.mark.parametrize("roles", [ROLES, *((role,) for role in ROLES)], ids="+".join)
@pytest.mark.parametrize("kind", PARTS)
def test_render_passes_texts_to_a_template_that_reads_lists_of_parts(
    kind: str, roles: tuple[str, ...]
) -> None:
    """The template reads the content of `roles` as a list of parts, and the content of
    the other roles as text."""
    template = (
        f"{{% for m in messages %}}{{{{ m.role }}}}:{{% if m.role in {roles} %}}{PARTS[kind]}"
        "{% else %}{{ '' + m.content }}{% endif %};{% endfor %}"
    )
    prompt = render(
        template,
        [*CHAT, {"role": "assistant", "content": "It is."}, CHAT[1]],
        tools=[TOOL],
    )
    assert (
        prompt
        == "system:Be brief.;user:Weather?;assistant:;tool:sunny;assistant:It is.;user:Weather?;"
    )


TEXTS_OF_ARGUMENTS = (
    "{{ a }}", "{{ '' + a }}", "{{ a + '' }}", "{{ '' ~ a }}", "{{ '%s' % a }}", "{{ '%s' | format(a) }}",
    "{{ '{}'.format(a) }}", "{{ a | string }}", "{{ a | trim }}", "{{ [a] | join }}", "{{ a | safe }}",
    "{{ a | indent }}", "{{ a | replace('_', '') }}", "{{ a | tojson }}", "{{ a.strip() }}", "{{ a.split('_')[0] }}",
    "{{ a if a is string }}", "{{ a | from_json | tojson }}", "{% set t %}{{ a }}{% endset %}{{ t }}",
    "{{ '{' }}{% for k, v in a.items() %}{{ ',' if not loop.first }}\"{{ k }}\": {{ v | tojson }}{% endfor %}{{ '}' }}",
    "{{ '{' }}{% for k, v in a | items %}{{ ',' if not loop.first }}\"{{ k }}\": {{ v | tojson }}{% endfor %}{{ '}' }}",
)  # fmt: skip
ARGUMENTS = {
    "city": 'Zürich\'s "x"',
    "now": True,
    "unit": None,
    "more": {"list": [1.5, False, {"a": "b"}]},
}


@pytest.mark.parametrize(
    "given", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"]
)
@pytest.mark.parametrize("text", TEXTS_OF_ARGUMENTS)
def test_render_writes_call_arguments_as_json(text: str, given: Any) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        + text
    )
    call = {"id": "1", "function": {"name": "f", "arguments": given}}
    messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    assert (
        json.loads(
            render(template + "{% endfor %}{% endfor %}", messages, tools=[TOOL])
        )
        == ARGUMENTS
    )


def test_render_writes_parts_of_arguments_as_json_and_keeps_their_types() -> None:
    template = (
        "{% set a = messages[1].tool_calls[0].function.arguments %}{{ a.more }}|{{ 'x' + a.more.list }}|"
        "{{ a.more.list + [2] == [1.5, false, {'a': 'b'}, 2] }}{{ a is mapping }}{{ a.more.list is sequence }}"
    )
    call = {"id": "1", "function": {"name": "f", "arguments": ARGUMENTS}}
    prompt = render(template, [*QUESTION, {"role": "assistant", "tool_calls": [call]}])
    assert (
        prompt
        == '{"list": [1.5, false, {"a": "b"}]}|x[1.5, false, {"a": "b"}]|TrueTrueTrue'
    )


@pytest.mark.parametrize("kind", RENDERED)
def test_render_passes_conversation_and_options_to_the_template(kind: str) -> None:
    """The characters `^` and `$` in expected texts stand for the beginning and end of
    the prompt."""
    template, messages, options, expected = RENDERED[kind]
    assert expected in f"^{render(template, messages, **options)}$"


def test_date_variables_hold_the_day_of_rendering() -> None:
    before = datetime.now()
    rendered = render("{{ date_string }}/{{ datetime }}", QUESTION)
    # Two around midnight.
    days = {day.strftime("%d %b %Y/%b %d %Y") for day in (before, datetime.now())}
    assert rendered in days


@pytest.mark.parametrize(
    "kind", [kind for kind in templates.TEMPLATES if kind != "plain"]
)
def test_template_of_every_family_renders_a_conversation_with_tools(kind: str) -> None:
    prompt = render(
        templates.TEMPLATES[kind], CHAT, tools=[TOOL], bos="<s>", eos="</s>"
    )
    assert "get_weather" in prompt and "Zürich" in prompt and "sunny" in prompt


def test_template_changes_to_lists_reach_neither_the_caller_nor_the_next_render() -> (
    None
):
    messages = [{"role": "user", "content": "x", "parts": ["a"]}]
    template = (
        "{% set _ = messages[0].parts.append('b') %}{{ messages[0].parts | join(',') }}"
    )
    assert render(template, messages) == "a,b"
    assert messages[0]["parts"] == ["a"]
    sandbox_pool.close()
    render("{% set x = 1 %}{% set _ = messages.append(2) %}", CHAT)
    assert (
        render("{{ x is defined }}{{ messages | length }}", CHAT) == f"False{len(CHAT)}"
    )


FEATURES = (
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=True) }}",
    "{{ {'b': '<&>\\'/é😀\u2028', 'a': [1.0, 1e20, 1e-7, none]} | tojson(separators=(',', ':'), sort_keys=True) }}",
    "{% for m in messages %}\n  {% if loop.index > 2 %}{% break %}{% endif %}\n  {{ m.role }}\n{% endfor %}\n\n",
    "{{ 'a,b,c'.rsplit(',', 1) }}{{ 'abc'.removeprefix('a') }}{{ 'a-b'.partition('-') }}{{ 'abcdef'[::-1][1:-1:2] }}",
    "{{ '%s|%5.1f|%(x)s' % {'x': 1} if false else '%s|%5.1f' % ('a', 2.25) }}{{ '{:>5}'.format(1) }}{{ 10**16 / 1 }}",
    "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3) }}{{ m(1, c=2) }}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem }}{{ loop.changed(m.role) }}{{ loop }}{% endfor %}",
    "{{ messages | selectattr('tool_calls', 'defined') | map(attribute='role') | list }}{{ messages[0] is mapping }}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ m.role }} {% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}",
    "{{ messages | groupby('role') | map('first') | join(' ') }}{{ [1, 2] | sum }}{{ nothing }}{{ [1, 'a', none] }}",
)


@pytest.mark.parametrize("template", [*templates.TEMPLATES.values(), *FEATURES])
def test_render_equals_jinja_with_the_settings_of_transformers(template: str) -> None:
    def dump(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    judge = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    judge.filters["tojson"] = dump
    judge.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    chat = [
        CHAT[0],
        CHAT[1],
        {"role": "assistant", "content": "<think>\nx</think>\n A 'b' ☀"},
        CHAT[1],
    ]
    expected = judge.from_string(template).render(
        messages=chat,
        tools=[TOOL],
        bos_token="<s>",
        eos_token="</s>",
        add_generation_prompt=True,
    )
    assert render(template, chat, tools=[TOOL], bos="<s>", eos="</s>") == expected


FAILING = {
    "its own rule": (
        "{{ raise_exception('roles must alternate') }}",
        "roles must alternate",
    ),
    "syntax": ("{% for %}", "line 1"),
    "another file": ("{% include '/etc/passwd' %}", "loader"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_failing_template_raises_template_error_with_the_reason(kind: str) -> None:
    template, words = FAILING[kind]
    with pytest.raises(TemplateError, match=re.escape(words)):
        render(template, CHAT)


DOUBLE = "{% set x = 'a' %}" + "{% set x = x + x %}" * 60
NEST = "{% set x = [] %}" + "{% set x = [x, x] %}" * 60
TUPLES = (
    "{% set x = () %}{% set y = () %}" + "{% set x = (x, x) %}{% set y = (y, y) %}" * 60
)
RANGE = "range(99999)"

ATTACKS = {
    "attributes": "{{ ''.__class__.__mro__ }}",
    "attributes by item": "{{ ''['__class__'] }}",
    "attributes by filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "attributes by format": "{{ '{0.__class__}'.format(1) }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "globals of a global": "{{ raise_exception.__globals__ }}",
    "the environment": "{{ self.__init__.__globals__ }}",
    "a huge range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": f"{{% for i in {RANGE} %}}{{% for j in {RANGE} %}}{{% endfor %}}{{% endfor %}}",
    "nested loops without a body's work": (
        f"{{% for i in {RANGE} %}}{{% for j in {RANGE} if false %}}{{% endfor %}}{{% endfor %}}"
    ),
    "filters in a loop": f"{{% for i in {RANGE} %}}{{% set x = {RANGE} | list %}}{{% endfor %}}",
    "straight-line work": "{% set x = 'a' * 9999999 %}" + "{{ x.title() == 'b' }}" * 5000,
    "a long text": "{{ 'a' * 10**10 }}",
    "a long list": "{{ [0] * 10**10 }}",
    "doubling": DOUBLE + "{{ x | length }}",
    "joining": "{% set x = 'a' * 999999 %}{{ ([x] * 99999) | join | length }}",
    "padding": "{{ '%999999999d' % 1 }}",
    "padding by a computed width": "{{ '%*d' % (10**9, 1) }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "nested output": NEST + "{{ x }}",
    "nested comparison": TUPLES + "{{ x == y }}",
    "itself": "{% set l = [] %}{% set _ = l.append(l) %}{{ l }}{{ l | tojson }}",
    "macros without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a block in itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "much text in a loop": f"{{% for i in {RANGE} %}}{'a' * 9999}{{% endfor %}}",
    "indented JSON": "{{ messages | tojson(indent=10**9) }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a deep sum": "{{ " + "1+" * 30000 + "1 }}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "too long": "a" * (129 << 10),
    "lipsum": "{{ lipsum(n=10**6) }}",
}  # fmt: skip


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_pool, "MAX_S", 0.5)


@pytest.mark.parametrize("kind", ATTACKS)
def test_attack_by_a_template_is_stopped_in_time(kind: str, impatient: None) -> None:
    begin = time.perf_counter()
    with pytest.raises(TemplateError):
        render(ATTACKS[kind], CHAT)
    assert time.perf_counter() - begin < 10 * MAX_S


def test_template_of_many_parts_is_compiled_in_time_or_stopped() -> None:
    begin = time.perf_counter()
    with contextlib.suppress(TemplateError):
        assert render("{{a}}" * 25000, CHAT) == ""
    assert time.perf_counter() - begin < 10 * MAX_S


@pytest.mark.parametrize(
    ("template", "limit"),
    [(ATTACKS["nested loops"], "0.5 s"), ("{{ 'a' * 10**10 }}", "MiB of memory")],
)
def test_stopped_template_names_the_limit(
    template: str, limit: str, impatient: None
) -> None:
    with pytest.raises(TemplateError, match=limit):
        render(template, CHAT)
    assert render("{{ 1 }}", []) == "1"  # the next template is rendered


def sandboxes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if sandbox_pool.COMMAND[-1] in child.cmdline()
    ]


def test_render_restarts_a_killed_sandbox_and_limits_the_processes() -> None:
    assert render("{{ 1 }}", CHAT) == "1"
    assert sandboxes()
    for process in sandboxes():
        process.kill()
        process.wait(5)
    assert render("{{ 2 }}", CHAT) == "2"
    sandbox_pool.close()
    assert not sandboxes()
    assert render("{{ 3 }}", CHAT) == "3"
    sandbox_pool.close()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: render(f"{{{{ {i} }}}}", CHAT), range(32))) == [
            str(i) for i in range(32)
        ]
    assert len(sandboxes()) <= sandbox_pool.MAX_PROCESSES


def test_render_starts_another_sandbox_beside_a_slow_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox_pool.close()
    monkeypatch.setattr(sandbox_pool, "MAX_S", 60.0)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(render, ATTACKS["nested loops"], CHAT)
        (busy,) = until(sandboxes)
        assert render("{{ 1 }}", CHAT) == "1"
        assert not slow.done()
        busy.kill()
        with pytest.raises(TemplateError, match="ended with code -9"):
            slow.result()


def test_sandbox_process_gets_the_module_path_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Uses a folder that this process has added to sys.path, and a Python without
    sys.executable."""
    (tmp_path / "elsewhere.py").write_text(
        "from moegguf.generate.sandbox import main\nmain()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.path.append(Path("of-another-type"))  # type: ignore[arg-type]  # Python ignores entries of the wrong type
    sandbox_pool.close()
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "")
        assert child_command("elsewhere")[0] == "python3"
    monkeypatch.setattr(sandbox_pool, "COMMAND", child_command("elsewhere"))
    assert render("{{ 4 }}", CHAT) == "4"
    sandbox_pool.close()


def test_render_limits_output_and_depth_but_accepts_long_conversations() -> None:
    assert (
        len(render(templates.QWEN, [{"role": "user", "content": "word " * 1_000_000}]))
        > 5_000_000
    )
    with pytest.raises(TemplateError, match="more than"):
        render(
            "{{ messages[0].content }}" * 3,
            [{"role": "user", "content": "a" * 6_000_000}],
        )
    deep: Any = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nest"):
        render(templates.PLAIN, [{"role": "user", "content": "x", "extra": deep}])


@given(st.text(alphabet="{}%#-|[]()'\"~+*.=_ abimnorst01\n", max_size=60))
def test_render_returns_a_prompt_or_a_template_error_for_any_template(
    template: str,
) -> None:
    with contextlib.suppress(TemplateError):
        assert isinstance(render(template, CHAT), str)


def test_capabilities_of_reads_tools_and_thinking_from_the_template() -> None:
    both = ("tools", "thinking")
    expected = {
        "plain": (),
        "qwen": both,
        "mistral": both[:1],
        "llama": both[:1],
        "deepseek": both,
        "harmony": both,
    }
    assert {
        kind: capabilities_of(templates.TEMPLATES[kind]) for kind in expected
    } == expected
    assert capabilities_of(None) == ()
