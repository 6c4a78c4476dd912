"""Compares answers with drafts to answers without drafts, half of them greedy and half
sampled.

The test is slow: only `make slow` runs it. By default it compares 2,000 answers of the
demo with drafts from n-grams. MOEGGUF_SLOW_MODEL, MOEGGUF_SLOW_DRAFT and
MOEGGUF_SLOW_ANSWERS set another model, other drafts and another number of answers.
With MOEGGUF_SLOW_DRAFT=known, drafts are parts of the undrafted answers, with some
wrong tokens. A model with random weights accepts such drafts, too.
"""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from answering import DEMO
from eager import WIDTH, Eager

from moegguf.bench.drafts import undrafted
from moegguf.engine.drafts import Draft, Source
from moegguf.generate import drafting
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling

PROMPTS = [
    each["prompt"]
    for each in json.loads(Path(__file__).with_name("repeating.json").read_text())
]
N_ANSWERS = int(os.environ.get("MOEGGUF_SLOW_ANSWERS", "2000"))
N_TOGETHER = 40
DRAFT = os.environ.get("MOEGGUF_SLOW_DRAFT", "ngram")


class KnownDrafts:
    """Makes drafts from contexts whose tokens are known. About every tenth drafted
    token is wrong."""

    least_key = 0
    n_max = WIDTH

    def __init__(self) -> None:
        self.known: list[list[int]] = []
        self._tokens: dict[int, list[int]] = {}
        self._random = random.Random(1)

    def set_tokens(self, seq_id: int, first: int, tokens: Sequence[int]) -> None:
        self._tokens[seq_id] = [*self._tokens.get(seq_id, [])[:first], *tokens]

    def draft(self, wanted: list[tuple[int, list[int]]]) -> list[Draft]:
        return [self._one(self._tokens[seq_id], max(n)) for seq_id, n in wanted]

    def accept(self, seq_id: int, n_accepted: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _one(self, tokens: list[int], n: int) -> Draft:
        n_known = len(tokens)
        for context in self.known:
            if len(context) > n_known and context[:n_known] == tokens:
                drafted = (
                    token ^ (self._random.random() < 0.1)
                    for token in context[n_known : n_known + n]
                )
                return Draft(Source.MODEL, tuple(drafted))
        return Draft()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, N_ANSWERS, N_TOGETHER))
def test_answers_with_drafts_equal_undrafted_answers(
    first: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(first, min(first + N_TOGETHER, N_ANSWERS))
    samplings = [
        Sampling(temperature=float(seed % 2), seed=seed, max_tokens=48)
        for seed in seeds
    ]
    texts = [
        f"{seed // len(PROMPTS)}\n{PROMPTS[seed % len(PROMPTS)]}" for seed in seeds
    ]
    with undrafted(engine):
        expected = engine.generate(texts, samplings, return_context=True)
    if DRAFT == "known":
        drafts = KnownDrafts()
        drafts.known = [list(one.summary.context) for one in expected]
        monkeypatch.setattr(engine._loop._drafter, "_drafts", drafts)
    before = engine.stats()
    answers = engine.generate(texts, samplings, return_context=True)
    assert (engine.stats() - before).accepted_tokens > 0
    for answer, one in zip(answers, expected, strict=True):
        assert answer.error is None
        assert (answer.summary.context, answer.text, answer.finish) == (
            one.summary.context,
            one.text,
            one.finish,
        )


@pytest.fixture(scope="module")
def engine() -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "DraftGate", Eager)
        model = os.environ.get("MOEGGUF_SLOW_MODEL", str(DEMO))
        draft = "ngram" if DRAFT == "known" else DRAFT
        with Engine(model, 4, expert_cache="50%", draft=draft, n_ctx=2048) as engine:
            yield engine
