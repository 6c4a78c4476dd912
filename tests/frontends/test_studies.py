"""The laboratory's commands over a recorded trace: `python -m predictors.study.NAME`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, Command, environment

from moegguf.trace.format import read


@pytest.fixture(scope="module")
def study() -> Command:
    """`study("score", path, ...)`: what the command wrote, and its exit code."""

    def call(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"predictors.study.{name}", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment(), cwd=ROOT, timeout=120)

    return call


def test_a_made_up_trace_is_simulated_as_a_recorded_one(here: Command, study: Command, tmp_path: Path) -> None:
    path = tmp_path / "made-up.npz"
    shape = ("--layers", "3", "--experts", "32", "--used", "2", "--expert-size", "3MiB")
    done = study("synthesize", "--locality", "qwen3-30b", *shape, "--tokens", "300", "-o", path)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{path}: 300 tokens, synthetic routing as of Qwen3-30B-A3B\n"
    made = read(path).shape
    assert (made.n_layer, made.n_expert, made.n_expert_used, made.expert_bytes) == (3, 32, 2, 3 << 20)
    rows = json.loads(here("trace", "simulate", path, "--policy", "lru", "--expert-cache", "40%", "--json").stdout)
    assert rows[0]["hit_rate"] == pytest.approx(0.9, abs=0.03)


def test_predictors_are_scored_beside_a_control(study: Command, recorded: Path) -> None:
    done = study("score", recorded, "--model", "demo", "--predictor", "skip,fresh-gate,eamc", "--link", "1")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    figures = [line.split() for line in done.stdout.splitlines()]
    skip = next(words for words in figures if words[:2] == ["skip", "1"])
    assert float(skip[2].rstrip("%")) > 2 * float(skip[3].rstrip("%"))
    gate = next(words for words in figures if words[:2] == ["fresh-gate", "0"])
    assert float(gate[2].rstrip("%")) > 99  # vectors are stored as float16
    assert "GOODPRED" in done.stdout


def test_the_token_scheduler_is_counted_beside_oracle_random_and_fifo(study: Command, recorded: Path) -> None:
    done = study("schedule", recorded, "--batch", "1,2", "--expert-cache", "50%", "--paths", "recent")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[2 : lines.index("")]]
    assert [row[:2] for row in rows] == [
        [size, order] for size in "12" for order in ("oracle", "predicted", "random", "fifo")
    ]
    assert all(row[3] == "0.0%" for row in rows[:4])  # a batch of one is what it is


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("score", "TRACE", "--predictor", "all,unknown"), "there is no predictor 'unknown'"),
        (("schedule", "TRACE", "--batch", "3"), "two batches of requests"),
        (("schedule", "TRACE", "--paths", "psychic"), "known are recent, token-id, routing-path"),
        (("synthesize", "--locality", "glm", "--expert-size", "big", "-o", "OUT"), "--expert-size: a size"),
    ],
)
def test_an_error_is_one_line_with_the_next_step(
    study: Command, recorded: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    known = {"TRACE": str(recorded), "OUT": str(tmp_path / "t.npz")}
    done = study(*(known.get(argument, argument) for argument in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^error: .*" + re.escape(words), done.stderr, re.MULTILINE)
    assert not (tmp_path / "t.npz").exists()
