"""From tokens to deltas: complete code points, no stop strings, thinking and tool calls separated.

The parts do not depend on how the text is chunked. Text is held back only while it may still become a mark, and none is
lost: what turns out not to be a call is text. The parsers work on text only; `Transcript` has the tokens.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moegguf.generate.request import Delta, GenerationRequest, TokenLogprob, ToolCall, join
from moegguf.generate.template import Continuation, capabilities
from moegguf.generate.tool_calls import (
    JSON_ONLY,
    ToolFormat,
    Types,
    ends_within_string,
    formats_of,
    json_value,
    tool_call,
    types_of,
)
from moegguf.gguf.chat_template import HARMONY, ThinkMarks, tail, think_marks_of

if TYPE_CHECKING:
    from moegguf.engine.vocabulary import Vocabulary
    from moegguf.generate.prompt import Prompt

_MARK = re.compile(r"<\|(?:start|end|return|call|channel|message|constrain)\|>")
_MESSAGE = "<|message|>"
_MARKS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", _MESSAGE, "<|constrain|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_HEADER = 300


class AnswerParser:
    """Separates thinking and calls from the text of one answer."""

    def __init__(self) -> None:
        self._held = self._text = self._thinking_text = ""
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> Delta:
        """What is certain after this chunk, often nothing."""
        self._held += text
        while self._held and self._read():
            pass
        return self._take_delta()

    def end(self) -> Delta:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        self._read_last(held)
        return self._take_delta()

    def _take_delta(self) -> Delta:
        delta = Delta(self._text, self._thinking_text, tuple(self._calls))
        self._text, self._thinking_text, self._calls = "", "", []
        return delta

    def _read(self) -> bool:
        """Consumes a part of `_held`; False where more text has to come first."""
        raise NotImplementedError

    def _read_last(self, held: str) -> None:
        raise NotImplementedError


class HarmonyParser(AnswerParser):
    """For the harmony format of gpt-oss, messages with a header that names their channel:
    `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`; a call is a
    message to `functions.NAME`. Analysis is thinking; messages that are neither thinking nor calls are text."""

    def __init__(self, *, tools: bool, prompt_end: str) -> None:
        super().__init__()
        self._tools = tools
        self._channel = self._recipient = self._arguments = ""
        _, start, header = prompt_end.rpartition("<|start|>")
        self._header_begin = header if start else ""  # the part of the header in the prompt
        self._in_header = True
        if _MESSAGE in self._header_begin:
            self._begin_message(self._header_begin)

    def feed(self, text: str) -> Delta:
        """What is certain after this chunk."""
        if not (self._in_header or self._recipient or self._held) and "<" not in text:
            return Delta(thinking=text) if self._in_thinking else Delta(text)
        return super().feed(text)

    def _read(self) -> bool:
        return self._read_header() if self._in_header else self._read_body()

    def _read_last(self, held: str) -> None:
        if not self._in_header:
            self._append(held)
            self._end_message()
        elif not _MARK.search(held):
            self._text += held

    @property
    def _in_thinking(self) -> bool:
        return self._channel == "analysis"

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


Tools = Sequence[Mapping[str, Any]]


def needs_special_tokens(template: str | None) -> bool:
    """Whether an `AnswerParser` needs the text of control tokens, which detokenizers usually omit.

    The marks of thinking and of tool calls are control tokens in many models.
    """
    text = template or ""
    marked = any(form.open for form in formats_of(text))
    return HARMONY in text or think_marks_of(text) is not None or marked


_MAYBE_CALL = re.compile(r"[\[{\s]*(?:\"(?P<key>[^\"]*)(?P<whole>\")?)?")
MAX_MARKS_IN_STRINGS = 8  # closing marks within the JSON strings of one call
_CALL_KEYS = frozenset({"name", "function", "type", "id", "parameters", "arguments", "tool_name", "tool_call_id"})


class MarkParser(AnswerParser):
    """For thinking and calls between marks: a state machine, `_state` reads. `end`: of the prompt; `continuation`: of
    an answer that begins in the middle of its text or, where the model thinks, of its thinking."""

    def __init__(
        self,
        think: ThinkMarks | None,
        formats: Sequence[ToolFormat],
        types: Types,
        end: str,
        continuation: Continuation | None = None,
    ) -> None:
        super().__init__()
        self._think = think
        self._types = types
        self._formats = {form.open: form for form in formats if form.open}
        self._json_only = any(not form.open for form in formats)
        self._opens = re.compile("|".join(map(re.escape, self._formats)) or r"(?!)")
        self._first = "".join({mark[0] for mark in self._formats})
        self._scanned = self._n_marks = 0
        self._plain = not think and not formats  # in the state _read_text
        self._state: Callable[[], bool] = self._read_text if self._plain else self._begin
        if think and think.begun_by(end):
            self._state = self._begin_thinking
        if continuation is not None:
            self._enter(self._read_thinking if continuation.in_thinking and think else self._read_text)

    def feed(self, text: str) -> Delta:
        """What is certain after this chunk."""
        if self._plain and not self._held and not any(first in text for first in self._first):
            return Delta(text)
        return super().feed(text)

    def _read(self) -> bool:
        return self._state()

    def _read_last(self, held: str) -> None:
        if self._state in (self._read_thinking, self._begin_thinking):
            self._thinking_text += held
        elif self._state in (self._read_call, self._read_possible_call):
            match = self._opens.match(held)
            calls = (self._formats[match[0]] if match else JSON_ONLY).calls(held, self._types)
            self._calls += [tool_call(*call) for call in calls or ()]
            self._text += held if calls is None else ""
        else:
            self._text += held

    def _begin(self) -> bool:
        """Drops blanks before thinking or a call."""
        body = self._held.lstrip()
        if not body or (self._think and _may_become(body, self._think.open)):
            return False
        if self._think and body.startswith(self._think.open):
            self._held = body.removeprefix(self._think.open)
            return self._enter(self._begin_thinking)
        return self._begin_answer(body)

    def _begin_answer(self, body: str) -> bool:
        """Selects the state for the answer after thinking, which begins with `body`."""
        if any(_may_become(body, mark) for mark in self._formats):
            return False
        if self._opens.match(body):
            self._held = body
            return self._enter(self._read_call)
        return self._enter(self._read_possible_call if self._json_only and body[0] in "{[" else self._read_text)

    def _begin_thinking(self) -> bool:
        self._held = self._held.lstrip("\n")
        return self._enter(self._read_thinking) if self._held else False

    def _read_thinking(self) -> bool:
        assert self._think is not None
        thought, mark, rest = self._held.partition(self._think.close)
        if mark:
            self._thinking_text += thought.rstrip()
            self._held = rest
            return self._enter(self._after_thinking)
        keep = tail(self._held, (self._think.close,))
        certain = self._held[: len(self._held) - keep].rstrip()
        self._thinking_text += certain
        self._held = self._held[len(certain) :]
        return False

    def _after_thinking(self) -> bool:
        self._held = self._held.lstrip("\n")
        body = self._held.lstrip()
        return self._begin_answer(body) if body else False

    def _read_text(self) -> bool:
        match = self._opens.search(self._held)
        if match:
            self._text += self._held[: match.start()]
            self._held = self._held[match.start() :]
            return self._enter(self._read_call)
        end = len(self._held) - tail(self._held, self._formats)
        self._text += self._held[:end]
        self._held = self._held[end:]
        return False

    def _read_call(self) -> bool:
        match = self._opens.match(self._held)
        assert match is not None
        form = self._formats[match[0]]
        at = self._held.find(form.close, max(match.end(), self._scanned)) if form.close else -1
        if at < 0:
            self._scanned = max(self._scanned, len(self._held) - len(form.close) + 1)
            return False
        end = at + len(form.close)
        calls = form.calls(self._held[:end], self._types)
        if calls is None and self._n_marks < MAX_MARKS_IN_STRINGS and ends_within_string(self._held[match.end() : at]):
            self._scanned, self._n_marks = end, self._n_marks + 1
            return True
        begin = 0
        if calls is None:  # an earlier opening mark that was never closed is text
            begin = self._held.rfind(match[0], 0, at)
            calls = form.calls(self._held[begin:end], self._types)
        self._text += self._held[: begin if calls else end]
        self._held = self._held[end:]
        self._calls += [tool_call(*call) for call in calls or ()]
        return self._enter(self._after_call if calls else self._read_text)

    def _after_call(self) -> bool:
        self._held = self._held.lstrip()
        return self._enter(self._read_text) if self._held else False

    def _read_possible_call(self) -> bool:
        """The whole answer is JSON: a call, if its first key is a call's."""
        match = _MAYBE_CALL.match(self._held)
        assert match is not None
        known = match["key"] in _CALL_KEYS if match["whole"] else match.end() == len(self._held)
        return False if known else self._enter(self._read_text)

    def _enter(self, state: Callable[[], bool]) -> bool:
        if state == self._read_call:
            self._scanned = self._n_marks = 0
        self._state, self._plain = state, state == self._read_text
        return True


