"""Tests that a recorded trace contains the run's requests, and that its simulation
yields equal counters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eager import Eager
from rpc_device import in_child
from running import (
    N_NEW,
    N_PROMPT,
    Llama,
    Load,
    Own,
    Reference,
    TinyModel,
    greedy_logits,
    random_prompt,
    share_for,
)

from moegguf.bench.record import RecordOptions, record
from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies import Policy, make_policy
from moegguf.controller.predictors import make_predictor
from moegguf.controller.predictors.base import NoPrediction
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights, save
from moegguf.engine.recording import TraceOptions
from moegguf.errors import GenerationCancelled, TraceError
from moegguf.generate import drafting
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling
from moegguf.gguf.experts import read_layout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.native.store import DeviceSlots, StoreOptions
from moegguf.quantities import Link
from moegguf.testing.library import arm_fault
from moegguf.trace.format import read
from moegguf.trace.prompts import Prompt
from moegguf.trace.recorder import Recorder
from moegguf.trace.simulate import (
    RAM,
    STAGING,
    VRAM,
    SimOptions,
    SimResult,
    Simulation,
    TierSpan,
)
from moegguf.trace.trace import Trace

COUNTED = ("lookups", "misses", "evictions")
PAIRS = [
    ("lru", "none"), ("lfu", "none"), ("lfu-decay", "none"), ("static", "none"), ("locality", "none"),
    ("locality", "previous-token"), ("locality", "eamc"), ("sparsity", "none"), ("next-use", "none"),
    ("next-use", "eamc"), ("next-use", "skip"),
]  # fmt: skip
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Successive cases alternate between these presets.
PRESETS = ("tiny-qwen2moe", "tiny-deepseek2")


@pytest.fixture
def path(own: Own) -> Callable[[str], Path]:
    """Returns a function that links a model into the test's own folder and saves random
    popularity for it."""

    def link(preset: str) -> Path:
        path = own(preset)
        artifacts = Artifacts(read_layout(path))
        shape = MoeShape.of(read_layout(path))
        table = np.random.default_rng(0).random(
            (len(shape.layers), shape.n_expert), np.float32
        )
        file = artifacts.writable_folder() / "popularity.safetensors"
        save(
            file,
            "popularity",
            artifacts.fingerprint,
            shape,
            Weights({"popularity": table}),
        )
        return path

    return link


def requests(llm: Llama) -> None:
    """Completes prompts of 30, 1 and 9 tokens. Then evaluates 17 tokens in an empty
    context, 12 one by one, and 5."""
    for n, n_prompt in enumerate((30, 1, 9)):
        llm.create_completion(
            random_prompt(llm, n_prompt, seed=n), max_tokens=24, temperature=0.8, seed=n
        )
    llm.reset()
    llm.eval(random_prompt(llm, 17, seed=7))
    for token in random_prompt(llm, 12, seed=8):
        llm.eval([token])
    llm.eval(random_prompt(llm, 5, seed=9))


def live(
    load: Load,
    path: Path,
    out: Path,
    policy: str,
    predictor: str,
    n_slots: int,
    **options: Any,
) -> Trace:
    """Loads a model and records `requests` in `out`. Returns the trace, whose header
    contains the run's counters."""
    llm = load(
        path, policy=policy, predictor=predictor, expert_cache=share_for(path, n_slots), n_ubatch=8,
        store=StoreOptions(sweep=False), trace=TraceOptions(out, inputs=predictor == "skip"),
        **{"logits_all": False, "lockstep": True, **options},
    )  # fmt: skip
    assert llm.plan.n_slots == n_slots
    requests(llm)
    llm.close()
    return read(out)


def simulated(
    trace: Trace, policy: Policy | str, predictor: str, path: Path, n_slots: int
) -> SimResult:
    """Simulates the recorded run without loading the model."""
    artifacts = Artifacts(read_layout(path))
    made = (
        make_policy(policy, trace.shape, artifacts)
        if isinstance(policy, str)
        else policy
    )
    ahead = make_predictor(predictor, trace.shape, artifacts)
    return Simulation(
        trace, made, ahead, n_slots, SimOptions(store=StoreOptions(sweep=False))
    ).run()


