"""Defines `Engine`, which processes many requests to one model together in this
process. It has blocking and asynchronous methods."""

from __future__ import annotations

import asyncio
import collections.abc as abc
import os
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Self

from moegguf.engine.llama import Llama
from moegguf.engine.stats import Stats
from moegguf.errors import ClosedError, OptionError
from moegguf.generate.batching import BatchLoop
from moegguf.generate.kv_sequences import Schedule
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    Message,
    Request,
    Sampling,
    join,
    prompt_fields,
    sampling_with,
)
from moegguf.generate.sequence import AnswerEvents, Sequence

DEFAULT_PARALLEL = 8
# Maximum number of requests submitted and not yet collected, per sequence of the
# context.
AHEAD = 2

Prompt = str | abc.Sequence[int]


@dataclass(frozen=True)
class EngineAnswer(Delta):
    """A whole answer: the content of all deltas, and a summary. `error` is the
    exception that ended the answer early, or None. After an error, the other fields
    contain what the model generated before the error."""

    summary: AnswerSummary = field(default_factory=AnswerSummary, repr=False)
    error: Exception | None = None

    @property
    def finish(self) -> str:
        """The reason for the answer's end: "stop", "length" or "cancelled"."""
        return self.summary.finish


class _Events(AnswerEvents):
    """Passes the deltas of one answer to `put`, and at the end an `EngineAnswer` that
    has the summary and the error but no content."""

    def __init__(self, put: Callable[[Delta], object]) -> None:
        self._put = put

    def on_delta(self, delta: Delta) -> None:
        self._put(delta)

    def on_end(self, summary: AnswerSummary, error: Exception | None) -> None:
        self._put(EngineAnswer(summary=summary, error=error))


def _collected(queue: SimpleQueue[Delta]) -> EngineAnswer:
    """Waits for the end of an answer. Returns the whole answer, with the content of all
    deltas in the queue."""
    deltas = list[Delta]()
    while not isinstance(delta := queue.get(), EngineAnswer):
        deltas.append(delta)
    return replace(delta, **vars(join(deltas)))


