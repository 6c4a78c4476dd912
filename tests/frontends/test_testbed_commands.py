"""Tests the commands of the predictor testbed.

These are `moegguf trace import`, `show` and `simulate`, the options for user-defined
policy and predictor classes, and `predictors.study.quick`.
"""

import csv
import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import httpx
import numpy as np
import pytest
from servers import Command, completed, serving

from moegguf.trace.format import read
from moegguf.trace.trace import Trace

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
POLICY = f"{EXAMPLES / 'policy.py'}:MostUsed"
PREDICTOR = f"{EXAMPLES / 'predictor.py'}:Followers"


@pytest.fixture(scope="module")
def imported(here: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imports random router logits of two requests, as another program may record them.
    Returns the trace's path."""
    folder = tmp_path_factory.mktemp("imported")
    for n in range(2):
        logits = (
            np.random.default_rng(n)
            .standard_normal((20, 3, 8))
            .cumsum(axis=0)
            .astype(np.float32)
        )
        np.savez(folder / f"{n}.npz", router_logits=logits, n_prompt=5)
    files = (folder / "0.npz", folder / "1.npz")
    facts = ("--used", "2", "--layers", "1-3", "--expert-size", "9MiB")
    done = here("trace", "import", *files, "-o", folder / "out.npz", *facts)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{folder / 'out.npz'}: 2 request(s), 40 tokens\n"
    return folder / "out.npz"


def test_an_imported_trace_is_shown_and_simulated(
    here: Command, imported: Path
) -> None:
    shape = read(imported).shape
    assert (shape.layers, shape.n_expert, shape.expert_bytes) == ((1, 2, 3), 8, 9 << 20)
    text = here("trace", "show", imported).stdout
    assert re.search(r"layers +3 with experts of 4\n", text)
    assert "8; a token uses 2\n" in text and "9.4 MB" in text
    assert "40; 30 of them were decoded" in text
    facts = json.loads(here("trace", "show", imported, "--json").stdout)
    assert (facts["n_requests"], facts["shape"]["n_expert"]) == (2, 8)
    rows = json.loads(
        here("trace", "simulate", imported, "--expert-cache", "50%", "--json").stdout
    )
    assert {"lru", "next-use", "belady"} <= {row["policy"] for row in rows}


def test_trace_show_prints_facts_of_a_recorded_trace(
    here: Command, recorded: Path, trace: Trace
) -> None:
    text = here("trace", "show", recorded).stdout
    assert f"{trace.n_tokens}; {trace.decode().n_tokens} of them were decoded" in text
    assert "4 (2 chat, 2 code)" in text and "weights, inputs" in text
    assert re.search(r"reuse +\d+\.\d% of a decoded token's experts", text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "n_expert_used is required.*--used N"),
        (("--used", "2"), "expert_bytes is required.*--expert-size SIZE"),
        (("--used", "2", "--expert-size", "big"), "--expert-size: "),
        (
            ("--used", "2", "--expert-size", "1MB", "--layers", "1,x"),
            "--layers must be whole numbers",
        ),
        (
            ("--used", "2", "--expert-size", "1MB", "--layers", "1-2"),
            "has 3 layers, but the model has experts in 2",
        ),
        (
            ("--used", "2", "--expert-size", "1MB", "--experts", "9"),
            "n_expert is 9 in the options, but 8",
        ),
        (("--model", "demo"), "n_expert is 32 in .*, but 8 in"),
    ],
)
def test_trace_import_without_a_needed_fact_prints_one_error_line(
    here: Command, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).random((4, 3, 8)))
    done = here(
        "trace", "import", tmp_path / "a.npy", "-o", tmp_path / "out.npz", *flags
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", done.stderr, re.DOTALL)
    assert {path.name for path in tmp_path.iterdir()} == {"a.npy"}


def test_simulate_csv_has_the_rows_and_counters_of_the_json(
    here: Command, recorded: Path
) -> None:
    flags = ("--policy", "lru", "--expert-cache", "25%,50%")
    text = here("trace", "simulate", recorded, *flags, "-o", "csv").stdout
    rows = json.loads(here("trace", "simulate", recorded, *flags, "-o", "json").stdout)
    lines = list(csv.DictReader(StringIO(text)))
    assert [(line["policy"], float(line["share"])) for line in lines] == [
        (row["policy"], row["share"]) for row in rows
    ]
    for line, row in zip(lines, rows, strict=True):
        assert float(line["decode_hit_rate"]) == row["decode_hit_rate"]
        for name, n in ((row["simulated"] or {}).get("counters") or {}).items():
            assert int(line[name]) == n, name
    done = here("trace", "simulate", recorded, "-o", "xml")
    assert (done.returncode, done.stderr) == (
        1,
        "error: -o must be one of table, csv, json, but is 'xml'.\n",
    )


def test_simulate_with_own_classes_reports_prefetch_accuracy(
    here: Command, recorded: Path
) -> None:
    flags = (
        "--policy",
        f"lru,{POLICY}",
        "--predictor",
        f"none,{PREDICTOR}",
        "--expert-cache",
        "25%",
        "--prefetch",
    )
    done = here("trace", "simulate", recorded, *flags)
    assert done.returncode == 0, done.stderr
    assert "Experts used of those fetched ahead" in done.stdout
    rows = list(
        csv.DictReader(
            StringIO(here("trace", "simulate", recorded, *flags, "-o", "csv").stdout)
        )
    )
    ahead = {
        (row["policy"], row["predictor"]): row["prefetch_accuracy"]
        for row in rows
        if row["policy"] != "belady"
    }
    assert ahead.keys() == {
        (policy, name) for policy in ("lru", POLICY) for name in ("none", PREDICTOR)
    }
    assert ahead["lru", "none"] == "" and 0 < float(ahead[POLICY, PREDICTOR]) <= 1
    done = here("trace", "simulate", recorded, *flags[:2], "--save")
    assert done.returncode == 1 and "--save measures for" in done.stderr


def test_run_and_bench_use_own_policy_and_predictor_classes(here: Command) -> None:
    own = ("--policy", POLICY, "--predictor", PREDICTOR, "--prefetch")
    done = here(
        "run",
        "demo",
        "What is an expert?",
        *own,
        "--expert-cache",
        "25%",
        "-n",
        "8",
        "--verbose",
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"policy: +MostUsed\n", done.stderr) and re.search(
        r"predictor: +Followers\n", done.stderr
    )
    sizes = (
        "-p",
        "0",
        "-n",
        "4",
        "-r",
        "1",
        "--no-warmup",
        "--keep-page-cache",
        "--expert-cache",
        "25%",
    )
    done = here("bench", "-m", "demo", *own, *sizes, "-o", "json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["policy"], row["predictor"], row["error"]) == (
        "MostUsed",
        "Followers",
        "",
    )


def test_serve_loads_own_classes_from_its_command_line_only(tmp_path: Path) -> None:
    (tmp_path / "from_a_request.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8"
    )
    mine = f"{tmp_path / 'from_a_request.py'}:Mine"
    names = {"policy": mine, "predictor": mine}
    with serving(
        tmp_path / "server", "--policy", POLICY, "--expert-cache", "25%"
    ) as server:

        def decided_by(model: str, **options: str) -> str:
            """Requests an answer from `model`. Returns the name of the eviction policy
            that was used."""
            chat = {
                "model": model,
                "messages": [{"role": "user", "content": "hi"}],
                "details": True,
            }
            body = {**chat, **options, "options": {"num_predict": 2, **options}}
            lines = httpx.post(
                f"{server.url}/api/chat", json=body, timeout=60
            ).text.splitlines()
            return str(json.loads(lines[-1])["timing"]["decisions"]["policy"])

        assert decided_by("demo") == decided_by("demo", **names) == "MostUsed"
        made = {"model": "mine", "from": "demo", "parameters": names, "stream": False}
        httpx.post(f"{server.url}/api/create", json=made, timeout=60)
        assert decided_by("mine") == "MostUsed"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "command",
    [("run", "demo", "hi"), ("bench", "-m", "demo"), ("serve", "--port", "0")],
)
def test_a_missing_class_ends_a_command_before_the_load(
    here: Command, command: tuple[str, ...]
) -> None:
    for flag in ("--policy", "--predictor"):
        done = here(*command, flag, "missing.py:Mine")
        assert (done.returncode, done.stdout) == (1, "")
        assert "error: there is no file 'missing.py' for the " in done.stderr


def test_the_quick_study_writes_tables_plots_and_a_manifest(
    recorded: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    command = [
        sys.executable,
        "-m",
        "predictors.study.quick",
        "--trace",
        str(recorded),
        "-o",
        str(tmp_path / "out"),
    ]
    done: subprocess.CompletedProcess[str] = completed(command)
    assert done.returncode == 0, done.stderr
    tables = ("policies", "strategies", "predictors")
    names = {f"{table}.{form}" for table in tables for form in ("csv", "png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {
        "tables.md",
        "manifest.json",
    }
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", manifest["routing_sha256"])
    text = (tmp_path / "out/tables.md").read_text(encoding="utf-8")
    assert all(
        f"| {name} " in text
        for name in ("belady", "moe-infinity", "duoserve", "skip", "routing-path")
    )