def _may_become(text: str, mark: str) -> bool:
    return len(text) < len(mark) and mark.startswith(text)


def answer_parser(
    template: str | None, tools: Tools = (), *, prompt_end: str = "", continuation: Continuation | None = None
) -> AnswerParser:
    """The parser of one answer, which separates thinking and the calls of `tools` from the text.

    `prompt_end`: the end of the prompt, which may have begun the thinking. `continuation`: of an answer that continues
    a message; its first blanks belong to it.
    """
    text = template or ""
    if HARMONY in text:
        return HarmonyParser(tools=bool(tools), prompt_end=prompt_end)
    formats = formats_of(text) if tools else ()
    return MarkParser(think_marks_of(text), formats, types_of(tools), prompt_end, continuation)


class StopStrings:
    """Passes text up to the first stop string, which is then `found`. Empty stop strings are ignored."""

    def __init__(self, stops: Iterable[str]) -> None:
        strings = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self.found = ""
        self._pattern = re.compile("|".join(map(re.escape, strings))) if strings else None
        self._beginnings = {stop[:n] for stop in strings for n in range(1, len(stop))}
        self._longest = max((len(stop) for stop in strings), default=0) - 1
        self._held = ""

    def __bool__(self) -> bool:
        return self._pattern is not None

    @property
    def n_held(self) -> int:
        """Characters held back because they may begin a stop string."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """The held characters and `text`, up to what may begin a stop string; "" once one was found."""
        if self._pattern is None:
            return text
        if self.found:
            return ""
        text = self._held + text
        match = self._pattern.search(text)
        if match:
            self.found, self._held = match[0], ""
            return text[: match.start()]
        n = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def end(self) -> str:
        """The held characters, at the end of the text."""
        text, self._held = self._held, ""
        return text


class Transcript:
    """The text of one answer, token by token, up to a stop string.

    `special`: include the text of control tokens, which `parser` needs where they mark thinking or calls.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Iterable[str] = (),
        parser: AnswerParser | None = None,
        *,
        special: bool = False,
    ) -> None:
        self._piece = vocabulary.piece
        self._special = special
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stops = StopStrings(stops)
        self._parser = parser
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()  # with the character at which the token begins
        self._n_fed = self._n_passed = 0  # characters, counted with logprobs only

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; "" when there is none."""
        return self._stops.found

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> Delta | None:
        """The delta after this token; None when it is empty."""
        text = self._decode(self._piece(token, special=self._special))
        if logprob is not None:
            self._logprobs.append((self._n_fed, logprob))
            self._n_fed += len(text)
        if text and self._stops:
            text = self._stops.feed(text)
        return self._delta(text)

    def end(self) -> Delta | None:
        """What was held back, at the end of the answer; None when that is nothing."""
        rest = "" if self._stops.found else self._decode(b"", True)
        delta = self._delta(self._stops.feed(rest) + self._stops.end())
        if self._parser is None:
            return delta
        last = self._parser.end()
        if delta is None:
            return last if last != Delta() else None
        return join((delta, last))

    def _delta(self, text: str) -> Delta | None:
        logprobs = self._released(len(text)) if self._logprobs else ()
        if self._parser is None:
            return Delta(text, logprobs=logprobs) if text or logprobs else None
        delta = self._parser.feed(text) if text else Delta()
        if logprobs:
            return replace(delta, logprobs=logprobs)
        return delta if delta.text or delta.thinking or delta.tool_calls else None

    def _released(self, n_more: int) -> tuple[TokenLogprob, ...]:
        """Logprobs of the tokens that begin within the next `n_more` characters: not those of a stop string."""
        self._n_passed += n_more
        all_passed = not self._stops.found and not self._stops.n_held
        released = []
        while self._logprobs and (all_passed or self._logprobs[0][0] < self._n_passed):
            released.append(self._logprobs.popleft()[1])
        return tuple(released)


def new_transcript(request: GenerationRequest, prompt: Prompt, vocabulary: Vocabulary) -> Transcript:
    """The transcript of an answer to `request`. Only answers to a chat template's prompt are parsed."""
    tools = () if request.tool_choice == "none" else request.tools
    template = prompt.template
    if template is None or not (tools or "thinking" in capabilities(template)):
        return Transcript(vocabulary, request.sampling.stop)
    parser = answer_parser(template, tools, prompt_end=prompt.end, continuation=prompt.continuation)
    return Transcript(vocabulary, request.sampling.stop, parser, special=needs_special_tokens(template))
