"""Records a trace: runs a model over prompts and writes the model's routing events to a
file."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moegguf.engine.llama import Llama
from moegguf.engine.recording import TraceOptions
from moegguf.engine.stats import Stats
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling
from moegguf.native import library
from moegguf.settings import read_load_keywords
from moegguf.trace.format import partial_of
from moegguf.trace.prompts import Prompt

# Called with the name of the current step and the completed share of the work (0 to 1)
Progress = Callable[[str, float], object]


@dataclass(frozen=True)
class RecordOptions:
    """Options for recording a trace, in addition to the options of `Llama`.

    If the option `draft` of `Llama` turns on drafting, the recorded passes also contain
    the drafted tokens. A simulation replays these passes, including the drafted tokens
    that the model rejected.
    """

    # Maximum number of tokens to generate, for prompts that do not set a number.
    n_predict: int = 128
    inputs: bool = False  # also records the routers' inputs
    temperature: float = 0.8
    seed: int = 0
    # No further prompt is recorded after this many evaluated tokens; 0: no limit.
    most_tokens: int = 0


def record(
    model: str | os.PathLike[str],
    prompts: Sequence[Prompt],
    out: str | os.PathLike[str],
    options: RecordOptions,
    progress: Progress = lambda what, share: None,
    **llama: Any,
) -> Stats:
    """Writes the trace `out`. Returns the counters of the run. If the recording is
    interrupted or fails, no incomplete file remains.

    Each prompt is a new request. If a prompt has a completion, the completion's tokens
    are evaluated one by one (teacher forcing) and no text is generated. Text too long
    for the context is cut, with a warning. flash_attn is by default what the
    environment sets for commands, as in `moegguf run`, so that the recorded routing is
    the same as that command's. llama.cpp's log is hidden. Raises the same errors as
    `Llama`, and OptionError if the model has no experts.
    """
    # The bindings print only what this logger's level allows.
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
    flash_attn = read_load_keywords(commands=True).get("flash_attn")
    llama = {"flash_attn": flash_attn, "verbose": False} | llama
    loading = partial(progress, "loading the model")
    n_cut = 0
    try:
        with Llama(
            model, trace=TraceOptions(out, options.inputs), progress=loading, **llama
        ) as llm:
            assert llm.recording is not None
            try:
                for number, prompt in enumerate(prompts):
                    if (
                        options.most_tokens
                        and llm.stats().tokens >= options.most_tokens
                    ):
                        break
                    progress(
                        f"prompt {number + 1} of {len(prompts)}", number / len(prompts)
                    )
                    llm.recording.label(llm.context.requests.sequence + 1, prompt.label)
                    n_cut += _run(llm, prompt, options)
            except BaseException:  # also on Ctrl-C: an incomplete trace is removed
                llm.recording.discard()
                raise
            if n_cut:
                warnings.warn(
                    f"{n_cut} of {len(prompts)} prompts, with their answers, are longer than the context and were cut;"
                    " a larger context keeps more of them (--ctx).",
                    stacklevel=2,
                )
            return llm.stats()
    except BaseException:
        # Ctrl-C may arrive after the file has been created and before `llm.recording`
        # is set.
        partial_of(Path(out)).unlink(missing_ok=True)
        raise


def _run(llm: Llama, prompt: Prompt, options: RecordOptions) -> bool:
    """Runs one request. At most half of the context is kept free for the answer. A
    completion is evaluated token by token; without a completion the model generates the
    answer. Returns True if the prompt or the completion was cut to fit the context."""
    n_predict = options.n_predict if prompt.n_predict is None else prompt.n_predict
    forced = None
    if prompt.completion is not None:
        forced = llm.tokenize(prompt.completion.encode(), add_bos=False)[
            : prompt.n_predict
        ]
        n_predict = len(forced)
    n_max = llm.n_ctx() - 1
    tokens = llm.tokenize(prompt.text.encode(), special=True)
    kept = tokens[: n_max - min(n_predict, n_max // 2)]
    n_answer = min(n_predict, n_max - len(kept))
    llm.reset()
    if forced is None and n_answer:
        _generate(llm, kept, n_answer, options)
    else:
        llm.eval(kept)
        for token in (forced or [])[:n_answer]:
            llm.eval([token])
    return len(kept) < len(tokens) or (forced is not None and n_answer < len(forced))


def _generate(
    llm: Llama, tokens: Sequence[int], n_answer: int, options: RecordOptions
) -> None:
    if llm.drafts is not None:
        sampling = Sampling(
            temperature=options.temperature, seed=options.seed, max_tokens=n_answer
        )
        with Engine(llm) as engine:
            (answer,) = engine.generate(tokens, sampling)
        if answer.error is not None:
            raise answer.error
        return
    llm.set_seed(options.seed)
    steps = llm.generate(tokens, temp=options.temperature)
    is_end = library.llama_cpp().llama_vocab_is_eog
    try:
        for _ in range(n_answer):
            if is_end(llm._model.vocab, next(steps)):
                break
    finally:
        steps.close()
