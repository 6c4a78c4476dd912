"""Answers that continue the assistant's last message instead of starting a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moegguf.generate.call_format import answer_format
from moegguf.generate.images import has_images, text_of
from moegguf.generate.request import Message


@dataclass(frozen=True)
class Continuation:
    """The end of a prompt for an answer that continues the assistant's last message.
    The template renders only the earlier messages, and the text of the last one is
    appended, because a template would close the message. llama.cpp
    (common/chat-auto-parser-generator.cpp) appends the text, too.

    `text`: the appended text, with delimiters. `content`: the message's text without
    its thinking. `in_thinking`: True if the answer continues the thinking.
    """

    text: str
    content: str = ""
    in_thinking: bool = False


def split_last(messages: Sequence[Message]) -> tuple[Sequence[Message], Message | None]:
    """Returns the earlier messages and the assistant's last message, which the answer
    continues.

    Returns all messages and None if the last message is not the assistant's, or has
    tool calls or images. If the assistant's last message has neither text nor thinking,
    returns the earlier messages and None.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or has_images((last,)):
        return messages, None
    return messages[:-1], last if text_of(last.get("content")) or last.get(
        "thinking"
    ) else None


def continuation_of(
    message: Message, rendered: str, template: str | None
) -> Continuation:
    """Returns the continuation of `message`. The caller appends its text to `rendered`,
    the prompt that `template` rendered for the earlier messages. `rendered` may already
    end with the opening delimiter of the thinking or of the text.

    If the message has text, its thinking is closed. A message without text is continued
    in its thinking, if the format has delimiters of thinking and `rendered` has not
    opened the text.
    """
    thinking, content = message.get("thinking") or "", text_of(message.get("content"))
    form = answer_format(template or "")
    if form.is_harmony:
        analysis, final = (
            f"<|channel|>analysis<|message|>{thinking}",
            f"<|channel|>final<|message|>{content}",
        )
        if content:
            analysis = (
                f"{analysis}<|end|><|start|>assistant{final}" if thinking else final
            )
        return Continuation(analysis, content, in_thinking=not content)
    marks, opened = form.think, form.text_open
    in_text = bool(opened) and rendered.rstrip().endswith(opened.strip())
    if marks is None or in_text:
        return Continuation(content if in_text else f"{opened}{content}", content)
    begun = marks.begun_by(rendered)
    text = f"{opened}{content}"
    if begun or thinking:
        before = (
            "" if begun else marks.open if opened else marks.open.rstrip("\n") + "\n"
        )
        behind = f"{marks.close}{opened}" if opened else f"\n{marks.close}\n\n"
        text = f"{before}{thinking}" + (f"{behind}{content}" if content else "")
    _, started, after = text.rpartition(marks.open)
    return Continuation(
        text, content, in_thinking=bool(started or begun) and marks.close not in after
    )
