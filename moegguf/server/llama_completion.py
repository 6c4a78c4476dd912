"""llama-server's own endpoints for text: /completion (a prompt as it is), /infill (the gap between two texts)
and /apply-template (the prompt of a conversation).

They take the sampling options of /v1/completions by the same names; those of samplers that are not here are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from moegguf.generate.request import MAX_TOP_LOGPROBS, Delta, GenerationRequest, PromptProgress, Sampling
from moegguf.models.entry import Details, ModelEntry
from moegguf.options import MAX_ANSWER_TOKENS
from moegguf.server.common import limits
from moegguf.server.common.body import Body
from moegguf.server.common.conversation import Conversation, Json, Reply, about_prompt
from moegguf.server.common.streams import event_line
from moegguf.server.llama_server import sampling_object
from moegguf.server.openai.chat import chat_logprobs, prompt_progress, statistics
from moegguf.server.openai.completions import Prompt, prompts_of
from moegguf.server.openai.schema import MAX_BIASES, Bias, ChatBody, GenerationBody, token_ids
from moegguf.serving.events import Done, Event
from moegguf.serving.lease import Lease

MAX_FILES = 256
STOP_TYPES = {"stop": "eos", "length": "limit"}  # by how an answer ended, unless by a stop string


def biases_of(given: Any) -> Any:
    """`logit_bias` as OpenAI's, from pairs of token and bias, too; of these false is never. Raises ValueError."""
    if isinstance(given, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in given):
            raise ValueError("must be pairs of a token id and a bias")
        given = {str(token): -100 if bias is False else bias for token, bias in given}
    return token_ids(given)


class _NativeBody(GenerationBody):
    """The fields that /completion and /infill share. Without `model` it is the only loaded one. n_predict: -1 and -2
    until the model ends or the context is full, 0 only evaluates the prompt."""

    model: str = Field("", max_length=limits.NAME_CHARS)
    n_predict: Annotated[int, Field(ge=-2, le=MAX_ANSWER_TOKENS)] | None = None
    n_keep: Annotated[int, Field(ge=-1, le=MAX_ANSWER_TOKENS)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES), BeforeValidator(biases_of)] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    return_tokens: bool | None = None

    @field_validator("grammar")
    @classmethod
    def _no_grammar(cls, grammar: str | None) -> str | None:
        if grammar:
            raise ValueError("grammars in GBNF are not supported; send json_schema")
        return grammar

    def max_answer_tokens(self) -> int | None:
        return self.max_tokens if self.n_predict is None else self.n_predict

    def request(self, entry: ModelEntry, **fields: Any) -> GenerationRequest:
        """The request for a prompt in `fields`, with what both endpoints share."""
        sampling = self.sampling(entry)
        if self.n_keep is not None:
            sampling = replace(sampling, num_keep=self.n_keep)
        return GenerationRequest(
            format=self.json_schema,
            truncate=bool(self.truncate),
            shift=bool(self.shift),
            n_logprobs=self.n_probs or None,
            prompt_only=self.n_predict == 0,
            return_context=bool(self.return_tokens),
            sampling=sampling,
            **fields,
        )


class _NativeCompletionBody(_NativeBody):
    """The body of /completion: a prompt as text or tokens, or a list of these."""

    prompt: Annotated[list[Prompt], BeforeValidator(prompts_of)]

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        requests = (
            self.request(entry, prompt=prompt)
            if isinstance(prompt, str)
            else self.request(entry, prompt="", context=tuple(prompt))
            for prompt in self.prompt
        )
        return [each for request in requests for each in self.repeated(request, self.n)]


class _ExtraFile(Body):
    text: str
    filename: str = "tmp"


class _InfillBody(_NativeBody):
    """The body of /infill. `prompt`: the text directly before the gap, after `input_prefix`."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Annotated[list[_ExtraFile], Field(max_length=MAX_FILES)] = Field(default_factory=list)

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        files = tuple((file.filename, file.text) for file in self.input_extra)
        text = self.input_prefix + self.prompt
        return self.repeated(self.request(entry, prompt=text, suffix=self.input_suffix, files=files), self.n)


class _NativeReply(Reply):
    """The objects of /completion and /infill; several answers are a list."""

    def __init__(self, body: _NativeBody, entry: ModelEntry, generations: Sequence[GenerationRequest]) -> None:
        self._body, self._model = body, entry.name
        self._generations = generations
        self._prompts = [generation.prompt or "" for generation in generations]
        self._index = 0  # of the current answer
        self._has_line = False  # in the text of a streamed answer
        self._answers: list[Json] = []

    async def prepare(self, lease: Lease) -> None:
        for i, generation in enumerate(self._generations):
            if generation.context:
                self._prompts[i] = await lease.detokenize(generation.context)

    def lines(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            self._has_line |= "\n" in event.text
            return event_line(self._part(event.text, **self._chances(event)))
        if isinstance(event, Done):
            return event_line(self._end("", event))
        if isinstance(event, PromptProgress) and self._body.return_progress:
            return event_line(self._part("", prompt_progress=prompt_progress(event)))
        return b""

    def add(self, delta: Delta, done: Done) -> None:
        self._has_line = "\n" in delta.text
        self._answers.append(self._end(delta.text, done) | self._chances(delta))

    def whole(self) -> Any:
        return self._answers if len(self._generations) > 1 else self._answers[0]

    def _part(self, content: str, **more: Any) -> Json:
        return {"index": self._index, "content": content, "tokens": [], "stop": False, "id_slot": -1, **more}

    def _chances(self, delta: Delta) -> Json:
        return {"completion_probabilities": chat_logprobs(delta.logprobs)["content"]} if self._body.n_probs else {}

    def _end(self, content: str, done: Done) -> Json:
        timing, n_prompt = done.timing, done.timing.prompt_tokens + done.timing.cached_tokens
        found = self._part(
            content,
            tokens=list(timing.context[n_prompt:]) if self._body.return_tokens else [],
            stop=True,
            model=self._model,
            tokens_predicted=timing.answer_tokens,
            tokens_evaluated=n_prompt,
            generation_settings=self._settings(),
            prompt=self._prompts[self._index],
            has_new_line=self._has_line,
            truncated=bool(timing.cut_tokens or timing.n_shifts),
            stop_type="word" if timing.stop_string else STOP_TYPES.get(timing.finish, "none"),
            stopping_word=timing.stop_string,
            tokens_cached=timing.cached_tokens,
            **statistics(timing),
        )
        self._index, self._has_line = self._index + 1, False
        return found

    def _settings(self) -> Json:
        sampling: Sampling = self._generations[self._index].sampling
        biases = [{"token": token, "bias": bias} for token, bias in sampling.logit_bias.items()]
        n_probs, stream = self._body.n_probs or 0, self._body.streams
        return {**sampling_object(sampling), "logit_bias": biases, "n_probs": n_probs, "stream": stream}


class _TemplateBody(ChatBody):
    """The body of /apply-template, which has the fields of /v1/chat/completions."""

    model: str = Field("", max_length=limits.NAME_CHARS)


COMPLETION: Conversation[_NativeCompletionBody] = Conversation(_NativeCompletionBody, _NativeReply, limits.BODY_BYTES)
INFILL: Conversation[_InfillBody] = Conversation(_InfillBody, _NativeReply, limits.BODY_BYTES)
routes = [
    COMPLETION.at("/completion"),
    COMPLETION.at("/completions"),
    INFILL.at("/infill"),
    about_prompt("/apply-template", _TemplateBody, "render", lambda text: {"prompt": text}),
]
