"""Tests policies, predictors and strategies on running models: the chosen ones are
used, and none of them changes a single bit of the logits.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from answering import DEMO, Load, TinyModel
from running import (
    Llama,
    Logits,
    Own,
    Reference,
    controller_of,
    count_scores,
    greedy_logits,
    hooks_off,
    random_prompt,
)
from watchdog_trials import set_trials

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies import policy_names
from moegguf.controller.predictors import PREDICTORS, UNTRAINED
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.controller.strategies import STRATEGIES
from moegguf.controller.watchdog import Watchdog
from moegguf.engine.recording import TraceOptions
from moegguf.errors import CallbackError, OptionError
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling
from moegguf.gguf.experts import read_layout
from moegguf.gguf.routers import read_routers
from moegguf.native.events import Float32s
from moegguf.native.store import ListenOptions, StoreOptions, native_policies
from moegguf.trace.analysis import TraceAnalysis
from moegguf.trace.format import read
from predictors.study.controls import FreshGate, probabilities
from predictors.study.judge import Judge

TIGHT: dict[str, Any] = {"expert_cache": "30%", "n_ubatch": 4}
N_PROMPT, N_NEW = 24, 16
ALL_TINY = ("tiny-qwen2moe", "tiny-qwen3moe", "tiny-mixtral", "tiny-deepseek2")
PRESETS = ("tiny-qwen2moe", "tiny-deepseek2")
NATIVE = native_policies().keys()
EAGER = PrefetchOptions(budget_bytes=1 << 30, least_probability=0.01, watchdog=False)


def logits_of(llm: Llama) -> Logits:
    return greedy_logits(llm, random_prompt(llm, N_PROMPT), N_NEW)


@pytest.fixture
def expected(tiny: TinyModel, reference: Reference) -> Callable[..., Logits]:
    return lambda preset="tiny-qwen2moe": reference(
        tiny(preset), n_ubatch=4, n_prompt=N_PROMPT, n_new=N_NEW
    )


@pytest.mark.parametrize(
    ("policy", "preset"),
    # `static` needs a file.
    [
        (name, PRESETS[n % 2])
        for n, name in enumerate(policy_names())
        if name != "static"
    ],
)
def test_every_policy_decides_and_changes_no_bit(
    own: Own, load: Load, expected: Callable[..., Logits], policy: str, preset: str
) -> None:
    llm = load(own(preset), policy=policy, lockstep=True, **TIGHT)
    assert llm.plan.n_ubatch == 4
    if policy in NATIVE:
        assert np.array_equal(logits_of(llm), expected(preset))
        assert llm.stats().evictions > 0
        figures, predictor = llm.decisions(), "eamc" if policy == "sparsity" else "none"
        assert [figures[name] for name in ("policy", "predictor", "prefetch")] == [
            policy,
            predictor,
            "off",
        ]
        return
    given = count_scores(llm)
    assert np.array_equal(logits_of(llm), expected(preset))
    assert llm.stats().evictions > 0
    assert controller_of(llm).policy is not None
    # The scores for the last event may not have been set yet.
    assert abs(sum(given) - N_NEW * len(llm.layout.layers)) <= 1
    assert llm.decisions()["policy"] == policy


@pytest.mark.parametrize(
    ("predictor", "preset"),
    [(name, PRESETS[n % 2]) for n, name in enumerate(UNTRAINED)],
)
def test_every_predictor_predicts_and_changes_no_bit(
    own: Own, load: Load, expected: Callable[..., Logits], predictor: str, preset: str
) -> None:
    llm = load(
        own(preset), policy="next-use", predictor=predictor, prefetch=EAGER, lockstep=True,
        store=StoreOptions(sweep=False), **TIGHT,
    )  # fmt: skip
    assert np.array_equal(logits_of(llm), expected(preset))
    assert llm.stats().evictions > 0
    figures = llm.decisions()
    assert (figures["policy"], figures["predictor"]) == ("next-use", predictor)
    # Eamc compares a request with earlier requests, and the first request has none.
    predicts = predictor not in ("none", "eamc")
    assert (llm.stats().prefetch_started > 0) == predicts


class LastLayersFirst:
    """A user's policy with only the method `scores`. Experts of the last layers are
    evicted first."""

    def __init__(self) -> None:
        self.calls = 0

    def scores(self, history: History, forecast: Forecast) -> Float32s:
        self.calls += 1
        return -np.arange(history.shape.n_layer, dtype=np.float32)[:, None].repeat(
            history.shape.n_expert, 1
        )


def test_a_policy_object_of_the_user_decides_and_changes_no_bit(
    own: Own, load: Load, expected: Callable[..., Logits]
) -> None:
    policy = LastLayersFirst()
    llm = load(own(), policy=policy, lockstep=True, **TIGHT)
    given = count_scores(llm)
    assert np.array_equal(logits_of(llm), expected())
    assert policy.calls >= N_NEW * 4
    assert sum(given) >= N_NEW * 4 - 1
    assert llm.decisions()["policy"] == "LastLayersFirst"


CALLS: dict[str, Callable[[Llama], object]] = {
    "generate": lambda llm: next(llm.generate([1, 2])),
    "completion": lambda llm: llm("x", max_tokens=1),
    "eval": lambda llm: llm.eval([1]),
    "embed": lambda llm: llm.embed("x"),
    "shift": lambda llm: llm.context.shift(0, 1),
    "budget": lambda llm: llm.set_budget(expert_cache="30%"),
    "close": lambda llm: llm.close(),
}


class CallsItsModel:
    """A policy whose method `scores` calls the model that uses the policy. `errors`
    collects the exceptions."""

    def __init__(self, call: Callable[[Llama], object]) -> None:
        self.call, self.llm, self.errors = call, None, list[Exception]()

    def scores(self, history: History, forecast: Forecast) -> None:
        if self.llm is not None:
            try:
                self.call(self.llm)
            except Exception as error:
                self.errors.append(error)
                raise


@pytest.mark.parametrize("lockstep", [True, False], ids=["lockstep", "free"])
@pytest.mark.parametrize("call", CALLS)
def test_a_policy_calling_its_model_fails_and_lru_takes_over(
    own: Own, load: Load, expected: Callable[..., Logits], call: str, lockstep: bool
) -> None:
    policy = CallsItsModel(CALLS[call])
    policy.llm = llm = load(own(), policy=policy, lockstep=lockstep, **TIGHT)
    # The policy has received all events once the model is closed.
    with (
        pytest.warns(
            UserWarning,
            match="CallsItsModel raised CallbackError: a policy, .*; continuing with LRU",
        ),
        llm,
    ):
        logits = logits_of(llm)
    assert np.array_equal(logits, expected())
    assert [type(error) for error in policy.errors] == [CallbackError]


def test_a_policy_calling_its_engine_fails_and_answers_continue(own: Own) -> None:
    engines = list[Engine]()
    policy = CallsItsModel(
        lambda _: engines[0].generate([[1, 2]], Sampling(max_tokens=1))
    )
    with Engine(
        own(), 2, policy=policy, n_ctx=128, n_threads=1, lockstep=True, **TIGHT
    ) as engine:
        engines.append(engine)
        policy.llm = engine.llm
        with pytest.warns(UserWarning, match="CallsItsModel raised CallbackError"):
            answers = engine.generate([[5, 6, 7]], Sampling(max_tokens=4))
    assert answers[0].error is None
    assert [type(error) for error in policy.errors] == [CallbackError]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"policy": 7}, "must be a name or an object with a method scores"),
        (
            {"policy": "lfru"},
            f"no policy 'lfru'; known policies: auto, {', '.join(policy_names())}",
        ),
        ({"predictor": 7}, "must be a name, a Predictor or None"),
        (
            {"predictor": "crystal-ball"},
            f"no predictor 'crystal-ball'; known predictors: {', '.join(PREDICTORS)}",
        ),
        ({"predictor": "mlp"}, "has to be trained for this model first"),
    ],
    ids=str,
)
def test_wrong_policies_and_predictors_are_refused_before_the_load(
    own: Own, options: dict[str, Any], rule: str
) -> None:
    shares: list[float] = []
    with pytest.raises(OptionError, match=rule):
        Llama(own(), verbose=False, progress=shares.append, **options, **TIGHT)
    assert shares == []


def test_a_wrong_policy_name_is_refused_with_hooks_off(own: Own) -> None:
    with hooks_off(), pytest.raises(OptionError, match="no policy 'lfru'"):
        Llama(own(), verbose=False, policy="lfru")


def test_a_policy_for_a_missing_tier_warns(own: Own, load: Load) -> None:
    with pytest.warns(
        UserWarning,
        match="policy='vram=slru' has no effect, because experts are only in RAM",
    ):
        assert load(own(), policy="vram=slru").decisions()["policy"] == "next-use"
    assert (
        load(own(), policy="vram=slru,ram=lfu-decay").decisions()["policy"]
        == "lfu-decay"
    )


def test_the_controller_of_a_resident_model_is_idle_until_a_shrink(
    own: Own, load: Load, expected: Callable[..., Logits]
) -> None:
    llm = load(own(), policy="lfu", expert_cache="100%", n_ubatch=4)
    given = count_scores(llm)
    assert np.array_equal(logits_of(llm), expected())
    assert controller_of(llm).n_events == 0
    assert given == []
    llm.set_budget(expert_cache="40%")
    assert np.array_equal(logits_of(llm), expected())
    assert controller_of(llm).n_events > 0
    assert sum(given) > 0
    assert llm.stats().evictions > 0


class LiveJudge(Judge):
    """A judge of predictions that can be added to a running model as a listener."""

    listen_options = ListenOptions(inputs=True, lockstep=True)


@pytest.mark.parametrize("preset", ALL_TINY)
@pytest.mark.parametrize("expert_cache", ["100%", "40%"])
def test_fresh_gate_predicts_every_expert(
    own: Own, load: Load, preset: str, expert_cache: str
) -> None:
    llm = load(own(preset), lockstep=True, expert_cache=expert_cache)
    judge = LiveJudge(
        FreshGate(MoeShape.of(llm.layout), Artifacts(llm.layout).routers())
    )
    llm.session.listeners.add(judge)
    logits_of(llm)
    llm.close()  # delivers the last events
    fresh = judge.table().fresh
    assert fresh is not None and (
        fresh.accuracy,
        fresh.top_k_hit,
        fresh.at_least_one,
    ) == (1, 1, 1)
    assert fresh.due == N_NEW * len(llm.layout.layers)


def test_unprofitable_prefetching_pauses_and_is_tried_again(
    own: Own, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own("tiny-qwen2moe")
    monkeypatch.setattr(Watchdog, "_decide", _never_pays)
    set_trials(monkeypatch, off_tokens=2, on_tokens=2, periods=1, warm_tokens=0)
    llm = load(
        path,
        policy="next-use",
        predictor="previous-token",
        prefetch=True,
        n_ctx=512,
        expert_cache="30%",
    )
    controller, tokens = controller_of(llm), random_prompt(llm, 40)
    controller.watchdog = Watchdog()
    plain = load(path, policy="lru", n_ctx=512, expert_cache="30%")
    predicted = []
    for token in tokens:
        llm.eval([token])
        plain.eval([token])
        assert np.array_equal(
            llm.scores[llm.n_tokens - 1], plain.scores[plain.n_tokens - 1]
        )
        predicted.append(llm.session.store.counters()["forecast_picks"])
    idle = [before == after for before, after in itertools.pairwise(predicted)]
    assert any(idle), "it paused, and predicted nothing"
    assert not all(idle[idle.index(True) :]), "it ran another trial"
    assert llm.decisions()["prefetch"] in ("measuring", "paused", "on")


def _never_pays(watchdog: Watchdog) -> None:
    watchdog._periods_ns = {False: [], True: []}
    watchdog.on, watchdog._pause_tokens = False, 10


class SlowPredictor(Predictor):
    """A predictor whose predict() takes 0.15 s and predicts nothing."""

    name: ClassVar[str] = "slow"
    calls = 0

    def predict(self, il: int, distance: int) -> Float32s | None:
        self.calls += 1
        time.sleep(0.15)
        return None


def test_close_does_not_wait_for_queued_events_of_a_slow_predictor(
    own: Own, load: Load, expected: Callable[..., Logits], tmp_path: Path
) -> None:
    slow = SlowPredictor(MoeShape.of(read_layout(own())), reach=9)
    llm = load(
        own(),
        policy="lfu",
        predictor=slow,
        prefetch=PrefetchOptions(window=1),
        trace=tmp_path / "t",
        **TIGHT,
    )
    assert np.array_equal(logits_of(llm), expected())
    assert 0 < slow.calls < 40  # a fast predictor is called at least 88 times
    begin = time.monotonic()
    llm.close()
    assert time.monotonic() - begin < 3


QUARTER: dict[str, Any] = {"expert_cache": "25%", "n_ubatch": 4, "n_ctx": 128}
PAPERS = ("moe-infinity", "promoe", "expertflow", "duoserve")


def run(llm: Llama) -> Logits:
    """Evaluates two prompts, each followed by some greedy tokens.

    Returns the second prompt's logits; a predictor may use the first prompt.
    """
    greedy_logits(llm, random_prompt(llm, 4, seed=1), 3)
    return greedy_logits(llm, random_prompt(llm, 12), 10)


@pytest.fixture(scope="module")
def resident() -> Logits:
    # The last three options are the values that the fixture `load` sets.
    with Llama(
        DEMO,
        expert_cache="100%",
        n_ubatch=4,
        n_ctx=128,
        n_threads=1,
        verbose=False,
        logits_all=True,
    ) as llm:
        return run(llm)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_decides_and_changes_no_bit(
    load: Load,
    resident: Logits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    llm, strategy = (
        load(DEMO, strategy=name, lockstep=True, **QUARTER),
        STRATEGIES[name],
    )
    assert np.array_equal(run(llm), resident)
    decided, store = llm.decisions(), llm.session.store  # type: ignore[union-attr]
    assert {
        switch: getattr(store.options, switch) for switch in strategy.switches
    } == strategy.switches
    assert llm.stats().evictions > 0
    if name == "moegguf":
        # Chosen by the demo's measured.json.
        assert (decided["policy"], decided["prefetch"]) == ("next-use", "off")
        return
    assert (decided["policy"], decided["predictor"]) == (
        strategy.policy,
        strategy.predictor,
    )
    assert decided["prefetch"] == ("on" if name in PAPERS else "off")
    assert (llm.stats().prefetch_started > 0) == (name in PAPERS)
    if name in PAPERS:
        assert decided["routing_events"] > 0 and decided["us_per_event"] > 0
        assert controller_of(llm).native, "each predicts in the store"


def test_moegguf_strategy_applies_unless_the_caller_names_a_strategy(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_STRATEGY", "none")
    assert not load(DEMO, **QUARTER).session.store.options.overlap  # type: ignore[union-attr]
    assert load(DEMO, strategy="lru", **QUARTER).session.store.options.overlap  # type: ignore[union-attr]
    monkeypatch.setenv("MOEGGUF_STRATEGY", "nine")
    with pytest.raises(OptionError, match="no strategy 'nine'"):
        load(DEMO, **QUARTER)


@pytest.mark.parametrize("name", ["none", *PAPERS])
def test_counters_of_a_simulated_strategy_equal_the_live_ones(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    # A simulated sweep reads at different times.
    options = replace(STRATEGIES[name].store, sweep=False)
    llm = load(
        DEMO, strategy=name, prefetch=False, store=options, lockstep=True,
        trace=TraceOptions(tmp_path / "t", inputs=True), **QUARTER,
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
        assert row.simulated.counters[counted] == trace.header.settings[counted], (
            counted
        )


@pytest.mark.parametrize("preset", ["tiny-gpt-oss", "tiny-deepseek2", "tiny-gemma4"])
def test_routers_choose_llama_cpps_experts_from_recorded_inputs(
    load: Load, tiny: TinyModel, tmp_path: Path, preset: str
) -> None:
    path = tiny(preset)
    with load(path, trace=TraceOptions(tmp_path / "t", inputs=True)) as llm:
        llm.eval(random_prompt(llm, 40))
    trace, routers = read(tmp_path / "t"), read_routers(read_layout(path))
    assert trace.inputs is not None
    chosen, expected = list[set[int]](), list[set[int]]()
    for il, inputs, ids in zip(
        routers.routers, trace.inputs, trace.expert_ids, strict=True
    ):
        for token, experts in zip(inputs, ids, strict=True):
            scores = probabilities(routers, il, token.astype(np.float32))
            chosen.append(set(scores.argsort()[-len(experts) :].tolist()))
            expected.append(set(experts.tolist()))
    # The last layer may be computed only for the last token.
    known = [pair for pair in zip(chosen, expected, strict=True) if -1 not in pair[1]]
    same = sum(found == wanted for found, wanted in known)
    # Rounding of the recorded inputs may exchange two experts with nearly equal scores.
    assert same >= 0.98 * len(known) > 100
