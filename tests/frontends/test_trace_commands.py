"""`moegguf trace`: record from the demo model, simulate; errors."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command, TinyModel, environment
from waiting import until

from moegguf.cli.app import main
from moegguf.controller.policies import policy_names
from moegguf.trace.format import read
from moegguf.trace.trace import Trace

Capture = pytest.CaptureFixture[str]
ERROR = r"(warning: .+\n)?error: .+[.?]\n"


def refused(capsys: Capture, *arguments: object) -> tuple[int, str]:
    """Exit code and the one line on stderr; runs in this process, which is faster."""
    code = main(["trace", *map(str, arguments)])
    out, said = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(ERROR, said)
    return code, said


def test_a_trace_has_every_prompt_as_a_request_of_its_kind(trace: Trace) -> None:
    assert trace.header.labels == {0: "chat", 1: "code", 2: "chat", 3: "code"}
    assert trace.header.model == "moegguf demo"
    assert trace.inputs is not None and trace.weights is not None
    for sequence, most in ((0, 8), (2, 3), (3, 8)):
        assert 1 <= trace.select([sequence]).decode().n_tokens <= most
    assert trace.select([1]).decode().n_tokens > 1


def test_hit_rates_of_every_policy_fit_a_narrow_terminal(here: Command, recorded: Path, trace: Trace) -> None:
    done = here("trace", "simulate", recorded)
    assert done.returncode == 0, done.stderr
    assert "hit rates ...\n" in done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
    names = [line.split()[0] for line in lines[2 : lines.index("")]]
    assert names[0] == "lru" and names[-1] == "belady"
    assert set(names[:-1]) <= set(policy_names())
    assert f"4 of 4 requests with {trace.decode().n_tokens} of {trace.decode().n_tokens} decoded tokens" in done.stdout


def test_json_is_the_table(here: Command, recorded: Path) -> None:
    flags = ("--policy", "lru,next-use", "--expert-cache", "25%, 0.5")
    rows = json.loads(here("trace", "simulate", recorded, *flags, "--json").stdout)
    assert [(row["policy"], row["share"]) for row in rows] == [
        ("lru", 0.25), ("next-use", 0.25), ("belady", 0.25), ("lru", 0.5), ("next-use", 0.5), ("belady", 0.5),
    ]  # fmt: skip
    table = here("trace", "simulate", recorded, *flags).stdout
    for row in rows:
        assert f"{row['decode_hit_rate']:.1%}" in table
        assert row["decode_hit_rate"] <= next(
            bound["decode_hit_rate"] for bound in rows if bound["policy"] == "belady" and bound["share"] == row["share"]
        )


def test_a_modelled_link_gives_stalls_and_speed(here: Command, recorded: Path) -> None:
    flags = ("--policy", "lru", "--predictor", "none,skip", "--model", "demo", "--expert-cache", "25%")
    timed = ("--link", "0.5", "--latency", "50", "--layer-compute", "1000")
    done = here("trace", "simulate", recorded, *flags, *timed, "--prefetch")
    assert done.returncode == 0, done.stderr
    stalls = done.stdout[done.stdout.index("Stall") : done.stdout.index("Decoded tokens per second")].splitlines()[2:4]
    none, skip = (float(line.split()[-1]) for line in stalls)
    assert 0 < skip <= none  # prefetching stops where it does not pay
    speeds = done.stdout[done.stdout.index("Decoded tokens per second") :].splitlines()[2:4]
    assert all(0 < float(line.split()[-1]) < 1000 for line in speeds)


def test_two_tiers_have_a_line_each_and_links_of_their_own(here: Command, recorded: Path) -> None:
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
        first = next(n for n, line in enumerate(lines) if row["policy"] in line and f"{row['share']:.0%}" in line)
        assert (lines[first][2:4], lines[first + 1][:3]) == (["VRAM", hits[0]], ["50%", "RAM", hits[1]])
        staged = row["simulated"]["tiers"].get("staging")
        assert (staged is not None) == (row["share"] == 0.7)
    assert all(row["simulated"]["t_per_s"] > 0 for row in rows)
    assert "prompts staged, of 70%: " in done.stdout


def test_several_devices_have_a_line_each(here: Command, recorded: Path) -> None:
    budgets = ("--vram-cache", "20%,20%", "--expert-cache", "50%", "--tensor-split", "1,1")
    links = ("--device-link", "4GB/s,20us", "--device-link", "1GB/s")
    row = json.loads(here("trace", "simulate", recorded, "--policy", "lru", *budgets, *links, "--json").stdout)[0]
    tiers = row["simulated"]["tiers"]
    assert row["share"] == 0.4 and list(row["devices"]) == ["CUDA0", "CUDA1"]
    for name in ("lookups", "hits", "evictions", "bytes_in"):
        assert tiers["VRAM"][name] == tiers["CUDA0"][name] + tiers["CUDA1"][name] > 0
    assert tiers["CUDA0"]["lookups"] > 2 * tiers["CUDA1"]["lookups"]
    assert tiers["CUDA0"]["hits"] / tiers["CUDA0"]["lookups"] < tiers["CUDA1"]["hits"] / tiers["CUDA1"]["lookups"]
    done = here("trace", "simulate", recorded, "--policy", "lru", *budgets, *links)
    words = [word for line in done.stdout.splitlines() for word in line.split()]
    assert [word for word in words if word in tiers][:4] == ["VRAM", "CUDA0", "CUDA1", "RAM"]


def test_all_strategies_are_those_that_the_trace_has_inputs_for(here: Command, without_inputs: Path) -> None:
    done = here("trace", "simulate", without_inputs, "--model", "demo", "--strategy", "all", "--link", "1")
    assert done.returncode == 0
    assert re.search(r"warning: left out: .*promoe.*: record the trace with --inputs\)", " ".join(done.stderr.split()))
    assert "promoe" not in done.stdout and "moe-infinity" in done.stdout


def test_trace_alone_shows_its_help(here: Command) -> None:
    done = here("trace")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^  simulate +Replay", done.stdout, re.MULTILINE)


def test_whole_strategies_are_replayed(here: Command, recorded: Path) -> None:
    options = ["--expert-cache", "25%", "--link", "1", "--layer-compute", "500", "--json"]
    done = here("trace", "simulate", recorded, "--model", "demo", "--strategy", "all", *options)
    assert done.returncode == 0, done.stderr
    rows = {row["strategy"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["none", "lru", "moe-infinity", "promoe", "expertflow", "duoserve", "moegguf", ""]
    ahead = {name: row["simulated"]["whole"]["bytes_prefetched"] for name, row in rows.items() if name}
    assert min(ahead[name] for name in ("moe-infinity", "promoe", "expertflow", "duoserve")) > ahead["lru"]
    assert ahead["none"] == 0
    assert (rows["expertflow"]["policy"], rows["expertflow"]["predictor"]) == ("locality", "routing-path")
    options = [*options, "--no-prefetch", "--policy", "lfu-decay"]
    done = here("trace", "simulate", recorded, "--model", "demo", "--strategy", "promoe", *options)
    (row, _) = json.loads(done.stdout)
    assert (row["policy"], row["predictor"]) == ("lfu-decay", "mlp")


def test_saved_hit_rates_are_written(here: Command, recorded: Path, trace: Trace, tmp_path: Path) -> None:
    done = here("trace", "simulate", recorded, "--policy", "lru,lfu", "--predictors", tmp_path, "--save")
    assert done.returncode == 0, done.stderr
    assert f"saved {tmp_path / 'measured.json'}: auto chooses by 2 of 4 requests" in done.stderr
    facts = json.loads((tmp_path / "measured.json").read_text())
    assert facts["fingerprint"] == trace.header.fingerprint
    assert list(facts["hit_rates"]) == ["lru", "lfu"]
    assert list(facts["hit_rates"]["lru"]) == ["0.1", "0.25", "0.5", "0.75"]
    assert "replayed: 2 of 4 requests" in done.stdout
    assert (facts["about"]["requests"], facts["about"]["ranges"]) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("simulate", "missing.npz"), 2, "does not exist"),
        (("simulate", "TRACE", "--policy", "lro"), 1, "there is no policy 'lro'; known are lru,"),
        (("simulate", "TRACE", "--policy", ","), 1, "no policy is named; known are lru,"),
        (("simulate", "TRACE", "--predictor", "skip"), 1, "--model"),
        (("simulate", "TRACE", "--model", "MODEL"), 1, "was recorded from another model (moegguf demo)"),
        (("simulate", "TRACE", "--expert-cache", "0%"), 1, "each above 0%, but not '0%'"),
        (("simulate", "TRACE", "--expert-cache", ""), 1, "but not ''"),
        (("simulate", "TRACE", "--expert-cache", "a few"), 1, "but not 'a few'"),
        (("simulate", "TRACE", "--prefetch", "--predictor", "eamc"), 1, "--link"),
        (("simulate", "TRACE", "--prefetch", "--link", "1"), 1, "--predictor"),
        (("simulate", "TRACE", "--strategy", "promo"), 1, "there is no strategy 'promo'; known are none, lru,"),
        (("simulate", "TRACE", "--strategy", "lru,moe-infinity"), 1, "moe-infinity prefetches, which needs a modelled"),
        (("simulate", "TRACE", "--strategy", "lru", "--policy", "lru,lfu"), 1, "take one name each"),
        (("simulate", "TRACE", "--strategy", "lru", "--save"), 1, "not for --strategy"),
        (("simulate", "TRACE", "--policy", "vram=lru,ram=slru"), 1, "--vram-cache"),
        (("simulate", "TRACE", "--vram-cache", "20%", "--policy", "ram=lfu"), 1, "lru, lfu-decay, slru, not by"),
        (("simulate", "TRACE", "--vram-cache", "0%"), 1, "--vram-cache takes shares"),
        (("simulate", "TRACE", "--vram-cache", "20%", "--strategy", "lru"), 1, "leave out --vram-cache"),
        (("simulate", "TRACE", "--vram-cache", "20%", "--device-link", "fast"), 1, "is not a link"),
        (("simulate", "TRACE", "--device-link", "4GB/s"), 1, "--vram-cache"),
        (("simulate", "TRACE", "--tensor-split", "1,1"), 1, "--vram-cache"),
        (("simulate", "TRACE", "--vram-cache", "20%", "--tensor-split", "1,x"), 1, "but not '1,x'"),
        (("simulate", "TRACE", "--vram-cache", "20%", "--tensor-split", "0,0"), 1, "some above"),
        (("simulate", "TRACE", "--vram-cache", "5%,5%,5%", "--tensor-split", "1,1"), 1, "given for 3 devices"),
        (("simulate", "TRACE", "--vram-cache", "9%", *("--device-link", "4GB/s") * 2), 1, "need --tensor-split"),
    ],
)
def test_an_error_is_one_line_with_the_next_step(
    capsys: Capture, recorded: Path, tiny: TinyModel, arguments: tuple[str, ...], code: int, words: str
) -> None:
    known = {"TRACE": str(recorded), "MODEL": str(tiny())}
    found, said = refused(capsys, *(known.get(argument, argument) for argument in arguments))
    assert found == code
    assert words in said


def test_prompts_alone_have_nothing_to_replay(here: Command, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("What is an expert?\n\nWhat is a router?\n")
    out = tmp_path / "t.npz"
    assert here("trace", "record", "demo", "--prompts", tmp_path / "prompts.txt", "-o", out, "-n", 0).returncode == 0
    trace = read(out)
    assert trace.n_tokens > 8 and trace.decode().n_tokens == 0
    assert trace.header.labels == {0: "prompts", 1: "prompts"}
    done = here("trace", "simulate", out)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--max-tokens above 0" in done.stderr


def test_prompts_longer_than_the_context_are_cut_with_a_warning(here: Command, tmp_path: Path) -> None:
    long = {"prompt": "word " * 400, "n_predict": 4}
    forced = {"prompt": "one", "completion": "word " * 400}
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, ({"prompt": "hi", "n_predict": 4}, long, forced))))
    out = tmp_path / "t.npz"
    done = here("trace", "record", "demo", "--prompts", tmp_path / "p.jsonl", "-o", out, "-c", 256, "-t", 1)
    assert done.returncode == 0, done.stderr
    assert re.search(r"warning: 2 of 3 prompts, .* were cut; a larger context .*\(--ctx\)\.\n", done.stderr)
    trace = read(out)
    assert 1 <= trace.select([1]).decode().n_tokens <= 4
    assert 250 < trace.select([1]).n_tokens <= 255
    assert 250 < trace.select([2]).n_tokens <= 255


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--expert-cache", "0%"), "accepted:"),
        (("--policy", "lro"), "there is no policy 'lro'"),
        (("--predictor", "skp"), "there is no predictor 'skp'"),
        (("-o", "no/folder/t.npz"), "there is no folder"),
        (("-o", "PROMPTS"), "would overwrite"),
        (("--prompts", "EMPTY"), "is empty; write at least one prompt"),
    ],
)
def test_a_failed_recording_leaves_nothing(
    capsys: Capture, prompts: Path, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    (tmp_path / "empty").touch()
    known = {"PROMPTS": str(prompts), "EMPTY": str(tmp_path / "empty")}
    common = ("--prompts", prompts, "-o", tmp_path / "t.npz", "-t", 1)
    code, said = refused(capsys, "record", "demo", *common, *(known.get(flag, flag) for flag in flags))
    assert code == 1
    assert words in said
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_without_experts_or_hooks_there_is_nothing_to_record(here: Command, prompts: Path, tmp_path: Path) -> None:
    done = here("trace", "record", "demo", "--prompts", prompts, "-o", tmp_path / "t", MOEGGUF_HOOKS="0")
    assert done.returncode == 1
    assert re.fullmatch(ERROR, done.stderr)
    assert "nothing to record" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_interrupted_recording_leaves_no_partial_file(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("What is an expert?\n\n" * 4000)
    out, partial = tmp_path / "t.npz", tmp_path / "t.npz.partial"
    out.write_bytes(b"an older trace")
    command = ["trace", "record", "demo", "--prompts", str(tmp_path / "p.txt"), "-o", str(out), "-t", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moegguf.cli.app", *command], env=environment(), stderr=subprocess.PIPE, text=True
    )
    until(partial.exists, 60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert out.read_bytes() == b"an older trace"
    assert not partial.exists()


def test_a_closed_stdout_harms_nothing(recorded: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    record = f"trace record demo --prompts {prompts} -o {out} -t 1 -n 2 >&- 2>&-"
    simulate = f"trace simulate {recorded} --policy lru >&-"
    for command in (record, simulate):
        shell = ["sh", "-c", f"{sys.executable} -m moegguf.cli.app {command}"]
        done = subprocess.run(shell, env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "error" not in done.stderr
    assert len(read(out).sequences()) == 4
