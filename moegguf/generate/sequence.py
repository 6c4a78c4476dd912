"""One request while it is answered: prompt, sampler, constraint, text, stops, limits; all but the evaluation of tokens.

`batching.py` evaluates its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moegguf.errors import OptionError
from moegguf.generate.constraint import constraint_for
from moegguf.generate.options import MAX_TOP_LOGPROBS
from moegguf.generate.prompt import read_prompt
from moegguf.generate.request import Delta, GenerationRequest, Timing, TokenLogprob
from moegguf.generate.sampler import Sampler, logprob_of
from moegguf.generate.transcript import new_transcript

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

MIN_SHIFTED = 4  # tokens at the end of the context that a shift may drop; llama.cpp's number
MAX_CONTEXTS = 10  # of tokens in an answer without a limit, when the context shifts; Ollama's number


class SequenceState:
    """What one request needs between its tokens. `generated`: the tokens of the answer, without an end token; `ended`:
    whether its last token was sampled.

    Raises ContextError, TemplateError, CapabilityError, SchemaError and OptionError.
    """

    def __init__(self, llm: Llama, request: GenerationRequest) -> None:
        self.request = request
        self.timing = Timing()
        self.generated: list[int] = []
        self.ended = False
        self._llm = llm
        llm.context.check_generates()
        self.prompt = read_prompt(llm, llm.vocabulary, request)
        self.timing.cut_messages, self.timing.cut_tokens = self.prompt.cut_messages, self.prompt.cut_tokens
        self._n_logprobs = _checked_n_logprobs(request.n_logprobs)
        constraint = constraint_for(request, self.prompt.template, self.prompt.end, self.prompt.continuation)
        self.sampler = Sampler(llm, request.sampling, self.prompt.text_tokens, constraint)
        self._transcript = new_transcript(request, self.prompt, llm.vocabulary)
        self.shifts = request.shift and llm.context.can_shift and self.prompt.images is None
        self._limit = self._token_limit()

    @property
    def reuses_prefix(self) -> bool:
        """Whether tokens of earlier requests may be reused: they were evaluated beside other tokens, which changes the
        last bits of their K and V where the model is not batch-invariant."""
        sampling = self.request.sampling
        return self._llm.batch_invariant or (sampling.seed is None and not sampling.exact)

    @property
    def is_exact_alone(self) -> bool:
        """Whether the request is `exact`, and other sequences in its passes may change bits. That is so of a context
        that becomes full, too: among others it is evaluated again, which rounds otherwise than moving its cells."""
        may_shift = self.shifts and len(self.prompt.tokens) + self._limit > self._llm.n_ctx()
        return self.request.sampling.exact and (may_shift or not self._llm.batch_invariant)

    @property
    def n_kept(self) -> int:
        """Tokens at the beginning that stay when the context shifts."""
        n_keep = self.request.sampling.num_keep
        n_first = len(self.prompt.tokens) if n_keep < 0 else n_keep + len(self._llm.vocabulary.bos_tokens)
        return min(n_first, self._llm.n_ctx() - MIN_SHIFTED)

    def accept(self, token: int, row: int = -1) -> Delta | None:
        """The delta after a sampled token, if any. `row`: of the logits that it was sampled from."""
        timing, transcript = self.timing, self._transcript
        timing.answer_tokens += 1
        if self._llm.vocabulary.is_end(token):
            self.end("stop")
            return None
        self.generated.append(token)
        delta = transcript.feed(token, self._logprob(token, row))
        if delta is not None and delta.thinking:
            timing.thinking_tokens = timing.answer_tokens
        if transcript.stopped or timing.answer_tokens >= self._limit:
            self.end("stop" if transcript.stopped else "length")
        return delta

    def end(self, reason: str) -> None:
        """Ends the answer."""
        self.ended, self.timing.finish = True, reason

    def note_end(self) -> None:
        """Completes what `timing` says about the text and the tokens."""
        self.timing.stop_string = self._transcript.stop_string
        if self.request.return_context:
            self.timing.context = (*self.prompt.text_tokens, *self.generated)

    def last_delta(self) -> Delta | None:
        """The text that was held back."""
        return self._transcript.end()

    def _token_limit(self) -> int:
        n_ctx = self._llm.n_ctx()
        most = MAX_CONTEXTS * n_ctx if self.shifts else n_ctx - len(self.prompt.tokens)
        limit = self.request.sampling.max_tokens
        return min(limit, most) if limit is not None and limit > 0 else most

    def _logprob(self, token: int, row: int) -> TokenLogprob | None:
        if self._n_logprobs is None:
            return None
        return logprob_of(token, self._llm, self._n_logprobs, row)


def _checked_n_logprobs(n_logprobs: int | None) -> int | None:
    if n_logprobs is not None and not 0 <= n_logprobs <= MAX_TOP_LOGPROBS:
        raise OptionError(f"n_logprobs is a number from 0 to {MAX_TOP_LOGPROBS}, but is {n_logprobs}.")
    return n_logprobs
