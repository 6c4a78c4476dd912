"""Generates the same answers with and without drafts, alternately, and compares the
times. The answer texts come from a file, not from the model."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from operator import add
from pathlib import Path

from moegguf.bench.turns import Row, take_turns
from moegguf.engine.stats import Stats
from moegguf.errors import OptionError
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling
from moegguf.generate.sampler import Sampler

LONGEST = 160  # maximum number of tokens in an answer


@contextmanager
def undrafted(engine: Engine) -> Iterator[None]:
    """Makes the engine generate without drafts inside the `with` block."""
    loop = engine._loop
    drafter = loop._drafter
    loop._drafter = None
    try:
        yield
    finally:
        loop._drafter = drafter


@contextmanager
def forced(tokens: Sequence[int]) -> Iterator[None]:
    """Makes each call of `Sampler.sample` inside the `with` block return the next token
    from `tokens`. The sampler still samples a token as usual, but that token is
    discarded."""
    left = iter(tokens)
    sample = Sampler.sample

    def given(self: Sampler, row: int = -1) -> int | None:
        sample(self, row)
        return next(left)

    Sampler.sample = given  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sampler.sample = sample  # type: ignore[method-assign]


def answer(
    engine: Engine, prompt: str, text: str, with_drafts: bool
) -> tuple[float, Stats]:
    """Makes the engine generate `text`, truncated to LONGEST tokens, as its answer to
    `prompt`. Returns the seconds from the first token to the end of the answer, and the
    counters for that interval."""
    tokens = engine.llm.tokenize(text.encode(), add_bos=False)[:LONGEST]
    with forced(tokens), nullcontext() if with_drafts else undrafted(engine):
        (done,) = engine.generate(
            prompt, Sampling(temperature=0.0, max_tokens=len(tokens))
        )
    if done.error is not None:
        raise done.error
    return done.summary.answer_s, done.summary.answer_stats


def read_texts(path: str, n_prompts: int) -> list[tuple[str, str, str]]:
    """Returns items (kind, prompt, answer) from a JSON file: all of them if there are
    fewer than 2 * `n_prompts`, otherwise at least `n_prompts`, evenly spaced. For each
    item, adds an item of the kind "other" with the same prompt. Its answer consists of
    90 different words chosen at random from the file. Raises OptionError if `path` is
    empty."""
    if not path:
        raise OptionError(
            "the preset drafts needs texts; give --set texts=FILE, where FILE has a JSON list of objects with kind,"
            " prompt and answer."
        )
    texts = [
        (each["kind"], each["prompt"], each["answer"])
        for each in json.loads(Path(path).read_text())
    ]
    words = sorted(
        {word for _, prompt, text in texts for word in (prompt + text).split()}
    )
    others = [
        ("other", text[1], " ".join(random.Random(i).sample(words, 90)))
        for i, text in enumerate(texts)
    ]
    step = max(1, len(texts) // n_prompts)
    return [*texts[::step], *others[::step]]


def speedup(
    model: str,
    *,
    texts: str = "",
    draft: str = "ngram",
    expert_cache: str = "50%",
    prompts: int = 40,
    rounds: int = 3,
) -> Iterator[Row]:
    """Yields a row for each kind of text, with ratios of the time without drafts to the
    time with drafts. A row contains the median ratio, the ratio of the total times, and
    draft counters.

    The answer texts come from the file `texts`, so they do not depend on the model. The
    model still evaluates every token, as for an answer of its own.
    """
    chosen = read_texts(texts, prompts)
    # {kind of text: seconds without drafts, seconds and counters with drafts}.
    results: dict[str, list[tuple[float, float, Stats]]] = {}
    with Engine(model, 1, n_ctx=2048, draft=draft, expert_cache=expert_cache) as engine:
        for _, prompt, text in chosen[:2]:
            answer(engine, prompt, text, with_drafts=True)
        for kind, prompt, text in chosen:
            turns = take_turns(
                {
                    each: partial(answer, engine, prompt, text, each)
                    for each in (False, True)
                },
                rounds,
            )
            for (without_s, _), drafted in zip(turns[False], turns[True], strict=True):
                results.setdefault(kind, []).append((without_s, *drafted))
    for kind, found in results.items():
        without, drafting, counted = zip(*found, strict=True)
        stats = reduce(add, counted)
        yield {
            "text": kind,
            "median ratio": statistics.median(
                without_s / with_s for without_s, with_s, _ in found
            ),
            "ratio of all the time": sum(without) / sum(drafting),
            "turns": len(found),
            "drafted tokens": stats.drafted_tokens,
            "accepted tokens": stats.accepted_tokens,
            "passes with drafts": stats.draft_passes,
        }
