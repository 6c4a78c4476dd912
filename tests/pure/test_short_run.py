"""Tests tools/gpu/short_run.py: time limits of steps, outcomes written as soon as a
part finishes, and the results table.
"""

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.gpu import pack, short_run
from tools.gpu.case import Case
from tools.gpu.short_plan import (
    ANSWER,
    CARD,
    EQUAL,
    REHEARSAL,
    SAME,
    SCORED,
    STOP,
    TOTAL_S,
    Part,
    Step,
    steps,
    switch_bits,
)
from tools.gpu.short_run import Runner, calls, ends, outcome_of, run, to_repeat
from tools.gpu.short_table import figures_of, table
from tools.gpu.steps import State

ROOT = Path(__file__).resolve().parents[2]
FACTS = Part("the machine", "facts")


def plan_of(*steps_: tuple[str, float, int, list[str]]) -> list[Step]:
    return [
        Step(
            name,
            share_s,
            "why?",
            tuple(Part(part, "micro", ("copies",)) for part in parts),
            n_turns,
        )
        for name, share_s, n_turns, parts in steps_
    ]


def answered(tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {"status": "done", "values": {"steady_tokens_per_s": tokens_per_s, **more}}


class Scripted(Runner):
    """A runner that does not start any process.

    A part takes its scripted seconds (by default 1), but no longer than the time left.
    """

    def __init__(
        self, seconds: dict[str, float], fail: str = "", switches: int = 0
    ) -> None:
        self.now, self.ran, self.switches = 0.0, list[tuple[str, float]](), 0
        self._built_in, self.devices = switches, ["CPU: a processor", "CUDA0: a card"]
        self._seconds, self._fail, self._setting = seconds, fail, CARD
        self.files = {"micro", "libcalls.so"}

    def clock(self) -> float:
        return self.now

    def has(self, name: str) -> bool:
        return name in self.files

    def run(self, part: Part, left_s: float) -> dict[str, Any]:
        self.ran.append((part.name, left_s))
        self.now += min(left_s, self._seconds.get(part.name, 1.0))
        facts = {"switches": self._built_in, "devices": self.devices}
        outcome: dict[str, Any] = {
            "status": "failed" if part.name == self._fail else "done"
        }
        return outcome | ({"values": facts} if part.kind == "facts" else {})


def test_calls_take_turns_between_parts_and_ends_are_sums_of_shares() -> None:
    plan = plan_of(("M", 10, 1, ["a"]), ("Q", 20, 2, ["b", "c"]), ("R", 30, 1, ["d"]))
    assert [call.name for call in calls(plan[1])] == [
        "Q/b/1",
        "Q/c/1",
        "Q/b/2",
        "Q/c/2",
    ]
    assert [end_s for _, end_s in ends(plan, 45)] == [10, 30, 45]
    once = replace(
        plan[1], parts=(plan[1].parts[0], replace(plan[1].parts[1], once=True))
    )
    assert [call.name for call in calls(once)] == ["Q/b/1", "Q/c/1", "Q/b/2"]


def test_step_uses_time_left_by_earlier_steps_and_none_of_later_ones(
    tmp_path: Path,
) -> None:
    plan = plan_of(("M", 10, 1, ["a"]), ("Q", 20, 2, ["b", "c"]), ("R", 30, 1, ["d"]))
    runner, state, said = (
        Scripted({"a": 4, "b": 15, "c": 8}),
        State(tmp_path / "results.json"),
        list[str](),
    )
    run(plan, state, runner, 55, said.append, runner.clock)
    assert runner.ran == [("a", 10), ("b", 26), ("c", 11), ("b", 3), ("d", 25)]
    assert state.outcomes["Q/c/2"] == {"status": "no time"}
    assert [
        name for name, outcome in state.outcomes.items() if outcome["status"] == "done"
    ][-1] == "R/d/1"
    assert runner.now == 31


def test_failed_part_does_not_end_the_run_and_outcomes_are_written_at_once(
    tmp_path: Path,
) -> None:
    plan, path = plan_of(("M", 10, 1, ["a", "b"])), tmp_path / "results.json"
    runner, kept = Scripted({}, fail="a"), list[list[str]]()
    run(
        plan,
        State(path),
        runner,
        55,
        lambda _: kept.append([*json.loads(path.read_text())] if path.exists() else []),
    )
    assert kept == [[], ["M/a/1"], ["M/a/1", "M/b/1"]]
    assert json.loads(path.read_text())["M/a/1"]["status"] == "failed"


def test_parts_with_switches_that_are_not_built_in_are_skipped(tmp_path: Path) -> None:
    remedies = [
        Part(f"with {switches}", "micro", switches=switches)
        for switches in ("-", "a", "ab", "f")
    ]
    plan = [Step("facts", 9, "", (FACTS,)), Step("Q3", 9, "", tuple(remedies))]
    for built_in, done in (
        (0, []),
        (switch_bits("ab"), ["with -", "with a", "with ab"]),
    ):
        runner, state = (
            Scripted({}, switches=built_in),
            State(tmp_path / f"{built_in}.json"),
        )
        run(plan, state, runner, 55, lambda _: None, runner.clock)
        statuses = {
            name.split("/")[1]: outcome["status"]
            for name, outcome in state.outcomes.items()
        }
        assert [
            name
            for name in statuses
            if name.startswith("with") and statuses[name] == "done"
        ] == done
        assert set(statuses.values()) <= {"done", "not built in"}
    assert (switch_bits("-"), switch_bits("abcdef")) == (0, 63)


def test_parts_without_their_program_are_skipped(tmp_path: Path) -> None:
    counting = Part("counting", "measure", counts_calls=True)
    plan = [
        Step(
            "M",
            9,
            "",
            (Part("copies", "micro", ("copies",)), Part("speed", "measure"), counting),
        )
    ]
    for files, ran in (
        ({"micro"}, ["copies", "speed"]),
        ({"libcalls.so"}, ["speed", "counting"]),
    ):
        runner, state = Scripted({}), State(tmp_path / f"{ran[0]}.json")
        runner.files = files
        run(plan, state, runner, 55, lambda _: None, runner.clock)
        assert [name for name, _ in runner.ran] == ran
        assert sorted(outcome["status"] for outcome in state.outcomes.values()) == [
            "done",
            "done",
            "not built in",
        ]


def test_said_line_of_a_failed_part_has_its_error(tmp_path: Path) -> None:
    runner, said = Scripted({}), list[str]()
    runner.run = lambda part, left_s: {
        "status": "failed",
        "error": "Traceback\n  no slot",
    }  # type: ignore[method-assign]
    run(
        plan_of(("M", 9, 1, ["a"])),
        State(tmp_path / "results.json"),
        runner,
        55,
        said.append,
        runner.clock,
    )
    assert said[-1].endswith("a: failed; Traceback no slot")


def test_switches_of_the_shell_do_not_reach_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGGUF_SWITCHES", "443")
    program = tmp_path / "micro"
    program.write_text("""#!/bin/sh
echo "{\\"item\\": \\"switches\\", \\"unit\\": \\"number\\", \\"value\\": ${MOEGGUF_SWITCHES:-0}}"
""")
    program.chmod(0o755)
    runner = Runner(CARD, tmp_path, tmp_path, tmp_path / "log.txt")
    for switches, value in (("", 0), ("ab", 3)):
        assert runner.run(Part("a", "micro", ("copies",), switches=switches), 5.0)[
            "values"
        ] == {"switches": value}


def test_log_has_the_output_of_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(CARD, tmp_path, tmp_path, tmp_path / "log.txt")
    failing = [
        "-c",
        "print('tests/live/test_gpu.py::test_a FAILED'); print('E  logits differ')",
    ]
    monkeypatch.setattr(runner, "_command", lambda _: failing)
    assert runner.run(TESTS, 20.0)["values"] == {"passed": 0, "failed": 1, "skipped": 0}
    assert "E  logits differ" in (tmp_path / "log.txt").read_text()


def test_run_that_continues_another_reads_the_switches_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Scripted({}, switches=switch_bits("a"))
    parts = (Part("one", "measure"), Part("two", "measure", switches="a"))
    plan = (Step("facts", 9, "", (FACTS,)), Step("Q", 9, "", parts))
    monkeypatch.setattr(short_run, "Runner", lambda *_: runner)
    monkeypatch.setattr(runner, "begin_models", lambda: None)
    monkeypatch.setattr(runner, "close", lambda: None)
    monkeypatch.setattr(short_run, "steps", lambda *_: plan)
    monkeypatch.setattr(short_run.signal, "signal", lambda *_: None)
    folder = [
        "--out",
        str(tmp_path),
        "--work",
        str(tmp_path),
        "--library",
        str(tmp_path),
    ]
    first = {"facts/the machine/1": {"status": "done"}, "Q/one/1": answered(7)}
    (tmp_path / "results.json").write_text(json.dumps(first))
    assert short_run.main(folder) == 0
    assert [name for name, _ in runner.ran] == ["the machine", "two"]


def test_run_without_its_device_ends_after_the_first_part(tmp_path: Path) -> None:
    plan = [Step("facts", 9, "", (FACTS,)), *plan_of(("M", 10, 1, ["a"]))]
    for devices, fail, reason in (
        (["CPU: a processor"], "", "the library sees no CUDA0, only CPU"),
        (["CUDA0: a card"], "the machine", "failed"),
    ):
        runner, said = Scripted({}, fail), list[str]()
        runner.devices = devices
        run(
            plan,
            State(tmp_path / f"{reason}.json"),
            runner,
            55,
            said.append,
            runner.clock,
        )
        assert [name for name, _ in runner.ran] == ["the machine"]
        assert said[-1].startswith(f"error: {reason}; nothing else")


MICRO, TESTS, MEASURE = (Part(kind, kind) for kind in ("micro", "tests", "measure"))
LINE = '{"item": "copy node", "unit": "us", "value": 4.65}\n'


@pytest.mark.parametrize(
    ("part", "text", "status", "log", "expected"),
    [
        (MICRO, LINE, 0, "", {"status": "done", "values": {"copy node, us": 4.65}}),
        (
            MICRO,
            LINE + '{"item": "cut o',
            None,
            "",
            {"status": "timed out", "values": {"copy node, us": 4.65}},
        ),
        (
            MICRO,
            LINE,
            3,
            "no CUDA-capable device",
            {"status": "needs a card", "values": {"copy node, us": 4.65}},
        ),
        (
            MICRO,
            "",
            -11,
            "illegal access",
            {"status": "failed", "error": "exit status -11: illegal access"},
        ),
        (
            MEASURE,
            '{"load_s": 1}\n{"error": "no"}',
            0,
            "",
            {"status": "failed", "error": "no", "values": {"load_s": 1}},
        ),
        (
            MEASURE,
            '{"error": "x"}',
            0,
            "cudaMalloc failed: out of memory",
            {"status": "does not fit"},
        ),
        (
            TESTS,
            "tests/live/test_gpu.py::test_a[q4 0] PASSED [ 50%]\ntests/live/test_gpu.py::test_b FAILED [100%]\n",
            1,
            "",
            {"status": "done", "values": {"passed": 1, "failed": 1, "skipped": 0}},
        ),
        (
            TESTS,
            "no tests ran",
            5,
            "",
            {"status": "failed", "error": "exit status 5: "},
        ),
    ],
)
def test_outcome_of_keeps_figures_of_an_unfinished_process(
    part: Part, text: str, status: int | None, log: str, expected: dict[str, Any]
) -> None:
    assert outcome_of(part, text, status or 0, status is None, log) == expected


def test_timed_out_process_is_killed_with_its_children_and_keeps_its_figures(
    tmp_path: Path,
) -> None:
    program = tmp_path / "micro"
    program.write_text(
        f"#!/bin/sh\necho '{LINE.strip()}'\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n"
    )
    program.chmod(0o755)
    runner = Runner(CARD, tmp_path, tmp_path, tmp_path / "log.txt")
    outcome = runner.run(Part("a", "micro", ("copies",)), 1.0)
    assert outcome == {"status": "timed out", "values": {"copy node, us": 4.65}}
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 10
    while child.exists() and "Z (zombie)" not in (child / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (tmp_path / "micro").unlink()
    assert runner.run(Part("a", "micro"), 1.0)["status"] == "failed"


def test_to_repeat_selects_gaps_and_parts_whose_turns_differ() -> None:
    parts = tuple(
        Part(name, "measure") for name in ("steady", "shaky", "missing", "too large")
    )
    plan = [Step("Q", 9, "", parts, n_turns=2)]
    outcomes = {
        "Q/steady/1": answered(100),
        "Q/steady/2": answered(104),
        "Q/shaky/1": answered(100),
        "Q/shaky/2": answered(106),
        "Q/missing/1": answered(100),
        "Q/missing/2": {"status": "no time"},
        "Q/too large/1": {"status": "does not fit"},
        "Q/too large/2": {"status": "does not fit"},
    }
    assert to_repeat(plan, outcomes) == {"Q/shaky/1", "Q/shaky/2", "Q/missing/2"}


def test_short_run_table_has_predictions_beside_medians() -> None:
    copies = Part(
        "copies", "micro", predicted={"from pinned memory, 900 kB each, GB/s": (42, 53)}
    )
    case = Case("m.gguf", "CUDA0", "llama.cpp")
    base = Part(
        "llama.cpp, resident", "measure", case=case, predicted={ANSWER: (600, 750)}
    )
    share = Part("65 %", "measure", predicted={STOP: (54, 70)}, n_layer=16)
    later = Part("23 %", "measure", predicted={ANSWER: (1, 2)})
    plan = [
        Step("facts", 9, "", (FACTS, copies)),
        Step("Q3", 9, "a stop?", (base, share, later), n_turns=2),
    ]
    text = table(
        plan,
        {
            "facts/the machine/1": {"status": "done", "values": {"name": "a card"}},
            "facts/copies/1": {
                "status": "done",
                "values": {"from pinned memory, 900 kB each, GB/s": 50.0},
            },
            "Q3/llama.cpp, resident/1": answered(500.0, tokens=[7, 8, 9]),
            "Q3/llama.cpp, resident/2": {"status": "timed out"},
            "Q3/65 %/1": answered(
                250.0,
                tokens=[7, 8, 1],
                placement="slots",
                predicted={"slots": 300.4, "cpu": 20, "chosen": 300.4},
                predicted_prompts={"slots": 4000, "cpu": 90, "chosen": 4000},
                complete=False,
                steady={"VRAM": {"hit_rate": 0.98, "bytes_per_token": 50e6}},
                prompt={
                    "VRAM": {"hit_rate": 0.6},
                    "store": {"stall_ns_per_token": 2e3},
                },
            ),
        },
    )
    lines = [
        "|".join(filter(None, (cell.strip() for cell in line.split("  "))))
        for line in text.splitlines()
    ]
    assert lines == [
        "name: a card",
        "",
        "what|figure|predicted|measured",
        "",
        "facts:",
        "the machine|done",
        "copies|from pinned memory, 900 kB each, GB/s|42 to 53|50",
        "",
        "Q3: a stop?",
        "llama.cpp, resident|answer, t/s|600 to 750|500|NOT AS PREDICTED",
        "tokens as of llama.cpp, resident|3",
        "timed out",
        "65 %|a stop, us|54 to 70|62.5",
        "answer, t/s|250",
        "hits|0.98",
        "MB a token|50",
        "hits in prompts|0.6",
        "every expert has a slot (1) or not (0)|0",
        "store, stall a prompt token, us|2",
        "tokens as of llama.cpp, resident|2",
        "planner: slots of these, prompt and answer, t/s: slots 4000 and 300, cpu 90 and 20",
        "23 %|not reached",
    ]


def test_table_of_a_rehearsal_marks_only_predictions_of_one_value() -> None:
    part = Part("ours", "batches", predicted={EQUAL: (1, 1), "speed": (2, 3)})
    outcomes = {"Q/ours/1": {"status": "done", "values": {EQUAL: 0.0, "speed": 9.0}}}
    for is_rehearsal, n_marked in ((False, 2), (True, 1)):
        text = table([Step("Q", 9, "", (part,))], outcomes, is_rehearsal)
        assert text.count("NOT AS PREDICTED") == n_marked and "2 to 3" in text


def test_rehearsal_without_a_cuda_build_uses_the_usual_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_run, "CARRIED", tmp_path)
    monkeypatch.setattr(short_run, "find_library", lambda: tmp_path / "lib")
    assert short_run.library_folder(REHEARSAL) == tmp_path / "lib"
    assert short_run.library_folder(CARD) == tmp_path
    (tmp_path / "libmoegguf.so").touch()
    assert short_run.library_folder(REHEARSAL) == tmp_path


def test_short_plan_leaves_prefetching_of_remedies_to_no_trial(tmp_path: Path) -> None:
    options = {
        (step.name, part.name): part.case.options or {}
        for step in steps(CARD, tmp_path, 16)
        for part in step.parts
        if step.name in ("Q3", "Q5") and part.case
    }
    chosen = {
        key: given["prefetch"]
        for key, given in options.items()
        if given and given["vram_cache"] != "100%"
    }
    assert [key for key, prefetches in chosen.items() if prefetches] == [
        ("Q5", "prediction from inputs"),
        ("Q5", "prediction in the graph"),
    ]
    assert len(chosen) > 15


def test_short_plan_predicts_the_same_bits_for_every_remedy(tmp_path: Path) -> None:
    for step in steps(CARD, tmp_path, 16):
        for part in step.parts:
            if part.switches and part.kind == "measure":
                assert part.predicted[SAME] == (320, 320)


@pytest.mark.parametrize("setting", [CARD, REHEARSAL])
def test_short_plan_fits_the_total_time_and_has_unique_part_names(
    setting: Any, tmp_path: Path
) -> None:
    plan = steps(setting, tmp_path, 16)
    assert sum(step.share_s for step in plan) <= TOTAL_S
    names = [call.name for step in plan for call in calls(step)]
    assert len(set(names)) == len(names)
    for step in plan:
        for part in step.parts:
            assert part.limit_s <= step.share_s + 40 and "/" not in part.name
            assert all(least <= most for least, most in part.predicted.values())
            assert (part.case is not None) == (part.kind in ("measure", "batches"))


def test_short_plan_compares_new_remedies_in_pairs_that_differ_in_one_switch(
    tmp_path: Path,
) -> None:
    parts = {
        part.name: part
        for part in next(s for s in steps(CARD, tmp_path, 16) if s.name == "Q5").parts
    }
    for name, other, letter in (
        ("prediction from inputs", "prediction in the graph", "g"),
        ("slots of one size", "slots of two sizes", "i"),
        ("slots of two sizes", "one arena", "k"),
    ):
        without, with_it = parts[name], parts[other]
        assert switch_bits(with_it.switches) - switch_bits(
            without.switches
        ) == switch_bits(letter)
        assert (
            replace(
                with_it,
                name=name,
                switches=without.switches,
                predicted=without.predicted,
            )
            == without
        )


def test_short_plan_names_only_tests_that_exist(tmp_path: Path) -> None:
    text = (ROOT / "tests/live/test_gpu.py").read_text()
    identity = next(
        step for step in steps(CARD, tmp_path, 16) if step.name == "identity"
    )
    for part in identity.parts:
        assert f"def {part.arguments[-1].split()[0]}" in text


def test_figures_include_a_count_of_zero_only_if_it_is_predicted() -> None:
    outcome = answered(
        100.0,
        steady={
            "store": {
                "forecast_scored_per_token": 0.0,
                "prefetch_started_per_token": 0.0,
            }
        },
    )
    part = Part("in the graph", "measure", predicted={SCORED: (3, 3)})
    assert figures_of(MEASURE, outcome) == {ANSWER: 100.0}
    assert figures_of(part, outcome) == {ANSWER: 100.0, SCORED: 0.0}


def test_figures_of_a_measurement_include_calls_per_token() -> None:
    outcome = answered(
        100.0,
        steady={
            "graph launches": {"n_per_token": 49.0, "ns_per_token": 3e5},
            "store": {},
        },
    )
    assert figures_of(MEASURE, outcome) == {
        ANSWER: 100.0,
        "graph launches, number a token": 49.0,
        "graph launches, time a token, us": 300.0,
    }


def test_pack_short_run_contains_no_upstream_sources_and_no_binary_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, folder, wanted = tmp_path / "library", tmp_path / "folder", list[str]()
    library.mkdir()
    (library / "CPU_FEATURES").write_text("avx2\n")
    monkeypatch.setattr(pack, "_fetch_wheels", lambda _, lines: wanted.extend(lines))
    files = dict(pack.own_sources())
    monkeypatch.setattr(
        pack, "own_sources", lambda: iter({"LICENSE": files["LICENSE"]}.items())
    )
    assert pack.pack_short_run(folder, library) < pack.SHORT_RUN_BYTES
    assert {
        "tools/gpu/short_run.py",
        "tests/live/test_gpu.py",
        "moegguf/bindings/llama_cpp/__init__.py",
    } <= files.keys()
    assert not [name for name in files if name.startswith("build/vendor/llama.cpp/")]
    assert [line for line in wanted if line.startswith("gguf")] and not [
        line for line in wanted if "numpy" in line
    ]
    assert (folder / "short_run.sh").stat().st_mode & 0o100
    assert short_run.SETTINGS.keys() == {"card", "link"} and EQUAL


def test_short_run_script_resolves_relative_paths_in_the_callers_folder(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\npwd\necho $PYTHONPATH\necho $*\n")
    python.chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(python),
        "OUT": "results",
        "WORK": "work",
    }
    command = [str(ROOT / "tools/gpu/short_run.sh"), "--after", "first/results.json"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    folder, sources, options = done.stdout.splitlines()
    assert (Path(folder), Path(sources)) == (tmp_path, ROOT)
    assert (
        options
        == f"-P -m tools.gpu.short_run --out results --work {tmp_path}/work --after first/results.json"
    )
    assert (tmp_path / "results").is_dir()
