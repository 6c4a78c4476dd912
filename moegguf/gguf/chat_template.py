"""Finds a model's capabilities, and the delimiters of its thinking, in its chat
template. The template is not rendered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkMarks:
    """The delimiters of the thinking in an answer."""

    open: str
    close: str
    # Text that identifies a template with these delimiters; "": `close` identifies it.
    sign: str = ""

    def begun_by(self, prompt_end: str) -> bool:
        """Returns True if a prompt with this ending has opened the thinking: only
        whitespace follows the last opening delimiter."""
        _, mark, after = prompt_end.rpartition(self.open)
        return bool(mark) and not after.strip()


HARMONY = "<|channel|>"
"""Starts a channel in an answer of gpt-oss, which writes every part of an answer into a
channel: analysis, commentary or final."""

CHATML = (
    "{%- for message in messages -%}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "    {{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)
"""The chat template for models whose files have none, as in llama-server."""

CHATML_END = "<|im_end|>"
"""Ends a message in CHATML. The tokenizer treats it as ordinary text if the model's
vocabulary has no token of this name."""

THINK_MARKS = (
    ThinkMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ThinkMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ThinkMarks("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThinkMarks("<think:opensource>", "</think:opensource>", "</think{}>"),  # Hunyuan 3
    ThinkMarks("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ThinkMarks("<thinking>", "</thinking>"),
    # Most other models: DeepSeek, Qwen, GLM, Kimi, MiniMax, ...
    ThinkMarks("<think>", "</think>"),
)

# End of the header of a thinking message, if headers name a recipient.
_SELF = " to=self<|message|>"
_THINKING = re.compile(r"reasoning_content|message\.reasoning|message\['reasoning']")
_TOOLS = re.compile(r"\btools\b|tool_call", re.ASCII)
_INSERT = re.compile(
    r"<\|fim_prefix\|>|<fim_prefix>|<\|fim▁begin\|>|<｜fim▁begin｜>|\[PREFIX\]"
)


def has_channels(template: str) -> bool:
    """Returns True if a model with this template writes each part of an answer
    (thinking, tool calls, text) as a message with its own header. Such parts are called
    channels."""
    return HARMONY in template or _SELF in template


def think_marks_of(template: str) -> ThinkMarks | None:
    """Returns the delimiters of the thinking of a model with this template; None if the
    template has no known delimiters, or if the model has channels."""
    if has_channels(template):
        return None
    return next(
        (marks for marks in THINK_MARKS if (marks.sign or marks.close) in template),
        None,
    )


def capabilities_of(template: str | None) -> tuple[str, ...]:
    """Returns which of "tools", "thinking" and "insert" the template supports, in this
    order.

    The rules for tools and thinking are Ollama's (server/images.go), with the
    delimiters of newer models added.
    """
    text = template or ""
    found = {
        "tools": _TOOLS.search(text) is not None,
        "thinking": has_channels(text)
        or think_marks_of(text) is not None
        or _THINKING.search(text) is not None,
        "insert": _INSERT.search(text) is not None,
    }
    return tuple(name for name, is_supported in found.items() if is_supported)


def tail(text: str, marks: Iterable[str]) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of one
    of `marks`; 0 if there is none."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0 and not mark.startswith(text[at:]):
            at = text.find(mark[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