class Engine:
    """Answers up to `parallel` requests to one model at once.

    Args:
        model: the same values as for `moegguf.Llama`, or a loaded `Llama`. A loaded `Llama` keeps its options, and
            `close` does not unload it.
        parallel: maximum number of sequences that the engine processes together. Each sequence may have `n_ctx` tokens
            of context. Some models, such as embedding models, allow only one sequence. With a loaded `Llama`, the
            `Llama`'s `n_seq_max` is used instead.
        kv_tokens: number of tokens that fit in the KV cache, for all sequences together. If the KV cache is full, the
            newest request returns to the queue and is processed again later. If `kv_tokens` is None, the number is
            parallel * n_ctx, or less if the experts need the memory.
        schedule: a function that receives the loaded model and returns the object that chooses the sequences of a step
            (`moegguf.generate.kv_sequences`). If `schedule` is None, all sequences take part in each step.
        options: other keywords of `moegguf.Llama`. By default, `flash_attn` is None and `verbose` is False.

    If the model is batch-invariant (`Llama.batch_invariant`), an answer is
    bit-identical whether it is generated alone or together with others, unless its
    context shifts. For other models, and for contexts that shift,
    `Sampling(exact=True)` processes a request alone. All methods may be called from any
    thread. Raises the errors of `Llama`, and OptionError for options given with a
    loaded `Llama`.

    Example:
        >>> import moegguf
        >>> with moegguf.Engine("demo") as engine:
        ...     answers = engine.generate(["Once upon a time", "The capital of France is"], max_tokens=4)
        >>> len(answers)
        2
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Llama,
        parallel: int = DEFAULT_PARALLEL,
        *,
        kv_tokens: int | None = None,
        schedule: Callable[[Llama], Schedule | None] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, Llama) and (options or kv_tokens is not None):
            names = ", ".join([*options, *["kv_tokens"] * (kv_tokens is not None)])
            raise OptionError(
                f"load options cannot change a loaded model, but these are given: {names}; give them to Llama."
            )
        options = {
            "verbose": False,
            "flash_attn": None,
            "n_seq_max": parallel,
            "kv_tokens": kv_tokens,
        } | options
        self._is_own = not isinstance(model, Llama)
        self._llm = model if isinstance(model, Llama) else Llama(model, **options)
        self._sampling = sampling_with(Sampling(), self._llm.layout.sampling)
        self._loop = BatchLoop(self._llm, schedule and schedule(self._llm))
        self._thread = threading.Thread(
            target=self._loop.run, name="moegguf-engine", daemon=True
        )
        self._thread.start()

    @property
    def llm(self) -> Llama:
        """The loaded model with its plan, vocabulary and statistics. Only the engine
        may evaluate tokens with this model.

        Example:
            >>> engine.llm.plan.n_experts
            192
        """
        return self._llm

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling: Sampling | abc.Sequence[Sampling] | None = None,
        **fields: Any,
    ) -> list[EngineAnswer]:
        """Returns the answers to prompts, in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, or a list of strings and lists of token ids.
            sampling: options for all prompts, or a list with one `Sampling` for each prompt. If `sampling` is None, the
                options come from the model's file, and otherwise from the defaults of `Sampling`.
            fields: further fields of `Sampling` and `Request`, such as `max_tokens=8, temperature=0`.

        If one prompt fails, its answer contains the exception in `error`. For example,
        a prompt that is longer than the context causes a ContextError, unless
        `truncate=True` removes the middle of the prompt. Raises OptionError and
        ClosedError.

        Example:
            >>> answers = engine.generate(["Once upon a time", "The capital of France is"], max_tokens=4)
            >>> [answer.error for answer in answers]
            [None, None]
        """
        given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._answers(
            [given] if given and isinstance(given[0], int) else given, sampling, fields
        )

    def chat(
        self,
        conversations: abc.Sequence[Message] | abc.Sequence[abc.Sequence[Message]],
        sampling: Sampling | abc.Sequence[Sampling] | None = None,
        **fields: Any,
    ) -> list[EngineAnswer]:
        """Returns the answers to one conversation or to a list of conversations. A
        conversation is a list of messages. If a conversation is too long, the engine
        leaves out the oldest messages, unless `truncate=False`. The other arguments and
        the errors are the same as for `generate`.

        Example:
            >>> [answer] = engine.chat([{"role": "user", "content": "What does moegguf do?"}], max_tokens=4)
            >>> answer.finish
            'length'
        """
        given: list[Any] = list(conversations)
        return self._answers(
            [given] if given and isinstance(given[0], dict) else given, sampling, fields
        )

    async def stream(
        self,
        prompt: Prompt | abc.Sequence[Message],
        sampling: Sampling | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Yields the parts of an answer to a string, token ids or messages, as the
        model generates them.

        If you close the generator before its end, the engine cancels the answer.
        `fields` has the same meaning as in `generate`. Raises OptionError and
        ClosedError, and the error that ended the answer, such as a ContextError.

        Example:
            >>> import asyncio
            >>> async def answer() -> str:
            ...     return "".join([delta.text async for delta in engine.stream("Once upon a time", max_tokens=4)])
            >>> isinstance(asyncio.run(answer()), str)
            True
        """
        queue = asyncio.Queue[Delta]()
        loop = asyncio.get_running_loop()

        def put(delta: Delta) -> None:
            # The event loop is closed: nobody reads the queue any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, delta)

        sequence = self._submit(
            _request(prompt, sampling or self._sampling, fields), put
        )
        try:
            while not isinstance(delta := await queue.get(), EngineAnswer):
                yield delta
        finally:
            self._loop.cancel(sequence)
        if delta.error is not None:
            raise delta.error

    def stats(self) -> Stats:
        """Returns the counters since the model was loaded.

        Example:
            >>> engine.stats().n_experts
            192
        """
        return self._llm.stats()

    def close(self) -> None:
        """Cancels all answers and frees the model. A loaded `Llama` that you passed to
        the engine stays loaded. A second call does nothing.

        Example:
            >>> engine = moegguf.Engine("demo")
            >>> engine.close()
        """
        self._llm.context.check_caller()
        self._loop.close()
        self._thread.join()
        if self._is_own:
            self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, request: Request, put: Callable[[Delta], object]) -> Sequence:
        self._llm.context.check_caller()
        if not self._thread.is_alive():
            raise ClosedError("the engine is closed; create another one.")
        return self._loop.submit(request, _Events(put))

    def _answers(
        self,
        prompts: abc.Sequence[Any],
        sampling: Sampling | abc.Sequence[Sampling] | None,
        fields: dict[str, Any],
    ) -> list[EngineAnswer]:
        """Returns the answers to `prompts`, in their order. The number of requests that
        are submitted and not yet collected is at most AHEAD times the number of
        sequences, so that thousands of prompts need little memory. An exception or
        interrupt cancels all submitted requests."""
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or self._sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise OptionError(
                f"a list of samplings must have one for each of {len(prompts)} prompts, but has {len(sampling)}; give"
                " that many, or one Sampling without a list."
            )
        requests = [
            _request(prompt, each, fields)
            for prompt, each in zip(prompts, sampling, strict=True)
        ]
        queues = [SimpleQueue[Delta]() for _ in requests]
        n_ahead = AHEAD * self._llm.n_seq_max
        submitted = list[Sequence]()
        answers = list[EngineAnswer]()
        try:
            for request, queue in zip(requests, queues, strict=True):
                if len(submitted) - len(answers) >= n_ahead:
                    answers.append(_collected(queues[len(answers)]))
                submitted.append(self._submit(request, queue.put))
            return answers + [_collected(queue) for queue in queues[len(answers) :]]
        except BaseException:
            # Also on an interrupt: nobody waits for these answers any more.
            for sequence in submitted:
                self._loop.cancel(sequence)
            raise


def _request(
    prompt: Prompt | abc.Sequence[Message], sampling: Sampling, fields: dict[str, Any]
) -> Request:
    """Returns the request for a string, token ids or messages, with the other `fields`.
    Unless `fields` sets `truncate` to True, a string or token ids that do not fit into
    the context will cause an error. Raises OptionError for an unknown field."""
    of_sampling, of_request = (
        Sampling.__dataclass_fields__,
        Request.__dataclass_fields__,
    )
    for name in fields:
        if name not in of_sampling and name not in of_request:
            raise OptionError.unknown(
                name,
                [*of_sampling, *of_request],
                "see help(moegguf.Sampling) for the list.",
            )
    given: dict[str, Any] = {"messages": tuple(prompt)}
    if not prompt or not isinstance(prompt[0], dict):
        given = {**prompt_fields(prompt), "truncate": False}
    given |= {name: value for name, value in fields.items() if name in of_request}
    return replace(Request(**given), sampling=sampling_with(sampling, fields))
