"""Tests `moegguf bench`, the measurements of tools/gpu_trial.py, and random models with
realistic routing. These random models' hit rates are close to published hit rates of
real models.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import typer
from rpc_device import on_servers
from running import Load, hooks_off
from typer.testing import CliRunner

from moegguf.bench.record import RecordOptions, record
from moegguf.bench.series import (
    KILLED,
    ProcessRunner,
    Spec,
    Test,
    limit_fault,
    make_systems,
)
from moegguf.bench.served import Server
from moegguf.cli.bench import bench
from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import NoPrediction
from moegguf.engine.recording import TraceOptions
from moegguf.errors import MoeggufError
from moegguf.gguf.experts import read_layout
from moegguf.quantities import MIB, Link
from moegguf.testing.link_device import add_link_device
from moegguf.trace.format import read
from moegguf.trace.prompts import Prompt
from moegguf.trace.simulate import Simulation, slots_of
from moegguf.trace.trace import Trace
from tools.gpu.case import Case
from tools.models import PRESETS, Shape, write_model
from tools.models.locality import LOCALITIES

Test.__test__ = False  # type: ignore[attr-defined]


def run(path: Path, *flags: str) -> list[dict[str, Any]]:
    app = typer.Typer()
    app.command()(bench)
    common = ["-m", str(path), "-p", "8", "-n", "4", "-r", "2", "-t", "1", "-o", "json"]
    done = CliRunner().invoke(app, [*common, *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_server_that_does_not_start_raises_an_error_with_its_last_messages() -> None:
    with pytest.raises(
        MoeggufError,
        match=r"connections: error: MOEGGUF_CONTEXT_LENGTH: 'x' .*; correct the cause",
    ):
        Server(Path("tiny.gguf"), "0", MOEGGUF_CONTEXT_LENGTH="x")


def test_bench_compares_moegguf_with_llama_cpp(tiny: Callable[..., Path]) -> None:
    rows = run(
        tiny("tiny-mix", "q4_0"),
        "--expert-cache",
        "40%",
        "--against",
        "mmap,resident",
        "--rounds",
        "1",
    )
    assert [(row["n_prompt"], row["system"]) for row in rows] == [
        (8, "moegguf"), (8, "mmap"), (8, "resident"), (0, "moegguf"), (0, "mmap"), (0, "resident"),
    ]  # fmt: skip
    for row in rows:
        assert row["error"] == ""
        assert row["avg_ts"] > 0
        assert row["peak_rss_bytes"] > 0
    decode = rows[3]
    assert 0 < decode["hit_rate"] < 1
    assert decode["mb_per_token"] > 0
    assert decode["link_gb_per_s"] > 0
    assert decode["evictions"] > 0
    for found in decode["against"].values():
        assert found["ratio"] > 0
        assert found["same_kernels"]
        assert found["same_tokens"]
        assert found["tokens_compared"] == 8


def test_bench_on_a_simulated_link_gives_the_same_tokens(
    tiny: Callable[..., Path],
) -> None:
    flags = (
        "--expert-cache",
        "40%",
        "--simulate-link",
        "1GB/s,35us",
        "--against",
        "resident",
        "--rounds",
        "1",
    )
    rows = run(tiny("tiny-mix", "q4_0"), *flags)
    assert {row["devices"] for row in rows} == {"simulated link 1GB/s,35us"}
    own = rows[2]
    assert (own["system"], own["n_gen"], own["error"]) == ("moegguf", 4, "")
    assert own["gpu_info"].startswith("the CPU behind a simulated link of ")
    assert own["against"]["resident"]["same_tokens"]
    assert own["evictions"] > 0


def test_bench_after_a_text_at_a_depth_gives_the_same_tokens(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words are enough")
    flags = (
        "--greedy",
        "-d",
        "4",
        "--expert-cache",
        "100%",
        "--against",
        "resident",
        "--rounds",
        "1",
    )
    rows = run(tiny("tiny-mix", "q4_0"), "--text", str(text), *flags)
    assert rows[0]["evictions"] == 0
    assert rows[2]["hit_rate"] == 1.0
    assert rows[2]["against"]["resident"]["same_tokens"]


def test_a_run_killed_by_its_memory_limit_is_a_result(
    tiny: Callable[..., Path],
) -> None:
    limit = 8 << 20  # even an idle Python process uses more
    if limit_fault(limit):
        return  # memory cannot be limited here, so nothing is tested
    spec = Spec(str(tiny()), (Test(4, 0),), loading={"expert_cache": "100%"})
    outcome = ProcessRunner(limit)(make_systems(spec, ["100%"], [])[0])
    assert outcome.error == KILLED
    assert outcome.cgroup_peak_bytes <= limit


def test_against_measures_named_policies_and_no_prefetch(
    tiny: Callable[..., Path],
) -> None:
    flags = (
        "-r",
        "1",
        "--rounds",
        "1",
        "--expert-cache",
        "40%",
        "--against",
        "lru,no-prefetch",
    )
    rows = run(
        tiny("tiny-mix", "q4_0"),
        *flags,
        "--policy",
        "next-use",
        "--predictor",
        "previous-token",
        "--prefetch",
    )
    decided = {
        row["system"]: (row["policy"], row["predictor"], row["prefetch"] != "off")
        for row in rows
    }
    assert decided == {
        "moegguf": ("next-use", "previous-token", True),
        "lru": ("lru", "none", False),
        "no-prefetch": ("next-use", "previous-token", False),
    }
    assert all(
        found["same_tokens"]
        for row in rows
        if row["system"] == "moegguf"
        for found in row["against"].values()
    )


def test_strategies_are_measured_with_moegguf_first(tiny: Callable[..., Path]) -> None:
    flags = ("--expert-cache", "40%", "--rounds", "1", "-r", "1")
    rows = run(
        tiny("tiny-mix", "q4_0"), *flags, "--strategy", "lru,moegguf,moe-infinity"
    )
    decided = {
        row["system"]: (row["policy"], row["predictor"], row["prefetch"])
        for row in rows
    }
    assert decided == {
        # The choice for a model without measured hit rates.
        "moegguf": ("next-use", "skip", "measuring"),
        "lru": ("lru", "none", "off"),
        "moe-infinity": ("sparsity", "eamc", "on"),
    }
    assert list(rows[0]["against"]) == ["lru", "moe-infinity"]
    assert all(found["same_tokens"] for found in rows[0]["against"].values())
    row, _ = run(
        tiny("tiny-mix", "q4_0"),
        *flags,
        "--strategy",
        "moe-infinity",
        "--policy",
        "lfu-decay",
    )
    assert (row["system"], row["policy"], row["predictor"]) == (
        "moe-infinity",
        "lfu-decay",
        "eamc",
    )


PROMPTS = [
    Prompt(text, "text")
    for text in ("Once upon a time", "def main():", "The cat sat on the mat and")
]
# Small shapes whose heads are wide enough for weights with a locality. `model` sets the
# numbers of experts.
SHAPES = {
    "qwen2moe": replace(
        PRESETS["tiny-qwen2moe"], n_embd=512, n_embd_head=128, n_vocab=8192
    ),
    "qwen3moe": replace(PRESETS["tiny-qwen3moe"], n_embd=512, n_vocab=8192),
    "qwen3vlmoe": replace(PRESETS["tiny-qwen3vlmoe"], n_embd=512, n_vocab=8192),
    "llama": replace(PRESETS["tiny-mixtral"], n_embd=512, n_vocab=8192),
    "deepseek2": replace(PRESETS["tiny-deepseek2"], n_embd=512, n_vocab=8192),
    "qwen35moe": replace(
        PRESETS["tiny-qwen35moe"],
        n_embd=512,
        n_vocab=8192,
        ssm_d_inner=512,
        ssm_d_state=128,
    ),
}


def model(
    folder: Path,
    locality: str,
    arch: str = "qwen3moe",
    quant: str = "q4_0",
    shape: Shape | None = None,
) -> Path:
    real = LOCALITIES[locality]
    shape = replace(
        shape or SHAPES[arch], n_expert=real.n_expert, n_expert_used=real.n_expert_used
    )
    return write_model(folder / "m.gguf", shape, quant, locality=locality)[0]


def recorded(path: Path, temperature: float) -> Trace:
    """Records a trace of PROMPTS with at most 400 new tokens each. Returns only the
    trace's decoded tokens."""
    out = path.with_suffix(".npz")
    options = RecordOptions(n_predict=400, temperature=temperature)
    record(
        path,
        PROMPTS,
        out,
        options,
        expert_cache="100%",
        n_ctx=512,
        n_threads=1,
        verbose=False,
    )
    return read(out).decode()


