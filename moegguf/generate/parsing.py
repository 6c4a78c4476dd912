"""An answer's text, as it comes, is taken apart: what the model thinks, what it says, the tools it calls.

However the text is cut into feeds, the parts are the same. Nothing is held back longer than it may still become a
mark, and nothing is lost: what turns out to be no call comes out as text. Does not know tokens or models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moegguf.generate.harmony import Harmony
from moegguf.generate.request import Delta
from moegguf.generate.tool_calls import Call, Types, within_string
from moegguf.generate.tool_formats import JSON_ONLY, ToolFormat, formats_of, tool_call, types_of
from moegguf.gguf.chat_template import HARMONY, ThinkMarks, tail, think_marks_of

Tools = Sequence[Mapping[str, Any]]


def needs_special_tokens(template: str | None) -> bool:
    """Whether tokens that a detokenizer usually leaves out have to be in the text that an `AnswerParser` reads.

    The marks of thinking and of tool calls are such tokens in many models.
    """
    text = template or ""
    marked = any(form.sign in text for form in formats_of(text) if form is not JSON_ONLY)
    return HARMONY in text or think_marks_of(text) is not None or marked


class AnswerParser:
    """For one answer: `feed` it the text, then `end` it.

    `thinking`: take thinking out of the text, if the model with this template writes any. `tools`: those of the
    request, or True for some; False or none leaves calls in the text. `prompt_end`: the end of the prompt, which may
    have begun the thinking.
    """

    def __init__(
        self, template: str | None, *, thinking: bool = True, tools: bool | Tools = False, prompt_end: str = ""
    ) -> None:
        text = template or ""
        given = tools if not isinstance(tools, bool) else ()
        parts: Harmony | _Marked
        if HARMONY in text and (thinking or tools):
            parts = Harmony(thinking=thinking, tools=bool(tools), prompt_end=prompt_end)
        else:
            marks = think_marks_of(text) if thinking else None
            parts = _Marked(marks, formats_of(text) if tools else (), types_of(given), prompt_end)
        self.feed: Callable[[str], Delta] = parts.feed
        """The next text, in any chunks. Gives what is certain by now; often an empty piece."""
        self.end: Callable[[], Delta] = parts.end
        """The answer has ended: what was held back."""


_MAYBE_CALL = re.compile(r"[\[{\s]*(?:\"(?P<key>[^\"]*)(?P<whole>\")?)?")
MAX_IN_TEXT = 8  # closing marks that may stand in a call's texts
_CALL_KEYS = frozenset({"name", "function", "type", "id", "parameters", "arguments", "tool_name", "tool_call_id"})


class _Marked:
    """Thinking and calls between marks. `_state` handles what is held and returns whether the next state goes on."""

    def __init__(self, think: ThinkMarks | None, formats: Sequence[ToolFormat], types: Types, end: str) -> None:
        self._think = think
        self._types = types
        self._formats = {form.open: form for form in formats if form.open}
        self._json_only = any(not form.open for form in formats)
        self._opens = re.compile("|".join(map(re.escape, self._formats)) or r"(?!)")
        self._first = "".join({mark[0] for mark in self._formats})
        self._held = ""
        self._scanned = self._n_in_text = 0
        self._text = self._thought = ""
        self._calls: list[Call] = []
        self._plain = not think and not formats  # in the state _say
        self._state: Callable[[], bool] = self._say if self._plain else self._start
        if think and think.begun_by(end):
            self._state = self._after_open

    def feed(self, text: str) -> Delta:
        if self._plain and not self._held and not any(first in text for first in self._first):
            return Delta(text)
        self._held += text
        while self._held and self._state():
            pass
        return self._piece()

    def end(self) -> Delta:
        held, self._held = self._held, ""
        if self._state in (self._reflect, self._after_open):
            self._thought += held
        elif self._state in (self._call, self._maybe_call):
            self._finish_call(held)
        else:
            self._text += held
        return self._piece()

    def _piece(self) -> Delta:
        delta = Delta(self._text, self._thought, tuple(tool_call(*call) for call in self._calls))
        self._text = self._thought = ""
        self._calls = []
        return delta

    def _start(self) -> bool:
        """Blanks before thinking or a call are no text."""
        body = self._held.lstrip()
        if not body or (self._think and _may_become(body, self._think.open)):
            return False
        if self._think and body.startswith(self._think.open):
            self._held = body.removeprefix(self._think.open)
            return self._go(self._after_open)
        return self._begin(body)

    def _begin(self, body: str) -> bool:
        """The answer proper."""
        if any(_may_become(body, mark) for mark in self._formats):
            return False
        if self._opens.match(body):
            self._held = body
            return self._go(self._call)
        return self._go(self._maybe_call if self._json_only and body[0] in "{[" else self._say)

    def _after_open(self) -> bool:
        self._held = self._held.lstrip("\n")
        return self._go(self._reflect) if self._held else False

    def _reflect(self) -> bool:
        assert self._think is not None
        thought, mark, rest = self._held.partition(self._think.close)
        if mark:
            self._thought += thought.rstrip()
            self._held = rest
            return self._go(self._after_thinking)
        keep = tail(self._held, (self._think.close,))
        sure = self._held[: len(self._held) - keep].rstrip()
        self._thought += sure
        self._held = self._held[len(sure) :]
        return False

    def _after_thinking(self) -> bool:
        self._held = self._held.lstrip("\n")
        body = self._held.lstrip()
        return self._begin(body) if body else False

    def _say(self) -> bool:
        match = self._opens.search(self._held)
        if match:
            self._text += self._held[: match.start()]
            self._held = self._held[match.start() :]
            return self._go(self._call)
        sure = len(self._held) - tail(self._held, self._formats)
        self._text += self._held[:sure]
        self._held = self._held[sure:]
        return False

    def _call(self) -> bool:
        match = self._opens.match(self._held)
        assert match is not None
        form = self._formats[match[0]]
        at = self._held.find(form.close, max(match.end(), self._scanned)) if form.close else -1
        if at < 0:
            self._scanned = max(self._scanned, len(self._held) - len(form.close) + 1)
            return False
        end = at + len(form.close)
        calls = form.parse(self._held[:end], self._types)
        if calls is None and self._n_in_text < MAX_IN_TEXT and within_string(self._held[match.end() : at]):
            self._scanned, self._n_in_text = end, self._n_in_text + 1
            return True
        begin = 0
        if calls is None:  # an earlier mark may never have been closed: it is text
            begin = self._held.rfind(match[0], 0, at)
            calls = form.parse(self._held[begin:end], self._types)
        self._text += self._held[: begin if calls else end]
        self._held = self._held[end:]
        self._calls += calls or ()
        return self._go(self._after_call if calls else self._say)

    def _after_call(self) -> bool:
        self._held = self._held.lstrip()
        return self._go(self._say) if self._held else False

    def _maybe_call(self) -> bool:
        """The whole answer is JSON: a call, if its keys are those of one."""
        match = _MAYBE_CALL.match(self._held)
        assert match is not None
        known = match["key"] in _CALL_KEYS if match["whole"] else match.end() == len(self._held)
        return False if known else self._go(self._say)

    def _finish_call(self, held: str) -> None:
        match = self._opens.match(held)
        parse = self._formats[match[0]].parse if match else JSON_ONLY.parse
        calls = parse(held, self._types)
        if calls is None:
            self._text += held
        else:
            self._calls += calls

    def _go(self, state: Callable[[], bool]) -> bool:
        if state == self._call:
            self._scanned = self._n_in_text = 0
        self._state, self._plain = state, state == self._say
        return True


def _may_become(text: str, mark: str) -> bool:
    return len(text) < len(mark) and mark.startswith(text)
