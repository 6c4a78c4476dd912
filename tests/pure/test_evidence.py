"""The laboratory's commands in docs/evidence.md and predictors/README.md exist; evidence.py works out its tables."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_help import help_of

from moegguf.trace.prompts import read_prompts
from predictors.models.demo.corpus import Document
from predictors.study import evidence

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("docs/evidence.md", "predictors/README.md"))
LINES = [
    shlex.split(line.split("#")[0])
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if not line.startswith("make ")
]
TRAINING = ("predictors.models.make_lab_model", "predictors.models.train_demo")  # import torch at once


def passed_on(words: list[str]) -> tuple[list[str], list[str]]:
    """(the module that a line runs, with its subcommand, its options); of `evidence` what that runs itself."""
    assert words[0] == "moegguf" or words[:2] == ["python", "-m"]
    module, rest = ("moegguf.cli.app", words[1:]) if words[0] == "moegguf" else (words[2], words[3:])
    command = [module, *rest[: 2 if rest[0] == "trace" else 1]] if module == "moegguf.cli.app" else [module]
    if module == "predictors.study.evidence":
        args, rest = evidence.arguments(rest)
        command = ["moegguf.cli.app", *(["bench"] if args.command == "speed" else ["trace", "simulate"])]
    return command, [word for word in rest if word.startswith("-")]


def test_every_command_and_option_exists() -> None:
    asked: dict[tuple[str, ...], set[str]] = {}
    for command, options in map(passed_on, LINES):
        asked.setdefault(tuple(command), set()).update(options)
    assert len(LINES) > 20 and len(asked) > 8
    assert all(find_spec(command[0]) for command in asked)
    for command, options in asked.items():
        if command[0] in TRAINING:
            continue
        if command[0] == "moegguf.cli.app":
            shown = help_of(*command[1:])
        else:
            shown = subprocess.check_output([sys.executable, "-m", *command, "--help"], text=True, cwd=ROOT)
        assert not {name for name in options if not re.search(rf"(^|[\s,/]){name}\b", shown, re.MULTILINE)}, command


def bench_row(system: str, *speeds: float) -> dict[str, Any]:
    store = {"hit_rate": 0.5, "mb_per_token": 2.0, "stall_ms_per_token": 1.0}
    return {"system": system, "n_prompt": 0, "n_gen": 8, "n_depth": 0, "samples_ts": list(speeds), **store}


def test_speeds_are_compared_round_by_round_over_all_calls() -> None:
    calls = [bench_row("lru", 10, 20), bench_row("promoe", 20, 10), bench_row("lru", 10), bench_row("promoe", 15)]
    table = evidence.speed_table(calls, "lru").splitlines()
    assert table[3] == "| tg8 | promoe | 15.0 (10.0 to 20.0) | 1.50 (0.50 to 2.00) | 50.0% | 2.0 | 1.00 |"
    assert "| 1.00 (1.00 to 1.00) |" in table[2]


def test_batches_are_compared_with_the_first_round_by_round() -> None:
    row = {"experts": 4.0, "hit_rate": 0.5, "mb_per_token": 1.25, "peak_mb": 99.6}
    of = {n: evidence.Batch("demo", "25%", 512, n, "fifo", 8, 8) for n in (1, 8)}
    found = {of[1]: [{**row, "ts": 10.0}, {**row, "ts": 20.0}], of[8]: [{**row, "ts": 20.0}, {**row, "ts": 30.0}]}
    table = evidence.batches_table(found).splitlines()
    assert table[3] == "| 8 | fifo | 4.0 | 50.0% | 1.25 | 100 | 25.0 (20.0 to 30.0) | 1.75 (1.50 to 2.00) |"
    assert table[2].endswith("| 1.00 (1.00 to 1.00) |")


def test_a_system_that_failed_has_no_speed() -> None:
    failed = {"system": "promoe", "n_prompt": 0, "n_gen": 8, "n_depth": 0, "samples_ts": []}
    assert "| promoe | failed | failed |" in evidence.speed_table([bench_row("lru", 10), failed], "lru")


def simulated(strategy: str, clock_ns: int) -> dict[str, Any]:
    decode = {"tokens": 10, "clock_ns": clock_ns, "stall_ns": 10**7, "bytes_missed": 10**7, "bytes_prefetched": 10**7}
    return {"strategy": strategy, "share": 0.25, "decode_hit_rate": 0.4, "simulated": {"decode": decode}}


def test_simulated_systems_are_compared_with_lru_at_the_same_share() -> None:
    bound = {"policy": "belady", "strategy": "", "share": 0.25, "decode_hit_rate": 0.9, "simulated": None}
    table = evidence.link_table([simulated("lru", 4 * 10**7), simulated("promoe", 2 * 10**7), bound]).splitlines()
    assert table[-1] == "| 25% | promoe | 40.0% | 1.0 | 2.0 | 2.00 | 2.00 |"


@pytest.mark.parametrize("training", [False, True])
def test_requests_are_texts_to_evaluate_and_questions_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    documents = [Document("manual", f"page {i}", f"text {i} " * 60) for i in range(200)]
    monkeypatch.setattr(evidence.corpus, "gather", lambda: documents)
    monkeypatch.setattr(evidence.corpus, "select", list)
    evidence.requests(tmp_path / "r.jsonl", 2, training)
    found = read_prompts(tmp_path / "r.jsonl")
    texts = [prompt for prompt in found if prompt.completion is not None]
    whole = [prompt.text + (prompt.completion or "") for prompt in texts]
    assert whole == [d.text[: evidence.REQUEST_CHARS] for d in documents if d.heldout != training][:2]
    assert (tmp_path / "r.txt").read_text().split("\n\n") == whole
    assert {prompt.label for prompt in found if prompt not in texts} == {"chat"}
