"""Learns from a chat template how its model writes thinking, text and tool calls.

The module renders a conversation with a known tool call, which is called the probe.
From the result it takes the delimiters of the format, such as "<tool_call>": the texts
before the call's name, between name and arguments, inside the arguments and after them.
Small tables contain the formats and delimiters of models whose templates do not render
calls or thinking.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moegguf.errors import TemplateError
from moegguf.generate.template import render
from moegguf.generate.tool_calls import (
    ARGUMENT_PAIRS,
    FUNCTIONS,
    JSON_CALLS,
    MISTRAL_CALLS,
    NAME_PATTERN,
    Call,
    ElementCalls,
    JsonCalls,
    MarkedCalls,
    NamedCalls,
    PythonCalls,
    Reader,
    RelaxedCalls,
    TaggedCalls,
    Types,
    calls_in,
    closed_json,
    json_at,
    json_value,
    pattern_of,
)
from moegguf.gguf.chat_template import HARMONY, ThinkMarks, has_channels, think_marks_of

NAME, OTHER_NAME = "qname", "qother"
ID, OTHER_ID = "qidaaaaaa", "qidbbbbbb"
ID_PATTERN = r"[\w-]*"
TEXT, THOUGHT = "ϰtextϰ", "ϰthoughtϰ"
VALUES: Mapping[str, Any] = {"qkeya": "qvala", "qkeyb": "qvalb"}
ESCAPED = "q'v\\w"
QUESTION = {"role": "user", "content": "qquestion"}
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "qdescription",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": "qdescription"}
                    for key in VALUES
                },
                "required": ["qkeya"],
            },
        },
    }
    for name in (NAME, OTHER_NAME)
)

# Maximum number of characters that a template may render for a probe.
MAX_RENDERED = 256 << 10
# Maximum length of the probe's call in characters; if a call is longer, its format is
# unknown.
MAX_WRITTEN = 4 << 10

# Maximum number of pieces of an ending, see `AnswerFormat.endings`.
MAX_ENDING_PIECES = 8

_PIECE = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|[^<\[\s]+|.", re.DOTALL)
# a word on its own line, or a text without braces that ends with a delimiter
_TEXT_OPEN = re.compile(r"\w+\n|[^{}]*<[^<>\s]*>\s*")
_MARK = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")
_BEGIN = re.compile(rf"\s*(?:(?:{NAME_PATTERN})?\s*(?:$|[\[{{<]))")


@dataclass(frozen=True)
class Written:
    """The exact text of one call, from which the grammar of calls is built: the texts
    `before` the name, `between` name and arguments, and `after` the arguments.

    If arguments have their own delimiters, `key_open` and `key_close` are the texts
    before and after an argument's name, and `value_close` is the text after its value.
    `key_close` maps a JSON type to its text; the key "" stands for any type.
    `separator` is the text between two arguments, and `quote` is the text before and
    after a string.
    """

    before: str
    between: str
    after: str
    # style of the arguments: json, tagged, elements, python, relaxed.
    style: str = "json"
    key_open: str = ""
    key_close: Mapping[str, str] = field(default_factory=dict)
    value_close: str = ""
    separator: str = ""
    quote: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls. A block of calls begins with `open` and ends with
    `close`. If `open` is empty, the whole answer is the block; if `close` is empty, the
    block extends to the end of the answer. The first of `readers` that finds calls in a
    block determines the result."""

    open: str
    close: str
    readers: tuple[Reader, ...]
    written: Written

    def calls(
        self, block: str, types: Types, *, final: bool = False
    ) -> list[Call] | None:
        """Returns the calls in a block, which is given with its delimiters, or None if
        the block is not a call. `final`: True if the answer has ended, so that the last
        delimiters may be missing."""
        body = self._body(block)
        found = (read(body, types, final=final) for read in self.readers)
        return next((calls for calls in found if calls is not None), None)

    def is_open(self, block: str) -> bool:
        """Returns True if the block ends within a value, so that a closing delimiter
        after it may belong to that value."""
        return any(read.is_open(self._body(block)) for read in self.readers)

    def may_begin(self, block: str) -> bool:
        """Returns True if the block may still become a call. Only a format without a
        closing delimiter can return False."""
        return bool(self.close) or _BEGIN.match(block, len(self.open)) is not None

    def cut_calls(self, block: str, types: Types) -> list[Call] | None:
        """Returns the calls in a block that the token limit cut off, or None if no call
        can be read. The last call has its arguments up to the cut."""
        begin = block.find("{", len(self.open))
        texts = [block]
        if begin >= 0:
            head = block[:begin]
            for text in closed_json(block[begin:]):
                texts += [head + text, f"{head}{text}]"]
        quote = self.written.quote or "'"
        texts += [
            block + end
            for end in (
                f"{quote})",
                ")",
                f'"{")"}',
                f"{quote}}}",
                "}",
                f"{quote}]}}",
                "]}",
            )
        ]
        found = (self.calls(text, types, final=True) for text in texts)
        return next((calls for calls in found if calls), None)

    def _body(self, block: str) -> str:
        body = block.removeprefix(self.open).rstrip()
        ends = list(itertools.accumulate(_pieces(self.close)))
        return body.removesuffix(
            next((end for end in reversed(ends) if body.endswith(end)), "")
        )


