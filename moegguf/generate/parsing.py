"""From tokens to deltas: complete code points, no stop strings, thinking and tool calls separated.

The parts do not depend on how the text is chunked. Text is held back only while it may still become a mark, and none is
lost: what turns out not to be a call is text. The parsers work on text only; `Transcript` has the tokens.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moegguf.generate.request import Delta, GenerationRequest, TokenLogprob, ToolCall, join
from moegguf.generate.template import Continuation
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
from moegguf.gguf.chat_template import HARMONY, ThinkMarks, capabilities_of, tail, think_marks_of

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
    """Separates thinking and calls from the text of one answer. `_parse` consumes what is in `_held`, and yields where
    more text has to come first; once `_ended`, none will."""

    def __init__(self) -> None:
        self._held = self._text = self._thinking = ""
        self._calls: list[ToolCall] = []
        self._ended = False
        self._steps = self._parse()

    def feed(self, text: str) -> Delta:
        """What is certain after this chunk, often nothing."""
        self._held += text
        next(self._steps, None)
        delta = Delta(self._text, self._thinking, tuple(self._calls))
        self._text, self._thinking, self._calls = "", "", []
        return delta

    def end(self) -> Delta:
        """What was held back, at the end of the answer."""
        self._ended = True
        return self.feed("")

    def _parse(self) -> Iterator[None]:
        raise NotImplementedError

    def _write(self, text: str) -> None:
        self._text += text

    def _write_until(self, marks: re.Pattern[str], texts: Iterable[str]) -> Generator[None, None, re.Match[str] | None]:
        """Writes what comes before the first of some marks, also given as `texts`, and consumes it; None at the end."""
        while True:
            match = marks.search(self._held)
            n_held = 0 if self._ended else tail(self._held, texts)
            n = match.start() if match else len(self._held) - n_held
            self._write(self._held[:n])
            self._held = self._held[n:]
            if match or self._ended:
                return match and marks.match(self._held)
            yield


class HarmonyParser(AnswerParser):
    """For the harmony format of gpt-oss, messages with a header that names their channel:
    `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`; a call is a
    message to `functions.NAME`. Analysis is thinking; messages that are neither thinking nor calls are text."""

    def __init__(self, *, tools: bool, prompt_end: str) -> None:
        super().__init__()
        self._tools = tools
        self._channel = self._recipient = self._arguments = ""
        _, start, header = prompt_end.rpartition("<|start|>")
        self._begun = header if start else ""  # the part of the first header that is in the prompt

    def _parse(self) -> Iterator[None]:
        header: str | None = self._begun
        if _MESSAGE not in self._begun:
            header = yield from self._header()
        while header is not None:
            self._begin_message(header)
            yield from self._body()
            self._end_message()
            self._begun = ""
            header = yield from self._header()

    def _header(self) -> Generator[None, None, str | None]:
        """Consumes a header, "" for an answer without headers; None at the end."""
        while not self._ended:
            body = self._held.lstrip()
            if not any(body.startswith(begin[: len(body)]) for begin in ("to=", *_MARKS)):
                return ""
            at = self._held.find(_MESSAGE, 0, _LONGEST_HEADER)
            if at >= 0:
                header, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
                return self._begun + header
            if len(self._held) >= _LONGEST_HEADER:
                return ""
            yield
        self._text += "" if _MARK.search(self._held) else self._held
        return None

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else ""
        self._recipient = recipient[1] if recipient and self._tools else ""
        self._arguments = ""

    def _body(self) -> Generator[None, None, None]:
        """Writes a message up to the mark that ends it, which may begin the next header."""
        while mark := (yield from self._write_until(_MARK, _MARKS)):
            is_text = mark[0] in (_MESSAGE, "<|constrain|>")
            self._write(mark[0] if is_text else "")
            if is_text or mark[0] not in ("<|start|>", "<|channel|>"):
                self._held = self._held[mark.end() :]
            if not is_text:
                return

    def _write(self, text: str) -> None:
        if self._recipient:
            self._arguments += text
        elif self._channel == "analysis":
            self._thinking += text
        else:
            self._text += text

    def _end_message(self) -> None:
        if self._recipient:
            arguments = json_value(self._arguments or "{}")
            if isinstance(arguments, dict):
                self._calls.append(tool_call(self._recipient, arguments))
            else:
                self._text += self._arguments


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
    """For thinking and calls between marks. `end`: of the prompt; `continuation`: of an answer that begins in the midst
    of its text or, where the model thinks, of its thinking."""

    def __init__(
        self,
        think: ThinkMarks | None,
        formats: Sequence[ToolFormat],
        types: Types,
        end: str,
        continuation: Continuation | None = None,
    ) -> None:
        super().__init__()
        self._think, self._types, self._continuation = think, types, continuation
        self._begun = think is not None and think.begun_by(end)
        self._formats = {form.open: form for form in formats if form.open}
        self._json_only = any(not form.open for form in formats)
        self._opens = re.compile("|".join(map(re.escape, self._formats)) or r"(?!)")

    def _parse(self) -> Iterator[None]:
        in_text = self._continuation is not None or not (self._think or self._formats or self._json_only)
        if self._think is not None:
            in_text = yield from self._read_thinking(self._think)
        if not in_text:
            body = yield from self._body(self._formats)
            if self._opens.match(body):
                self._held = body
            elif self._json_only and body[:1] in ("{", "["):
                yield from self._read_only_call()
        while match := (yield from self._write_until(self._opens, self._formats)):
            yield from self._read_call(self._formats[match[0]])

    def _body(self, marks: Iterable[str]) -> Generator[None, None, str]:
        """The held text without blanks at its beginning, once it is not the beginning of a mark; "" at the end."""
        while not self._ended:
            body = self._held.lstrip()
            if body and not any(len(body) < len(mark) and mark.startswith(body) for mark in marks):
                return body
            yield
        return ""

    def _read_thinking(self, think: ThinkMarks) -> Generator[None, None, bool]:
        """Consumes the thinking, if it comes first; whether text comes next, of which nothing is dropped."""
        if self._continuation is not None:
            if not self._continuation.in_thinking:
                return True
        else:
            if not self._begun:
                body = yield from self._body((think.open,))
                if not body.startswith(think.open):
                    return False
                self._held = body.removeprefix(think.open)
            yield from self._drop_line_breaks()
        while think.close not in self._held and not self._ended:
            certain = self._held[: len(self._held) - tail(self._held, (think.close,))].rstrip()
            self._thinking += certain
            self._held = self._held[len(certain) :]
            yield
        thought, mark, self._held = self._held.partition(think.close)
        self._thinking += thought.rstrip() if mark else thought
        yield from self._drop_line_breaks()
        return False

    def _drop_line_breaks(self) -> Iterator[None]:
        while not (begun := self._held.lstrip("\n")) and not self._ended:
            yield
        self._held = begun

    def _read_call(self, form: ToolFormat) -> Iterator[None]:
        """Consumes a call with its marks, or writes the text that is none."""
        n_read, n_marks = len(form.open), 0  # characters without the closing mark; such marks within strings
        while True:
            at = self._held.find(form.close, n_read) if form.close else -1
            if at < 0 and self._ended:
                self._end_call(form)
                return
            if at < 0:
                n_read = max(n_read, len(self._held) - len(form.close) + 1)
                yield
                continue
            end = at + len(form.close)
            calls = form.calls(self._held[:end], self._types)
            within = calls is None and ends_within_string(self._held[len(form.open) : at])
            if not within or n_marks == MAX_MARKS_IN_STRINGS:
                break
            n_read, n_marks = end, n_marks + 1
        begin = 0
        if calls is None:  # an earlier opening mark that was never closed is text
            begin = self._held.rfind(form.open, 0, at)
            calls = form.calls(self._held[begin:end], self._types)
        self._text += self._held[: begin if calls else end]
        self._held = self._held[end:]
        self._calls += [tool_call(*call) for call in calls or ()]
        if calls:
            yield from self._body(())
            self._held = self._held.lstrip()

    def _read_only_call(self) -> Iterator[None]:
        """The whole answer is JSON: a call, if its first key is a call's."""
        while not self._ended:
            match = _MAYBE_CALL.match(self._held)
            assert match is not None
            if not (match["key"] in _CALL_KEYS if match["whole"] else match.end() == len(self._held)):
                return
            yield
        self._end_call(JSON_ONLY)

    def _end_call(self, form: ToolFormat) -> None:
        """At the end of the answer."""
        calls = form.calls(self._held, self._types)
        self._calls += [tool_call(*call) for call in calls or ()]
        self._text += self._held if calls is None else ""
        self._held = ""


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
    `with_tokens`: deltas have their tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Iterable[str] = (),
        parser: AnswerParser | None = None,
        *,
        special: bool = False,
        with_tokens: bool = False,
    ) -> None:
        self._piece = vocabulary.piece
        self._special = special
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stops = StopStrings(stops)
        self._parser = parser
        self._with_tokens = with_tokens
        self._held: deque[tuple[int, int, TokenLogprob | None]] = deque()  # the first character, and the token
        self._n_fed = self._n_passed = 0  # characters, counted where deltas have tokens or logprobs

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; "" when there is none."""
        return self._stops.found

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> Delta | None:
        """The delta after this token; None when it is empty."""
        text = self._decode(self._piece(token, special=self._special))
        if self._with_tokens or logprob is not None:
            self._held.append((self._n_fed, token, logprob))
            self._n_fed += len(text)
        return self._delta(self._stops.feed(text))

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
        released = self._released(len(text)) if self._held else []
        logprobs = tuple(logprob for _, logprob in released if logprob is not None)
        tokens = tuple(token for token, _ in released) if self._with_tokens else ()
        if self._parser is None:
            return Delta(text, logprobs=logprobs, tokens=tokens) if text or released else None
        delta = self._parser.feed(text) if text else Delta()
        if released:
            return replace(delta, logprobs=logprobs, tokens=tokens)
        return delta if delta.text or delta.thinking or delta.tool_calls else None

    def _released(self, n_more: int) -> list[tuple[int, TokenLogprob | None]]:
        """Returns the tokens that begin within the next `n_more` characters: not those of a stop string."""
        self._n_passed += n_more
        all_passed = not self._stops.found and not self._stops.n_held
        released = []
        while self._held and (all_passed or self._held[0][0] < self._n_passed):
            released.append(self._held.popleft()[1:])
        return released


def new_transcript(request: GenerationRequest, prompt: Prompt, vocabulary: Vocabulary) -> Transcript:
    """The transcript of an answer to `request`. Only answers to a chat template's prompt are parsed."""
    tools = () if request.tool_choice == "none" else request.tools
    template = prompt.template
    if template is None or not (tools or "thinking" in capabilities_of(template)):
        return Transcript(vocabulary, request.sampling.stop, with_tokens=request.return_tokens)
    parser = answer_parser(template, tools, prompt_end=prompt.end, continuation=prompt.continuation)
    return Transcript(
        vocabulary,
        request.sampling.stop,
        parser,
        special=needs_special_tokens(template),
        with_tokens=request.return_tokens,
    )