def assert_equal(trace: Trace, result: SimResult) -> None:
    was = trace.header.settings
    for name in COUNTED:
        assert result.counters[name] == was[name], name
    hits = result.counters["hits_ready"] + result.counters["hits_late"]
    assert hits == int(was["hits_ready"]) + int(was["hits_late"])
    assert result.counters["evictions"] > 0


@pytest.mark.parametrize(
    ("policy", "predictor", "preset"),
    [(*pair, PRESETS[n % 2]) for n, pair in enumerate(PAIRS)],
)
def test_simulated_counters_equal_the_counters_of_the_run(
    path: Callable[[str], Path],
    load: Load,
    tmp_path: Path,
    preset: str,
    policy: str,
    predictor: str,
) -> None:
    model = path(preset)
    trace = live(
        load,
        model,
        tmp_path / "t",
        policy,
        predictor,
        22,
        logits_all=policy == "lfu-decay",
    )
    # Removes the collection that the run saved, because the run began without it.
    (model.with_name(model.name + ".moegguf") / "eamc.safetensors").unlink(
        missing_ok=True
    )
    assert trace.header.settings["events_dropped"] == 0
    assert_equal(trace, simulated(trace, policy, predictor, model, 22))


@pytest.mark.parametrize(
    ("policy", "predictor"),
    [("POLICY", "none"), ("locality", "PREDICTOR"), ("POLICY", "PREDICTOR")],
)
def test_simulated_counters_of_own_classes_equal_the_live_counters(
    path: Callable[[str], Path], load: Load, tmp_path: Path, policy: str, predictor: str
) -> None:
    own = {
        "POLICY": f"{EXAMPLES / 'policy.py'}:MostUsed",
        "PREDICTOR": f"{EXAMPLES / 'predictor.py'}:Followers",
    }
    model = path("tiny-qwen2moe")
    names = own.get(policy, policy), own.get(predictor, predictor)
    trace = live(load, model, tmp_path / "t", *names, 22)
    assert trace.header.settings["events_dropped"] == 0
    assert_equal(trace, simulated(trace, *names, model, 22))
    plain = simulated(trace, "lru", "none", model, 22)
    assert plain.counters["misses"] != trace.header.settings["misses"], "they decide"


def test_simulated_counters_with_drafts_equal_the_live_counters(
    path: Callable[[str], Path],
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "DraftGate", Eager)
    model, out = path("tiny-qwen2moe"), tmp_path / "t"
    options: dict[str, Any] = {
        "lockstep": True,
        "store": StoreOptions(sweep=False),
        "n_ctx": 512,
        "n_ubatch": 8,
    }
    cache = share_for(model, 22)
    with load(
        model,
        policy="lru",
        expert_cache=cache,
        trace=out,
        draft="ngram",
        flash_attn=None,
        **options,
    ) as llm:
        with Engine(llm) as engine:
            for text in ([1, 2, 3, 4, 5, 6] * 9, [7, 8, 9] * 12):
                engine.generate(text, Sampling(temperature=0.0, max_tokens=60))
        drafted = llm.stats()
    assert drafted.drafted_tokens > drafted.accepted_tokens
    trace = read(out)
    assert trace.n_tokens == drafted.tokens, "with tokens that were refused"
    assert_equal(trace, simulated(trace, "lru", "none", model, 22))


@pytest.mark.filterwarnings("ignore:.*the hit rate will be low")
@pytest.mark.parametrize(
    ("policy", "n_slots"),
    [
        ("lru", 16),
        ("lru", 22),
        ("lru", 40),
        *(("next-use", n) for n in (8, 16, 22, 40, 60)),
    ],
)
def test_native_policies_replay_exactly_without_lockstep_at_any_budget(
    path: Callable[[str], Path], load: Load, tmp_path: Path, policy: str, n_slots: int
) -> None:
    model = path("tiny-qwen2moe")
    trace = live(load, model, tmp_path / "t", policy, "none", n_slots, lockstep=False)
    assert trace.header.settings["events_dropped"] == 0
    assert_equal(trace, simulated(trace, policy, "none", model, n_slots))


