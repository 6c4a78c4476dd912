"""Tests the artifacts of a model on disk: saving, loading, damaged files, and the warm
start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import (
    Llama,
    Load,
    Logits,
    Own,
    Reference,
    TinyModel,
    controller_of,
    greedy_logits,
    random_prompt,
)
from waiting import until

from moegguf.controller.artifacts import MEASURED, Artifacts
from moegguf.controller.collection import Eamc
from moegguf.controller.hit_rates import Measured, write_measured
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.shape import MoeShape
from moegguf.engine.live_controller import CHECKPOINT_REQUESTS
from moegguf.engine.warm_start import HALF_LIFE_PASSES, most_used
from moegguf.errors import AllocationError, MoeggufError
from moegguf.gguf.experts import read_layout
from moegguf.native.store import Store

pytestmark = pytest.mark.usefixtures("user")

TIGHT: dict[str, Any] = {"expert_cache": "40%", "n_ubatch": 4, "lockstep": True}
N_PROMPT, N_NEW = 12, 6


@pytest.fixture
def path(own: Own) -> Path:
    """Returns the path of a tiny model in the test's own folder."""
    return own()


@pytest.fixture
def beside(path: Path) -> Path:
    folder = path.with_name("tiny-qwen2moe.gguf.moegguf")
    folder.mkdir()
    return folder


@pytest.fixture
def expected(tiny: TinyModel, reference: Reference) -> Logits:
    return reference(tiny(), n_ubatch=4, n_prompt=N_PROMPT, n_new=N_NEW)


def logits_of(llm: Llama, seed: int = 0) -> Logits:
    return greedy_logits(llm, random_prompt(llm, N_PROMPT, seed=seed), N_NEW)


def entries_of(llm: Llama) -> Eamc:
    predictor = controller_of(llm).predictor
    assert isinstance(predictor, EamcPredictor)
    return predictor.eamc


LEARNERS = [
    {"predictor": "eamc"},
    {"policy": "sparsity"},
    {"policy": "sparsity", "predictor": "eamc"},
]


@pytest.mark.parametrize("learner", LEARNERS, ids=str)
def test_a_stored_eamc_collection_grows_over_runs(
    path: Path, load: Load, expected: Logits, learner: dict[str, str]
) -> None:
    kept = path.with_name("tiny-qwen2moe.gguf.moegguf") / "eamc.safetensors"
    for run in range(2):
        llm = load(path, **learner, **TIGHT)
        assert entries_of(llm).n_entries == 3 * run
        for request in range(3):
            greedy_logits(
                llm, random_prompt(llm, N_PROMPT, seed=10 * run + request), N_NEW
            )
        llm.close()
        assert kept.is_file()
    llm = load(path, **learner, **TIGHT)
    eamc = entries_of(llm)
    assert eamc.n_entries == 6
    assert np.array_equal(logits_of(llm), expected)
    whole = N_NEW * len(llm.layout.layers) * llm.layout.n_expert_used
    # The last entry of each run may lack its last events, because the model was closed.
    assert sorted(eamc.state.sum(axis=(1, 2)).tolist())[2:] == [whole] * 4


def test_an_eamc_collection_is_saved_during_a_run(path: Path, load: Load) -> None:
    kept = path.with_name("tiny-qwen2moe.gguf.moegguf") / "eamc.safetensors"
    llm = load(path, predictor="eamc", **TIGHT)
    # A request ends when the next one begins.
    for request in range(CHECKPOINT_REQUESTS + 1):
        assert not kept.exists()
        greedy_logits(llm, random_prompt(llm, 5, seed=request), 2)
    until(kept.is_file)
    saved = Artifacts(read_layout(path)).collection(MoeShape.of(read_layout(path)))
    assert saved is not None and saved.n_entries == CHECKPOINT_REQUESTS


def test_a_load_without_requests_writes_no_file(path: Path, load: Load) -> None:
    load(path, predictor="eamc", **TIGHT).close()
    assert [found.name for found in path.parent.iterdir()] == ["tiny-qwen2moe.gguf"]


@pytest.mark.parametrize(
    ("name", "options", "policy"),
    [
        ("popularity.safetensors", {"policy": "static"}, "lru"),
        (MEASURED, {}, "next-use"),
        ("popularity.safetensors", {"policy": "lfu", "predictor": "popularity"}, "lfu"),
    ],
)
def test_damaged_artifacts_are_ignored_after_one_warning(
    path: Path,
    beside: Path,
    load: Load,
    expected: Logits,
    name: str,
    options: dict[str, str],
    policy: str,
) -> None:
    (beside / name).write_text("{damaged")
    with pytest.warns(UserWarning, match=name) as caught:
        llm = load(path, **options, **TIGHT)
    assert len(caught) == 1
    assert np.array_equal(logits_of(llm), expected)
    assert llm.decisions()["policy"] == policy


def measure(path: Path, policy: str, predictor: str = "none") -> None:
    rates = {"lru": {0.4: 0.5}, policy: {0.4: 0.6}}
    found = Measured(
        Artifacts(read_layout(path)).fingerprint, rates, {policy: predictor}
    )
    write_measured(path.with_name("tiny-qwen2moe.gguf.moegguf") / MEASURED, found)


