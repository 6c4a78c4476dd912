"""Tests `moegguf trace record` and `simulate` with the demo model, and three studies in
predictors/study."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import Command, completed, started
from waiting import until

from moegguf.controller.policies import policy_names
from moegguf.trace.format import read
from moegguf.trace.trace import Trace


def test_trace_record_labels_a_request_for_each_prompt(trace: Trace) -> None:
    assert trace.header.labels == {0: "chat", 1: "code", 2: "chat", 3: "code"}
    assert trace.header.model == "moegguf demo"
    assert trace.inputs is not None and trace.weights is not None
    for sequence, most in ((0, 8), (2, 3), (3, 8)):
        assert 1 <= trace.select([sequence]).decode().n_tokens <= most
    assert trace.select([1]).decode().n_tokens > 1


def test_simulate_prints_hit_rates_of_every_policy_in_80_columns(
    here: Command, recorded: Path, trace: Trace
) -> None:
    done = here("trace", "simulate", recorded)
    assert done.returncode == 0, done.stderr
    assert "hit rates ...\n" in done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
    names = [line.split()[0] for line in lines[2 : lines.index("")]]
    assert names[0] == "lru" and names[-1] == "belady"
    assert set(names[:-1]) <= set(policy_names())
    assert (
        f"4 of 4 requests with {trace.decode().n_tokens} of {trace.decode().n_tokens} decoded tokens"
        in done.stdout
    )


def test_simulate_json_has_the_figures_of_the_table(
    here: Command, recorded: Path
) -> None:
    flags = ("--policy", "lru,next-use", "--expert-cache", "25%, 0.5")
    rows = json.loads(here("trace", "simulate", recorded, *flags, "--json").stdout)
    assert [(row["policy"], row["share"]) for row in rows] == [
        ("lru", 0.25), ("next-use", 0.25), ("belady", 0.25), ("lru", 0.5), ("next-use", 0.5), ("belady", 0.5),
    ]  # fmt: skip
    table = here("trace", "simulate", recorded, *flags).stdout
    for row in rows:
        assert f"{row['decode_hit_rate']:.1%}" in table
        assert row["decode_hit_rate"] <= next(
            bound["decode_hit_rate"]
            for bound in rows
            if bound["policy"] == "belady" and bound["share"] == row["share"]
        )


def test_simulate_with_a_link_prints_stalls_and_speed(
    here: Command, recorded: Path
) -> None:
    flags = (
        "--policy",
        "lru",
        "--predictor",
        "none,skip",
        "--model",
        "demo",
        "--expert-cache",
        "25%",
    )
    timed = ("--link", "0.5", "--latency", "50", "--layer-compute", "1000")
    done = here("trace", "simulate", recorded, *flags, *timed, "--prefetch")
    assert done.returncode == 0, done.stderr
    stalls = done.stdout[
        done.stdout.index("Stall") : done.stdout.index("Decoded tokens per second")
    ].splitlines()[2:4]
    none, skip = (float(line.split()[-1]) for line in stalls)
    # The watchdog stops prefetching if it does not reduce stalls.
    assert 0 < skip <= none
    speeds = done.stdout[done.stdout.index("Decoded tokens per second") :].splitlines()[
        2:4
    ]
    assert all(0 < float(line.split()[-1]) < 1000 for line in speeds)


def test_simulate_of_two_tiers_prints_a_line_for_each(
    here: Command, recorded: Path
) -> None:
    budgets = ("--vram-cache", "10%,70%", "--expert-cache", "50%")
    links = ("--link", "0.5", "--device-link", "4GB/s,20us", "--layer-compute", "100")
    flags = ("--policy", "vram=next-use,ram=slru", "--policy", "lru", *budgets, *links)
    rows = json.loads(here("trace", "simulate", recorded, *flags, "--json").stdout)
    names = ["vram=next-use,ram=slru", "lru"]
    assert [(row["policy"], row["share"], row["ram_share"]) for row in rows] == [
        (name, share, 0.5) for share in (0.1, 0.7) for name in names
    ]
    done = here("trace", "simulate", recorded, *flags)
    lines = [line.split() for line in done.stdout.splitlines()]
    for row in rows:
        vram, ram = (row["simulated"]["decode_tiers"][tier] for tier in ("VRAM", "RAM"))
        assert vram["lookups"] - vram["hits"] == ram["lookups"]
        hits = [f"{tier['hits'] / tier['lookups']:.1%}" for tier in (vram, ram)]
        first = next(
            n
            for n, line in enumerate(lines)
            if row["policy"] in line and f"{row['share']:.0%}" in line
        )
        assert (lines[first][2:4], lines[first + 1][:3]) == (
            ["VRAM", hits[0]],
            ["50%", "RAM", hits[1]],
        )
        staged = row["simulated"]["tiers"].get("staging")
        assert (staged is not None) == (row["share"] == 0.7)
    assert all(row["simulated"]["t_per_s"] > 0 for row in rows)
    assert "prompts staged, of 70%: " in done.stdout


def test_simulate_of_several_devices_prints_a_line_for_each(
    here: Command, recorded: Path
) -> None:
    budgets = (
        "--vram-cache",
        "20%,20%",
        "--expert-cache",
        "50%",
        "--tensor-split",
        "1,1",
    )
    links = ("--device-link", "4GB/s,20us", "--device-link", "1GB/s")
    row = json.loads(
        here(
            "trace", "simulate", recorded, "--policy", "lru", *budgets, *links, "--json"
        ).stdout
    )[0]
    tiers = row["simulated"]["tiers"]
    assert row["share"] == 0.4 and list(row["devices"]) == ["CUDA0", "CUDA1"]
    for name in ("lookups", "hits", "evictions", "bytes_in"):
        assert tiers["VRAM"][name] == tiers["CUDA0"][name] + tiers["CUDA1"][name] > 0
    assert tiers["CUDA0"]["lookups"] > 2 * tiers["CUDA1"]["lookups"]
    assert (
        tiers["CUDA0"]["hits"] / tiers["CUDA0"]["lookups"]
        < tiers["CUDA1"]["hits"] / tiers["CUDA1"]["lookups"]
    )
    done = here("trace", "simulate", recorded, "--policy", "lru", *budgets, *links)
    words = [word for line in done.stdout.splitlines() for word in line.split()]
    assert [word for word in words if word in tiers][:4] == [
        "VRAM",
        "CUDA0",
        "CUDA1",
        "RAM",
    ]


def test_simulate_leaves_out_strategies_without_recorded_inputs(
    here: Command, without_inputs: Path
) -> None:
    done = here(
        "trace",
        "simulate",
        without_inputs,
        "--model",
        "demo",
        "--strategy",
        "all",
        "--link",
        "1",
    )
    assert done.returncode == 0
    assert re.search(
        r"warning: left out: .*promoe.*record it with `moegguf trace record --inputs`\)",
        " ".join(done.stderr.split()),
    )
    assert "promoe" not in done.stdout and "moe-infinity" in done.stdout


def test_simulate_replays_every_strategy(here: Command, recorded: Path) -> None:
    options = [
        "--expert-cache",
        "25%",
        "--link",
        "1",
        "--layer-compute",
        "500",
        "--json",
    ]
    done = here(
        "trace", "simulate", recorded, "--model", "demo", "--strategy", "all", *options
    )
    assert done.returncode == 0, done.stderr
    rows = {row["strategy"]: row for row in json.loads(done.stdout)}
    assert list(rows) == [
        "none",
        "lru",
        "moe-infinity",
        "promoe",
        "expertflow",
        "duoserve",
        "moegguf",
        "",
    ]
    ahead = {
        name: row["simulated"]["whole"]["bytes_prefetched"]
        for name, row in rows.items()
        if name
    }
    assert (
        min(
            ahead[name] for name in ("moe-infinity", "promoe", "expertflow", "duoserve")
        )
        > ahead["lru"]
    )
    assert ahead["none"] == 0
    assert (rows["expertflow"]["policy"], rows["expertflow"]["predictor"]) == (
        "locality",
        "routing-path",
    )
    options = [*options, "--no-prefetch", "--policy", "lfu-decay"]
    done = here(
        "trace",
        "simulate",
        recorded,
        "--model",
        "demo",
        "--strategy",
        "promoe",
        *options,
    )
    (row, _) = json.loads(done.stdout)
    assert (row["policy"], row["predictor"]) == ("lfu-decay", "mlp")


def test_simulate_save_writes_hit_rates_for_auto(
    here: Command, recorded: Path, trace: Trace, tmp_path: Path
) -> None:
    done = here(
        "trace",
        "simulate",
        recorded,
        "--policy",
        "lru,lfu",
        "--predictors",
        tmp_path,
        "--save",
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"saved {tmp_path / 'measured.json'}: auto chooses by 2 of 4 requests"
        in done.stderr
    )
    facts = json.loads((tmp_path / "measured.json").read_text())
    assert facts["fingerprint"] == trace.header.fingerprint
    assert list(facts["hit_rates"]) == ["lru", "lfu"]
    assert list(facts["hit_rates"]["lru"]) == ["0.1", "0.25", "0.5", "0.75"]
    assert "replayed: 2 of 4 requests" in done.stdout
    assert (facts["about"]["requests"], facts["about"]["ranges"]) == (2, 2)


def test_simulate_refuses_a_trace_without_decoded_tokens(
    here: Command, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("What is an expert?\n\nWhat is a router?\n")
    out = tmp_path / "t.npz"
    assert (
        here(
            "trace",
            "record",
            "demo",
            "--prompts",
            tmp_path / "prompts.txt",
            "-o",
            out,
            "-n",
            0,
        ).returncode
        == 0
    )
    trace = read(out)
    assert trace.n_tokens > 8 and trace.decode().n_tokens == 0
    assert trace.header.labels == {0: "prompts", 1: "prompts"}
    done = here("trace", "simulate", out)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--max-tokens above 0" in done.stderr


def test_trace_record_cuts_long_prompts_with_a_warning(
    here: Command, tmp_path: Path
) -> None:
    long = {"prompt": "word " * 400, "n_predict": 4}
    forced = {"prompt": "one", "completion": "word " * 400}
    (tmp_path / "p.jsonl").write_text(
        "\n".join(map(json.dumps, ({"prompt": "hi", "n_predict": 4}, long, forced)))
    )
    out = tmp_path / "t.npz"
    done = here(
        "trace",
        "record",
        "demo",
        "--prompts",
        tmp_path / "p.jsonl",
        "-o",
        out,
        "-c",
        256,
        "-t",
        1,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"warning: 2 of 3 prompts, .* were cut; a larger context .*\(--ctx\)\.\n",
        done.stderr,
    )
    trace = read(out)
    assert 1 <= trace.select([1]).decode().n_tokens <= 4
    assert 250 < trace.select([1]).n_tokens <= 255
    assert 250 < trace.select([2]).n_tokens <= 255


def test_trace_record_without_hooks_is_an_error(
    here: Command, prompts: Path, tmp_path: Path
) -> None:
    done = here(
        "trace",
        "record",
        "demo",
        "--prompts",
        prompts,
        "-o",
        tmp_path / "t",
        MOEGGUF_HOOKS="0",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "nothing to record" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_interrupted_recording_leaves_no_partial_file(
    recorded: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("What is an expert?\n\n" * 4000)
    out, partial = tmp_path / "t.npz", tmp_path / "t.npz.partial"
    out.write_bytes(b"an older trace")
    with started(
        "trace", "record", "demo", "--prompts", tmp_path / "p.txt", "-o", out, "-t", 1
    ) as process:
        # A partial file with contents shows that the model is loaded and passes are
        # being recorded.
        until(lambda: partial.exists() and partial.stat().st_size, 60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert out.read_bytes() == b"an older trace"
    assert not partial.exists()


def test_trace_commands_succeed_with_a_closed_stdout(
    recorded: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.npz"
    record = f"trace record demo --prompts {prompts} -o {out} -t 1 -n 2 >&- 2>&-"
    simulate = f"trace simulate {recorded} --policy lru >&-"
    for command in (record, simulate):
        done = completed(["sh", "-c", f"{sys.executable} -m moegguf {command}"])
        assert done.returncode == 0, done.stderr
        assert "error" not in done.stderr
    assert len(read(out).sequences()) == 4


@pytest.fixture(scope="module")
def study() -> Command:
    """Returns `study(name, *arguments)`, which runs `predictors.study.NAME` and returns
    the completed process."""

    def call(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return completed(
            [sys.executable, "-m", f"predictors.study.{name}", *map(str, arguments)]
        )

    return call


def test_a_synthetic_trace_is_simulated_with_its_given_locality(
    here: Command, study: Command, tmp_path: Path
) -> None:
    path = tmp_path / "made-up.npz"
    shape = ("--layers", "3", "--experts", "32", "--used", "2", "--expert-size", "3MiB")
    done = study(
        "synthesize", "--locality", "qwen3-30b", *shape, "--tokens", "300", "-o", path
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{path}: 300 tokens, synthetic routing as of Qwen3-30B-A3B\n"
    made = read(path).shape
    assert (made.n_layer, made.n_expert, made.n_expert_used, made.expert_bytes) == (
        3,
        32,
        2,
        3 << 20,
    )
    rows = json.loads(
        here(
            "trace",
            "simulate",
            path,
            "--policy",
            "lru",
            "--expert-cache",
            "40%",
            "--json",
        ).stdout
    )
    assert rows[0]["hit_rate"] == pytest.approx(0.9, abs=0.03)


def test_the_score_study_rates_predictors_beside_a_control(
    study: Command, recorded: Path
) -> None:
    done = study(
        "score",
        recorded,
        "--model",
        "demo",
        "--predictor",
        "skip,fresh-gate,eamc",
        "--link",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    figures = [line.split() for line in done.stdout.splitlines()]
    skip = next(words for words in figures if words[:2] == ["skip", "1"])
    assert float(skip[2].rstrip("%")) > 2 * float(skip[3].rstrip("%"))
    gate = next(words for words in figures if words[:2] == ["fresh-gate", "0"])
    # Below 100 %, because traces store router inputs as float16.
    assert float(gate[2].rstrip("%")) > 99
    assert "GOODPRED" in done.stdout


def test_the_schedule_study_compares_oracle_predicted_random_and_fifo(
    study: Command, recorded: Path
) -> None:
    done = study(
        "schedule",
        recorded,
        "--batch",
        "1,2",
        "--expert-cache",
        "50%",
        "--paths",
        "recent",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[2 : lines.index("")]]
    assert [row[:2] for row in rows] == [
        [size, order]
        for size in "12"
        for order in ("oracle", "predicted", "random", "fifo")
    ]
    # The order saves nothing in batches of one request.
    assert all(row[3] == "0.0%" for row in rows[:4])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("score", "TRACE", "--predictor", "all,unknown"),
            "there is no predictor 'unknown'",
        ),
        (("schedule", "TRACE", "--batch", "3"), "two batches of requests"),
        (
            ("schedule", "TRACE", "--paths", "psychic"),
            "known paths: recent, token-id, routing-path",
        ),
        (
            ("synthesize", "--locality", "glm", "--expert-size", "big", "-o", "OUT"),
            "--expert-size: a size",
        ),
    ],
)
def test_errors_of_the_studies_are_one_line_with_the_next_step(
    study: Command,
    recorded: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    known = {"TRACE": str(recorded), "OUT": str(tmp_path / "t.npz")}
    done = study(*(known.get(argument, argument) for argument in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^error: .*" + re.escape(words), done.stderr, re.MULTILINE)
    assert not (tmp_path / "t.npz").exists()