def live_on_a_device(
    path: Path, out: Path, policy: str, n_slots: tuple[int, int], staging: int
) -> dict[str, TierSpan]:
    """Records `requests` on the device RPC0. Returns the counters of each tier after
    the last pass."""
    shares = dict(
        zip(
            ("vram_cache", "expert_cache"),
            (share_for(path, n) for n in n_slots),
            strict=True,
        )
    )
    store = StoreOptions(sweep=False, device="RPC0", staging=staging)
    with Llama(
        path, policy=policy, placement="slots", n_ubatch=8, n_ctx=256, lockstep=True, verbose=False, store=store,
        trace=TraceOptions(out), **shares,
    ) as llm:  # fmt: skip
        assert [tier.n_slots for tier in llm.stats().tiers] == list(n_slots)
        requests(llm)
        llm.session.store.drain(10)
        figures = llm.session.tiers() | (
            {STAGING: llm.session.store.staging()} if staging else {}
        )
    return {name: TierSpan.of(counted) for name, counted in figures.items()}


def compared(tiers: Mapping[str, TierSpan]) -> dict[tuple[str, str], int]:
    """Returns the figures that must be equal in a live run and in its simulation.

    The evictions and bytes of staging tensors are left out, because they depend on the
    speed of copies. A copy that is no longer needed may or may not have begun.
    """
    figures = {
        name: (
            "lookups",
            "hits",
            *(() if name == STAGING else ("evictions", "bytes_in")),
        )
        for name in tiers
    }
    return {
        (name, figure): getattr(tiers[name], figure)
        for name in tiers
        for figure in figures[name]
    }


# The store itself assigns slots to a prompt's experts if it stages prompts. A
# listener's scores may arrive before or after this. The policy `lfu`, a listener in
# Python, is therefore tested without staging.
@pytest.mark.parametrize(
    ("vram", "ram", "n_slots", "staging"),
    [
        ("lru", "lru", (10, 30), 2), ("lru", "slru", (22, 12), 1), ("next-use", "lfu-decay", (9, 40), 2),
        ("next-use", "lru", (16, 20), 0), ("lfu", "slru", (22, 12), 0),
    ],
)  # fmt: skip
def test_simulated_counters_of_two_tiers_equal_the_live_counters(
    path: Callable[[str], Path],
    tmp_path: Path,
    vram: str,
    ram: str,
    n_slots: tuple[int, int],
    staging: int,
) -> None:
    model = path("tiny-qwen2moe")
    tiers = in_child(
        live_on_a_device,
        model,
        tmp_path / "t",
        f"vram={vram},ram={ram}",
        n_slots,
        staging,
    )
    trace = read(tmp_path / "t")
    assert trace.header.settings["events_dropped"] == 0
    link = Link(2e9, 2e-5)
    device = DeviceSlots(
        "GPU0",
        n_slots[0],
        trace.shape.layers,
        through_ram=True,
        staging=staging,
        link=link,
    )
    policy, predictor = (
        make_policy(vram, trace.shape, Artifacts(read_layout(model))),
        NoPrediction(trace.shape),
    )
    how = StoreOptions(sweep=False)
    options = SimOptions(
        store=how, link_bytes_per_s=1e9, n_ram_slots=n_slots[1], ram_policy=ram
    )
    result = Simulation(trace, policy, predictor, [device], options).run()
    assert compared(tiers) == compared({name: result.tiers[name] for name in tiers})
    assert all(result.tiers[name].evictions > 0 for name in (VRAM, RAM))
    assert (STAGING in result.tiers) == (staging > 0)
    assert result.t_per_s is not None


TIGHT: dict[str, Any] = {"expert_cache": "40%", "n_ubatch": 4}


