"""Records a trace: runs a model over prompts of several kinds and writes down how it routed them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moegguf.engine.llama import Llama
from moegguf.engine.prompts import Prompt
from moegguf.engine.recording import TraceOptions
from moegguf.engine.stats import Stats
from moegguf.errors import OptionError
from moegguf.native import library

Progress = Callable[[int, int], object]  # prompts done, of how many


@dataclass(frozen=True)
class RecordOptions:
    """How prompts are run. n_predict: tokens to generate where a prompt does not say. inputs: record the router's input
    vectors. temperature, seed: of sampling. Every other option is one of `Llama`.
    """

    n_predict: int = 128
    inputs: bool = False
    temperature: float = 0.8
    seed: int = 0


def record(
    model: str | os.PathLike[str],
    prompts: Sequence[Prompt],
    out: str | os.PathLike[str],
    options: RecordOptions,
    progress: Progress | None = None,
    **llama: Any,
) -> Stats:
    """Writes the trace `out`; returns what the run counted.

    Each prompt is a request of its own. A prompt with a completion is read token by token as if the model had written
    it (teacher forcing): routing of text that the model has not made up. Raises OptionError when the model has no
    experts, and what `Llama` raises.
    """
    with Llama(model, trace=TraceOptions(out, options.inputs), **llama) as llm:
        if llm.recording is None:
            raise OptionError(f"{os.fspath(model)!r} has no experts (or MOEGGUF_HOOKS=0 is set): nothing to record.")
        for number, prompt in enumerate(prompts):
            if progress is not None:
                progress(number, len(prompts))
            llm.recording.label(llm.next_sequence, prompt.label)
            _run(llm, prompt, options)
        return llm.stats()


def _run(llm: Llama, prompt: Prompt, options: RecordOptions) -> None:
    room = llm.n_ctx() - 1
    tokens = llm.tokenize(prompt.text.encode(), special=True)[:room]
    if prompt.completion is not None:
        forced = llm.tokenize(prompt.completion.encode(), add_bos=False)[: room - len(tokens)]
        llm.reset()
        llm.eval(tokens)
        for token in forced[: prompt.n_predict]:
            llm.eval([token])
        return
    n_predict = options.n_predict if prompt.n_predict is None else prompt.n_predict
    left = min(n_predict, room - len(tokens))
    llm.reset()
    llm.set_seed(options.seed)
    steps = llm.generate(tokens, temp=options.temperature)
    is_end = library.llama_cpp().llama_vocab_is_eog
    try:
        for _ in range(left):
            if is_end(llm._model.vocab, next(steps)):
                break
    finally:
        steps.close()
