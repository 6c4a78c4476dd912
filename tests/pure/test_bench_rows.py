"""Tests `moegguf bench` without running a model: the order of runs, the contents of
rows, and the output formats.

Memory limits are tested in folders that imitate cgroups. One test drops a file from the
page cache.
"""

import csv
import io
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_machine import GIB, V1_MOUNT, V2_MOUNT

from moegguf.bench import memory_limit as limits
from moegguf.bench import report
from moegguf.bench.memory_limit import (
    LimitError,
    cached_bytes,
    drop_page_cache,
    make_group,
    memory_limit,
)
from moegguf.bench.rows import FIELDS, FORMATS, as_markdown, imitated_routing, make_rows
from moegguf.bench.series import (
    KILLED,
    VARIANTS,
    BenchedSystem,
    Outcome,
    Spec,
    Test,
    combinations,
    compared_system,
    make_systems,
    resident_bytes,
    run_series,
)
from moegguf.bench.series import test_name as name_of
from moegguf.cli.bench import parse_ints, parse_pairs, parse_tests, split
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout

Test.__test__ = False  # type: ignore[attr-defined]

LLAMA_BENCH_FIELDS = (
    "build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,model_size,model_n_params,n_batch,"
    "n_ubatch,n_threads,cpu_mask,cpu_strict,poll,type_k,type_v,n_gpu_layers,n_cpu_moe,split_mode,main_gpu,no_kv_offload,"
    "flash_attn,devices,tensor_split,tensor_buft_overrides,load_mode,lazy_mode,embeddings,no_op_offload,no_host,repack,"
    "fit_target,fit_min_ctx,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts"
)

SPEC = Spec(
    "m.gguf",
    (Test(4, 0), Test(0, 2)),
    n_threads=2,
    repetitions=2,
    loading={"expert_cache": "50%"},
)


def result(seconds: float, tokens: int = 7, store: bool = True) -> dict[str, Any]:
    """Returns a made-up result of a child process, with two repetitions of both tests
    of SPEC.

    The 4 prompt tokens take `seconds` in total, and each of the 2 generated tokens
    takes `seconds`.
    """
    ns = int(seconds * 1e9)
    figures = {
        "hit_rate": 0.75, "mb_per_token": 84.0, "stall_ms_per_token": 12.5, "hook_ms_per_token": 0.03,
        "compute_ms_per_token": 40.0, "link_gb_per_s": 1.5, "link_bound_pct": 91.0, "evictions": 10,
        "staged_mb_per_token": 0.0, "copies_overlapped_pct": 0.0,
        "draft_acceptance": 0.0,
        "tokens_per_draft_pass": 0.0,
        "mb_per_accepted_token": 0.0,
    }  # fmt: skip
    shared = {
        "test_time": "2026-01-02T03:04:05Z",
        "figures": [figures] * 2 if store else [],
    }
    return {
        "build_commit": "abc", "build_number": 0, "cpu_info": "A CPU", "gpu_info": "", "backends": "CPU",
        "model_type": "moe 1B Q4_0", "model_size": 8 << 30, "model_n_params": 14 * 10**9, "routing": "",
        "load_s": 0.5, "fill_s": 0.0, "peak_rss_bytes": 3 << 30, "n_slots": 540 if store else 0, "n_ubatch_used": 512,
        "budget_bytes": 2 << 30, "planned_bytes": 3 << 30, "placement": "", "predicted_ts": 0.0,
        "decisions": {"policy": "next-use", "predictor": "none", "prefetch": "off", "gates": 9} if store else {},
        "tests": [
            {"n_prompt": 4, "n_gen": 0, "n_depth": 0, "n_parallel": 1, "samples_ns": [ns] * 2, "token_ns": [[], []],
             "tokens": [[1], [2]], **shared},
            {"n_prompt": 0, "n_gen": 2, "n_depth": 0, "n_parallel": 1, "samples_ns": [2 * ns] * 2,
             "token_ns": [[ns, ns]] * 2, "tokens": [[3, 4], [5, tokens]], **shared},
        ],
    }  # fmt: skip


OWN = BenchedSystem("moegguf", SPEC, compared=True)
MMAP = BenchedSystem(
    "mmap", replace(SPEC, system="mmap", repack=False), "llama.cpp, no repack"
)
RESIDENT = BenchedSystem(
    "resident", replace(SPEC, system="resident"), "llama.cpp, default kernels"
)
OUTCOMES = [
    Outcome(OWN, 0, result(0.5), cgroup_peak_bytes=3 << 30),
    Outcome(MMAP, 0, result(5.0, store=False)),
    Outcome(RESIDENT, 0, error=KILLED),
    Outcome(OWN, 1, result(1.0), cgroup_peak_bytes=2 << 30),
    Outcome(MMAP, 1, result(4.0, tokens=8, store=False)),
]


