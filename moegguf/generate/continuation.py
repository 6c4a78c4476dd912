"""An answer that continues the assistant's last message instead of beginning another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moegguf.generate.call_format import answer_format
from moegguf.generate.images import has_images, text_of
from moegguf.generate.request import Message


@dataclass(frozen=True)
class Continuation:
    """The assistant's message at the end of a conversation, which the answer continues instead of beginning another
    one. The messages before it are rendered with the beginning of an answer, and its text is appended: templates would
    close it. llama.cpp (common/chat-auto-parser-generator.cpp) appends it, too.

    `text`: the end of the prompt. `content`: the part of this text that begins the answer itself. `in_thinking`: the
    answer goes on with thinking.
    """

    text: str
    content: str = ""
    in_thinking: bool = False


def split_last(messages: Sequence[Message]) -> tuple[Sequence[Message], Message | None]:
    """Returns the messages before the one to continue, and that one: None unless the last is the assistant's, without
    calls and images.

    An empty one is left out: there is nothing to continue.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or has_images((last,)):
        return messages, None
    return messages[:-1], last if text_of(last.get("content")) or last.get("thinking") else None


def continuation_of(message: Message, rendered: str, template: str | None) -> Continuation:
    """Returns the continuation of `message` after the prompt that `template` rendered. The prompt may have begun the
    thinking or the text.

    A text ends the thinking; a message of thinking alone goes on thinking.
    """
    thinking, content = message.get("thinking") or "", text_of(message.get("content"))
    form = answer_format(template or "")
    if form.is_harmony:
        analysis, final = f"<|channel|>analysis<|message|>{thinking}", f"<|channel|>final<|message|>{content}"
        if content:
            analysis = f"{analysis}<|end|><|start|>assistant{final}" if thinking else final
        return Continuation(analysis, content, in_thinking=not content)
    marks, opened = form.think, form.text_open
    in_text = bool(opened) and rendered.rstrip().endswith(opened.strip())
    if marks is None or in_text:
        return Continuation(content if in_text else f"{opened}{content}", content)
    begun = marks.begun_by(rendered)
    text = f"{opened}{content}"
    if begun or thinking:
        before = "" if begun else marks.open if opened else marks.open.rstrip("\n") + "\n"
        behind = f"{marks.close}{opened}" if opened else f"\n{marks.close}\n\n"
        text = f"{before}{thinking}" + (f"{behind}{content}" if content else "")
    _, started, after = text.rpartition(marks.open)
    return Continuation(text, content, in_thinking=bool(started or begun) and marks.close not in after)
