"""What a chat template's text tells about the model it belongs to: whether it thinks, calls tools, fills gaps.

A template is only read here, never run. The marks are those that models write into their answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkMarks:
    """What stands before and after the thinking in an answer. `sign`: what gives them away in a template that puts
    them together; else the closing one."""

    open: str
    close: str
    sign: str = ""

    def begun_by(self, prompt_end: str) -> bool:
        """A prompt that ends so has opened the thinking and not closed it."""
        _, mark, after = prompt_end.rpartition(self.open)
        return bool(mark) and not after.strip()


HARMONY = "<|channel|>"
"""gpt-oss writes every part of an answer into a channel: analysis, commentary or final."""

THINK_MARKS = (
    ThinkMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ThinkMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ThinkMarks("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThinkMarks("<think:opensource>", "</think:opensource>", "</think{}>"),  # Hunyuan 3
    ThinkMarks("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ThinkMarks("<thinking>", "</thinking>"),
    ThinkMarks("<think>", "</think>"),  # most others: DeepSeek, Qwen, GLM, Kimi, MiniMax, ...
)

_TOOLS = re.compile(r"\btools\b|tool_call", re.ASCII)
_INSERT = re.compile(r"<\|fim_prefix\|>|<fim_prefix>|<\|fim▁begin\|>|<｜fim▁begin｜>|\[PREFIX\]")


def think_marks_of(template: str) -> ThinkMarks | None:
    """The marks around the thinking of a model with this template; None when it names none, or uses channels."""
    if HARMONY in template:
        return None
    return next((marks for marks in THINK_MARKS if (marks.sign or marks.close) in template), None)


def capabilities_of(template: str | None) -> tuple[str, ...]:
    """Of "tools", "thinking" and "insert" those that the template's text speaks of, in this order.

    Follows Ollama's rule (server/images.go) for tools and thinking, with the marks of newer models added.
    """
    text = template or ""
    found = {
        "tools": _TOOLS.search(text) is not None,
        "thinking": HARMONY in text or think_marks_of(text) is not None,
        "insert": _INSERT.search(text) is not None,
    }
    return tuple(name for name, there in found.items() if there)


def tail(text: str, marks: Iterable[str]) -> int:
    """How many of the last characters may be the beginning of a mark."""
    starts = [n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])]
    return max(starts, default=0)