@pytest.mark.parametrize("logits_all", [True, False])
@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-deepseek2"])
def test_a_trace_has_the_requests_of_the_run(
    tiny: TinyModel, load: Load, tmp_path: Path, preset: str, logits_all: bool
) -> None:
    llm, tokens = (
        load(tiny(preset), trace=tmp_path / "t", logits_all=logits_all, **TIGHT),
        list[int](),
    )
    for n, label in enumerate(("prose", "code")):
        llm.recording.label(llm.context.requests.sequence + 1, label)
        llm.create_completion(
            random_prompt(llm, 10, seed=n), max_tokens=6, temperature=0
        )
        tokens += llm.input_ids[: llm.n_tokens].tolist()
    stats = llm.stats()
    llm.close()
    trace = read(tmp_path / "t")
    assert trace.sequences() == [0, 1] and trace.tokens.tolist() == tokens
    assert (trace.expert_ids[0] >= 0).all() and (trace.weights[0] > 0).all()
    assert trace.header.labels == {0: "prose", 1: "code"}
    assert trace.header.fingerprint == fingerprint(llm.layout)
    assert trace.shape.layers == tuple(layer.il for layer in llm.layout.layers)
    settings = trace.header.settings
    assert settings["n_slots"] == llm.plan.n_slots
    assert settings["events_dropped"] == 0
    for name in ("lookups", "hits_ready", "hits_late", "misses", "evictions"):
        assert settings[name] == getattr(stats, name)
    assert trace.pass_phase[0] == Phase.PREFILL
    assert (trace.decode().pass_phase == Phase.DECODE).all()
    assert (np.diff(trace.decode().pass_start) == 1).all()


def test_recording_changes_no_bit_and_includes_resident_models(
    tiny: TinyModel, load: Load, reference: Reference, tmp_path: Path
) -> None:
    llm = load(tiny(), trace=tmp_path / "t", expert_cache="100%", n_ubatch=512)
    assert np.array_equal(greedy_logits(llm), reference(tiny()))
    llm.close()
    assert read(tmp_path / "t").n_tokens == N_PROMPT + N_NEW
    assert llm.plan.resident


def test_a_failed_or_cancelled_pass_leaves_the_trace_readable(
    tiny: TinyModel, load: Load, tmp_path: Path
) -> None:
    llm = load(tiny(), trace=tmp_path / "t", **TIGHT)
    prompt = random_prompt(llm, 12)
    greedy_logits(llm, prompt, 2)
    arm_fault("read", 1, sticky=True)
    with pytest.raises(Exception, match="read"):
        greedy_logits(llm, random_prompt(llm, 12, seed=1), 2)
    arm_fault("read", 0)
    llm.cancel()
    with pytest.raises(GenerationCancelled):
        llm.eval([1])
    llm.resume()
    greedy_logits(llm, prompt, 3)
    llm.close()
    trace = read(tmp_path / "t")
    whole = trace.select([trace.sequences()[-1]])
    assert whole.n_tokens == 15
    assert (whole.expert_ids >= 0).all()
    for _ in trace.events():
        pass


def test_a_trace_error_at_close_is_raised_and_frees_the_model(
    tiny: TinyModel, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(tiny(), trace=tmp_path / "t", **TIGHT)
    session = llm.session
    greedy_logits(llm, random_prompt(llm, 5), 2)

    def full(*_: object, **__: object) -> None:
        raise TraceError("no space left")

    monkeypatch.setattr(Recorder, "close", full)
    with pytest.raises(TraceError, match="no space"):
        llm.close()
    assert session.store._handle is None
    llm.close()


@pytest.mark.parametrize(
    ("given", "kind"), [({}, "AUTO"), ({"flash_attn": False}, "DISABLED")]
)
def test_record_uses_the_flash_attention_default_of_run(
    tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    kind: str,
) -> None:
    opened = list[int]()

    class Opened(Llama):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            opened.append(self.context_params.flash_attn_type)

    monkeypatch.setattr("moegguf.bench.record.Llama", Opened)
    prompts = [Prompt("once", "prose")]
    record(
        tiny(),
        prompts,
        tmp_path / "t",
        RecordOptions(2),
        n_ctx=64,
        n_threads=1,
        verbose=False,
        **given,
    )
    assert opened == [getattr(library.llama_cpp(), f"LLAMA_FLASH_ATTN_TYPE_{kind}")]
