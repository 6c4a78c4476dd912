"""Short ways to get answers in process: texts, timings, and the model that ships with the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from moegguf.engine.llama import Llama
from moegguf.generate.batching import BatchLoop
from moegguf.generate.request import Delta, GenerationRequest, PromptProgress, Sampling, Timing

DEMO = Path(__file__).resolve().parents[2] / "moegguf" / "demo" / "moegguf-demo-Q4_0.gguf"
QUESTION = "What does moegguf do?"
SAMPLING = {field.name for field in fields(Sampling)}
Load = Callable[..., Llama]  # the fixtures of conftest.py
TinyModel = Callable[..., Path]


def ask(*messages: str, **options: Any) -> GenerationRequest:
    """A request at temperature 0: user and assistant messages in turn, options of GenerationRequest and Sampling."""
    sampling = {name: options.pop(name) for name in list(options) if name in SAMPLING}
    turns = tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages))
    options.setdefault("return_context", not messages)
    return GenerationRequest(messages=turns or None, sampling=Sampling(**{"temperature": 0.0, **sampling}), **options)


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


class Answer:
    """One answer, by a loop that computes no other, on this thread. What is wrong with the request is raised at
    construction."""

    def __init__(self, llm: Llama, request: GenerationRequest) -> None:
        self.reports: list[PromptProgress] = []
        self._loop, self._deltas = BatchLoop(llm), list[Delta]()
        self._error: Exception | None = None
        self._then: Callable[[], object] = lambda: None
        self._answer = self._loop.submit(request, self)
        if (error := self._answer.read(llm)) is not None:
            raise error
        self.prompt = self._answer.prompt

    @property
    def timing(self) -> Timing:
        return self._answer.timing

    def deltas(self, then: Callable[[], object] = lambda: None) -> list[Delta]:
        """All of them; `then` is called after each delta and each report of progress."""
        self._then = then
        self._loop.run()
        if self._error is not None:
            raise self._error
        return self._deltas

    def cancel(self) -> None:
        self._loop.cancel(self._answer)

    def on_progress(self, progress: PromptProgress) -> None:
        self.reports.append(progress)
        self._then()

    def on_delta(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._then()

    def on_end(self, timing: Timing, error: Exception | None) -> None:
        self._error = error
        self._loop.close()


def reply(llm: Llama, *messages: str, **options: Any) -> tuple[str, Timing]:
    """The text and the timing of an answer."""
    answer = Answer(llm, ask(*messages, **options))
    return text_of(answer.deltas()), answer.timing


def ends_of(llm: Llama) -> list[int]:
    """The tokens that end an answer."""
    return [token for token in range(llm.n_vocab()) if llm.vocabulary.is_end(token)]
