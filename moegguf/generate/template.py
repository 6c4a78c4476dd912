"""A conversation becomes a prompt through the model's chat template, which nobody has checked.

Templates are compiled once and kept. What they are given has the names that transformers gives them. Does not know
models or tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from moegguf.errors import TemplateError
from moegguf.generate.purse import MAX_TEXT, LimitError, Purse, size_of
from moegguf.generate.request import Message
from moegguf.generate.sandbox import Sandbox
from moegguf.gguf.chat_template import capabilities_of as capabilities

__all__ = ["capabilities", "render"]

MAX_TEMPLATE_BYTES = 128 << 10
MAX_SECONDS = 2.0
COST = 16 << 20  # what any template may spend, in characters looked at or made
COST_PER_INPUT = 64  # and for each character of the conversation
MAX_DEPTH = 64  # of lists in objects in lists in what is given
KEPT = 32  # compiled templates


class _RefusedError(Exception):
    """raise_exception of a template: the model's own rule about conversations."""


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    think: bool | str | None = None,
    options: Mapping[str, Any] | None = None,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
) -> str:
    """The prompt. `tools` in OpenAI's form. `think` True, False or a level becomes the variables that templates know
    for it; None leaves it to the template. `options`: further variables. `bos`, `eos`: texts of those tokens.

    Raises TemplateError when the template is too long, cannot be read, refuses the conversation, fails, or computes,
    writes or waits more than a template may.
    """
    given = [_message(_plain(message)) for message in messages]
    if "length 9" in template:
        _short_ids(given)
    variables = {
        **(options or {}),
        **_thinking(think),
        "messages": given,
        "tools": [_plain(tool) for tool in tools] or None,
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _write(template, variables)
    except TypeError:  # some want an empty list for no tools, and the arguments of calls as text to join
        return _write_surely(
            template, {**variables, "messages": _text_arguments(given), "tools": variables["tools"] or []}
        )
    except _RefusedError as error:
        if given and given[0].get("role") == "system" and "system" in str(error).lower():
            return _write_surely(template, {**variables, "messages": _without_system(given)})
        raise _refusal(error) from error


def _write_surely(template: str, variables: Mapping[str, Any]) -> str:
    try:
        return _write(template, variables)
    except TypeError as error:
        raise TemplateError(f"the chat template fails: {error}.") from error
    except _RefusedError as error:
        raise _refusal(error) from error


def _refusal(error: _RefusedError) -> TemplateError:
    return TemplateError(f"the chat template does not take this conversation: {error}")


def _write(template: str, variables: Mapping[str, Any]) -> str:
    """Raises TypeError and _RefusedError as they come, everything else as TemplateError."""
    try:
        compiled = _compile(template)
        with Purse(COST + COST_PER_INPUT * size_of(variables), MAX_SECONDS):
            return "".join(_bounded(compiled.root_render_func(compiled.new_context(dict(variables)))))
    except (TypeError, TemplateError, _RefusedError):
        raise
    except LimitError as error:
        raise TemplateError(f"the chat template was stopped: {error}; the model needs another one.") from error
    except (jinja2.exceptions.SecurityError, RecursionError, MemoryError) as error:
        raise TemplateError(f"the chat template was stopped: {str(error).rstrip('.') or 'no memory'}.") from error
    except Exception as error:  # whatever the model's own template makes Python raise
        raise TemplateError(f"the chat template fails: {str(error).rstrip('.')}.") from error


@functools.lru_cache(KEPT)
def _compile(template: str) -> jinja2.Template:
    size = len(template.encode(errors="replace"))
    if size > MAX_TEMPLATE_BYTES:
        raise TemplateError(f"a chat template has up to {MAX_TEMPLATE_BYTES} bytes, but this one has {size}.")
    try:
        with Purse(COST, MAX_SECONDS):
            return _sandbox().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template cannot be read (line {error.lineno}): {error.message}") from error


@functools.cache
def _sandbox() -> Sandbox:
    sandbox = Sandbox()
    sandbox.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return sandbox


def _bounded(parts: Iterable[str]) -> Iterable[str]:
    n_characters = 0
    for part in parts:
        n_characters += len(part)
        if n_characters > MAX_TEXT:
            raise LimitError(f"it writes more than {MAX_TEXT} characters")
        yield part


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])


def _message(message: Message) -> Message:
    """With the fields that templates look at; in templates an absent field is not the same as an empty one."""
    given = {name: value for name, value in message.items() if value is not None and name not in ("images", "index")}
    given.setdefault("content", "")
    if thinking := given.get("thinking"):
        given["reasoning_content"] = thinking
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = [_call(call) for call in calls]
    if "tool_name" in given:
        given.setdefault("name", given["tool_name"])
    return given


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # then it is what the model wrote, and the template shows it so
            function["arguments"] = json.loads(function["arguments"])
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _text_arguments(messages: Sequence[Message]) -> list[Message]:
    changed = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _json_text(call["function"].get("arguments", {}))}}
            for call in message.get("tool_calls", ())
        ]
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short_ids(messages: Sequence[Message]) -> None:
    """Mistral's templates take only ids of nine letters and digits."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = _short_id(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])


def _short_id(text: str) -> str:
    return "".join(c for c in str(text) if c.isascii() and c.isalnum())[-9:].rjust(9, "0")


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """For models that know no such role: the first user's message begins with it."""
    system, *rest = messages
    for at, message in enumerate(rest):
        if message.get("role") == "user":
            rest[at] = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return rest
    return [{"role": "user", "content": system["content"]}, *rest]


def _thinking(think: bool | str | None) -> dict[str, Any]:
    """The variables: enable_thinking (Qwen, GLM), thinking (DeepSeek, Granite), reasoning_effort (gpt-oss)."""
    if think is None:
        return {}
    level = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": bool(think), "thinking": bool(think), **level}


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy of JSON, which a template may change."""
    if isinstance(value, str | int | float | None):
        return value
    if depth > MAX_DEPTH:
        raise TemplateError(f"messages and tools nest up to {MAX_DEPTH} deep; give simpler ones.")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return str(value)
