"""POST /v1/completions: continues prompts, or fills the gap before a suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from moegguf.generate.request import AnswerSummary, Delta, Request, TokenLogprob
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Whole
from moegguf.server.common.conversation import Json, conversation
from moegguf.server.common.options import Texts
from moegguf.server.common.replies import MIN_LOGPROB
from moegguf.server.openai.chat import (
    Choices,
    ChoicesReply,
    GenerationBody,
    TopLogprobs,
)
from moegguf.serving.lease import Lease

DEFAULT_MAX_TOKENS = 16  # default in OpenAI's API


class CompletionBody(GenerationBody):
    """The body of /v1/completions. Each prompt gets `best_of` answers (default: `n`).
    The reply has the `n` answers whose tokens have the highest mean log probability.
    The answers are in the order of the prompts."""

    limit = limits.BODY_BYTES
    operation = "generate"

    prompt: Texts
    suffix: str = ""
    echo: bool = False
    best_of: Choices | None = None
    max_tokens: Annotated[Whole, Field(ge=-1, le=MAX_ANSWER_TOKENS)] = (
        DEFAULT_MAX_TOKENS
    )
    logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> CompletionBody:
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise ValueError("suffix needs prompts as text, not as tokens")
        if self.suffix and self.scores_prompt:
            raise ValueError(
                "logprobs of a prompt (echo) cannot be combined with a suffix; leave one of them out"
            )
        if self.n_answers * len(self.prompt) > limits.INPUTS:
            n = self.n_answers * len(self.prompt)
            raise ValueError(
                f"the number of prompts times n (or best_of) must be at most {limits.INPUTS}, but is {n}; send several"
                " requests"
            )
        if self.n_answers < self.n:
            raise ValueError(
                f"best_of must be at least n ({self.n}), but is {self.best_of}"
            )
        if self.stream and self.n_answers > self.n:
            raise ValueError(
                "best_of cannot be streamed, because the best answers are known only at the end; leave out stream"
            )
        return self

    @property
    def n_answers(self) -> int:
        """Returns the number of answers that are generated for each prompt. Only `n` of
        them are sent."""
        return self.best_of or self.n

    @property
    def scores_prompt(self) -> bool:
        """True if the reply also has logprobs of the prompt's tokens."""
        return self.echo and self.logprobs is not None

    def requests(self, entry: ModelEntry, known: Details) -> list[Request]:
        """Returns `n_answers` requests for each prompt. The model entry's parameters
        apply, but not its template and messages."""
        # 0: logprobs of the chosen tokens, which rank the answers
        ranked = 0 if self.n_answers > self.n else None
        base = self.request(
            entry,
            self.max_tokens,
            suffix=self.suffix or None,
            truncate=self.truncate and not self.scores_prompt,
            n_logprobs=ranked if self.logprobs is None else self.logprobs,
            prompt_logprobs=self.scores_prompt,
            prompt_only=self.max_tokens == 0,
        )
        return self.for_prompts(base, self.prompt)


def _logprobs_object(logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    """Returns the object `logprobs` of a completion. `offset` is the number of
    characters of the text before the first of these tokens. If alternative tokens have
    the same text, such as parts of characters, only the likeliest is included."""
    tops: list[dict[str, float]] = []
    offsets = []
    for logprob in logprobs:
        offsets.append(offset)
        offset += len(logprob.text)
        top: dict[str, float] = {}
        for chance in logprob.top:
            top.setdefault(chance.text, max(chance.logprob, MIN_LOGPROB))
        tops.append(top)
    return {
        "tokens": [logprob.text for logprob in logprobs],
        "token_logprobs": [max(logprob.logprob, MIN_LOGPROB) for logprob in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


class _CompletionReply(ChoicesReply):
    """The reply of /v1/completions, with the choices of all prompts. Chunks of a stream
    have the same object type as a reply that is not streamed."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    empty: ClassVar[Mapping[str, Any]] = {"text": ""}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logprobs = self.body.logprobs is not None
        # Number of answers to each prompt that are sent.
        self._n_sent = self.body.n
        # Texts of the prompts if `echo` is true, else "".
        self._prompts = [""] * len(self.body.prompt)
        # Mean logprob of each complete choice that is not streamed; 0: no logprobs.
        self._scores: list[float] = []
        self._offset = 0

    async def prepare(self, lease: Lease) -> None:
        for i, prompt in enumerate(self.body.prompt if self.body.echo else ()):
            self._prompts[i] = (
                prompt
                if isinstance(prompt, str)
                else await lease.value("detokenize", prompt=prompt)
            )
        self._offset = len(self._before)

    @property
    def _before(self) -> str:
        return (
            self._prompts[self.index // self.n_answers]
            if self.index < self.n_choices
            else ""
        )

    def _first(self) -> Json:
        return self._chunk({"text": self._before})

    def _end_choice(self, summary: AnswerSummary) -> None:
        super()._end_choice(summary)
        self._offset = len(self._before)

    def _chunks(self, delta: Delta) -> list[Json]:
        text = delta.thinking + delta.text
        if not (text or delta.logprobs or delta.prompt):
            return []
        return [self._chunk({"text": text, "logprobs": self._logprobs(delta)})]

    def _logprobs(self, delta: Delta) -> Json | None:
        """Returns the logprobs of the delta's tokens, or None if the body does not
        request logprobs. The tokens of an echoed prompt come first, and the prompt's
        first token has null."""
        if not self.logprobs:
            return None
        found = _logprobs_object(delta.logprobs, self._offset)
        self._offset += sum(len(logprob.text) for logprob in delta.logprobs)
        if not delta.prompt:
            return found
        prompt = _logprobs_object(delta.prompt, 0)
        prompt["token_logprobs"][0] = prompt["top_logprobs"][0] = None
        return {name: values + found[name] for name, values in prompt.items()}

    def add(self, delta: Delta, summary: AnswerSummary) -> None:
        scores = [logprob.logprob for logprob in delta.logprobs]
        self._scores.append(sum(scores) / len(scores) if scores else 0.0)
        text = self._before + delta.thinking + delta.text
        self._add({"text": text, "logprobs": self._logprobs(delta)}, summary)

    def whole(self) -> Json:
        if self._n_sent < self.n_answers:
            groups = (
                range(first, first + self.n_answers)
                for first in range(0, self.n_choices, self.n_answers)
            )
            best = [
                i
                for group in groups
                for i in nlargest(self._n_sent, group, key=self._scores.__getitem__)
            ]
            self._choices = [
                {**self._choices[old], "index": new} for new, old in enumerate(best)
            ]
        return super().whole()


CompletionBody.reply_kind = _CompletionReply

routes = [conversation("/v1/completions", CompletionBody)]
