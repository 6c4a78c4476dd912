"""`moegguf bench` end to end on a tiny model: every system in a process of its own, the same tokens from all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moegguf.bench.series import KILLED, ProcessRunner, Spec, Test, limit_fault, make_systems
from moegguf.cli.bench import bench
from moegguf.errors import OptionError

Test.__test__ = False  # type: ignore[attr-defined]


def run(path: Path, *flags: str) -> list[dict[str, Any]]:
    app = typer.Typer()
    app.command()(bench)
    common = ["-m", str(path), "-p", "8", "-n", "4", "-r", "2", "-t", "1", "-o", "json"]
    done = CliRunner().invoke(app, [*common, *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_against_llama_cpp(tiny: Callable[..., Path]) -> None:
    rows = run(tiny("tiny-mix", "q4_0"), "--expert-cache", "40%", "--against", "mmap,resident", "--rounds", "1")
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


def test_a_simulated_link_changes_the_device_and_no_token(tiny: Callable[..., Path]) -> None:
    flags = ("--expert-cache", "40%", "--simulate-link", "1GB/s,35us", "--against", "resident", "--rounds", "1")
    rows = run(tiny("tiny-mix", "q4_0"), *flags)
    assert {row["devices"] for row in rows} == {"simulated link 1GB/s,35us"}
    own = rows[2]
    assert (own["system"], own["n_gen"], own["error"]) == ("moegguf", 4, "")
    assert own["gpu_info"].startswith("the CPU behind a simulated link of ")
    assert own["against"]["resident"]["same_tokens"]
    assert own["evictions"] > 0


def test_own_tokens_after_a_text(tiny: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words are enough")
    flags = ("--greedy", "-d", "4", "--expert-cache", "100%", "--against", "resident", "--rounds", "1")
    rows = run(tiny("tiny-mix", "q4_0"), "--text", str(text), *flags)
    assert rows[0]["evictions"] == 0
    assert rows[2]["hit_rate"] == 1.0
    assert rows[2]["against"]["resident"]["same_tokens"]


def test_a_run_killed_by_its_limit_is_a_result(tiny: Callable[..., Path]) -> None:
    limit = 8 << 20  # less than the interpreter alone
    if limit_fault(limit):
        return  # nothing can be limited on this machine, and `bench` says so
    spec = Spec(str(tiny()), (Test(4, 0),), expert_cache="100%")
    outcome = ProcessRunner(limit)(make_systems(spec, ["100%"], [])[0])
    assert outcome.error == KILLED
    assert outcome.cgroup_peak_bytes <= limit


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--against", "ollama"), ("-o", "xml"), ("--memory-limit", "much"), ("-p", "x"), ("--simulate-link", "24GB"),
        ("--policy", "lro"), ("--predictor", "skp"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_before_anything_runs(tiny: Callable[..., Path], flag: str, value: str) -> None:
    with pytest.raises(OptionError, match=value):
        run(tiny(), flag, value)


def test_policies_are_named_beside_moegguf_with_something_left_out(tiny: Callable[..., Path]) -> None:
    flags = ("-r", "1", "--rounds", "1", "--expert-cache", "40%", "--against", "lru,no-prefetch")
    rows = run(tiny("tiny-mix", "q4_0"), *flags, "--policy", "next-use", "--predictor", "previous-token", "--prefetch")
    decided = {row["system"]: (row["policy"], row["predictor"], row["prefetch"] != "off") for row in rows}
    assert decided == {
        "moegguf": ("next-use", "previous-token", True),
        "lru": ("lru", "none", False),
        "no-prefetch": ("next-use", "previous-token", False),
    }
    assert all(found["same_tokens"] for row in rows if row["system"] == "moegguf" for found in row["against"].values())


def test_systems_alternate_with_moegguf_s_own_first(tiny: Callable[..., Path]) -> None:
    flags = ("--expert-cache", "40%", "--rounds", "1", "-r", "1")
    rows = run(tiny("tiny-mix", "q4_0"), *flags, "--strategy", "lru,moegguf,moe-infinity")
    decided = {row["system"]: (row["policy"], row["predictor"], row["prefetch"]) for row in rows}
    assert decided == {
        "moegguf": ("next-use", "skip", "measuring"),  # nothing was measured of this model
        "lru": ("lru", "none", "off"),
        "moe-infinity": ("sparsity", "eamc", "on"),
    }
    assert list(rows[0]["against"]) == ["lru", "moe-infinity"]
    assert all(found["same_tokens"] for found in rows[0]["against"].values())
    row, _ = run(tiny("tiny-mix", "q4_0"), *flags, "--strategy", "moe-infinity", "--policy", "lfu-decay")
    assert (row["system"], row["policy"], row["predictor"]) == ("moe-infinity", "lfu-decay", "eamc")