def assert_hits_as_published(trace: Trace, locality: str) -> None:
    for share, published in LOCALITIES[locality].hit_rates.items():
        result = Simulation(
            trace, LRU, NoPrediction(trace.shape), slots_of(trace.shape, share)
        ).run()
        assert result.hit_rate == pytest.approx(published, abs=0.03), share


# All pairs of locality and temperature, cycling through the shapes of SHAPES.
CASES = zip(product(LOCALITIES, (1.0, 0.0)), cycle(SHAPES), strict=False)


@pytest.mark.parametrize(
    ("locality", "temperature", "arch"), [(*case, arch) for case, arch in CASES]
)
def test_random_models_hit_at_the_published_rates(
    tmp_path: Path, locality: str, temperature: float, arch: str
) -> None:
    trace = recorded(model(tmp_path, locality, arch), temperature)
    assert trace.n_tokens > 500
    # No answer repeats itself forever.
    assert len(set(trace.tokens.tolist())) > trace.n_tokens / 2
    assert_hits_as_published(trace, locality)


def test_a_random_model_in_blocks_of_256_hits_at_the_published_rates(
    tmp_path: Path,
) -> None:
    shape = replace(
        PRESETS["tiny-mix"], n_embd=1024, n_embd_head=256, n_layer=2, n_vocab=4096
    )
    assert_hits_as_published(
        recorded(model(tmp_path, "qwen3-30b", quant="q4_k_m", shape=shape), 1.0),
        "qwen3-30b",
    )


