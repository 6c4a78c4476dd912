"""Converts tokens to deltas. Deltas contain only complete code points and no stop
strings. Thinking and tool calls are separated from the text.

The joined deltas do not depend on how the text is divided into chunks. Text is held
back while it may still become a stop string, a delimiter such as "<tool_call>", or a
call. Text that turns out not to be a call is sent as text. Parsers receive only text;
`Transcript` receives the tokens.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moegguf.generate.call_format import AnswerFormat, ToolFormat, answer_format
from moegguf.generate.continuation import Continuation
from moegguf.generate.request import Delta, Request, TokenLogprob, Tool, ToolCall, join
from moegguf.generate.tool_calls import (
    Call,
    Types,
    closed_json,
    json_value,
    tool_call,
    types_of,
)
from moegguf.gguf.chat_template import ThinkMarks, capabilities_of, tail

if TYPE_CHECKING:
    from moegguf.engine.vocabulary import Vocabulary
    from moegguf.generate.prompt import Prompt

_MESSAGE = "<|message|>"
_MARKS = (
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|channel|>",
    _MESSAGE,
    "<|constrain|>",
)
_OTHER_MARKS = ("<|eom|>", "<|eot|>")
_CHANNELS = {"self": "analysis", "user": "final"}  # recipient in a header -> channel
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_HEADER = 300


class AnswerParser:
    """Base class: separates thinking and calls from the text of one answer. Subclasses
    implement `_parse`, which consumes the text in `_held`, yields whenever it needs
    more text, and returns once `_ended` is True."""

    def __init__(self) -> None:
        self._held = ""
        self._text = ""
        self._thinking = ""
        self._calls: list[ToolCall] = []
        self._ended = self._cut = False
        self._endings: frozenset[str] = frozenset()
        self._steps = self._parse()

    def feed(self, text: str) -> Delta:
        """Adds a chunk of text. Returns a delta with the parts that are certain so far.
        The delta is often empty."""
        self._held += text
        next(self._steps, None)
        delta = Delta(self._text, self._thinking, tuple(self._calls))
        self._text = self._thinking = ""
        self._calls = []
        return delta

    def end(self, *, cut: bool = False) -> Delta:
        """Ends the answer. Returns a delta with everything that was held back. `cut`:
        True if the token limit ended the answer."""
        self._ended, self._cut = True, cut
        return self.feed("")

    def _parse(self) -> Iterator[None]:
        raise NotImplementedError

    def _write(self, text: str) -> None:
        self._text += text

    def _write_until(
        self, marks: re.Pattern[str], texts: Iterable[str]
    ) -> Generator[None, None, re.Match[str] | None]:
        """Writes the text before the first of the delimiters. Returns the match of this
        delimiter, or None at the end of the answer. `texts`: the delimiters as strings.
        Text that may be the beginning of one of them is held back."""
        while True:
            match = marks.search(self._held)
            if self._ended and self._held in self._endings:
                self._held = ""
            n_held = 0 if self._ended else tail(self._held, texts)
            n = match.start() if match else len(self._held) - n_held
            self._write(self._held[:n])
            self._held = self._held[n:]
            if match or self._ended:
                return match and marks.match(self._held)
            yield


class ChannelParser(AnswerParser):
    """Parses answers that consist of messages with headers.

    gpt-oss names a channel in the header of a message, and a function in the header of
    a call:
    `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`.
    Other models name a recipient: ` to=self<|message|>...<|eom|><|start|>assistant
    to=user<|message|>...<|eot|>`. Analysis and messages to the model itself are
    thinking. Messages that are neither thinking nor calls are text.
    """

    def __init__(
        self,
        formats: Sequence[ToolFormat],
        types: Types,
        prompt_end: str,
        marks: Sequence[str],
    ) -> None:
        super().__init__()
        self._formats, self._types, self._marks = formats, types, marks
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._channel = self._recipient = ""
        self._arguments: list[str] = []  # parts of the current call's arguments
        _, start, header = prompt_end.rpartition("<|start|>")
        # The part of the first header that the prompt already contains.
        self._begun = header if start else ""

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
        """Consumes a header and returns it. Returns "" if the text does not begin with
        a header, or None at the end of the answer."""
        while not self._ended:
            body = self._held.lstrip()
            if not any(
                body.startswith(begin[: len(body)]) for begin in ("to=", *self._marks)
            ):
                return ""
            at = self._held.find(_MESSAGE, 0, _LONGEST_HEADER)
            if at >= 0:
                header, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
                return self._begun + header
            if len(self._held) >= _LONGEST_HEADER:
                return ""
            yield
        self._text += "" if self._mark.search(self._held) else self._held
        return None

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient else ""
        self._channel = channel[1] if channel else _CHANNELS.get(name, "")
        is_call = bool(self._formats) and name not in _CHANNELS
        self._recipient = name if is_call else ""
        self._arguments = []

    def _body(self) -> Generator[None, None, None]:
        """Writes a message up to the delimiter that ends it. A delimiter that also
        begins the next header is not consumed."""
        while mark := (yield from self._write_until(self._mark, self._marks)):
            is_text = mark[0] in (_MESSAGE, "<|constrain|>")
            self._write(mark[0] if is_text else "")
            if is_text or mark[0] not in ("<|start|>", "<|channel|>"):
                self._held = self._held[mark.end() :]
            if not is_text:
                return

    def _write(self, text: str) -> None:
        if self._recipient:
            self._arguments.append(text)
        elif self._channel == "analysis":
            self._thinking += text
        else:
            self._text += text

    def _end_message(self) -> None:
        if not self._recipient:
            return
        text = "".join(self._arguments)
        arguments = json_value(text or "{}")
        if isinstance(arguments, dict):
            self._calls.append(tool_call(self._recipient, arguments))
        elif calls := self._calls_in(text):
            self._calls += [tool_call(*call) for call in calls]
        else:
            self._text += text

    def _calls_in(self, text: str) -> list[Call] | None:
        """Returns the calls in the text of a message to a function, or None if there
        are none. The token limit may have cut the text."""
        for form in self._formats:
            if (
                form.open
                and form.open in text
                and (calls := form.calls(text.strip(), self._types, final=True))
            ):
                return calls
        if not self._cut or not text.strip():
            return None
        values = (json_value(closed) for closed in closed_json(text))
        found = next((value for value in values if isinstance(value, dict)), None)
        return None if found is None else [(self._recipient, found)]


_MAYBE_CALL = re.compile(r"[\[{\s]*(?:\"(?P<key>[^\"]*)(?P<whole>\")?)?")
# Maximum number of closing delimiters that may be part of values within one call.
MAX_MARKS_IN_VALUES = 8
_CALL_KEYS = frozenset(
    {
        "name",
        "function",
        "type",
        "id",
        "parameters",
        "arguments",
        "tool_name",
        "tool_call_id",
    }
)


class MarkParser(AnswerParser):
    """Parses answers in which delimiters surround thinking, text and calls.

    form: the format of the model's answers, with the thinking delimiters.

    formats: the formats of calls. If there are none, calls are not parsed.

    prompt_end: the end of the prompt.

    continuation: given if the answer continues a message. The answer then begins in the
    middle of the text or of the thinking.
    """

    def __init__(
        self,
        form: AnswerFormat,
        formats: Sequence[ToolFormat],
        types: Types,
        prompt_end: str,
        continuation: Continuation | None = None,
    ) -> None:
        super().__init__()
        self._form, self._types, self._continuation = form, types, continuation
        self._think = form.think
        self._think_begun = form.think is not None and form.think.begun_by(prompt_end)
        self._formats = {each.open: each for each in formats if each.open}
        self._json_only = next((each for each in formats if not each.open), None)
        self._marks = [mark for mark in (*self._formats, form.text_close) if mark]
        self._opens = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        # An opening delimiter of calls at the end of the prompt is read as if the model
        # had written it.
        self._prompt_mark = self._held = (
            form.begun(prompt_end) if formats and continuation is None else ""
        )
        self._endings = form.endings if formats or form.text_close else frozenset()

    def _parse(self) -> Iterator[None]:
        in_text = self._continuation is not None
        if self._think is not None:
            in_text = yield from self._read_thinking(self._think)
        if not in_text:
            yield from self._begin_text()
        # `_write_until` holds back the beginnings of these texts. Because of the added
        # "\0", which never occurs, it also holds back a complete ending.
        held = [*self._marks, *(f"{ending}\0" for ending in self._endings)]
        while match := (yield from self._write_until(self._opens, held)):
            if match[0] == self._form.text_close:
                self._held = self._held[match.end() :]
            else:
                yield from self._read_call(self._formats[match[0]])

    def _begin_text(self) -> Iterator[None]:
        """Consumes the opening delimiter of the text. If the answer begins with JSON
        and calls have no delimiters, reads the answer as a call."""
        opened = self._form.text_open.strip()
        if not (self._think or self._formats or self._json_only or opened):
            return
        opened = f"{self._prompt_mark}{opened}" if opened else ""
        body = yield from self._body(
            [mark for mark in (*self._formats, opened) if mark]
        )
        if opened and body.startswith(opened):
            self._held, self._prompt_mark = body.removeprefix(opened), ""
            yield from self._drop_line_breaks()
        elif body.startswith(tuple(self._formats)):
            self._held = body
        elif self._json_only and body[:1] in ("{", "["):
            yield from self._read_only_call(self._json_only)

    def _body(self, marks: Iterable[str]) -> Generator[None, None, str]:
        """Waits until the held text is not only whitespace and is not an incomplete
        delimiter from `marks`. Returns the held text without leading whitespace, or ""
        if the answer has ended."""
        while not self._ended:
            body = self._held.lstrip()
            if body and not any(
                len(body) < len(mark) and mark.startswith(body) for mark in marks
            ):
                return body
            yield
        return ""

    def _read_thinking(self, think: ThinkMarks) -> Generator[None, None, bool]:
        """Consumes the thinking if the answer begins with thinking. Returns True if the
        answer continues the text of a message, so that leading whitespace must be kept;
        otherwise False."""
        if self._continuation is not None:
            if not self._continuation.in_thinking:
                return True
        else:
            if not self._think_begun:
                marks = (
                    (think.open, think.close)
                    if self._form.closes_thinking
                    else (think.open,)
                )
                body = yield from self._body(marks)
                if not body.startswith(marks):
                    return False
                if body.startswith(think.open):
                    self._held = body.removeprefix(think.open)
            yield from self._drop_line_breaks()
        while think.close not in self._held and not self._ended:
            certain = self._held[
                : len(self._held) - tail(self._held, (think.close,))
            ].rstrip()
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
        """Consumes a block of calls with its delimiters. A block that turns out to have
        no valid call is written as text."""
        # Searched characters; closing delimiters that are part of values.
        n_read, n_marks = len(form.open), 0
        while True:
            if not form.may_begin(self._held):
                self._write_mark(form.open)
                return
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
            within = calls is None and form.is_open(self._held[:at])
            if not within or n_marks == MAX_MARKS_IN_VALUES:
                break
            n_read, n_marks = end, n_marks + 1
        begin = 0
        # Perhaps an earlier opening delimiter was never closed and is text.
        if calls is None:
            begin = self._held.rfind(form.open, 0, at)
            calls = form.calls(self._held[begin:end], self._types)
        self._text += self._held[: begin if calls else end]
        self._held = self._held[end:]
        self._calls += [tool_call(*call) for call in calls or ()]
        if calls:
            self._prompt_mark = ""
            yield from self._body(())
            self._held = self._held.lstrip()

    def _write_mark(self, mark: str) -> None:
        """Writes as text a delimiter that does not begin a call, unless the prompt ends
        with this delimiter."""
        self._text += "" if self._prompt_mark else mark
        self._held, self._prompt_mark = self._held.removeprefix(mark), ""

    def _read_only_call(self, form: ToolFormat) -> Iterator[None]:
        """Reads an answer that begins with JSON. If the first key is in _CALL_KEYS,
        waits for the end of the answer and reads all of it as a call. Otherwise leaves
        the answer to be written as text."""
        while not self._ended:
            match = _MAYBE_CALL.match(self._held)
            assert match is not None
            if not (
                match["key"] in _CALL_KEYS
                if match["whole"]
                else match.end() == len(self._held)
            ):
                return
            yield
        self._end_call(form)

    def _end_call(self, form: ToolFormat) -> None:
        """Reads a block of calls without a closing delimiter, which extends to the end
        of the answer. A block without a valid call is written as text."""
        block = self._without_ending(self._held)
        calls = form.calls(block, self._types, final=True)
        if calls is None and self._cut:
            calls = form.cut_calls(block, self._types)
        self._calls += [tool_call(*call) for call in calls or ()]
        self._text += (
            self._held.removeprefix(self._prompt_mark) if calls is None else ""
        )
        self._held = ""

    def _without_ending(self, text: str) -> str:
        found = [ending for ending in self._endings if text.endswith(ending)]
        return text.removesuffix(max(found, key=len, default=""))


def needs_special_tokens(template: str | None) -> bool:
    """Returns True if the parser of an answer needs the text of control tokens, which
    detokenizers usually omit. In many models the delimiters of thinking and of tool
    calls are control tokens."""
    if template is None:
        return False
    form = answer_format(template)
    return (
        form.channels
        or form.think is not None
        or bool(form.text_open)
        or any(each.open for each in form.tools)
    )


def answer_parser(
    template: str | None,
    tools: Sequence[Tool] = (),
    *,
    prompt_end: str = "",
    continuation: Continuation | None = None,
) -> AnswerParser:
    """Returns the parser of one answer, which separates thinking and the calls of
    `tools` from the text.

    `tools`: if there are none, calls are not parsed. `prompt_end`: the end of the
    prompt, which may already contain the opening delimiter of thinking. `continuation`:
    given if the answer continues a message.
    """
    form = answer_format(template or "")
    formats = form.tools if tools else ()
    types = types_of(tools)
    if form.channels:
        marks = [*_MARKS, *(mark for mark in _OTHER_MARKS if mark in (template or ""))]
        return ChannelParser(formats, types, prompt_end, marks)
    return MarkParser(form, formats, types, prompt_end, continuation)


class StopStrings:
    """Passes text on up to the first stop string. `found` is this stop string, or "" if
    none has been found yet. Empty stop strings are ignored."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.found = ""
        self._strings = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._strings)) or r"(?!)")
        self._held = ""

    @property
    def n_held(self) -> int:
        """The number of characters that are held back because they may begin a stop
        string."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """Adds text. Returns the text that is certainly not part of a stop string;
        nothing that follows a stop string is returned."""
        if self.found:
            return ""
        text = self._held + text
        if match := self._pattern.search(text):
            self.found = match[0]
            self._held = ""
            return text[: match.start()]
        n_passed = len(text) - tail(text, self._strings)
        self._held = text[n_passed:]
        return text[:n_passed]

    def end(self) -> str:
        """Returns the characters that were held back. Called at the end of the text."""
        text, self._held = self._held, ""
        return text


@dataclass
class Transcript:
    """Converts the tokens of one answer to deltas, up to a stop string."""

    vocabulary: Vocabulary
    stops: Iterable[str] = ()
    parser: AnswerParser | None = None
    special: bool = False  # True if the text includes the text of control tokens
    with_tokens: bool = False  # True if deltas contain their tokens

    def __post_init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stops = StopStrings(self.stops)
        # (index of first character, token, logprob).
        self._held: deque[tuple[int, int, TokenLogprob | None]] = deque()
        # Decoded characters, sent characters; only if deltas have tokens or logprobs.
        self._n_fed = self._n_passed = 0

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer, or "" if there is none."""
        return self._stops.found

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> Delta | None:
        """Adds a token. Returns the next delta, or None if it is empty."""
        text = self._decode(self.vocabulary.piece(token, special=self.special))
        if self.with_tokens or logprob is not None:
            self._held.append((self._n_fed, token, logprob))
            self._n_fed += len(text)
        return self._delta(self._stops.feed(text))

    def end(self, *, cut: bool = False) -> Delta | None:
        """Ends the answer. Returns a delta with everything that was held back, or None
        if nothing was held back. `cut`: True if the token limit ended the answer."""
        rest = "" if self._stops.found else self._decode(b"", True)
        delta = self._delta(self._stops.feed(rest) + self._stops.end())
        if self.parser is None:
            return delta
        last = self.parser.end(cut=cut)
        if delta is None:
            return last if last != Delta() else None
        return join((delta, last))

    def _delta(self, text: str) -> Delta | None:
        released = self._released(len(text)) if self._held else []
        logprobs = tuple(logprob for _, logprob in released if logprob is not None)
        tokens = tuple(token for token, _ in released) if self.with_tokens else ()
        if self.parser is None:
            return (
                Delta(text, logprobs=logprobs, tokens=tokens)
                if text or released
                else None
            )
        delta = self.parser.feed(text) if text else Delta()
        if released:
            return replace(delta, logprobs=logprobs, tokens=tokens)
        return delta if delta.text or delta.thinking or delta.tool_calls else None

    def _released(self, n_more: int) -> list[tuple[int, TokenLogprob | None]]:
        """Returns the tokens, with logprobs, that begin within the next `n_more`
        characters. Tokens that begin in a stop string are left out."""
        self._n_passed += n_more
        all_passed = not self._stops.found and not self._stops.n_held
        released = []
        while self._held and (all_passed or self._held[0][0] < self._n_passed):
            released.append(self._held.popleft()[1:])
        return released


def new_transcript(
    request: Request, prompt: Prompt, vocabulary: Vocabulary
) -> Transcript:
    """Returns the transcript for an answer to `request`. It has a parser only if a chat
    template rendered the prompt, and if the request has tools or the template supports
    thinking."""
    template, parser = prompt.template, None
    if template is not None and (
        request.tools or "thinking" in capabilities_of(template)
    ):
        parser = answer_parser(
            template,
            request.tools,
            prompt_end=prompt.end,
            continuation=prompt.continuation,
        )
    return Transcript(
        vocabulary,
        (*request.sampling.stop, *prompt.stops),
        parser,
        special=parser is not None and needs_special_tokens(template),
        with_tokens=request.return_tokens,
    )
