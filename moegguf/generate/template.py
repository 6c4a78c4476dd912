"""Renders a conversation to a prompt with the model's chat template, which is untrusted.

Templates are rendered with the variables that transformers defines, in limited processes. Does not know models or
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.errors import TemplateError
from moegguf.generate.images import has_images, text_of
from moegguf.generate.limited import LimitedError
from moegguf.generate.request import Message
from moegguf.generate.template_forms import MAX_CHARACTERS, default_variables, forms_of, rendered
from moegguf.gguf.chat_template import HARMONY, think_marks_of

MAX_TEMPLATE_BYTES = 128 << 10


class LongPromptError(TemplateError):
    """A template writes more characters than the caller allows."""


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    think: bool | str | None = None,
    options: Mapping[str, Any] | None = None,
    bos: str = "",
    eos: str = "",
    begins_answer: bool = True,
    characters: int = MAX_CHARACTERS,
) -> str:
    """Returns the prompt.

    `tools` have OpenAI's form. `think` True, False or a level becomes the variables that templates know for it:
    enable_thinking (Qwen, GLM), thinking (DeepSeek, Granite), thinking_mode (MiniMax), thinking_budget (Seed),
    reasoning_effort (gpt-oss). None sets enable_thinking only, as llama-server does, unless `options`, which are
    further variables, decide it. `bos`, `eos`: texts of those
    tokens. `begins_answer`: the prompt ends with the beginning of an answer.

    Raises LongPromptError above so many `characters`, and TemplateError when the template is too long or invalid,
    rejects the conversation, fails, or exceeds the limits of time or memory.
    """
    variables = default_variables() | _reasoning(options or {}) | {"bos_token": bos, "eos_token": eos}
    variables["add_generation_prompt"] = begins_answer
    if think is not None:
        mode = "enabled" if think else "disabled"
        variables |= {"enable_thinking": bool(think), "thinking": bool(think), "thinking_mode": mode}
    if think is False:
        variables["thinking_budget"] = 0
    if isinstance(think, str):
        variables |= _reasoning({"reasoning_effort": think})
    size = len(template.encode(errors="replace"))
    if size > MAX_TEMPLATE_BYTES:
        raise TemplateError(f"a chat template has up to {MAX_TEMPLATE_BYTES} bytes, but this one has {size}.")
    try:
        return rendered(template, forms_of(template), messages, tools, variables, characters)
    except LimitedError as error:
        if error.kind == "long":
            raise LongPromptError(
                f"the chat template writes more than {characters} characters; shorten the conversation."
            ) from error
        reason = str(error).rstrip(".")
        messages_of = {
            "refused": f"the chat template rejects this conversation: {error}",
            "syntax": f"the chat template cannot be read (line {error.line}): {error}",
            "stopped": f"the chat template was stopped: {reason}; the model needs another one.",
        }
        raise TemplateError(messages_of.get(error.kind, f"the chat template fails: {reason}.")) from error


def _reasoning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options, and what llama-server adds to them: other names of templates for the same choice."""
    added = dict[str, Any]()
    if isinstance(keeps := options.get("preserve_reasoning"), bool):
        added = {"preserve_thinking": keeps}
        added |= dict.fromkeys(("clear_thinking", "truncate_history_thinking", "drop_thinking"), not keeps)
    if isinstance(effort := options.get("reasoning_effort"), str):
        added["reasoning_strength"] = effort
    return added | dict(options)


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
