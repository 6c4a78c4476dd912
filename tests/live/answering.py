"""Generates answers in the test's own process.

`Answer` and `reply` generate one answer in its own `BatchLoop`. `answers_of` and
`answers_together` generate many answers in one loop. With a `Scripted` schedule, a test
acts at numbered steps, so that results do not depend on time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from waiting import until

from moegguf.engine.llama import Llama
from moegguf.generate.batching import BatchLoop
from moegguf.generate.kv_sequences import Schedule, Step
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    PromptProgress,
    Request,
    Sampling,
    TokenLogprob,
)
from moegguf.generate.sequence import Sequence

DEMO = (
    Path(__file__).resolve().parents[2] / "moegguf" / "demo" / "moegguf-demo-Q4_0.gguf"
)
QUESTION = "What does moegguf do?"
SAMPLING = {field.name for field in fields(Sampling)}
Load = Callable[..., Llama]  # types of the fixtures `load` and `tiny`
TinyModel = Callable[..., Path]


def prompt_of(n_tokens: int, seed: int = 0) -> list[int]:
    """Returns random tokens, which are the same for the same seed."""
    return np.random.default_rng(seed).integers(5, 900, n_tokens).tolist()


def ask(*messages: str, **options: Any) -> Request:
    """Returns a request. Its temperature is 0 unless `options` sets another one.

    `messages` are texts that the user and the assistant write in turn, beginning with
    the user. `options` are fields of Request and Sampling. Without messages, the
    summary includes the context by default.
    """
    sampling = {name: options.pop(name) for name in list(options) if name in SAMPLING}
    turns = tuple(
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(messages)
    )
    options.setdefault("return_context", not messages)
    return Request(
        messages=turns or None,
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
        **options,
    )


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


class Answer:
    """An answer that `deltas` generates in its own loop, on the caller's thread.

    The constructor renders the prompt, and raises an error if the request is invalid.
    """

    def __init__(self, llm: Llama, request: Request) -> None:
        self.reports: list[PromptProgress] = []
        self._loop, self._deltas = BatchLoop(llm), list[Delta]()
        self._error: Exception | None = None
        self._then: Callable[[], object] = lambda: None
        self._sequence = self._loop.submit(request, self)
        until(lambda: self._loop._arrived)
        if self._sequence.error is not None:
            raise self._sequence.error
        self.prompt = self._sequence.prompt

    @property
    def summary(self) -> AnswerSummary:
        return self._sequence.summary

    def deltas(self, then: Callable[[], object] = lambda: None) -> list[Delta]:
        """Generates the answer and returns its deltas, or raises the error that ended
        it.

        Calls `then` after each delta and after each report of progress.
        """
        self._then = then
        self._loop.run()
        if self._error is not None:
            raise self._error
        return self._deltas

    def cancel(self) -> None:
        self._loop.cancel(self._sequence)

    def on_progress(self, progress: PromptProgress) -> None:
        self.reports.append(progress)
        self._then()

    def on_delta(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._then()

    def on_end(self, summary: AnswerSummary, error: Exception | None) -> None:
        self._error = error
        self._loop.close()


def reply(llm: Llama, *messages: str, **options: Any) -> tuple[str, AnswerSummary]:
    """Generates the answer to `messages`. Returns its text and its summary."""
    answer = Answer(llm, ask(*messages, **options))
    return text_of(answer.deltas()), answer.summary


def endless(llm: Llama, bias: float = -1000.0) -> dict[int, float]:
    """Returns a logit bias for the tokens that end an answer. The default bias
    suppresses them."""
    return {
        token: bias for token in range(llm.n_vocab()) if llm.vocabulary.is_end(token)
    }


def of_tokens(
    llm: Llama, tokens: Iterable[int], max_tokens: int = 8, **options: Any
) -> Request:
    """Returns a request with these prompt tokens. End tokens are suppressed by
    default."""
    options = {"n_logprobs": 2, "logit_bias": endless(llm), **options}
    context = tuple(tokens)
    return ask(prompt="", context=context, max_tokens=max_tokens, **options)


def solo(llm: Llama, request: Request) -> list[TokenLogprob]:
    """Returns the logprobs of an answer that is generated alone, in an empty
    context."""
    llm.reset()
    return [
        logprob for delta in Answer(llm, request).deltas() for logprob in delta.logprobs
    ]


TIMEOUT_S = 60.0


class Received:
    """Collects the events of one answer. A loop uses the object as its
    `AnswerEvents`."""

    def __init__(self) -> None:
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.progress: list[PromptProgress] = []
        self.summary = AnswerSummary()
        self.error: Exception | None = None
        self.ended = threading.Event()

    def on_progress(self, progress: PromptProgress) -> None:
        self.progress.append(progress)

    def on_delta(self, delta: Delta) -> None:
        assert not self.ended.is_set(), "nothing comes after the end"
        self.text += delta.text
        self.logprobs += delta.logprobs

    def on_end(self, summary: AnswerSummary, error: Exception | None) -> None:
        assert not self.ended.is_set(), "an answer ends once"
        self.summary, self.error = summary, error
        self.ended.set()

    def wait(self) -> Received:
        assert self.ended.wait(TIMEOUT_S), "an answer hangs"
        return self


class Scripted:
    """A schedule that selects the sequences that `inner` selects, or all running
    sequences if `inner` is None.

    Before each selection it calls `before` with the selection's number, from 1. `steps`
    collects the steps that were run.
    """

    def __init__(
        self,
        before: Callable[[int], object] = lambda step: None,
        inner: Schedule | None = None,
    ) -> None:
        self._before = before
        self._inner = inner
        self.steps: list[Step] = []
        self.n_asked = 0

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
        self.n_asked += 1
        self._before(self.n_asked)
        return running if self._inner is None else self._inner.choose(running)

    def ran(self, step: Step) -> None:
        self.steps.append(step)
        if self._inner is not None:
            self._inner.ran(step)


@contextmanager
def running(
    llm: Llama, schedule: Schedule | None = None, step_tokens: int | None = None
) -> Iterator[BatchLoop]:
    """Yields a new loop that runs on its own thread until the end of the `with`
    block."""
    with started(BatchLoop(llm, schedule, step_tokens)) as loop:
        yield loop


@contextmanager
def started(loop: BatchLoop) -> Iterator[BatchLoop]:
    """Runs `loop` on its own thread and yields the loop. Closes the loop at the end of
    the `with` block."""
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    try:
        yield loop
    finally:
        loop.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the loop hangs"


def answers_of(loop: BatchLoop, requests: list[Request]) -> list[Received]:
    """Submits all requests to a running loop and waits for the answers. Returns the
    events of each answer."""
    received = [Received() for _ in requests]
    for request, events in zip(requests, received, strict=True):
        loop.submit(request, events)
    return [events.wait() for events in received]


def answers_together(
    llm: Llama,
    requests: list[Request],
    schedule: Schedule | None = None,
    step_tokens: int | None = None,
) -> list[Received]:
    """Generates the answers to `requests` in a new loop. Returns the events of each
    answer.

    All requests arrive before the first step, so thread timing does not affect the
    steps.
    """
    loop, received = (
        BatchLoop(llm, schedule, step_tokens),
        [Received() for _ in requests],
    )
    for n, (request, events) in enumerate(zip(requests, received, strict=True)):
        loop.submit(request, events)
        until(lambda n=n: len(loop._arrived) > n)
    with started(loop):
        return [events.wait() for events in received]
