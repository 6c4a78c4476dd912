"""gpt-oss's form of an answer: messages with a header that names their channel.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`; a call is a
message to `functions.NAME`. Analysis is thinking, everything else that is no call is text.
"""

from __future__ import annotations

import re

from moegguf.generate.request import Delta, ToolCall
from moegguf.generate.tool_calls import json_value
from moegguf.generate.tool_formats import tool_call
from moegguf.gguf.chat_template import tail

_MARK = re.compile(r"<\|(?:start|end|return|call|channel|message|constrain)\|>")
_MESSAGE = "<|message|>"
_MARKS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", _MESSAGE, "<|constrain|>")
_TO = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_HEADER = 300


class Harmony:
    """Feeds and ends like a `AnswerParser`."""

    def __init__(self, *, thinking: bool, tools: bool, prompt_end: str) -> None:
        self._thinking = thinking
        self._tools = tools
        self._held = self._channel = self._to = ""
        self._text = self._thought = self._arguments = ""
        self._calls: list[ToolCall] = []
        _, start, header = prompt_end.rpartition("<|start|>")
        self._before = header if start else ""  # what the prompt holds of the header
        self._in_header = True
        if _MESSAGE in self._before:
            self._open(self._before)

    def feed(self, text: str) -> Delta:
        if not (self._in_header or self._to or self._held) and "<" not in text:
            return Delta(thinking=text) if self._thinks else Delta(text)
        self._held += text
        while self._held and (self._read_header() if self._in_header else self._read_body()):
            pass
        return self._piece()

    def end(self) -> Delta:
        held, self._held = self._held, ""
        if not self._in_header:
            self._put(held)
            self._close()
        elif not _MARK.search(held):
            self._text += held
        return self._piece()

    @property
    def _thinks(self) -> bool:
        return self._thinking and self._channel == "analysis"

    def _piece(self) -> Delta:
        delta = Delta(self._text, self._thought, tuple(self._calls))
        self._text = self._thought = ""
        self._calls = []
        return delta

    def _read_header(self) -> bool:
        body = self._held.lstrip()
        likely = any(body.startswith(way[: len(body)]) for way in ("to=", *_MARKS))
        at = self._held.find(_MESSAGE, 0, _LONGEST_HEADER) if likely else -1
        if at >= 0:
            self._open(self._before + self._held[:at])
            self._held = self._held[at + len(_MESSAGE) :]
        elif likely and len(self._held) < _LONGEST_HEADER:
            return False
        else:  # the model does without: it just answers
            self._open("")
        return True

    def _open(self, header: str) -> None:
        channel, to = _CHANNEL.search(header), _TO.search(header)
        self._channel = channel[1] if channel else ""
        self._to = to[1] if to and self._tools else ""
        self._before, self._in_header = "", False

    def _read_body(self) -> bool:
        mark = _MARK.search(self._held)
        if mark is None:
            sure = len(self._held) - tail(self._held, _MARKS)
            self._put(self._held[:sure])
            self._held = self._held[sure:]
            return False
        self._put(self._held[: mark.start()])
        if mark[0] in (_MESSAGE, "<|constrain|>"):
            self._put(mark[0])
            self._held = self._held[mark.end() :]
            return True
        self._close()
        self._in_header = True
        self._held = self._held[mark.start() if mark[0] in ("<|start|>", "<|channel|>") else mark.end() :]
        return True

    def _put(self, text: str) -> None:
        if self._to:
            self._arguments += text
        elif self._thinks:
            self._thought += text
        else:
            self._text += text

    def _close(self) -> None:
        if self._to:
            arguments = json_value(self._arguments or "{}")
            if isinstance(arguments, dict):
                self._calls.append(tool_call(self._to, arguments))
            else:
                self._text += self._arguments
        self._to = self._channel = self._arguments = ""
