"""From tokens to deltas: complete code points, no stop strings, thinking and tool calls separated."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from moegguf.generate.parsing import AnswerParser, answer_parser, needs_special_tokens
from moegguf.generate.request import Delta, GenerationRequest, TokenLogprob, join
from moegguf.generate.template import capabilities

if TYPE_CHECKING:
    from moegguf.engine.vocabulary import Vocabulary
    from moegguf.generate.prompt import Prompt


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


_new_decoder = codecs.getincrementaldecoder("utf-8")


def new_transcript(request: GenerationRequest, prompt: Prompt, vocabulary: Vocabulary) -> Transcript:
    """The transcript of an answer to `request`. Only answers to a chat template's prompt are parsed."""
    tools = () if request.tool_choice == "none" else request.tools
    template = prompt.template
    if template is None or not (tools or "thinking" in capabilities(template)):
        return Transcript(vocabulary, request.sampling.stop)
    parser = answer_parser(template, tools, prompt_end=prompt.end, continuation=prompt.continuation)
    return Transcript(vocabulary, request.sampling.stop, parser, special=needs_special_tokens(template))


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
        self._decode = _new_decoder("replace").decode
        self._stops = StopStrings(stops)
        self._parser = parser
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()  # with the character at which the token begins
        self._n_fed = self._n_passed = 0  # characters, counted with logprobs only

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; "" when there is none."""
        return self._stops.found

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return bool(self._stops.found)

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
        rest = "" if self.stopped else self._decode(b"", True)
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
        all_passed = not self.stopped and not self._stops.n_held
        released = []
        while self._logprobs and (all_passed or self._logprobs[0][0] < self._n_passed):
            released.append(self._logprobs.popleft()[1])
        return tuple(released)
