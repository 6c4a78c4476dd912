"""Tests the learning of strategies on a tiny model: each learned strategy predicts
experts, and does not change a single bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import Load, TinyModel
from running import Logits, Reference, greedy_logits, random_prompt

from moegguf.bench.record import RecordOptions, record
from moegguf.controller.artifacts import Artifacts
from moegguf.engine.learnt import learnt_facts
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout
from moegguf.learning import expert_mlp, mlp, routing_path
from moegguf.learning.learn import LEARNERS, Learning, Learnt
from moegguf.trace.format import read
from moegguf.trace.prompts import Prompt

PRESET = "tiny-qwen3moe"
TIGHT: dict[str, Any] = {"expert_cache": "40%", "n_ubatch": 4}
N_PROMPT, N_NEW = 12, 12
SMALL = {
    "mlp": mlp.Options(windows=(1, 2, 4), n_hidden=32, epochs=2, batch=64),
    "expert-mlp": expert_mlp.Options(
        hidden=(32,) * 6, epochs=2, batch=64, most_samples=1000
    ),
    "routing-path": routing_path.Options(
        epochs=2, n_embd=16, n_ff=16, window=8, chunk=4, batch=8
    ),
}
TEXTS = [
    "A short text.",
    "Another one, about the sea.",
    "1 2 3 4 5 6 7",
    "def f(x): return x",
    "Two words",
    "The end.",
]


@pytest.fixture(scope="module")
def learnt(
    tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Learnt]]:
    """Links a tiny model into its own folder, records a trace, and learns every
    strategy of LEARNERS from the trace.

    Returns the model's path and the outcome of each strategy.
    """
    folder = tmp_path_factory.mktemp("learn")
    path = folder / "model.gguf"
    os.link(tiny(PRESET), path)
    prompts = [Prompt(text, "text") for text in TEXTS]
    options = RecordOptions(N_NEW, inputs=True)
    record(
        path, prompts, folder / "t.npz", options, n_ctx=256, n_threads=1, verbose=False
    )
    learning = Learning(read(folder / "t.npz"), Artifacts(read_layout(path)), SMALL)
    return path, {name: learning.learn(name) for name in LEARNERS}


def test_a_strategy_without_learned_files_names_the_learn_command(
    tiny: TinyModel, load: Load, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    os.link(tiny(PRESET), path)
    for name in ("promoe", "expertflow", "duoserve"):
        with pytest.raises(
            OptionError, match=f"`moegguf learn MODEL --strategy {name}`"
        ):
            load(path, strategy=name, **TIGHT)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learned_strategy_predicts_and_changes_no_bit(
    learnt: tuple[Path, dict[str, Learnt]],
    tiny: TinyModel,
    load: Load,
    reference: Reference,
    name: str,
) -> None:
    path, outcome = learnt
    expected: Logits = reference(
        tiny(PRESET), n_ubatch=4, n_prompt=N_PROMPT, n_new=N_NEW
    )
    llm = load(path, strategy=name, lockstep=True, **TIGHT)
    assert np.array_equal(
        greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW), expected
    )
    assert llm.session is not None
    counters = llm.session.store.counters()
    assert counters["forecast_picks"] > 0 and counters["prefetch_started"] > 0
    assert llm.stats().evictions > 0
    assert 0 < outcome[name].lru < 1


def test_learnt_facts_list_every_learned_file(
    learnt: tuple[Path, dict[str, Learnt]],
) -> None:
    path, outcome = learnt
    listed = learnt_facts(read_layout(path))
    assert {(one["predictor"], one["strategy"]) for one in listed} == {
        (file.stem, name) for name, found in outcome.items() for file in found.files
    }
    for one in listed:
        if one["predictor"] != "eamc":  # this file grows while the model runs
            found = outcome[one["strategy"]]
            assert (one["tokens"], one["requests"], one["right"]) == (
                found.tokens,
                found.requests,
                found.right,
            )


def test_record_stops_once_most_tokens_are_recorded(
    tiny: TinyModel, tmp_path: Path
) -> None:
    prompts = [Prompt(text, "text") for text in TEXTS]
    options = RecordOptions(4, most_tokens=30)
    stats = record(
        tiny(PRESET),
        prompts,
        tmp_path / "t",
        options,
        n_ctx=256,
        n_threads=1,
        verbose=False,
    )
    trace = read(tmp_path / "t")
    assert 1 < len(trace.sequences()) < len(TEXTS)
    assert stats.tokens >= 30 > trace.select(trace.sequences()[:-1]).n_tokens
