"""Short ways to get answers in process: texts, timings, and the model that ships with the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from moegguf.engine.llama import Llama
from moegguf.generate.answer import Answer
from moegguf.generate.request import Delta, GenerationRequest, Sampling, Timing

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


def reply(llm: Llama, *messages: str, **options: Any) -> tuple[str, Timing]:
    """The text and the timing of an answer."""
    answer = Answer(llm, ask(*messages, **options))
    return text_of(list(answer.deltas())), answer.timing


def ends_of(llm: Llama) -> list[int]:
    """The tokens that end an answer."""
    return [token for token in range(llm.n_vocab()) if llm.vocabulary.is_end(token)]
