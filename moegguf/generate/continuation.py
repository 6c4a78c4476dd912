"""The assistant's message at the end of a conversation, which the answer continues instead of beginning another one.

The messages before it are rendered with the beginning of an answer, and its text is appended: templates would close it.
llama.cpp (common/chat-auto-parser-generator.cpp) does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moegguf.generate.images import has_images, text_of
from moegguf.generate.request import Message
from moegguf.gguf.chat_template import HARMONY, ThinkMarks, think_marks_of


@dataclass(frozen=True)
class Continuation:
    """`text`: what the prompt ends with. `content`: the part of it that begins the answer itself. `in_thinking`:
    whether what follows is thinking."""

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
        return Continuation(_in_channels(thinking, content), content, in_thinking=not content)
    marks = think_marks_of(template or "")
    if marks is None:
        return Continuation(content, content)
    begun = marks.begun_by(rendered)
    text = content
    if begun or thinking:
        open = "" if begun else marks.open.rstrip("\n") + "\n"
        text = f"{open}{thinking}" + (f"\n{marks.close}\n\n{content}" if content else "")
    return Continuation(text, content, in_thinking=_ends_in_thinking(marks, text, begun=begun))


def _in_channels(thinking: str, content: str) -> str:
    analysis = f"<|channel|>analysis<|message|>{thinking}"
    if not content:
        return analysis
    return (f"{analysis}<|end|><|start|>assistant" if thinking else "") + f"<|channel|>final<|message|>{content}"


def _ends_in_thinking(marks: ThinkMarks, text: str, *, begun: bool) -> bool:
    _, opened, after = text.rpartition(marks.open)
    return bool(opened or begun) and marks.close not in after