# Specs and options


def test_spec_survives_json_and_imitated_routing_reads_the_locality_field() -> None:
    spec = replace(SPEC, store={"readers": 2}, text="a ü.txt")
    assert Spec.from_json(spec.as_json()) == spec
    assert "as published of glm (" in imitated_routing({"moegguf.locality": "glm"})
    assert {
        imitated_routing(found)
        for found in ({"moegguf.locality": "x\n"}, {"moegguf.locality": 3}, {})
    } == {""}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"system": "ollama"}, "system"),
        ({"type_k": "q9"}, "q9"),
        ({"flash_attn": "maybe"}, "flash_attn"),
        ({"repetitions": 0}, "repetitions"),
        ({"tests": ()}, "nothing to measure"),
    ],
)
def test_spec_rejects_invalid_fields(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        replace(SPEC, **wrong)


def test_parse_ints_and_pairs_read_llama_bench_lists() -> None:
    assert split(["a,b", "c"]) == ["a", "b", "c"]
    assert parse_ints(["512"], "-p") == [512]
    assert parse_ints(["128,256", "0"], "-p") == [128, 256, 0]
    assert parse_ints(["64-512*2"], "-p") == [64, 128, 256, 512]
    assert parse_ints(["1-4"], "-t") == [1, 2, 3, 4]
    assert parse_ints(["1-6+2"], "-t") == [1, 3, 5]
    assert parse_ints(["-1"], "-ngl") == [-1]
    assert parse_pairs(["512,128", "4,2"]) == [(512, 128), (4, 2)]


@pytest.mark.parametrize("text", ["x", "1.5", "1-2-3", "1-8*1", "0-8*2", "1-8+0"])
def test_parse_ints_rejects_malformed_lists(text: str) -> None:
    with pytest.raises(OptionError, match="-p"):
        parse_ints([text], "-p")


def test_parse_tests_orders_like_llama_bench_and_combinations_are_complete() -> None:
    tests = parse_tests(
        {"n_prompt": ["512,0"], "n_gen": ["128"], "pg": ["16,8"], "n_depth": ["0,32"]}
    )
    assert tests == [
        (512, 0, 0),
        (0, 128, 0),
        (16, 8, 0),
        (512, 0, 32),
        (0, 128, 32),
        (16, 8, 32),
    ]
    names = [
        name_of({"n_prompt": p, "n_gen": n, "n_depth": d, "n_parallel": 1})
        for p, n, d in tests
    ]
    assert names[2:5] == ["pp16+tg8", "pp512 @ d32", "tg128 @ d32"]
    found = combinations(SPEC, {"n_ubatch": [64, 128], "n_threads": [1, 2]})
    assert [(spec.n_ubatch, spec.n_threads) for spec in found] == [
        (64, 1),
        (64, 2),
        (128, 1),
        (128, 2),
    ]


# Tests of the systems to compare, and of the order in which they run


def test_mmap_system_does_not_repack_if_a_copy_does_not_fit(tiny: Any) -> None:
    layout = read_layout(tiny("tiny-mix"))
    base = replace(SPEC, model=str(tiny("tiny-mix")))
    small, large = (
        resident_bytes(layout, base),
        resident_bytes(layout, base) + (1 << 30),
    )
    assert compared_system("mmap", base, layout, large).spec.repack
    two = replace(base, tests=(Test(4, 0, n_parallel=2),))
    assert small < resident_bytes(layout, two), "with a KV cache of two sequences"
    assert small < resident_bytes(layout, replace(base, flash_attn="off"))
    assert not compared_system("mmap", base, layout, small).spec.repack
    assert "does not fit" in compared_system("mmap", base, layout, small).note
    assert compared_system("mmap-repacked", base, layout, small).spec.repack
    assert not compared_system("resident-plain", base, layout, large).spec.repack
    for name in ("ollama", "mmap-fast", ""):
        with pytest.raises(OptionError, match="mmap, resident"):
            compared_system(name, SPEC, layout, None)


def test_ablation_steps_add_one_feature_after_the_other(tiny: Any) -> None:
    layout = read_layout(tiny("tiny-mix"))
    base = replace(SPEC, model=str(tiny("tiny-mix")), strategy="promoe")
    off = [
        {
            name
            for name, value in compared_system(
                step, base, layout, None
            ).spec.store.items()
            if not value
        }
        for step in VARIANTS
        if step.startswith("step-")
    ]
    assert off[0] > off[1] > off[2] == {"overlap"}


def test_make_systems_lists_own_budgets_before_llama_cpp_systems(tiny: Any) -> None:
    group = make_systems(
        replace(SPEC, model=str(tiny())), ["30%", "100%"], ["mmap", "resident"], 1 << 40
    )
    assert [(entry.label, entry.spec.system, entry.is_llama_cpp) for entry in group] == [
        ("moegguf", "moegguf", False), ("moegguf", "moegguf", False),
        ("mmap", "mmap", True), ("resident", "resident", True),
    ]  # fmt: skip
    assert [entry.spec.loading["expert_cache"] for entry in group[:2]] == [
        "30%",
        "100%",
    ]


def test_run_series_skips_a_system_that_was_killed() -> None:
    runs: list[str] = []

    def run(entry: BenchedSystem) -> Outcome:
        runs.append(entry.label)
        return (
            Outcome(entry, 0, error=KILLED)
            if entry is RESIDENT
            else Outcome(entry, 0, result(1.0))
        )

    said: list[str] = []
    outcomes = list(run_series([OWN, RESIDENT, MMAP], 2, run, said.append))
    assert runs == ["moegguf", "resident", "mmap", "moegguf", "mmap"]
    assert [outcome.round for outcome in outcomes] == [0, 0, 0, 1, 1]
    assert "  killed by the memory limit" in said


# Rows and formats


def test_markdown_names_synthetic_routing_and_policies_once() -> None:
    assert (
        as_markdown(make_rows(OUTCOMES, 4 << 30))
        == (Path(__file__).parent / "bench.md").read_text()
    )
    synthetic = result(0.5) | {"routing": "random weights"}
    page = as_markdown(
        make_rows([Outcome(OWN, 0, synthetic), Outcome(MMAP, 0, synthetic)])
    )
    assert page.count("routing: random weights\n") == 1
    others = [
        BenchedSystem(name, replace(SPEC, loading=SPEC.loading | {"policy": "lru"}))
        for name in ("lru", "no-chunks")
    ]
    page = as_markdown(
        make_rows([Outcome(entry, 0, result(0.5)) for entry in (OWN, *others)])
    )
    assert (
        "policy next-use, predictor none, prefetch off: moegguf 50%; lru 50%; no-chunks 50%\n"
        in page
    )
    assert page.count("policy next-use") == 1
    assert "|    stall | same tokens" in page and "|   1.000x | yes, 4 of 4 |" in page


def test_sql_output_fills_a_sqlite_table() -> None:
    rows = make_rows(OUTCOMES)
    rows[0]["model_filename"] = "it's.gguf"
    database = sqlite3.connect(":memory:")
    for _ in range(2):  # the outputs of two runs, one after the other
        database.executescript(FORMATS["sql"](rows))
    found = database.execute(
        "SELECT model_filename, n_prompt, avg_ts, typeof(avg_ts) FROM llama_bench"
    ).fetchall()
    assert len(found) == 2 * len(rows)
    assert found[0][0] == "it's.gguf"
    assert found[0][1] == rows[0]["n_prompt"]
    assert found[0][2] == pytest.approx(rows[0]["avg_ts"], abs=1e-6)
    assert found[0][3] == "real"


def test_csv_json_and_jsonl_output_have_equal_rows() -> None:
    lines = list(csv.DictReader(io.StringIO(FORMATS["csv"](make_rows(OUTCOMES)))))
    assert ",".join(list(lines[0])[: len(FIELDS)]) == LLAMA_BENCH_FIELDS
    assert (lines[0]["avg_ts"], lines[0]["repack"], lines[0]["n_prompt"]) == (
        "6.000000",
        "1",
        "4",
    )
    assert lines[3]["against"] == "mmap=7.000;resident="
    rows = make_rows(OUTCOMES)
    objects = json.loads(FORMATS["json"](rows))
    assert objects == [json.loads(line) for line in FORMATS["jsonl"](rows).splitlines()]
    assert list(objects[0])[: len(FIELDS)] == list(FIELDS)
    assert objects[0]["samples_ns"] == [5 * 10**8, 5 * 10**8, 10**9, 10**9]
    assert objects[3]["against"]["mmap"]["ratio"] == 7.0


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v1(root: Path, place: str = "/job") -> Path:
    write(root / "proc/self/mountinfo", V1_MOUNT)
    write(root / "proc/self/cgroup", f"4:memory:{place}\n0::/\n")
    folder = root / "sys/fs/cgroup/memory" / place.strip("/")
    write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    return folder


def v2(root: Path, *, leaf_has_processes: bool) -> Path:
    """Writes the files of a cgroup v2 below a slice, and returns the group's folder.

    With leaf_has_processes, the group has no subtree controllers, because a group with
    processes cannot enable them.
    """
    write(root / "proc/self/mountinfo", V2_MOUNT)
    write(root / "proc/self/cgroup", "0::/slice/leaf\n")
    leaf = root / "sys/fs/cgroup/slice/leaf"
    for folder, passed_on in (
        (leaf.parent, "cpu memory"),
        (leaf, "" if leaf_has_processes else "memory"),
    ):
        write(folder / "cgroup.controllers", "cpu memory\n")
        write(folder / "cgroup.subtree_control", passed_on)
    return leaf


@pytest.fixture(autouse=True)
def rmdir_like_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes removing a group's folder also delete the files in it, as the kernel does
    for cgroups."""
    monkeypatch.setattr(limits, "_rmdir", shutil.rmtree)


def test_make_group_on_cgroup_v1_limits_memory_and_swap(tmp_path: Path) -> None:
    parent = v1(tmp_path)
    group = make_group(4 * GIB, tmp_path)
    assert group.folder.parent == parent
    assert (group.folder / "memory.limit_in_bytes").read_text() == str(4 * GIB)
    assert (group.folder / "memory.memsw.limit_in_bytes").read_text() == str(4 * GIB)
    group.remove()
    assert list(parent.iterdir()) == [parent / "memory.limit_in_bytes"]


@pytest.mark.parametrize("has_processes", [False, True])
def test_make_group_on_cgroup_v2_nests_or_goes_beside_a_busy_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_processes: bool
) -> None:
    leaf, real_write = v2(tmp_path, leaf_has_processes=has_processes), limits._write

    def busy(path: Path, text: str) -> bool:
        return not (
            has_processes and path == leaf / "cgroup.subtree_control"
        ) and real_write(path, text)

    monkeypatch.setattr(limits, "_write", busy)
    group = make_group(GIB, tmp_path)
    assert group.folder.parent == (leaf.parent if has_processes else leaf)
    assert (group.folder / "memory.max").read_text() == str(GIB)
    assert (group.folder / "memory.swap.max").read_text() == "0"


def test_make_group_without_cgroups_raises_and_no_limit_makes_no_group(
    tmp_path: Path,
) -> None:
    with pytest.raises(LimitError, match="systemd-run"):
        make_group(GIB, tmp_path)
    with memory_limit(None, tmp_path) as group:
        assert group is None


def test_make_group_removes_groups_of_dead_processes(tmp_path: Path) -> None:
    parent = v1(tmp_path)
    (parent / "moegguf-999999999-1").mkdir()
    (parent / f"moegguf-{os.getpid()}-0").mkdir()
    make_group(GIB, tmp_path).remove()
    assert sorted(path.name for path in parent.glob("moegguf-*")) == [
        f"moegguf-{os.getpid()}-0"
    ]


@pytest.mark.parametrize(
    ("make", "peak", "events"),
    [
        (
            v1,
            "memory.max_usage_in_bytes",
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ),
        (
            lambda root: v2(root, leaf_has_processes=False),
            "memory.peak",
            ("memory.events", "low 0\noom 3\noom_kill 2\n"),
        ),
    ],
)
def test_group_reads_peak_bytes_and_oom_kills(
    tmp_path: Path, make: Callable[[Path], None], peak: str, events: tuple[str, str]
) -> None:
    make(tmp_path)
    group = make_group(GIB, tmp_path)
    # 0 while the files are missing, as on an old kernel.
    assert (group.peak_bytes, group.oom_kills) == (0, 0)
    write(group.folder / peak, "123456789\n")
    write(group.folder / events[0], events[1])
    assert (group.peak_bytes, group.oom_kills) == (123456789, 2)


def test_memory_limit_runs_commands_in_the_group_and_removes_the_group_on_error(
    tmp_path: Path,
) -> None:
    v1(tmp_path)
    with memory_limit(GIB, tmp_path) as group:
        words = subprocess.run(
            group.command(["echo", "a b", "$HOME"]),
            capture_output=True,
            check=True,
            text=True,
        )
        assert words.stdout == "a b $HOME\n"
        assert int((group.folder / "cgroup.procs").read_text()) > 0
    v1(tmp_path)
    with pytest.raises(ZeroDivisionError), memory_limit(GIB, tmp_path) as group:
        print(1 // 0)
    assert not group.folder.exists()


def test_drop_page_cache_returns_the_bytes_that_stay_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert drop_page_cache([path]) == 0
    path.write_bytes(bytes(1 << 20))
    kept = drop_page_cache([path])
    assert kept in (0, 1 << 20)  # tmpfs keeps its files in memory, so all bytes stay
    fd = os.open(path, os.O_RDONLY)
    try:
        os.read(fd, 1 << 20)
        assert cached_bytes(fd) == 1 << 20
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("feed", "shown"),
    [
        ("random", "random"),
        ("greedy", "greedy"),
        ("text /home/ada/letters.txt", "text letters.txt"),
        (f"text {report.TEXT}", "text of the demo's README"),
    ],
)
def test_report_shows_only_the_name_of_the_text_file(feed: str, shown: str) -> None:
    assert report._input(feed) == shown