def test_auto_chooses_the_measured_policy_and_predictor(
    path: Path, beside: Path, load: Load, expected: Logits
) -> None:
    found = load(path, **TIGHT).decisions()  # nothing was measured yet
    assert (found["policy"], found["predictor"], found["prefetch"]) == (
        "next-use",
        "skip",
        "measuring",
    )
    measure(path, "next-use", "skip")
    llm = load(path, **TIGHT)
    assert np.array_equal(logits_of(llm), expected)
    found = llm.decisions()
    assert (found["policy"], found["predictor"], found["prefetch"]) == (
        "next-use",
        "skip",
        "off",
    )


@pytest.mark.parametrize(
    ("policy", "predictor"),
    [("static", "none"), ("next-use", "mlp"), ("yesterdays", "none"), ("lfu", "gone")],
)
def test_auto_falls_back_to_lru_with_a_warning_for_an_unusable_choice(
    path: Path, beside: Path, load: Load, expected: Logits, policy: str, predictor: str
) -> None:
    measure(path, policy, predictor)
    with pytest.warns(UserWarning, match="[Cc]ontinuing with LRU") as caught:
        llm = load(path, **TIGHT)
    assert len(caught) == 1
    assert np.array_equal(logits_of(llm), expected)
    assert llm.decisions()["policy"] == "lru"


FAILURES = [
    PermissionError(13, "Permission denied"),
    ValueError("truncated"),
    AllocationError("no thread"),
]


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Makes predictions fail with `error`. The store's set_predictor() raises an
    AllocationError; any other error is raised while routers are read."""

    def fail(*given: Any) -> Any:
        if len(given) == 1 or given[1] is not None:
            raise error

    where = (
        (Store, "set_predictor")
        if isinstance(error, AllocationError)
        else (Artifacts, "routers")
    )
    monkeypatch.setattr(*where, fail)


@pytest.mark.parametrize("error", FAILURES, ids=repr)
@pytest.mark.parametrize("policy", ["auto", "slru"])
def test_failing_predictions_by_default_warn_and_load(
    path: Path,
    beside: Path,
    load: Load,
    expected: Logits,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    error: Exception,
) -> None:
    if policy != "auto":
        measure(path, policy, "skip")
    broken(monkeypatch, error)
    with pytest.warns(
        UserWarning, match=f"{error.args[-1]}.* Continuing with"
    ) as caught:
        llm = load(path, policy=policy, **TIGHT)
    assert len(caught) == 1
    assert np.array_equal(logits_of(llm), expected)
    found = llm.decisions()
    assert (found["policy"], found["predictor"]) == (
        "next-use" if policy == "auto" else policy,
        "none",
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("named", [{"predictor": "skip"}, {"prefetch": True}], ids=str)
@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_failing_predictions_by_option_raise(
    path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any], error: Exception
) -> None:
    broken(monkeypatch, error)
    with pytest.raises(MoeggufError, match=str(error.args[-1])):
        Llama(path, verbose=False, **named, **TIGHT)


WARM: dict[str, Any] = {"expert_cache": "40%", "n_ubatch": 4, "warm_start": True}


def saved(path: Path) -> Any:
    layout = read_layout(path)
    return Artifacts(layout).uses(MoeShape.of(layout))


def test_warm_start_loads_the_most_used_experts(
    path: Path, load: Load, expected: Logits
) -> None:
    llm = load(path, **WARM)
    assert llm.stats().prefetch_started == 0
    assert np.array_equal(logits_of(llm), expected)
    uses, _ = llm.session.store.activity()
    llm.close()
    assert np.array_equal(saved(path), uses)
    llm = load(path, **WARM)
    llm.session.store.drain(10)
    there, n_slots = llm.session.store.residency() == 2, llm.stats().n_slots
    il, experts = most_used(saved(path), n_slots)
    assert il.size == n_slots
    assert there[il, experts].all()
    assert np.array_equal(logits_of(llm), expected)


def test_saved_uses_are_a_sum_in_which_earlier_runs_decay(
    path: Path, load: Load
) -> None:
    total = np.float32(0)
    for run in range(2):
        llm = load(path, **WARM)
        logits_of(llm, seed=run)
        uses, passes = (
            llm.session.store.activity()[0],
            llm.session.store.counters()["passes"],
        )
        total = uses + total * np.float32(0.5 ** (passes / HALF_LIFE_PASSES))
        llm.close()
        assert np.allclose(saved(path), total)


def test_uses_are_not_saved_without_warm_start_or_by_resident_lockstep_or_unused_loads(
    path: Path, load: Load, user: Path
) -> None:
    for options in (
        {"warm_start": False},
        {"expert_cache": "100%"},
        {"lockstep": True},
    ):
        llm = load(path, **{**WARM, **options})
        logits_of(llm)
        llm.close()
    load(path, **WARM).close()
    assert not list(path.parent.rglob("uses.safetensors"))
    assert not user.exists() or not list(user.rglob("uses.safetensors"))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64])
def test_damaged_uses_warn_and_are_replaced(
    path: Path, beside: Path, load: Load, content: bytes
) -> None:
    (beside / "uses.safetensors").write_bytes(content)
    with pytest.warns(UserWarning, match="continuing without it"):
        llm = load(path, **WARM)
    logits_of(llm)
    with pytest.warns(UserWarning, match="continuing without it"):
        llm.close()
    assert saved(path).any()