def test_a_random_model_hits_at_published_rates_in_a_long_context(
    tmp_path: Path, load: Load
) -> None:
    """Far positions are hard to distinguish, because keys are stored in 16 bits and the
    rotation per position is small.
    """
    shape = replace(SHAPES["qwen3moe"], n_ctx_train=32768, n_layer=2)
    path = model(tmp_path, "qwen3-30b", shape=shape)
    llm = load(
        path,
        trace=TraceOptions(tmp_path / "t"),
        n_ctx=5000,
        logits_all=False,
        expert_cache="100%",
    )
    tokens = [n * n * 7919 % llm.n_vocab() for n in range(4800)]
    llm.eval(tokens[:4300])
    for token in tokens[4300:]:
        llm.eval([token])
    llm.close()
    assert_hits_as_published(read(tmp_path / "t").decode(), "qwen3-30b")


SIZES = {"n_prompt": 40, "n_decode": 8, "n_ctx": 256, "n_ubatch": 32}


@pytest.mark.parametrize("path", [("tiny-mix", "q4_0")], indirect=True)
@on_servers()
def test_gpu_measurements_of_llama_cpp_and_moegguf_have_the_same_tokens(
    path: Path,
) -> None:
    """Compares the tokens of four loads: three of llama.cpp and one of moegguf.

    llama.cpp has all experts on the device, some of them, or none. The last two and
    moegguf have equal device memory limits. moegguf also has slots in RAM for 30 % of
    the experts.
    """
    from tools.gpu import measure

    def measured(each: Case) -> dict[str, Any]:
        return {
            name: value for part in measure.run(each) for name, value in part.items()
        }

    device, layout = (
        add_link_device(Link(2e9, 20e-6), memory_bytes=64 * MIB),
        read_layout(path),
    )
    case = Case(str(path), device, "llama.cpp", **SIZES)
    limited = replace(
        case,
        hold=False,
        limit_bytes=layout.dense_bytes + int(0.6 * layout.expert_bytes) + 2 * MIB,
    )
    with hooks_off():
        upstream = [
            measured(each)
            for each in (case, limited, replace(limited, all_on_cpu=True))
        ]
    ours = measured(replace(limited, system="moegguf", options={"expert_cache": "30%"}))
    everything, some, none = upstream
    assert everything["tokens"] == some["tokens"] == none["tokens"] == ours["tokens"]
    assert len(ours["tokens"]) == 64 + SIZES["n_decode"]
    assert (
        everything["n_cpu_moe"]
        == 0
        < some["n_cpu_moe"]
        < none["n_cpu_moe"]
        == layout.n_layer
    )
    assert everything["device_bytes"] > some["device_bytes"] > none["device_bytes"] > 0
    assert ours["n_cpu_moe"] is None
    assert 0 < ours["steady"]["VRAM"]["hit_rate"] < 1
    assert ours["steady"]["VRAM"]["bytes_per_token"] > 0
    for result in (*upstream, ours):
        assert (
            min(
                result[f"{part}_tokens_per_s"] for part in ("prompt", "first", "steady")
            )
            > 0
        )


@pytest.mark.parametrize("keep_free_mib", [1, 24, 200])
@on_servers()
def test_held_leaves_the_free_memory_of_a_smaller_card(keep_free_mib: int) -> None:
    from moegguf.engine.devices import find_gpus
    from tools.gpu.measure import Held

    device = add_link_device(Link(2e9, 20e-6), memory_bytes=64 * MIB)
    Held(find_gpus(device)[0], keep_free_mib * MIB)
    assert abs(find_gpus(device)[0].free_bytes - min(keep_free_mib, 64) * MIB) < 4096
