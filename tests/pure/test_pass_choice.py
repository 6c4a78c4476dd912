"""Tests the number of tokens of a pass that plans choose. The model files contain
headers but no weights."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from moegguf.controller.hit_rates import typical_hit_rate
from moegguf.engine.cost import (
    ANSWER_TOKENS,
    ModelBytes,
    Speeds,
    prompt_tokens_per_s,
    touched_bytes,
)
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import Machine, Memory
from moegguf.engine.plan import Plan
from moegguf.engine.run_hits import RunHits, read_prompt_token_s
from moegguf.engine.solver import make_plan
from moegguf.engine.stats import Stats
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.quantities import GIB
from tools.models import PRESETS, write_sparse_model

DISK_BYTES_PER_S = (0.2e9, 1e9, 2e9, 7e9)
MEMORY_BYTES_PER_S = (10e9, 40e9, 100e9)
PROMPT_GAINS = (3, 15)  # speed of prompts relative to answers
CHOICES = (256, 512, 1024, 2048, 4096)


@pytest.fixture(scope="module", params=["qwen3-30b-a3b", "deepseek-v4-flash"])
def layout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ExpertLayout:
    path = tmp_path_factory.mktemp("sparse") / "model.gguf"
    return read_layout(write_sparse_model(path, PRESETS[request.param], "q4_k_m"))


def plan(
    layout: ExpertLayout, share: float, n_ctx: int = 8192, n_ubatch: int | None = None
) -> Plan:
    """Returns the plan for the CPU with memory for about this share of the experts.
    `n_ubatch` is the given number of tokens of a pass; None: the plan chooses it."""
    free = int(layout.dense_bytes + 1.2 * GIB + share * layout.expert_bytes)
    spec = LoadSpec(n_ctx, n_batch=None, n_ubatch=n_ubatch, flash_attn=None)
    return make_plan(layout, Machine(Memory(2 * free, free, "x")), spec)


def seconds(
    layout: ExpertLayout,
    plan: Plan,
    disk_bytes_per_s: float,
    memory_bytes_per_s: float,
    gain: int,
) -> float:
    """Returns the predicted time of two requests, if nothing overlaps: the prompts have
    512 and 4,096 tokens."""
    token_bytes = layout.dense_bytes + layout.token_cycle_bytes
    found = 0.0
    for n_prompt in (512, 4096):
        n_tokens = min(plan.n_ubatch, n_prompt)
        touched = touched_bytes(layout, n_tokens)
        missing = 1 - plan.n_slots / plan.n_experts
        found += n_prompt / n_tokens * touched * missing / disk_bytes_per_s
        found += (
            n_prompt / n_tokens * (layout.dense_bytes + touched) / memory_bytes_per_s
        )
        found += (n_prompt / gain + ANSWER_TOKENS) * token_bytes / memory_bytes_per_s
        missed = layout.token_cycle_bytes * (1 - typical_hit_rate(layout, plan.n_slots))
        found += ANSWER_TOKENS * missed / disk_bytes_per_s
    return found


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.8])
def test_chosen_pass_is_almost_the_fastest_on_every_machine(
    layout: ExpertLayout, share: float
) -> None:
    """The choice uses no measured speed. So the choice must be good for slow and fast
    disks, memories and processors."""
    chosen = plan(layout, share)
    plans = [plan(layout, share, n_ubatch=n) for n in CHOICES]
    for speeds in product(DISK_BYTES_PER_S, MEMORY_BYTES_PER_S, PROMPT_GAINS):
        least = min(seconds(layout, other, *speeds) for other in plans)
        assert seconds(layout, chosen, *speeds) <= 1.05 * least, (
            f"{chosen.n_ubatch} tokens of a pass, speeds {speeds}"
        )


def test_short_contexts_have_shorter_passes(layout: ExpertLayout) -> None:
    n_ubatches = [plan(layout, 0.5, n_ctx).n_ubatch for n_ctx in (512, 1024, 8192)]
    assert n_ubatches == sorted(n_ubatches)
    assert n_ubatches[0] == 512 < n_ubatches[-1]


def test_estimated_prompt_speed_uses_the_shortest_time_of_a_long_prompt(
    layout: ExpertLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path))
    prompt = Stats(tokens=1000, passes=2, eval_s=12.0, stall_s=2.0)
    busy = replace(prompt, eval_s=30.0)
    short_passes = replace(prompt, passes=20, eval_s=3.0)
    for on_device, prompts, token_s in (
        (True, [prompt], 0.0),
        (False, [short_passes, Stats()], 0.0),
        (False, [busy, prompt], 0.01),
        (False, [busy], 0.01),
    ):
        hits = RunHits(layout, on_device)
        for found in prompts:
            hits.add_prompt(found)
        hits.save()
        assert read_prompt_token_s(layout) == token_s
    model = ModelBytes.of(layout)
    speeds = replace(Speeds.of_cpu(1e15, 1e15), cpu_prompt_token_s=0.01)
    assert prompt_tokens_per_s(
        layout, model, speeds, 512, 1.0, dense_on_cpu=True
    ) == pytest.approx(100)
