"""Each strategy on the demo model, which has a trained predictor for each: the same tokens, and its parts at work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import DEMO
from running import Llama, Load, Logits, controller_of, greedy_logits, random_prompt

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.strategies import STRATEGIES
from moegguf.engine.recording import TraceOptions
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout
from moegguf.native.store import StoreOptions
from moegguf.trace.analysis import TraceAnalysis
from moegguf.trace.format import read

TIGHT: dict[str, Any] = {"expert_cache": "25%", "n_ubatch": 4, "n_ctx": 128}
N_PROMPT, N_NEW = 12, 10
PAPERS = ("moe-infinity", "promoe", "expertflow", "duoserve")


def run(llm: Llama) -> Logits:
    """Two requests, of which the first is one that the second can be matched with."""
    greedy_logits(llm, random_prompt(llm, 4, seed=1), 3)
    return greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)


@pytest.fixture(scope="module")
def expected() -> Logits:
    # as `load` of conftest.py does
    with Llama(DEMO, expert_cache="100%", n_ubatch=4, n_ctx=128, n_threads=1, verbose=False, logits_all=True) as llm:
        return run(llm)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_decides_and_changes_no_bit(
    load: Load, expected: Logits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    llm, strategy = load(DEMO, strategy=name, lockstep=True, **TIGHT), STRATEGIES[name]
    assert np.array_equal(run(llm), expected)
    decided, store = llm.decisions(), llm.session.store  # type: ignore[union-attr]
    assert {switch: getattr(store.options, switch) for switch in strategy.switches} == strategy.switches
    assert llm.stats().evictions > 0
    if name == "moegguf":
        assert (decided["policy"], decided["prefetch"]) == ("next-use", "off")  # as measured.json says
        return
    assert (decided["policy"], decided["predictor"]) == (strategy.policy, strategy.predictor)
    assert decided["prefetch"] == ("on" if name in PAPERS else "off")
    assert (llm.stats().prefetch_started > 0) == (name in PAPERS)
    if name in PAPERS:
        assert decided["routing_events"] > 0 and decided["us_per_event"] > 0
        assert controller_of(llm).native, "each predicts in the store"


def test_parts_named_by_themselves_replace_those_of_the_system(load: Load) -> None:
    llm = load(DEMO, strategy="promoe", predictor="token-id", policy="next-use", prefetch=False, **TIGHT)
    decided = llm.decisions()
    assert (decided["policy"], decided["predictor"], decided["prefetch"]) == ("next-use", "token-id", "off")
    own = StoreOptions(chunked=True)
    assert load(DEMO, strategy="duoserve", store=own, **TIGHT).session.store.options == own  # type: ignore[union-attr]


def test_the_environment_names_a_strategy_where_callers_do_not(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_STRATEGY", "none")
    assert not load(DEMO, **TIGHT).session.store.options.overlap  # type: ignore[union-attr]
    assert load(DEMO, strategy="lru", **TIGHT).session.store.options.overlap  # type: ignore[union-attr]
    monkeypatch.setenv("MOEGGUF_STRATEGY", "nine")
    with pytest.raises(OptionError, match="no strategy 'nine'"):
        load(DEMO, **TIGHT)


@pytest.mark.parametrize("name", ["none", *PAPERS])
def test_a_simulated_strategy_counts_what_the_live_one_counted(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    options = replace(STRATEGIES[name].store, sweep=False)  # fetching ahead takes time, which differs
    llm = load(
        DEMO, strategy=name, prefetch=False, store=options, lockstep=True,
        trace=TraceOptions(tmp_path / "t", inputs=True), **TIGHT,
    )  # fmt: skip
    run(llm)
    n_slots = llm.plan.n_slots
    llm.close()
    for learned in tmp_path.rglob("eamc.safetensors"):
        learned.unlink()
    trace, layout = read(tmp_path / "t"), read_layout(DEMO)
    share = n_slots / layout.n_expert_total
    analysis = TraceAnalysis(trace, Artifacts(layout, trace.header.fingerprint))
    monkeypatch.setitem(STRATEGIES, name, replace(STRATEGIES[name], store=options))
    row, _ = analysis.simulate_strategies([name], [share], prefetch=False)
    assert (row.strategy, row.n_slots) == (name, n_slots)
    for counted in ("lookups", "misses", "evictions"):
        assert row.simulated.counters[counted] == trace.header.settings[counted], counted
