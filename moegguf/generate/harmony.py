"""The harmony format of gpt-oss: messages with a header that names their channel.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`; a call is a
message to `functions.NAME`. Analysis is thinking; messages that are neither thinking nor calls are text.
"""

from __future__ import annotations

import re

from moegguf.generate.request import Delta, ToolCall
from moegguf.generate.tool_calls import json_value, tool_call
from moegguf.gguf.chat_template import tail

_MARK = re.compile(r"<\|(?:start|end|return|call|channel|message|constrain)\|>")
_MESSAGE = "<|message|>"
_MARKS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", _MESSAGE, "<|constrain|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_HEADER = 300


class HarmonyParser:
    """An `AnswerParser` for the harmony format; the same arguments and methods."""

    def __init__(self, *, thinking: bool, tools: bool, prompt_end: str) -> None:
        self._split_thinking = thinking
        self._tools = tools
        self._held = self._channel = self._recipient = ""
        self._text = self._thinking_text = self._arguments = ""
        self._calls: list[ToolCall] = []
        _, start, header = prompt_end.rpartition("<|start|>")
        self._header_begin = header if start else ""  # the part of the header in the prompt
        self._in_header = True
        if _MESSAGE in self._header_begin:
            self._begin_message(self._header_begin)

    def feed(self, text: str) -> Delta:
        """What is certain after this chunk."""
        if not (self._in_header or self._recipient or self._held) and "<" not in text:
            return Delta(thinking=text) if self._in_thinking else Delta(text)
        self._held += text
        while self._held and (self._read_header() if self._in_header else self._read_body()):
            pass
        return self._take_delta()

    def end(self) -> Delta:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if not self._in_header:
            self._append(held)
            self._end_message()
        elif not _MARK.search(held):
            self._text += held
        return self._take_delta()

    @property
    def _in_thinking(self) -> bool:
        return self._split_thinking and self._channel == "analysis"

    def _take_delta(self) -> Delta:
        delta = Delta(self._text, self._thinking_text, tuple(self._calls))
        self._text = self._thinking_text = ""
        self._calls = []
        return delta

    def _read_header(self) -> bool:
        body = self._held.lstrip()
        maybe_header = any(body.startswith(begin[: len(body)]) for begin in ("to=", *_MARKS))
        at = self._held.find(_MESSAGE, 0, _LONGEST_HEADER) if maybe_header else -1
        if at >= 0:
            self._begin_message(self._header_begin + self._held[:at])
            self._held = self._held[at + len(_MESSAGE) :]
        elif maybe_header and len(self._held) < _LONGEST_HEADER:
            return False
        else:  # an answer without headers
            self._begin_message("")
        return True

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else ""
        self._recipient = recipient[1] if recipient and self._tools else ""
        self._header_begin, self._in_header = "", False

    def _read_body(self) -> bool:
        mark = _MARK.search(self._held)
        if mark is None:
            end = len(self._held) - tail(self._held, _MARKS)
            self._append(self._held[:end])
            self._held = self._held[end:]
            return False
        self._append(self._held[: mark.start()])
        if mark[0] in (_MESSAGE, "<|constrain|>"):
            self._append(mark[0])
            self._held = self._held[mark.end() :]
            return True
        self._end_message()
        self._in_header = True
        self._held = self._held[mark.start() if mark[0] in ("<|start|>", "<|channel|>") else mark.end() :]
        return True

    def _append(self, text: str) -> None:
        if self._recipient:
            self._arguments += text
        elif self._in_thinking:
            self._thinking_text += text
        else:
            self._text += text

    def _end_message(self) -> None:
        if self._recipient:
            arguments = json_value(self._arguments or "{}")
            if isinstance(arguments, dict):
                self._calls.append(tool_call(self._recipient, arguments))
            else:
                self._text += self._arguments
        self._recipient = self._channel = self._arguments = ""
