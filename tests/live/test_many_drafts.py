"""Compares answers with drafts to answers without drafts, half of them greedy and half
sampled.

The test is slow: only `make slow` runs it. By default it compares 2,000 answers of the
demo with drafts from n-grams. MOEGGUF_SLOW_MODEL, MOEGGUF_SLOW_DRAFT and
MOEGGUF_SLOW_ANSWERS set another model, other drafts and another number of answers.
"""

import json
import os
from pathlib import Path

import pytest
from answering import DEMO
from eager import Eager

from moegguf.bench.drafts import undrafted
from moegguf.generate import drafting
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling

PROMPTS = [
    each["prompt"]
    for each in json.loads(Path(__file__).with_name("repeating.json").read_text())
]
N_ANSWERS = int(os.environ.get("MOEGGUF_SLOW_ANSWERS", "2000"))
N_TOGETHER = 40


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, N_ANSWERS, N_TOGETHER))
def test_answers_with_drafts_equal_undrafted_answers(
    first: int, engine: Engine
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
        draft = os.environ.get("MOEGGUF_SLOW_DRAFT", "ngram")
        with Engine(model, 4, expert_cache="50%", draft=draft, n_ctx=2048) as engine:
            yield engine
