"""POST /v1/completions: continues prompts, or fills the gap before a suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moegguf.generate.request import MAX_TOP_LOGPROBS, Delta, GenerationRequest, TokenLogprob
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.conversation import Conversation, Json
from moegguf.server.common.objects import MIN_LOGPROB
from moegguf.server.common.options import MAX_TOKEN
from moegguf.server.openai.chat import ChoicesReply
from moegguf.server.openai.schema import GenerationBody, one_answer
from moegguf.serving.events import Done

if TYPE_CHECKING:
    from moegguf.serving.lease import Lease

DEFAULT_MAX_TOKENS = 16  # OpenAI's


Prompt = str | list[int]


def prompts_of(given: Any) -> list[Prompt]:
    """The prompts from any of their forms: a text, its tokens, or a list of these. Raises ValueError."""
    prompts = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(prompts) > limits.INPUTS:
        raise ValueError(f"has {len(prompts)} prompts, but at most {limits.INPUTS} are taken; send several requests")
    if not all(isinstance(prompt, str) or _are_tokens(prompt) for prompt in prompts):
        raise ValueError("must be a text, the tokens of one, or a list of texts or tokens")
    return prompts


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(t) is int and 0 <= t <= MAX_TOKEN for t in prompt)


class CompletionBody(GenerationBody):
    """The body of /v1/completions. A list of prompts gets one choice for each, in their order."""

    prompt: Annotated[list[Prompt], BeforeValidator(prompts_of)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, AfterValidator(one_answer)] | None = None
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_ANSWER_TOKENS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def max_answer_tokens(self) -> int | None:
        """`max_tokens`, with OpenAI's default."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _suffix_follows_text(self) -> CompletionBody:
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise ValueError("suffix needs prompts as text, not as tokens")
        if self.suffix and self.scores_prompt:
            raise ValueError("logprobs of a prompt (echo) cannot be had with a suffix; leave one of them out")
        return self

    @property
    def scores_prompt(self) -> bool:
        """Whether the tokens of the prompt have logprobs, too."""
        return bool(self.echo) and self.logprobs is not None

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        """A request for each prompt; of the entry's defaults, only the options apply."""
        sampling = self.sampling(entry)
        if self.max_tokens == 0:  # which is no limit in Ollama's options
            sampling = replace(sampling, max_tokens=0)
        return [
            GenerationRequest(
                prompt=prompt if isinstance(prompt, str) else "",
                context=() if isinstance(prompt, str) else tuple(prompt),
                suffix=self.suffix or None,
                truncate=bool(self.truncate) and not self.scores_prompt,
                shift=bool(self.shift),
                n_logprobs=self.logprobs,
                prompt_logprobs=self.scores_prompt,
                sampling=sampling,
            )
            for prompt in self.prompt
        ]


def completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    """`logprobs` of completion; `offset`: position of the first of these tokens in the text."""
    offsets = []
    for logprob in logprobs:
        offsets.append(offset)
        offset += len(logprob.text)
    return {
        "tokens": [logprob.text for logprob in logprobs],
        "token_logprobs": [max(logprob.logprob, MIN_LOGPROB) for logprob in logprobs],
        "top_logprobs": [_by_text(logprob.top) for logprob in logprobs],
        "text_offset": offsets,
    }


def _by_text(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Of tokens with the same text, such as parts of characters, the likeliest."""
    found: dict[str, float] = {}
    for text, logprob in top:
        found.setdefault(text, max(logprob, MIN_LOGPROB))
    return found


def prompt_logprobs(prompt: Sequence[TokenLogprob]) -> Json:
    """`logprobs` of an echoed prompt: null for its first token."""
    found = completion_logprobs(prompt, 0)
    found["token_logprobs"][:1], found["top_logprobs"][:1] = [None], [None]
    return found


class CompletionReply(ChoicesReply):
    """A reply of /v1/completions with one choice per prompt; whole and streamed objects are alike."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    empty: Mapping[str, Any] = {"text": ""}

    def __init__(self, body: CompletionBody, entry: ModelEntry) -> None:
        super().__init__(body, entry, logprobs=body.logprobs is not None)
        self.n_choices = len(body.prompt)
        self._echoed = body.prompt if body.echo else []
        self._before = [""] * self.n_choices  # the text that each choice begins with
        self._offset = 0

    async def prepare(self, lease: Lease) -> None:
        """Makes text of prompts that are echoed."""
        for i, prompt in enumerate(self._echoed):
            self._before[i] = prompt if isinstance(prompt, str) else await lease.detokenize(prompt)
        self._offset = len(self._before[0])

    def first(self) -> Json:
        """The chunk before all others of a choice."""
        return self._chunk({"text": self._before[self._index]})

    def _end_choice(self, done: Done) -> None:
        super()._end_choice(done)
        self._offset = len(self._before[self._index]) if self._index < self.n_choices else 0

    def chunks(self, delta: Delta) -> list[Json]:
        """One chunk; none for an empty delta."""
        text = delta.thinking + delta.text
        if not (text or delta.logprobs or delta.prompt):
            return []
        return [self._chunk({"text": text, "logprobs": self._logprobs(delta)})]

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self.logprobs:
            return None
        found = completion_logprobs(delta.logprobs, self._offset)
        self._offset += sum(len(logprob.text) for logprob in delta.logprobs)
        if not delta.prompt:
            return found
        return {name: values + found[name] for name, values in prompt_logprobs(delta.prompt).items()}

    def add(self, delta: Delta, done: Done) -> None:
        """Adds the choice of the next prompt."""
        text = self._before[self._index] + delta.thinking + delta.text
        self._add({"text": text, "logprobs": self._logprobs(delta)}, done)


COMPLETIONS = Conversation(CompletionBody, lambda body, entry, _: CompletionReply(body, entry), limits.BODY_BYTES)
routes = [COMPLETIONS.at("/v1/completions")]
