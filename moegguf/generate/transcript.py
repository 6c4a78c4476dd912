"""From tokens to pieces: code points whole, stop strings out, thinking and tool calls apart."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from moegguf.generate.parsing import AnswerParser, needs_special_tokens
from moegguf.generate.request import Delta, GenerationRequest, TokenLogprob
from moegguf.generate.template import capabilities

if TYPE_CHECKING:
    from moegguf.engine.vocabulary import Vocabulary
    from moegguf.generate.prompt import Prompt


class StopStrings:
    """Lets text through up to the first stop string; `found` afterwards. Empty stop strings are ignored."""

    def __init__(self, stops: Iterable[str]) -> None:
        wanted = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self.found = False
        self._pattern = re.compile("|".join(map(re.escape, wanted))) if wanted else None
        self._beginnings = {stop[:n] for stop in wanted for n in range(1, len(stop))}
        self._longest = max((len(stop) for stop in wanted), default=0) - 1
        self._held = ""

    def __bool__(self) -> bool:
        return self._pattern is not None

    @property
    def n_held(self) -> int:
        """Characters that were fed and may be the beginning of a stop string."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """What is surely no part of a stop string, of what was held and `text`; nothing once one was found."""
        if self._pattern is None:
            return text
        if self.found:
            return ""
        text = self._held + text
        match = self._pattern.search(text)
        if match:
            self.found, self._held = True, ""
            return text[: match.start()]
        n = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def end(self) -> str:
        """What was held, once no more text comes."""
        text, self._held = self._held, ""
        return text


_new_decoder = codecs.getincrementaldecoder("utf-8")


def new_transcript(request: GenerationRequest, prompt: Prompt, vocabulary: Vocabulary) -> Transcript:
    """For an answer to `ask`. Text that did not come from a chat template is not taken apart."""
    tools = () if request.tool_choice == "none" else request.tools
    template = prompt.template
    if template is None or not (tools or "thinking" in capabilities(template)):
        return Transcript(vocabulary, request.sampling.stop)
    splitter = AnswerParser(template, tools=tools, prompt_end=prompt.end)
    return Transcript(vocabulary, request.sampling.stop, splitter, special=needs_special_tokens(template))


class Transcript:
    """The text of one answer, token by token; `stopped` once a stop string was found, which is no part of it.

    `special`: control tokens are text, which `splitter` needs where thinking or calls are marked with them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Iterable[str] = (),
        splitter: AnswerParser | None = None,
        *,
        special: bool = False,
    ) -> None:
        self._piece = vocabulary.piece
        self._special = special
        self._decode = _new_decoder("replace").decode
        self._stops = StopStrings(stops)
        self._splitter = splitter
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()  # with the place in the text where its token begins
        self._n_fed = self._n_told = 0  # characters, counted where there are chances

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> Delta | None:
        """What is there to tell after this token; None when nothing is."""
        text = self._decode(self._piece(token, special=self._special))
        if logprob is not None:
            self._logprobs.append((self._n_fed, logprob))
            self._n_fed += len(text)
        if text and self._stops:
            text = self._stops.feed(text)
        return self._told(text)

    def end(self) -> Delta | None:
        """What was held back, once no more tokens come."""
        rest = "" if self.stopped else self._decode(b"", True)
        delta = self._told(self._stops.feed(rest) + self._stops.end())
        if self._splitter is None:
            return delta
        last = self._splitter.end()
        if delta is None:
            return last if last != Delta() else None
        return Delta(
            delta.text + last.text, delta.thinking + last.thinking, delta.tool_calls + last.tool_calls, delta.logprobs
        )

    def _told(self, text: str) -> Delta | None:
        logprobs = self._released(len(text)) if self._logprobs else ()
        if self._splitter is None:
            return Delta(text, logprobs=logprobs) if text or logprobs else None
        delta = self._splitter.feed(text) if text else Delta()
        if logprobs:
            return replace(delta, logprobs=logprobs)
        return delta if delta.text or delta.thinking or delta.tool_calls else None

    def _released(self, n_more: int) -> tuple[TokenLogprob, ...]:
        """The chances of tokens that are told with the next `n_more` characters: not those of a stop string."""
        self._n_told += n_more
        all_told = not self.stopped and not self._stops.n_held
        released = []
        while self._logprobs and (all_told or self._logprobs[0][0] < self._n_told):
            released.append(self._logprobs.popleft()[1])
        return tuple(released)
