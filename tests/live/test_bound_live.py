"""Tests `moegguf bench --bound` and `--parallel`.

The demo's bounds are printed beside its speeds. A replay of the recorded routing reads
as many bytes as the store counted. Sequences that are evaluated together get the same
tokens as sequences evaluated alone.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from answering import DEMO
from running import Load, TinyModel, share_for
from test_bench import run

from moegguf.bench.bound import Bounds
from moegguf.bench.measure import Feed, Sample, begin, measure
from moegguf.bench.series import Spec, Test
from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import NoPrediction
from moegguf.native.store import StoreOptions
from moegguf.trace.simulate import SimOptions, Simulation

Test.__test__ = False  # type: ignore[attr-defined]
# A speed may exceed its bound slightly, because the bound is also based on measured
# times.
MOST_PCT = 105


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    text = str(DEMO.parent / "README.md")
    return run(
        DEMO, "--expert-cache", "25%", "--bound", "--text", text, "--parallel", "1,4"
    )


def test_bench_bound_prints_bounds_beside_the_speeds(
    rows: list[dict[str, Any]],
) -> None:
    tests = [(row["n_parallel"], row["n_prompt"], row["n_gen"]) for row in rows]
    assert tests == [(1, 8, 0), (1, 0, 4), (4, 8, 0), (4, 0, 4)]
    for row in rows:
        assert row["error"] == ""
        assert 0 < row["bound_reached_pct"] <= MOST_PCT
        assert row["bound_ts"] > 0
        assert row["bound_by"] in ("reads", "computing")
        assert 0 < row["bound_read_mb_per_token"] <= row["mb_per_token"]
        assert row["bound_compute_ms_per_token"] > 0
        assert row["bound_weights_ms_per_token"] > 0
        assert row["bound_copy_ms_per_token"] == 0


def test_parallel_sequences_share_the_weights_in_the_bound(
    rows: list[dict[str, Any]],
) -> None:
    one, four = rows[1], rows[3]
    assert four["bound_weights_ms_per_token"] < one["bound_weights_ms_per_token"]


def test_the_bound_of_a_resident_model_reads_nothing(tiny: TinyModel) -> None:
    for row in run(
        tiny("tiny-mix", "q4_0"), "--expert-cache", "100%", "--bound", "-r", "1"
    ):
        assert row["bound_read_mb_per_token"] == 0
        assert row["bound_by"] == "computing"
        assert 50 < row["bound_reached_pct"] <= 100


N_SLOTS = 24


def begun(load: Load, path: Path, test: Test) -> tuple[Any, list[list[int]]]:
    """Loads `path` with N_SLOTS slots and the strategy lru. Returns the model and each
    sequence's tokens for `test`."""
    llm = load(
        path, strategy="lru", expert_cache=share_for(path, N_SLOTS), store=StoreOptions(sweep=False),
        n_seq_max=test.n_parallel, logits_all=False, flash_attn=None, n_ctx=64, context_store=0,
    )  # fmt: skip
    feed = Feed(llm, Spec(str(path), (test,)))
    return llm, [feed.tokens(test.n_tokens, n) for n in range(test.n_parallel)]


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_bytes_of_the_recorded_routing_equal_the_stores_counter(
    load: Load, tiny: TinyModel, n_parallel: int
) -> None:
    path = tiny("tiny-qwen2moe")
    test = Test(6, 12, n_parallel=n_parallel)
    llm, tokens = begun(load, path, test)
    bounds = Bounds(llm, llm.session)
    nothing = bounds.held()
    samples: list[Sample] = []
    routing = bounds.record(
        lambda: samples.append(
            measure(begin(llm, test, tokens), test, tokens, greedy=False)
        )
    )
    counted = samples[0].stats.bytes_missed
    options = SimOptions(store=StoreOptions(sweep=False))
    simulated = Simulation(
        routing, LRU, NoPrediction(routing.shape), N_SLOTS, options
    ).run()
    assert counted == simulated.counters["misses"] * routing.shape.expert_bytes > 0
    assert nothing.everywhere.size == 0
    assert 0 < bounds.least_bytes(routing, nothing).read <= counted
    filled = bounds.held()
    assert 0 < filled.everywhere.size <= N_SLOTS
    assert (
        bounds.least_bytes(routing, filled).read
        < bounds.least_bytes(routing, nothing).read
    )


@pytest.mark.parametrize("preset", ["tiny-mix", "tiny-qwen35moe"])
def test_parallel_sequences_get_the_tokens_of_single_runs(
    load: Load, tiny: TinyModel, preset: str
) -> None:
    path = tiny(preset, "q4_0")
    together = Test(6, 5, 3, n_parallel=3)
    llm, tokens = begun(load, path, together)
    found = measure(begin(llm, together, tokens), together, tokens, greedy=True).tokens
    evaluate = partial(measure, greedy=True)
    alone = Test(6, 5, 3)
    for n, own in enumerate(tokens):
        assert found[n::3] == evaluate(begin(llm, alone, [own]), alone, [own]).tokens
