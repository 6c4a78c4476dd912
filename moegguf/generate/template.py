"""Renders a conversation to a prompt with the model's chat template, which is untrusted.

Templates are rendered with the variables that transformers defines, in limited processes. Does not know models or
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moegguf.errors import TemplateError
from moegguf.generate.images import has_images, text_of
from moegguf.generate.limited import LimitedError, reply_of
from moegguf.generate.request import Message
from moegguf.gguf.chat_template import HARMONY, think_marks_of

MAX_TEMPLATE_BYTES = 128 << 10
MAX_CHARACTERS = 16 << 20  # of a prompt


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    think: bool | str | None = None,
    options: Mapping[str, Any] | None = None,
    bos: str = "",
    eos: str = "",
) -> str:
    """The prompt. `tools` in OpenAI's form. `think` True, False or a level becomes the variables that templates know
    for it: enable_thinking (Qwen, GLM), thinking (DeepSeek, Granite), reasoning_effort (gpt-oss); None leaves it to the
    template. `options`: further variables. `bos`, `eos`: texts of those tokens.

    Raises TemplateError when the template is too long or invalid, rejects the conversation, fails, or exceeds the
    limits of time, memory or output.
    """
    prepared = [_message(message) for message in messages]
    system_first = bool(prepared) and prepared[0].get("role") == "system"
    if "length 9" in template:
        for message in prepared:
            for call in message.get("tool_calls", ()):
                call["id"] = _short_id(call["id"])
            if "tool_call_id" in message:
                message["tool_call_id"] = _short_id(message["tool_call_id"])
    variables = {
        **(options or {}),
        **({} if think is None else {"enable_thinking": bool(think), "thinking": bool(think)}),
        **({"reasoning_effort": think} if isinstance(think, str) else {}),
        "messages": prepared,
        "tools": list(tools) or None,
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": True,
    }
    size = len(template.encode(errors="replace"))
    if size > MAX_TEMPLATE_BYTES:
        raise TemplateError(f"a chat template has up to {MAX_TEMPLATE_BYTES} bytes, but this one has {size}.")
    try:
        try:
            return reply_of({"template": template, "variables": variables, "characters": MAX_CHARACTERS})
        except LimitedError as error:
            if error.kind == "type":  # some templates need an empty list for no tools, and calls' arguments as text
                variables["tools"] = variables["tools"] or []
                for function in (call["function"] for message in prepared for call in message.get("tool_calls", ())):
                    given = function.get("arguments", {})
                    function["arguments"] = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            elif error.kind == "refused" and "system" in str(error).lower() and system_first:
                variables["messages"] = _without_system(prepared)
            else:
                raise
        return reply_of({"template": template, "variables": variables, "characters": MAX_CHARACTERS})
    except LimitedError as error:
        reason = str(error).rstrip(".")
        messages_of = {
            "refused": f"the chat template rejects this conversation: {error}",
            "syntax": f"the chat template cannot be read (line {error.line}): {error}",
            "stopped": f"the chat template was stopped: {reason}; the model needs another one.",
        }
        raise TemplateError(messages_of.get(error.kind, f"the chat template fails: {reason}.")) from error


def _message(message: Message) -> Message:
    """With the fields that templates use; templates distinguish absent fields from empty ones."""
    prepared = {name: value for name, value in message.items() if value is not None and name not in ("images", "index")}
    prepared.setdefault("content", "")
    if thinking := prepared.get("thinking"):
        prepared["reasoning_content"] = thinking
    calls = list[dict[str, Any]]()
    for call in prepared.pop("tool_calls", None) or ():
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError):  # invalid JSON of a model stays text
                function["arguments"] = json.loads(function["arguments"])
        calls.append({"id": call.get("id", ""), "type": "function", "function": function})
    if calls:
        prepared["tool_calls"] = calls
    if "tool_name" in prepared:
        prepared.setdefault("name", prepared["tool_name"])
    return prepared


def _short_id(text: str) -> str:
    """Mistral's templates accept only ids of nine letters and digits."""
    return "".join(c for c in str(text) if c.isascii() and c.isalnum())[-9:].rjust(9, "0")


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """For models without a system role: its text begins the first user message."""
    system, *rest = messages
    for at, message in enumerate(rest):
        if message.get("role") == "user":
            rest[at] = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return rest
    return [{"role": "user", "content": system["content"]}, *rest]


@dataclass(frozen=True)
class Continuation:
    """The assistant's message at the end of a conversation, which the answer continues instead of beginning another
    one. The messages before it are rendered with the beginning of an answer, and its text is appended: templates would
    close it. llama.cpp (common/chat-auto-parser-generator.cpp) does the same.

    `text`: what the prompt ends with. `content`: the part of it that begins the answer itself. `in_thinking`: whether
    what follows is thinking."""

    text: str
    content: str = ""
    in_thinking: bool = False


def split_last(messages: Sequence[Message]) -> tuple[Sequence[Message], Message | None]:
    """The messages before the one to continue, and that one; None unless the last is the assistant's, without calls
    and images.

    An empty one is left out: there is nothing to continue.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or has_images((last,)):
        return messages, None
    return messages[:-1], last if text_of(last.get("content")) or last.get("thinking") else None


def continuation_of(message: Message, rendered: str, template: str | None) -> Continuation:
    """How to go on with `message` after the `rendered` prompt, which may have begun the thinking.

    A text ends the thinking; a message of thinking alone goes on thinking.
    """
    thinking, content = message.get("thinking") or "", text_of(message.get("content"))
    if HARMONY in (template or ""):
        analysis, final = f"<|channel|>analysis<|message|>{thinking}", f"<|channel|>final<|message|>{content}"
        if content:
            analysis = f"{analysis}<|end|><|start|>assistant{final}" if thinking else final
        return Continuation(analysis, content, in_thinking=not content)
    marks = think_marks_of(template or "")
    if marks is None:
        return Continuation(content, content)
    begun = marks.begun_by(rendered)
    text = content
    if begun or thinking:
        open = "" if begun else marks.open.rstrip("\n") + "\n"
        text = f"{open}{thinking}" + (f"\n{marks.close}\n\n{content}" if content else "")
    _, opened, after = text.rpartition(marks.open)
    return Continuation(text, content, in_thinking=bool(opened or begun) and marks.close not in after)
