"""Limits the number of thinking tokens of an answer. When the budget is used up, forces
tokens that end the thinking.

The text, not the tokens, is searched for the thinking delimiters, because tokens may
divide a delimiter in different ways. If there is a token in `forced`, a `Sampler` uses
this token instead of sampling one.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moegguf.generate.call_format import answer_format

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.engine.vocabulary import Vocabulary
    from moegguf.generate.prompt import Prompt
    from moegguf.generate.request import Request


class _Channels(NamedTuple):
    """The delimiters in the format of models whose messages have a channel or a
    recipient.

    `open` and `close` match the start and the end of a thinking message. `next_message`
    ends such a message and begins another one. If `answer` follows, the other message
    is the answer.
    """

    open: re.Pattern[str]
    close: re.Pattern[str]
    next_message: str
    answer: str


_HARMONY = _Channels(
    re.compile(r"(?:\A|assistant)\s*<\|channel\|>\s*analysis\s*<\|message\|>"),
    re.compile(r"<\|(?:start|end|return|call|channel)\|>"),
    "<|end|><|start|>assistant",
    "<|channel|>final<|message|>",
)
_RECIPIENTS = _Channels(
    re.compile(r"\bto=self\s*<\|message\|>"),
    re.compile(r"<\|(?:start|eom|eot)\|>"),
    "<|eom|><|start|>assistant",
    " to=user<|message|>",
)
_WINDOW = 512  # number of most recent characters that are searched for a delimiter


@dataclass
class ThinkingBudget:
    """Counts the thinking tokens of one answer, and forces the end of the thinking when
    the budget is used up."""

    vocabulary: Vocabulary
    open: re.Pattern[str]  # delimiter before the thinking
    close: re.Pattern[str]  # delimiter after the thinking
    n_left: int  # tokens left for all thinking of the answer
    # Tokens that end the thinking the first time, the second time, ...; the last entry
    # repeats.
    ends: list[list[int]]
    only_first: bool = False  # True if only the start of the answer can be thinking
    # Tokens forced before the end tokens, unless the model has begun the end tokens.
    message: Sequence[int] = ()
    # Text since the last delimiter, up to _WINDOW characters. If the model's messages
    # have channels, it begins with the end of the prompt.
    text: str = ""
    thinks: bool = False

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = deque[int](maxlen=max(map(len, self.ends)))
        self._forced = deque[int]()
        self._is_over = False
        self._look()

    @property
    def forced(self) -> int | None:
        """The token that must come next, or None if any token may come next."""
        return self._forced[0] if self._forced else None

    def release(self) -> None:
        """Stops forcing tokens. Called if the constraint of the answer forbids the
        forced token."""
        self._forced.clear()

    def accept(self, token: int) -> None:
        """Updates the budget and the forced tokens with the next token of the
        answer."""
        if self._is_over:
            return
        self._last.append(token)
        self.text += self._decoder.decode(self.vocabulary.piece(token, special=True))
        if self._forced:
            self._forced.popleft()
        elif self.thinks:
            self.n_left -= 1
        self._look()

    def _look(self) -> None:
        """Finds the start and the end of thinking in the text. If the answer thinks and
        the budget is used up, forces the end of the thinking."""
        if not self.thinks and (match := self.open.search(self.text)):
            self.thinks = True
            self.text = self.text[match.end() :]
        elif not self.thinks:
            self._is_over = self.only_first and len(self.text.lstrip()) >= _WINDOW
        if self.thinks and (match := self.close.search(self.text)):
            self.thinks = False
            self.text = self.text[match.start() :]
            self._is_over = self.only_first
        self.text = self.text[-_WINDOW:]
        # False: the last token ends within a character.
        is_whole = not self._decoder.getstate()[0]
        if self.thinks and self.n_left <= 0 and is_whole and not self._forced:
            self._force()

    def _force(self) -> None:
        """Forces `message` and the tokens that end the thinking. If the model has
        already written the first of these end tokens, forces only the rest of them."""
        end, last = self.ends[0], list(self._last)
        if len(self.ends) > 1:
            del self.ends[0]
        n_begun = next(
            (n for n in range(len(end) - 1, 0, -1) if last[-n:] == end[:n]), 0
        )
        self._forced.extend(end[n_begun:] if n_begun else [*self.message, *end])


def thinking_budget_of(
    llm: Llama, request: Request, prompt: Prompt
) -> ThinkingBudget | None:
    """Returns the thinking budget for the answer to `request`. Returns None if the
    request sets no budget, if the request has a suffix (fill-in-the-middle), or if the
    model's thinking delimiters are unknown.

    The request may name the delimiters. Otherwise the chat template determines them;
    for a prompt without a template, the model's own template.
    """
    n_tokens, tokens = request.sampling.reasoning_budget_tokens, llm.vocabulary.tokens
    if n_tokens is None or request.suffix is not None:
        return None
    template = prompt.template or llm.metadata.get("tokenizer.chat_template") or ""
    message = tokens(request.sampling.reasoning_budget_message, special=False)
    form = answer_format(template)
    if form.channels and not request.think_marks:
        open_pattern, close_pattern, next_message, answer = (
            _HARMONY if form.is_harmony else _RECIPIENTS
        )
        last = _end_of(llm, prompt).rpartition("<|start|>")[2]
        # The first forced end allows a call instead of the answer.
        ends = [next_message] if request.tools else []
        ids = [tokens(end) for end in (*ends, next_message + answer)]
        return ThinkingBudget(
            llm.vocabulary,
            open_pattern,
            close_pattern,
            n_tokens,
            ids,
            message=message,
            text=last,
        )
    marks = form.think
    open, *closes = request.think_marks or (
        (marks.open, marks.close) if marks else ("", "")
    )
    if not (open and closes and closes[0]):
        return None
    if prompt.template is None:
        end = _end_of(llm, prompt)
        thinks = end.rfind(open) > max(end.rfind(close) for close in closes)
    else:
        in_thinking = (
            prompt.continuation is not None and prompt.continuation.in_thinking
        )
        thinks = in_thinking or (marks is not None and marks.begun_by(prompt.end))
    return ThinkingBudget(
        llm.vocabulary,
        re.compile(rf"\A\s*{re.escape(open)}"),
        re.compile("|".join(map(re.escape, closes))),
        n_tokens,
        [tokens(closes[0])],
        only_first=True,
        message=message,
        thinks=thinks,
    )


def _end_of(llm: Llama, prompt: Prompt) -> str:
    """Returns the text of the prompt. If it is not known, decodes it from the
    tokens."""
    pieces = (llm.vocabulary.piece(token, special=True) for token in prompt.text_tokens)
    return prompt.end or b"".join(pieces).decode(errors="replace")