def _json_written(
    open_mark: str, close: str, *, arguments: str = "arguments", listed: bool = False
) -> Written:
    begin, end = ("[", "]") if listed else ("", "")
    return Written(
        f'{open_mark}{begin}{{"name": "', f'", "{arguments}": ', f"}}{end}{close}"
    )


HARMONY_CALL = Written(
    "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""
)
JSON_ONLY = ToolFormat("", "", (JSON_CALLS,), _json_written("", ""))

_DEEPSEEK = NamedCalls(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?", r"\s*(?:<｜tool▁sep｜>|\n)\s*(?:```json\s*)?",
    r"(?:```\s*)?<｜tool▁call▁end｜>",
)  # fmt: skip

# Formats that a model may use although its template does not render them. A format
# applies if the template contains the key.
KNOWN_FORMATS: Mapping[str, ToolFormat] = {
    "<tool_call>": ToolFormat(
        "<tool_call>", "</tool_call>", (JSON_CALLS, FUNCTIONS, ARGUMENT_PAIRS),
        _json_written("<tool_call>\n", "\n</tool_call>")
    ),
    "<function=": ToolFormat(
        "<function=", "</function>", (replace(FUNCTIONS, before=""),), Written("<function=", ">", "</function>")
    ),
    "[TOOL_CALLS]": ToolFormat("[TOOL_CALLS]", "", (MISTRAL_CALLS,), _json_written("[TOOL_CALLS]", "", listed=True)),
    "<｜tool▁output": ToolFormat(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", (_DEEPSEEK,),
        Written(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ),
    "List of tools: ": ToolFormat(
        "<|tool_call_start|>", "<|tool_call_end|>", (PythonCalls(),),
        Written("<|tool_call_start|>[", "(", ")]<|tool_call_end|>", "python", key_close={"": "="}, separator=", "),
    ),
    "<TOOLCALL>": ToolFormat(
        "<TOOLCALL>", "</TOOLCALL>", (JSON_CALLS,), _json_written("<TOOLCALL>", "</TOOLCALL>", listed=True)
    ),
    "<|tool_call|>": ToolFormat("<|tool_call|>", "", (JSON_CALLS,), _json_written("<|tool_call|>", "", listed=True)),
    '"parameters"': ToolFormat("", "", (JSON_CALLS,), _json_written("", "", arguments="parameters")),
    "<|python_tag|>": ToolFormat(
        "<|python_tag|>", "", (JSON_CALLS,), _json_written("<|python_tag|>", "", arguments="parameters")
    ),
}  # fmt: skip


@functools.lru_cache(32)
def answer_format(template: str) -> AnswerFormat:
    """Returns the format in which a model with this template writes the parts of an
    answer. For a template that cannot be rendered, the format comes only from the
    tables of known formats and delimiters."""
    return AnswerFormat(template)


def _common_prefix(*texts: str) -> int:
    return len(os.path.commonprefix(texts))


def _common_suffix(*texts: str) -> int:
    return len(os.path.commonprefix([text[::-1] for text in texts]))


def _call(name: str, call_id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }


CALL = _call(NAME, ID, VALUES)


def _answer(
    *calls: Mapping[str, Any], text: str = "", thinking: str = ""
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _pieces(text: str) -> list[str]:
    return _PIECE.findall(text)


def _shared_end(one: str, other: str) -> str:
    """Returns the common suffix of two texts, cut so that it begins with a whole
    delimiter, word or whitespace."""
    parts, others, n = _pieces(one), _pieces(other), 0
    while n < min(len(parts), len(others)) and parts[-1 - n] == others[-1 - n]:
        n += 1
    return "".join(parts[len(parts) - n :])


def _whole_mark_begin(text: str, at: int) -> int:
    """Returns the start of the delimiter if the position `at` is inside a delimiter,
    otherwise `at`."""
    cut = re.search(r"[<\[][^<>\[\]\s]*$", text[:at])
    return cut.start() if cut else at


def _whole_mark_end(text: str, at: int) -> int:
    """Returns the end of the delimiter if the position `at` is inside a delimiter,
    otherwise `at`."""
    if _whole_mark_begin(text, at) == at:
        return at
    rest = re.compile(r"[^<>\[\]\s]*[>\]]?").match(text, at)
    return rest.end() if rest else at


def _open_mark(head: str) -> str:
    """Returns the text that announces a call, such as "<tool_call>". `head`: the text
    before the call's name.

    The result is the first word of `head` up to the call's id, cut after the last
    delimiter. A word without a delimiter is not cut.
    """
    word = head.split(maxsplit=1)[0].partition(ID)[0] if head.strip() else ""
    marks = list(_MARK.finditer(word))
    return word[: marks[-1].end()] if marks else word


def _unique_begin(close: str, block: str) -> str:
    """Returns the shortest prefix of `close` that consists of whole pieces, does not
    occur in `block`, and contains a delimiter (if `close` has one). Returns all of
    `close` if there is no such prefix."""
    found, has_mark = "", _MARK.search(close) is not None
    for found in itertools.accumulate(_pieces(close.strip())):
        if found not in block and (_MARK.search(found) or not has_mark):
            return found
    return found


def _unique_end(close: str, block: str) -> str:
    """Returns the shortest suffix of `close` that consists of whole pieces, begins with
    a delimiter and does not occur in `block`. Returns all of `close` if there is no
    such suffix."""
    found = ""
    for piece in reversed(_pieces(close.strip())):
        found = piece + found
        if found.strip() and found not in block and not re.match(r"[^<\[]", piece):
            return found
    return found


def _behind_name(head: str) -> int:
    """Finds the last `NAME` (the name of the probe's tool) in `head`, and the first
    delimiter after it.

    Returns the position where this delimiter, such as "<tool_call>", ends, or 0 if
    either is missing.
    """
    at = head.rfind(NAME)
    mark = _MARK.search(head, at) if at >= 0 else None
    return mark.end() if mark else 0


def _through(text: str, mark: str) -> str:
    """Returns `text` up to and including the first `mark`. Returns "" if `mark` is
    empty or not in the text."""
    return text[: text.index(mark) + len(mark)] if mark and mark in text else ""


def _object_at(text: str, begin: int) -> tuple[int, int] | None:
    """Returns the start and end of the JSON object with the probe's arguments, or None
    if there is none. The search starts at the position `begin`."""
    for match in re.compile(r"\{").finditer(text, begin):
        found = json_at(text, match.start())
        if found and found[0] == VALUES:
            return match.start(), found[1]
    return None


def _json_around(text: str, at: int) -> tuple[int, int] | None:
    """Returns the start and end of the outermost JSON object or list that contains the
    position `at`, or None if there is none."""
    for match in re.compile(r"[\[{]").finditer(text, 0, at):
        found = json_at(text, match.start())
        if found and found[1] > at:
            return match.start(), found[1]
    return None


class AnswerFormat:
    """The format of a model's answers: its delimiters, and its formats of tool calls.
    The format is learned from the chat template, by rendering conversations with known
    words and looking for these words in the result.

    `think`: the thinking delimiters. `closes_thinking`: True if an answer without
    thinking begins with the delimiter that ends thinking. `text_open`, `text_close`:
    the delimiters around the text. `channels`: True if an answer consists of messages
    whose headers name a channel or a recipient.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self.channels, self.is_harmony = has_channels(template), HARMONY in template
        self._prompt = self._render()
        self._text = self._render(_answer(text=TEXT))
        self.think = self._think_marks()
        self.closes_thinking = self._empties_text = False
        self.text_open, self.text_close = self._text_marks()

    @property
    def empties_text(self) -> bool:
        """True if the template writes the delimiters around the text even before a call
        without text."""
        return bool(self.tools) and self._empties_text

    @functools.cached_property
    def endings(self) -> frozenset[str]:
        """The texts that may follow an answer without belonging to it, such as
        end-of-turn delimiters that are not end tokens. Each consists of at most
        MAX_ENDING_PIECES pieces, and contains a delimiter."""
        return frozenset(
            ending
            for text in self._behind_answers()
            for ending in itertools.accumulate(_pieces(text)[:MAX_ENDING_PIECES])
            if _MARK.search(ending)
        )

    def learn(self) -> None:
        """Computes the cached properties now, so that the first request does not have
        to wait for them."""
        _ = self.tools, self.endings

    def begun(self, prompt_end: str) -> str:
        """Returns the opening delimiter of calls if the prompt ends with this delimiter
        and the model also has an opening delimiter for text. Otherwise returns ""."""
        marks = [
            form.open
            for form in self.tools
            if form.open and prompt_end.endswith(form.open)
        ]
        return marks[0] if marks and self.text_open else ""

    @functools.cached_property
    def tools(self) -> tuple[ToolFormat, ...]:
        """The formats in which the model may write calls. There is at least one. The
        format that the template renders, if it is recognized, comes first."""
        formats = {
            form.open: form
            for sign, form in KNOWN_FORMATS.items()
            if sign in self._template
        }
        learned = self._tool_format
        if learned is None:
            return tuple(formats.values()) or (JSON_ONLY,)
        known = next(
            (
                form
                for form in formats.values()
                if form.open and learned.open.startswith(form.open)
            ),
            learned,
        )
        readers = dict.fromkeys((*learned.readers, *known.readers, JSON_CALLS))
        others = [form for form in formats.values() if form.open not in learned.open]
        return replace(learned, open=known.open, readers=tuple(readers)), *others

    def _render(self, *answers: Mapping[str, Any], think: bool = True) -> str:
        """Renders the probe's question, followed by `answers`. Returns "" if the
        template cannot render them."""
        try:
            conversation = [QUESTION, *map(dict, answers)]
            return render(
                self._template,
                conversation,
                tools=TOOLS,
                think=think,
                characters=MAX_RENDERED,
            )
        except TemplateError:
            return ""

    # Thinking and text

    def _think_marks(self) -> ThinkMarks | None:
        """Returns the delimiters around thinking: the known delimiters of this
        template, otherwise the delimiters that it renders. Returns None if there are
        neither."""
        known = think_marks_of(self._template)
        rendered = self._render(_answer(text=TEXT, thinking=THOUGHT))
        before, thought, rest = rendered.partition(THOUGHT)
        close, text, _ = rest.partition(TEXT)
        if known or not thought or not text or not close.strip():
            return known
        open_text = self._text.partition(TEXT)[0][
            _common_prefix(self._text, self._prompt) :
        ]
        marks = close.strip().removesuffix(open_text.strip())
        # `marks` is empty if an answer without thinking begins with the same delimiters
        # as `close`. The opening delimiter of the text is then the common suffix of
        # `close` and a prompt with think=False.
        if not marks:
            shared = _pieces(
                _shared_end(close.strip(), self._render(think=False).strip())
            )
            marks = close.strip().removesuffix("".join(shared))
            # the opening delimiter ends with this piece, so it also belongs to the
            # closing delimiter
            if shared and before.endswith(shared[0]):
                marks += shared[0]
        shared_end = _common_prefix(self._prompt, rendered)
        written, begun = before[shared_end:], self._prompt[shared_end:]
        opened = (
            begun
            or written
            or "".join(_pieces(before.rstrip())[-len(_pieces(marks)) :])
        )
        return ThinkMarks(opened.strip("\n"), marks.strip())

    def _text_marks(self) -> tuple[str, str]:
        """Returns the delimiters before and after the text of an answer, or two empty
        strings if there are none. Also sets `closes_thinking`."""
        begin = _whole_mark_begin(self._text, _common_prefix(self._text, self._prompt))
        opened, text, rest = self._text[begin:].partition(TEXT)
        if self.think and self.think.close in opened:
            before, _, opened = opened.rpartition(self.think.close)
            self.closes_thinking = not before.strip()
        opened = opened.lstrip("\n")
        if (
            not text
            or not _TEXT_OPEN.fullmatch(opened)
            or opened.strip() in self._prompt[begin:]
        ):
            return "", ""
        with_call = self._render(_answer(CALL, text=TEXT)).partition(TEXT)[2]
        if with_call:
            return opened, rest[
                : _whole_mark_begin(rest, _common_prefix(rest, with_call))
            ].strip()
        call = self._render(_answer(CALL))
        return opened, rest[
            : _whole_mark_end(rest, len(rest) - _common_suffix(call, rest))
        ]

    def _behind_answers(self) -> list[str]:
        """Returns the text that the template renders after an answer's text. If the
        format of calls is known, also returns the text after a call."""
        behind_text = self._text.partition(TEXT)[2].removeprefix(self.text_close)
        learned = self._tool_format
        if learned is None:
            return [behind_text]
        rendered = self._render(_answer(CALL))
        return [behind_text, rendered.rpartition(learned.written.after or "}")[2]]

    # Calls

    @functools.cached_property
    def _tool_format(self) -> ToolFormat | None:
        """The format in which the template renders calls, or None if it renders none or
        the format is not recognized."""
        written = self._written(CALL)
        if NAME not in written or len(written) > MAX_WRITTEN:
            return None
        return self._json_format(written) or self._named_format(written)

    def _written(self, *calls: Mapping[str, Any]) -> str:
        """Returns the text that the template renders for these calls, without the
        header and the end of the message. Also sets `_empties_text`."""
        text, rendered = self._text, self._render(_answer(*calls))
        # Some templates render a call only if the result of the call follows.
        if NAME not in rendered[_common_prefix(rendered, self._prompt) :]:
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "qresult"}
                for call in calls
            ]
            rendered = self._render(_answer(*calls), *results).partition("qresult")[0]
            text = self._render(_answer(text=TEXT), QUESTION)
        before = self._prompt if self.channels else text
        begin = _whole_mark_begin(rendered, _common_prefix(rendered, before))
        end = _whole_mark_end(
            rendered, len(rendered) - _common_suffix(rendered[begin:], text[begin:])
        )
        found = rendered[begin:end]
        head = found.partition(NAME)[0]
        if self.think and self.think.close in head:
            found = found[head.rindex(self.think.close) + len(self.think.close) :]
        self._empties_text = bool(self.text_close) and found.startswith(self.text_close)
        return found.removeprefix(self.text_close) if self.text_close else found

    def _json_format(self, written: str) -> ToolFormat | None:
        """Returns the format of the calls if their name is inside JSON, otherwise
        None."""
        found = _json_around(written, written.index(NAME))
        arguments = _object_at(written, found[0]) if found else None
        if found is None or arguments is None:
            return None
        begin, end = found
        reader = JsonCalls(
            name_is_key=calls_in(json_value(written[begin:end]))
            != [(NAME, dict(VALUES))]
        )
        head, rest = written[:begin], written[end:]
        close = _unique_begin(rest, written[begin:end]) if head.strip() else ""
        at = begin + written[begin:].index(NAME)
        after = written[arguments[1] : end] + _through(rest, close)
        exact = Written(written[:at], written[at + len(NAME) : arguments[0]], after)
        return ToolFormat(head.strip(), close, (reader,), exact)

    def _named_format(self, written: str) -> ToolFormat | None:
        """Returns the format of the calls if their name is between delimiters,
        otherwise None."""
        at = written.rfind(NAME, 0, max(written.find("qkeya"), 0))
        style = self._style(written, at)
        if style is None:
            return None
        head, rest = written[:at], written[style.end :]
        block = head[_behind_name(head) :]
        next_head, call_close = self._between_calls(block)
        # The prompt ends with the first call's delimiter, so the second call's is used.
        if not head.strip():
            head = block = next_head
        opened = _open_mark(block)
        inner = [block.strip().removeprefix(opened)]
        if next_head == block:  # each call has its own block
            ending = rest[: _common_prefix(rest, call_close)] if call_close else rest
            close = _unique_end(ending, written[at : style.end])
            after = ending.strip().removesuffix(close)
            inner += [] if close else [block.strip()]
        else:
            after = call_close.rstrip()
            section = rest.removeprefix(after)
            close = _unique_begin(section, written[at : style.end] + after)
            inner.append(next_head.strip())
        before = "|".join(
            dict.fromkeys(_flexible(part.strip()) for part in inner if part.strip())
        )
        reader = replace(style.reader, before=before, after=_flexible(after.strip()))
        exact = replace(
            style.written,
            before=head,
            after=style.written.after + _through(rest, close),
        )
        return ToolFormat(opened, close, (reader,), exact)

    def _between_calls(self, head: str) -> tuple[str, str]:
        """Returns the delimiters before the name of a second call, and the delimiters
        that end the first call. `head`: the delimiters before the name of the first
        call. If the template renders only one call, returns `head` and ""."""
        two = self._written(CALL, _call(OTHER_NAME, OTHER_ID, {"qkeya": "qvalc"}))
        first, second = (
            two.rfind(NAME, 0, two.find("qkeya")),
            two.rfind(OTHER_NAME, 0, two.rfind("qkeya")),
        )
        again = self._style(two, first)
        if second < 0 or again is None:
            return head, ""
        between = two[again.end : second].replace(OTHER_ID, ID)
        if not head.strip() and self._prompt.endswith(between.strip()):
            return between, ""
        next_head = head if between.endswith(head) else _shared_end(head, between)
        return next_head, between.removesuffix(next_head)

    def _style(self, written: str, at: int) -> _Style | None:
        """Returns the style of the arguments after the name at position `at`, or None
        if the probe's arguments are not found in `written` or `at` is negative."""
        if at < 0:
            return None
        if whole := _object_at(written, at):
            between = written[at + len(NAME) : whole[0]]
            reader = NamedCalls(between=_flexible(between.strip()))
            return _Style(whole[1], reader, Written("", between, ""))
        places = [
            written.find(text, at) for text in ("qkeya", "qvala", "qkeyb", "qvalb")
        ]
        if min(places) < 0 or places != sorted(places):
            return None
        key, value, next_key, next_value = places
        begin = written[at + len(NAME) : key]
        key_close = written[key + 5 : value]
        divider, rest = written[value + 5 : next_key], written[next_value + 5 :]
        if begin.strip() == "{" and key_close.startswith(":"):
            return _relaxed_style(key_close[1:].strip(), next_value + 5, rest)
        if begin.strip() == "(":
            return self._python_style(key_close, next_value + 5, rest)
        if "</qkeya>" in divider:
            return _element_style(begin, divider, next_value + 5, rest)
        return self._tagged_style(begin, key_close, divider, next_value + 5, rest)

    def _python_style(self, key_close: str, end: int, rest: str) -> _Style:
        raw = ESCAPED in self._render(_answer(_call(NAME, ID, {"qkeya": ESCAPED})))
        n = len(_through(rest, ")"))
        exact = Written(
            "",
            "(",
            ")",
            "python",
            key_close={"": "="},
            separator=", ",
            quote="'" if raw else "",
        )
        return _Style(end + n, PythonCalls(raw=raw), exact)

    def _tagged_style(
        self, begin: str, key_close: str, divider: str, end: int, rest: str
    ) -> _Style:
        key_open = _shared_end(begin, divider)
        value_close = divider.removesuffix(key_open)
        pattern, signs = self._key_close(key_close)
        reader = TaggedCalls(
            between=_flexible(begin.removesuffix(key_open).strip()),
            key_open=_flexible(key_open.strip()),
            key_close=pattern,
            value_close=("\\n?" if value_close.startswith("\n") else "")
            + _flexible(value_close.strip()),
            string_sign=signs.get("string", ""),
        )
        texts = {
            kind: key_close.replace(signs["string"], sign, 1)
            for kind, sign in signs.items()
        } or {"": key_close}
        exact = Written(
            "", begin.removesuffix(key_open), "", "tagged", key_open, texts, value_close
        )
        return _Style(end + _common_prefix(value_close, rest), reader, exact)

    def _key_close(self, text: str) -> tuple[str, dict[str, str]]:
        """Returns a regular expression for the text between an argument's name and its
        value. If this text names the type of the value, also returns {JSON type: name
        of the type in this text}, otherwise {}."""
        found = {kind: self._key_close_of(*each) for kind, each in KINDS.items()}
        begin, end = _common_prefix(*found.values()), _common_suffix(*found.values())
        blank = "\\n?" if text.endswith("\n") else ""
        if len(set(found.values())) == 1 or not all(found.values()):
            return _flexible(text.strip()) + blank, {}
        while begin and text[begin - 1].isalnum():
            begin -= 1
        while end and text[len(text) - end].isalnum():
            end -= 1
        signs = {kind: each[begin : len(each) - end] for kind, each in found.items()}
        pattern = rf"{_flexible(text[:begin])}([^<>\"]*){_flexible(text[len(text) - end :].strip())}{blank}"
        return pattern, signs

    def _key_close_of(self, value: Any, begin: str) -> str:
        """Returns the text between an argument's name and its value, or "" if the value
        is not found. `begin`: regular expression for the beginning of the value."""
        rendered = self._render(
            _answer(_call(NAME, ID, {"qkeya": value, "qkeyb": "qvalb"}))
        )
        at = rendered.rfind("qkeya")
        found = re.compile(begin).search(rendered, at + 5) if at >= 0 else None
        return rendered[at + 5 : found.start()] if found else ""


KINDS: Mapping[str, tuple[Any, str]] = {
    "string": ("qvala", "qvala"),
    "number": (77, "77"),
    "boolean": (True, "(?i:true)"),
    "object": ({"x": 77}, r"\{"),
    "array": ([77], r"\["),
}
"""{JSON type: (a value of this type, regular expression for the beginning of the value's
text)}"""


@dataclass(frozen=True)
class _Style:
    """The way a template writes arguments."""

    end: int  # position after the arguments
    # Reads such arguments; its delimiters `before` and `after` are set later.
    reader: MarkedCalls
    written: Written  # exact text from the name to the arguments' end


def _relaxed_style(quote: str, end: int, rest: str) -> _Style:
    n = len(_through(rest, "}"))
    exact = Written(
        "", "{", "}", "relaxed", key_close={"": ":"}, separator=",", quote=quote
    )
    return _Style(end + n, RelaxedCalls(quote=quote), exact)


def _element_style(begin: str, divider: str, end: int, rest: str) -> _Style:
    sign = divider.partition("</")[0]
    between = begin.removesuffix(f"{sign}<")
    reader = ElementCalls(between=_flexible(between.strip()), sign=sign)
    exact = Written("", between, "", "elements", key_open=sign)
    return _Style(end + len(_through(rest, "</qkeyb>")), reader, exact)


def _flexible(text: str) -> str:
    """Returns a regular expression for a delimiter that the template rendered. In place
    of the probe's call id, any id matches."""
    return ID_PATTERN.join(pattern_of(part) for part in text.split(ID))
