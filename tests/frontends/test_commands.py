"""Tests help, commands that only read headers, models by name, and the errors of
commands."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import split
from subprocess import CompletedProcess

import pytest
from batch_files import jsonl, request
from fake_hub import FakeHub, running_hub
from servers import ROOT, Command, Server, TinyModel, completed, serving

import moegguf
from moegguf.cli.batch import _progress_text
from moegguf.cli.model_commands import clear, library
from moegguf.errors import ModelNotFoundError
from moegguf.models import hub as downloads
from moegguf.models.catalog import Catalog
from moegguf.native.abi import ABI_VERSION
from moegguf.serving.batch.answers import Counts


def test_help_lists_the_commands_and_is_printed_without_arguments(
    here: Command,
) -> None:
    explicit, bare = here("--help"), here()
    assert explicit.returncode == bare.returncode == 0
    assert explicit.stdout == bare.stdout
    for command in ("run", "batch", "estimate", "show", "doctor", "bench", "trace"):
        assert re.search(rf"^  {command}\b", explicit.stdout, re.MULTILINE)
    # No command's description is cut off.
    assert "..." not in explicit.stdout.partition("Commands:")[2]
    for command in ("run", "pull", "create"):
        assert not re.search(r"<\w+|\{", here(command, "--help").stdout), (
            "names of arguments, not types of Python"
        )


@pytest.mark.parametrize(
    "command", ["", "run", "batch", "bench", "trace", "trace simulate"]
)
def test_help_imports_no_heavy_module(command: str) -> None:
    heavy = {"numpy", "llama_cpp", "rich", "psutil", "matplotlib", "safetensors", "prompt_toolkit", "jinja2",
             "prometheus_client"}  # fmt: skip
    code = (
        f"import sys\nfrom moegguf.cli.app import main\nmain([*'{command}'.split(), '--help'])\n"
        f"print(*sorted({heavy} & set(sys.modules)))"
    )
    done = completed([sys.executable, "-c", code])
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "run",
            "--system-prompt --verbose --ctx --expert-cache --max-tokens --temperature --help",
        ),
        ("serve", "--host --port --api-key --memory --parallel --expert-cache"),
        ("bench", "--model --n-prompt --n-gen --expert-cache --against --output"),
        ("batch", "--output --model --parallel --ctx --expert-cache"),
    ],
)
def test_the_first_screen_of_help_has_the_common_options(
    here: Command, command: str, flags: str
) -> None:
    screen = here(command, "--help", COLUMNS="80").stdout.splitlines()[:24]
    assert [flag for flag in flags.split() if flag not in " ".join(screen)] == []


def test_bench_of_one_model_prints_a_row_for_each_test(here: Command) -> None:
    done = here(
        "bench",
        "-m",
        "demo",
        "-t",
        "auto",
        "-p",
        "4",
        "-n",
        "2",
        "-r",
        "1",
        "-o",
        "json",
    )
    assert [(row["n_prompt"], row["n_gen"]) for row in json.loads(done.stdout)] == [
        (4, 0),
        (0, 2),
    ], done.stderr


def test_options_in_the_help_of_run_are_grouped(here: Command) -> None:
    text = here("run", "--help").stdout
    titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert titles == [
        "Arguments",
        "Options",
        "Model",
        "Memory",
        "Sampling",
        "Output",
        "Research",
    ]


def test_show_json_agrees_with_the_layout(here: Command, tiny: TinyModel) -> None:
    from moegguf import read_layout

    path = tiny("tiny-deepseek2")
    facts, layout = json.loads(here("show", path, "--json").stdout), read_layout(path)
    assert facts["experts"]["all_bytes"] == layout.expert_bytes
    assert facts["experts"]["token_cycle_bytes"] == layout.token_cycle_bytes
    assert (
        facts["experts"]["shared"] == layout.metadata["deepseek2.expert_shared_count"]
    )
    assert facts["active_parameters"] < facts["parameters"]
    assert [row["share"] for row in facts["budgets"]] == [0.1, 0.25, 0.5, 1.0]


def test_estimate_prints_memory_and_reasons_and_its_json_has_the_plan(
    here: Command, tiny: TinyModel
) -> None:
    ask = ("estimate", tiny("tiny-mix"), "--ctx", 512, "--expert-cache")
    done, whole = here(*ask, "50%"), here(*ask, "100%")
    assert done.returncode == 0, done.stderr
    for words in (
        "32 of 64 experts at a time (50%)",
        "KV cache",
        "hit rate",
        "Why",
        "context of 512 tokens",
    ):
        assert words in done.stdout
    assert re.search(r"read for a token .*[KM]iB +of .*[KM]iB it touches", done.stdout)
    assert not re.search(r"\d [KMG]B\b(?!/s)", done.stdout), "one unit for sizes"
    facts, resident = (
        json.loads(here(*ask, share, "--json").stdout) for share in ("50%", "100%")
    )
    assert facts["plan"]["budget_bytes"] == 32 * facts["plan"]["slot_bytes"]
    assert (
        0 < facts["expected"]["hit_low"] < facts["expected"]["hit_high"] < 1
        and facts["disk"]["bytes_per_s"] > 0
    )
    assert (
        resident["plan"]["resident"]
        and resident["disk"] is None
        and "limited by the processor" in whole.stdout
    )


def test_estimate_of_the_demo_has_the_measured_hit_rates(
    here: Command, tmp_path: Path
) -> None:
    """The hit rates in the estimate for half of the demo's experts are in the measured
    range, and below Belady's bound of 86 %."""
    # No answer of another test has reached a hit rate here.
    home = str(tmp_path / "home")
    done = here(
        "estimate", "demo", "--expert-cache", "50%", "--json", MOEGGUF_HOME=home
    )
    facts = json.loads(done.stdout)["expected"]
    assert 0.55 < facts["hit_low"] < 0.63 and 0.75 < facts["hit_high"] < 0.86
    assert (
        "measured on this model" in facts["basis"]
        and "lower bound" not in facts["basis"]
    )
    shown = here("estimate", "demo", "--expert-cache", "50%").stdout
    (speed,) = re.findall(r"speed +([\d,.]+)(?: to ([\d,.]+))? tokens/s", shown)
    for number in filter(None, speed):
        assert len(re.sub(r"[,.]", "", number).strip("0")) <= 2, (
            "two significant digits"
        )
    budgets = json.loads(here("show", "demo", "--json").stdout)["budgets"]
    assert [row["low"] for row in budgets] == sorted(row["low"] for row in budgets)


def test_estimate_prints_cpu_speeds_of_prompts_and_answers_as_assumed(
    here: Command, tiny: TinyModel
) -> None:
    ask = ("estimate", tiny("tiny-mix"), "--ctx", 512, "--expert-cache")
    shown = here(*ask, "50%").stdout
    part = shown.partition("Speed on the CPU")[2].partition("\n\n")[0].splitlines()
    assert "assumed" in part[0] and len("  Speed on the CPU" + part[0]) <= 80
    assert (
        part[1].split() == ["tokens/s", "prompt", "answer"]
        and max(map(len, part)) <= 80
    )
    assert [re.sub(r" +[\d,.]+ +[\d,.]+$", "", row).strip() for row in part[2:]] == [
        "32 of 64 experts in memory", "every expert in memory",
    ]  # fmt: skip
    (passes,) = [line for line in shown.splitlines() if "a prompt is read" in line]
    assert re.search(r"a prompt is read 512 tokens at a time: \w+", passes)
    (bound,) = [line for line in shown.splitlines() if "at most" in line]
    found = re.search(
        r"at most ([\d,.]+) tokens/s of an answer: reads at [\d.]+ GB/s allow ([\d,.]+) with a hit rate of \d+%,"
        r" computing allows ([\d,.]+)$",
        bound,
    )
    assert found, bound
    most, reads, computing = (float(n.replace(",", "")) for n in found.groups())
    assert most == min(reads, computing)
    assert "at most" not in here(*ask, "100%").stdout
    some, every = json.loads(here(*ask, "50%", "--json").stdout)["cpu"]["placements"]
    assert some["tokens_per_s"] < every["tokens_per_s"]
    assert some["prompt_tokens_per_s"] <= every["prompt_tokens_per_s"]
    (only,) = json.loads(here(*ask, "100%", "--json").stdout)["cpu"]["placements"]
    assert only["text"] == "every expert in memory"


def test_estimate_sizes_the_kv_cache_by_its_types(
    here: Command, tiny: TinyModel
) -> None:
    def kv_bytes(*flags: str, **env: str) -> int:
        facts = json.loads(
            here("estimate", tiny(), "--ctx", 512, "--json", *flags, **env).stdout
        )
        return int(facts["plan"]["kv_bytes"])

    plain, both = (
        kv_bytes(),
        kv_bytes("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
    )
    assert both < kv_bytes("-ctk", "q8_0") < plain
    assert kv_bytes(MOEGGUF_KV_CACHE_TYPE="q8_0") == both


def test_doctor_json_has_every_section(here: Command, tiny: TinyModel) -> None:
    facts = json.loads(here("doctor", tiny(), "--json").stdout)
    assert list(facts) == [
        "moegguf",
        "build",
        "devices",
        "cards",
        "machine",
        "disk",
        "folders",
        "environment",
    ]
    assert facts["machine"]["cpus_allowed"] >= 1
    assert facts["machine"]["memory"]["available_bytes"] > 0
    assert facts["disk"]["bytes_per_s"] > 0
    assert facts["build"]["abi"] == ABI_VERSION
    assert (
        f"llama_cpp_commit = {facts['build']['llama.cpp pin']}"
        in (ROOT / "patches/UPSTREAM").read_text()
    )
    assert facts["devices"]["CPU"]["total_bytes"] > 0
    assert list(facts["cards"]) == ["found", "plugins", "problems", "note"]


def test_doctor_prints_every_folder_with_its_size(
    here: Command, tiny: TinyModel, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "cache/contexts").mkdir(parents=True)
    (home / "cache/contexts/block").write_bytes(bytes(3000))
    (home / "history").write_bytes(bytes(500))
    (home / "linked").hardlink_to(home / "history")
    (tmp_path / "models").mkdir()
    model = Path(shutil.copy(tiny(), tmp_path / "models"))
    (home / "models").symlink_to(model.parent)
    variables = {"MOEGGUF_HOME": str(home), "HF_HUB_CACHE": str(tmp_path / "none")}
    folders = json.loads(here("doctor", model, "--json", **variables).stdout)["folders"]
    assert list(folders) == [
        "package",
        "data",
        "models",
        "cache",
        "downloads",
        "learnt",
    ]
    assert folders["learnt"] == {}
    assert folders["package"]["size_bytes"] > 1_000_000  # the demo model
    assert folders["data"] == {"path": str(home), "size_bytes": 3500}
    assert folders["models"]["size_bytes"] >= model.stat().st_size
    assert folders["cache"] == {"path": str(home / "cache"), "size_bytes": 3000}
    assert folders["downloads"] == {"path": str(tmp_path / "none"), "size_bytes": 0}
    shown = here("doctor", model, **variables).stdout
    assert re.search(
        rf" cache +2\.93KiB in {re.escape(str(home))}/cache$", shown, re.MULTILINE
    )


def test_doctor_prints_the_folder_beside_each_model(
    here: Command, tiny: TinyModel, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").symlink_to(tiny())
    (tmp_path / "b.gguf").symlink_to(tiny())
    beside = tmp_path / "a.gguf.moegguf"
    beside.mkdir()
    (beside / "uses.safetensors").write_bytes(bytes(2000))
    variables = {
        "MOEGGUF_HOME": str(tmp_path / "home"),
        "MOEGGUF_MODELS": str(tmp_path),
    }
    variables |= {"HF_HUB_CACHE": str(tmp_path / "none")}
    folders = json.loads(here("doctor", "demo", "--json", **variables).stdout)[
        "folders"
    ]
    assert folders["learnt"] == {"a:latest": {"path": str(beside), "size_bytes": 2000}}
    shown = here("doctor", "demo", **variables).stdout
    assert (
        "learnt a:latest" in shown and "1.95KiB in" in shown and "b:latest" not in shown
    )


def test_contexts_clear_accepts_the_name_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {"moegguf-demo-Q4_0": list[object]()}
    monkeypatch.setattr("moegguf.cli.model_commands._by_model", lambda: stored)
    clear("demo")
    assert capsys.readouterr().out.startswith("deleted 0 B")
    with pytest.raises(ModelNotFoundError, match="no contexts of 'nosuch' are kept"):
        clear("nosuch")


@pytest.mark.parametrize("command", ["run", "serve", "bench", "batch"])
def test_help_leaves_out_the_limits_of_numbers(here: Command, command: str) -> None:
    assert not re.search("x[<>]=", here(command, "--help").stdout)


def test_a_batch_has_no_time_left_before_an_answer() -> None:
    refused = Counts(failed=1)
    assert _progress_text(refused, Counts(), 3, 0.1) == "0 of 3 answered, 1 failed"


def test_doctor_check_answers_with_few_slots_and_prints_one_line(here: Command) -> None:
    done = here("doctor", "--check")
    assert re.fullmatch(
        r"The expert store's bookkeeping is correct after 16 tokens of the demo\nmodel with 30% of its experts:"
        r" [\d,]+ look-ups, [1-9][\d,]* evictions\.\n",
        done.stdout,
    )


def test_doctor_succeeds_with_missing_facts_and_prints_no_key(
    moegguf: Command, tmp_path: Path
) -> None:
    done = moegguf(
        "doctor",
        "no-such-model",
        MOEGGUF_LIBRARY=str(tmp_path),
        MOEGGUF_HOOKS="perhaps",
        LLAMA_API_KEY="hush",
    )
    assert done.returncode == 0, done.stderr
    assert "unknown: " in done.stdout
    assert (
        "MOEGGUF_HOOKS: 'perhaps' means neither on nor off; give 1 or 0" in done.stdout
    )
    assert "hush" not in done.stdout


def test_an_unexpected_error_names_its_type_and_moegguf_debug(
    here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(self: Catalog, name: str) -> None:
        raise ZeroDivisionError("so it goes")

    monkeypatch.setattr(Catalog, "find", find)
    done = here("show", "x")
    assert done.returncode == 1
    assert done.stderr == (
        "error: unexpected ZeroDivisionError: so it goes; run again with MOEGGUF_DEBUG=1 for the traceback.\n"
    )
    with pytest.raises(ZeroDivisionError):  # outside tests, Python prints its traceback
        here("show", "x", MOEGGUF_DEBUG="1")


def test_bench_report_describes_machine_model_and_both_systems(here: Command) -> None:
    done = here(
        "bench",
        "-m",
        "demo",
        "--report",
        "-t",
        1,
        "-p",
        8,
        "-n",
        4,
        "-r",
        1,
        "--rounds",
        1,
        "--expert-cache",
        "50%",
    )
    assert done.returncode == 0, done.stderr
    facts = dict(re.findall(r"^- ([\w ]+): (.+)$", done.stdout, re.MULTILINE))
    assert list(facts) == [
        "machine",
        "drive",
        "model",
        "memory for experts",
        "build",
        "input",
    ]
    assert (
        re.search(r"file [0-9a-f]{12}, routers [0-9a-f]{12}", facts["model"])
        and "96 of 192" in facts["memory for experts"]
    )
    assert facts["input"] == "text of the demo's README"
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    assert rows[0] == ["", "moegguf", "llama.cpp (mmap)"]
    assert [row[0] for row in rows[2:]] == [
        "prompt of 8, t/s", "answer of 4, t/s", "hit rate of the last test", "peak memory", "load"
    ]  # fmt: skip
    assert all(float(cell) > 0 for row in rows[2:4] for cell in row[1:]) and rows[4][
        1
    ].endswith("%")
    assert os.path.expanduser("~") not in done.stdout
    refused = here("bench", "-m", "demo", "-m", "demo", "--report")
    assert refused.returncode == 1 and "--report measures one model" in refused.stderr


def test_the_help_command_equals_the_help_option(here: Command) -> None:
    assert here("help").stdout == here("--help").stdout
    assert (
        here("help", "trace", "simulate").stdout
        == here("trace", "simulate", "--help").stdout
    )
    usages = [
        here("help", command).stdout.splitlines()[0] for command in ("rm", "budget")
    ]
    assert usages == [
        "Usage: moegguf rm [OPTIONS] MODEL...",
        "Usage: moegguf budget [OPTIONS] MODEL [BUDGET]",
    ]


def test_estimate_uses_the_same_speeds_and_hit_rate_in_both_tables(
    here: Command,
) -> None:
    device = (
        "--device-memory",
        "394MiB",
        "--device-bandwidth",
        "448GB/s",
        "--link",
        "24GB/s",
    )
    facts = json.loads(
        here(
            "estimate",
            "demo",
            "--expert-cache",
            "2MiB",
            "--ctx",
            512,
            *device,
            "--json",
        ).stdout
    )
    speeds = facts["placement"]["speeds"]
    assert round(speeds["disk_bytes_per_s"]) == facts["disk"]["bytes_per_s"]
    assert round(speeds["cpu_bytes_per_s"]) == facts["expected"]["memory_bytes_per_s"]
    assert "measured on this model" in facts["expected"]["basis"]
    assert "measured on this model" in facts["placement"]["hit_rates"]


def test_estimate_prints_speeds_on_a_device_as_predictions(
    here: Command, tiny: TinyModel
) -> None:
    device = (
        "--device-memory",
        "386MiB",
        "--device-bandwidth",
        "448GB/s",
        "--link",
        "24GB/s,30us",
    )
    shown = here("estimate", tiny(), *device, "--ctx", 512)
    assert shown.returncode == 0, shown.stderr
    assert re.search("copies +24 GB/s  .*\n +a stop at a layer +30 us", shown.stdout)
    assert (
        "predicted from speeds given for the device" in shown.stdout
        and "tokens/s" in shown.stdout
    )
    found = json.loads(
        here("estimate", tiny(), *device, "--ctx", 512, "--json").stdout
    )["placement"]
    assert {placement["kind"] for placement in found["placements"]} & {
        "cpu",
        "resident",
    }
    rows = (
        shown.stdout.partition("Speed with a device")[2]
        .partition("Basis of these predictions")[0]
        .splitlines()[1:]
    )
    assert (
        rows[0].split() == ["tokens/s", "prompt", "answer"]
        and max(map(len, rows)) <= 80
    )
    for placement in found["placements"]:
        (row,) = [row for row in rows if placement["text"] in row]
        assert (
            len(re.findall(r" [\d,.]+(?= |$)", row.removeprefix(placement["text"])))
            >= 2
        )
    assert re.search(
        r"about [\d.,]+ tokens/s of a prompt and [\d.,]+ of an answer|every expert fits",
        shown.stdout,
    )


def test_estimate_with_a_device_keeps_to_the_budget_for_ram(here: Command) -> None:
    device = "--device-memory 8GB --device-bandwidth 272GB/s --link 12.5GB/s".split()
    found = json.loads(
        here("estimate", "demo", "--expert-cache", "50%", *device, "--json").stdout
    )
    there = {each["kind"]: each for each in found["placement"]["placements"]}
    assert there["cpu"]["tokens_per_s"] == found["cpu"]["placements"][0]["tokens_per_s"]


Mine = Callable[..., "CompletedProcess[str]"]


@pytest.fixture(scope="module")
def hub(tiny: TinyModel) -> Iterator[FakeHub]:
    """A hub with one repository, which contains a small model and, in a folder, a model
    of three shards."""
    with running_hub() as found:
        whole, split = tiny("tiny-qwen2moe"), tiny("tiny-mix", "q4_k_m", 3)
        shards = sorted(split.parent.glob(split.name.replace("00001-of", "*-of")))
        files = {
            f"Q8_0/m-Q8_0-{i:05}-of-00003.gguf": shard.read_bytes()
            for i, shard in enumerate(shards, 1)
        }
        found.add("User/Moe-GGUF", {"m-Q4_K_M.gguf": whole.read_bytes(), **files})
        yield found


@pytest.fixture
def mine(here: Command, hub: FakeHub, tmp_path: Path) -> Mine:
    """Returns the command with its own home and the hub of the fixture `hub`. No server
    listens at its MOEGGUF_HOST."""

    def call(*arguments: object, **extra: str) -> CompletedProcess[str]:
        own = {"MOEGGUF_HOME": str(tmp_path / "own"), "MOEGGUF_HOST": "127.0.0.1:9"}
        return here(*arguments, **{**hub.environment(tmp_path / "hf"), **own, **extra})

    return call


def names(done: CompletedProcess[str]) -> list[str]:
    return [line.split()[0] for line in done.stdout.splitlines()[1:]]


def test_models_are_pulled_listed_shown_copied_and_removed(mine: Mine) -> None:
    pulled = mine("pull", "hf.co/user/moe-gguf")
    assert (pulled.returncode, pulled.stdout) == (0, ""), pulled.stderr
    listed = mine("list")
    assert re.match(r"NAME +ID +SIZE +MODIFIED\n", listed.stdout)
    assert names(listed) == ["hf.co/User/Moe-GGUF:Q4_K_M", "demo:latest"]
    assert re.search(
        r"GGUF:Q4_K_M +[0-9a-f]{12} +\d[\d.]* [KM]B +.+ ago$",
        listed.stdout,
        re.MULTILINE,
    )
    assert names(mine("ls", "DEMO")) == ["demo:latest"]
    assert (
        mine("cp", "user/moe-gguf", "mine").stdout
        == "copied 'user/moe-gguf' to 'mine'\n"
    )
    assert "qwen2moe" in mine("show", "mine").stdout
    facts = json.loads(mine("ls", "--json").stdout)
    assert {fact["name"] for fact in facts} == {
        "mine:latest",
        "hf.co/User/Moe-GGUF:Q4_K_M",
        "demo:latest",
    }
    assert (
        mine("rm", "mine", "user/moe-gguf:q4_k_m").stdout
        == "deleted 'mine'\ndeleted 'user/moe-gguf:q4_k_m'\n"
    )
    assert names(mine("list")) == ["demo:latest"]


def test_a_split_model_is_pulled_whole_and_runs(mine: Mine) -> None:
    assert mine("pull", "user/moe-gguf:q8_0").returncode == 0
    shown = mine("show", "user/moe-gguf:Q8_0", HF_HUB_OFFLINE="1")
    assert "in 3 shards" in shown.stdout, shown.stderr
    answered = mine(
        "run", "user/moe-gguf:Q8_0", "hi", "-n", 2, "-t", 1, HF_HUB_OFFLINE="1"
    )
    assert answered.returncode == 0, answered.stderr


def test_estimate_uses_the_parameters_of_a_name_and_flags_replace_them(
    mine: Mine, tmp_path: Path
) -> None:
    file = tmp_path / "Modelfile"
    file.write_text("FROM demo\nPARAMETER num_ctx 768\nPARAMETER expert_cache 50%\n")
    assert mine("create", "small", "-f", file).returncode == 0
    of_the_name = json.loads(mine("estimate", "small", "--json").stdout)
    assert (of_the_name["n_ctx"], of_the_name["expert_cache"]) == (768, "50%")
    by_flags = json.loads(mine("estimate", "small", "--ctx", 512, "--json").stdout)
    assert (by_flags["n_ctx"], by_flags["expert_cache"]) == (512, "50%")
    file.write_text("FROM demo\nPARAMETER num_gpu 5\n")
    assert mine("create", "layers", "-f", file).returncode == 0
    refused = mine("estimate", "layers", "--placement", "cpu")
    assert "uses no GPU, but n_gpu_layers is 5" in refused.stderr, (
        "the chat refuses this, too"
    )
    assert mine("estimate", "layers", "--placement", "cpu", "-ngl", 0).returncode == 0


def test_create_from_a_modelfile_and_show_print_the_same_parts(
    mine: Mine, tmp_path: Path
) -> None:
    file = tmp_path / "Modelfile"
    file.write_text(
        'FROM demo\nSYSTEM """Be kind."""\nPARAMETER temperature 0.25\nPARAMETER stop x\nLICENSE MIT\n'
    )
    assert mine("create", "kind", "-f", file).returncode == 0
    assert mine("show", "kind", "--system").stdout == "Be kind.\n"
    assert mine("show", "kind", "--license").stdout == "MIT\n"
    assert "<|im_start|>" in mine("show", "kind", "--template").stdout
    assert re.search(
        r"^temperature +0\.25$",
        mine("show", "kind", "--parameters").stdout,
        re.MULTILINE,
    )
    again = mine("show", "kind", "--modelfile").stdout
    file.write_text(again)
    assert mine("create", "kinder", "-f", file).returncode == 0
    assert mine("show", "kinder", "--system").stdout == "Be kind.\n"
    whole = mine("show", "kind").stdout
    assert all(part in whole for part in ("Capabilities", "Be kind.", "0.25", "MIT"))
    both = mine("show", "kind", "--system", "--license")
    assert both.returncode == 2 and "only one of" in both.stderr


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Server]:
    """A server that has loaded the demo model."""
    with serving(tmp_path / "server", "--expert-cache", "50%") as found:
        found.call("/api/generate", {"model": "demo", "options": {"num_thread": 1}})
        yield found


def test_ps_lists_loaded_models_and_stop_unloads_them(
    loaded: Server, mine: Mine
) -> None:
    there = {"MOEGGUF_HOST": loaded.url}
    shown = mine("ps", **there).stdout
    assert re.match(
        r"NAME +ID +SIZE +PROCESSOR +EXPERTS +HITS +CONTEXT +REUSED +UNTIL\n", shown
    )
    assert re.search(
        r"demo:latest +[0-9a-f]{12} +\d+ MB +100% CPU +50.0% +[-\d.%]+ +2048 +- +\d+ minutes from now",
        shown,
    )
    assert json.loads(mine("ps", "--json", **there).stdout)[0]["name"] == "demo:latest"
    missing = mine("stop", "unknown", **there)
    assert (
        missing.returncode == 1
        and "couldn't find model 'unknown' to stop" in missing.stderr
    )
    assert mine("stop", "demo", **there).returncode == 0
    assert names(mine("ps", **there)) == []
    version = mine("--version", **there)
    assert (version.stdout, version.stderr) == (f"moegguf {moegguf.__version__}\n", "")


def test_budget_reads_and_changes_a_loaded_model(loaded: Server, mine: Mine) -> None:
    there = {"MOEGGUF_HOST": loaded.url}
    assert re.search(
        r"demo:latest: .* for \d+ of \d+ experts",
        mine("budget", "demo", **there).stderr,
    )
    done = mine("budget", "demo", "50%", **there)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"demo:latest: [\d.]+MiB for \d+ of \d+ experts, the most .*, [\d.]+MiB in all",
        done.stderr,
    )
    less = mine("budget", "demo", "40%", **there)
    assert re.search(
        r"demo:latest: [\d.]+MiB for \d+ of \d+ experts, [\d.]+MiB in all", less.stderr
    )
    more = mine("budget", "demo", "100%", **there)
    assert re.search(
        r"experts, the most that it was loaded with, [\d.]+MiB in all", more.stderr
    )
    for arguments, words in (
        (
            ("demo", "1KiB"),
            "expert_cache='1.00KiB' is too small for a model that was loaded to read 1024 tokens",
        ),
        (("demo", "much"), "accepted"),
        (("unknown", "50%"), "unknown"),
    ):
        failed = mine("budget", *arguments, **there)
        assert failed.returncode == 1 and words in failed.stderr


SECRET = "http://me:hush@127.0.0.1:9"


@pytest.mark.parametrize(
    "command",
    [
        "doctor", "doctor --json", "ps", "top", "run demo hi -n 1 -t 1", "stop demo", "budget demo", "serve",
        f"serve --host {SECRET}", f"run {SECRET}/x hi", f"show {SECRET}", f"pull {SECRET}/x",
        f"HF_ENDPOINT={SECRET} pull user/some-gguf", f"OLLAMA_HOST={SECRET} ps", "batch TMP/one.jsonl",
    ],
)  # fmt: skip
def test_commands_hide_the_password_of_an_address(
    mine: Mine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(downloads, "WAIT_S", 0.01)
    (tmp_path / "one.jsonl").write_bytes(jsonl([request("a")]))
    words = command.replace("TMP", str(tmp_path)).split()
    extra = dict(word.split("=") for word in words if "=" in word)
    host = "" if "OLLAMA_HOST" in extra else SECRET
    done = mine(
        *(word for word in words if "=" not in word), MOEGGUF_HOST=host, **extra
    )
    assert "127.0.0.1" in done.stdout + done.stderr
    assert "hush" not in done.stdout + done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
def test_create_reads_modelfiles_of_each_encoding_and_crlf(
    mine: Mine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    mark = "\ufeff" * encoding.startswith("utf-16")
    data = f'{mark}FROM demo\r\nSYSTEM """Sois\r\nbref, café."""\r\nPARAMETER temperature .5\r\n'.encode(
        encoding
    )
    (tmp_path / "Modelfile").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    assert mine("create", "from-a-file").returncode == 0
    assert mine("show", "from-a-file", "--system").stdout == "Sois\nbref, café.\n"
    assert (
        mine(
            "create",
            "from-stdin",
            "-f",
            "-",
            stdin=data.decode(errors="surrogateescape"),
        ).returncode
        == 0
    )
    assert (
        mine("show", "from-stdin", "--modelfile").stdout
        == mine("show", "from-a-file", "--modelfile").stdout
    )


NOT_UTF8 = os.fsdecode(b"caf\xe9")


def test_a_path_that_is_not_utf8_is_read_and_shown(
    mine: Mine, tiny: TinyModel, tmp_path: Path
) -> None:
    folder = tmp_path / NOT_UTF8
    folder.mkdir()
    path = folder / "model.gguf"
    path.symlink_to(tiny())
    own = {"MOEGGUF_MODELS": str(folder)}
    for command in ("show", "estimate", "doctor"):
        for option in ((), ("--json",)):
            done = mine(command, path, *option)
            assert done.returncode == 0, done.stderr
    assert mine("cp", path, "mine").returncode == 0
    assert names(mine("list", **own)) == ["mine:latest", "model:latest", "demo:latest"]
    assert json.loads(mine("list", "mine", "--json").stdout)[0]["files"] == [
        str(tmp_path / "caf\ufffd" / "model.gguf")
    ]
    assert (
        mine("show", "mine", "--modelfile").stdout
        == f"FROM {tmp_path}/caf\ufffd/model.gguf\n"
    )
    assert mine("run", "mine", NOT_UTF8, "-n", 1, "-t", 1).returncode == 0
    path.unlink()
    lost = mine("list", "mine")
    assert lost.returncode == 0 and "missing" in lost.stdout
    assert json.loads(mine("list", "mine", "--json").stdout)[0]["missing"]
    for command in (
        ("run", "mine", "hi"),
        ("show", path),
        ("run", NOT_UTF8, "hi"),
        ("budget", NOT_UTF8),
    ):
        done = mine(*command)
        assert (
            done.returncode == 1
            and re.fullmatch(r"error: .+\n", done.stderr)
            and "unexpected" not in done.stderr
        )


def test_library_lists_models_with_sizes_and_speeds(mine: Mine) -> None:
    header, *rows = mine("library", "gpt-oss").stdout.splitlines()
    assert header.startswith("NAME") and [row.split()[0] for row in rows] == [
        "gpt-oss:20b",
        "gpt-oss:120b",
    ]
    (facts,) = json.loads(mine("library", "olmoe", "--json").stdout)
    assert (
        facts["size_bytes"] < facts["all_bytes"]
        and facts["hub_name"] in mine("library", "olmoe").stdout
    )
    slow, fast = facts["tokens_per_s"] or (1, 2)
    assert 0 < slow < fast


@pytest.mark.parametrize("is_fluent", [True, False])
def test_library_says_what_its_star_means(
    is_fluent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = 0.0 if is_fluent else 1e9
    monkeypatch.setattr("moegguf.terminal.facts.READING_TOKENS_PER_S", limit)
    monkeypatch.setattr("moegguf.terminal.facts.RESERVE_BYTES", 0)
    library("olmoe")
    said = capsys.readouterr()
    assert "olmoe:7b *" in said.out
    assert ("* fits best" in said.err) == is_fluent


@pytest.mark.parametrize("command", ["list", "library"])
def test_a_prefix_of_no_name_gets_a_message_instead_of_a_table(
    mine: Mine, command: str
) -> None:
    done = mine(command, "nosuch")
    assert not done.stdout and "begins with 'nosuch'" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("moegguf run gpt", "gpt-oss:20b"),
        ("moegguf sho", "show"),
        ("moegguf run a --vr", "--vram-cache"),
    ],
)
def test_the_shell_completes_commands_options_and_names(
    mine: Mine, words: str, expected: str
) -> None:
    position = str(len(words.split()) - 1)
    done = mine(
        _MOEGGUF_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position
    )
    assert expected in done.stdout.split()


# Each entry of ERRORS: a command, its exit code, and words from the single sentence on
# stderr. The folder TMP contains the files `empty` and `one.jsonl`.
STRATEGIC = ("serve", "batch TMP/one.jsonl", "bench -m demo", "trace simulate TRACE")
ERRORS = [
    ("run demo hi --strategy nine", 2, "no strategy 'nine'; known strategies: none"),
    *(
        (f"{command} --strategy nine", 1, "no strategy 'nine'; known strategies: none")
        for command in STRATEGIC
    ),
    ("serve --system nine", 2, "--system"),
    ("run demmo hi", 1, "did you mean 'demo'"),
    (
        "run no/such/folder.gguf hi",
        1,
        "there is no file 'no/such/folder.gguf'; check the path",
    ),
    ("run demo hi --expert-cash 1GiB", 2, "--expert-cache"),
    ("run demo hi -n 0", 2, "--max-tokens"),
    ("run demo hi --top-p 3", 2, "it has to be at most 1; see"),
    ("run demo hi --top-k x", 2, "it has to be a whole number; see"),
    *(
        (f"run demo hi --threads {given}", 2, "1 to 512 nor 'auto'")
        for given in ("0", "-1", "513", "1.5", "²", "many")
    ),
    *(
        (f"run -hf '{given}' hi", 2, "USER/REPOSITORY")
        for given in ("demo", "u/r/f", "u/")
    ),
    ("run -m m.gguf -hf u/r", 2, "not both"),
    ("run", 2, "moegguf list"),
    *(
        (
            f"run demo hi --keepalive foo{local}",
            2,
            "--keepalive: 'foo' is not a duration",
        )
        for local in ("", " --local")
    ),
    (
        "run llama3.2 hi",
        1,
        "https://huggingface.co/models?library=gguf&search=llama3.2",
    ),
    *(
        (
            f"{command} llama3.2{prompt}",
            1,
            "hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF (a name",
        )
        for command, prompt in (("run", " hi"), ("pull", ""))
    ),
    ("rm llama3.2", 1, "there is no model named 'llama3.2'. `moegguf list`"),
    ("pull demo", 1, "'demo' ships with moegguf"),
    ("contexts clear", 2, "or --all, but neither is given"),
    ("contexts clear demo --all", 2, "'demo' and --all are both given"),
    ("help frobnicate", 2, "no such command 'frobnicate'"),
    (
        "MOEGGUF_PLACEMENT=guess run demo hi",
        1,
        "MOEGGUF_PLACEMENT: 'guess' must be one of auto, layers, slots, slots-mapped, cpu.",
    ),
    (f"show {__file__}", 1, ""),
    (
        "estimate demo -c 99999999999",
        1,
        "2147483392, or 0 for the model's own context length",
    ),
    ("estimate MODEL --expert-cache 1KiB", 1, "give at least"),
    ("estimate MODEL --link 24GB/s", 1, "--device-memory 8GB"),
    (
        "estimate MODEL --device-memory 1GiB --device-bandwidth 448GB/s --link fast",
        1,
        "24GB/s,35us",
    ),
    ("frobnicate", 2, "no such command 'frobnicate'"),
    ("pull user/missing", 1, "there is no"),
    ("pull user/moe-gguf:Q2_K", 1, "vailable GGUF files"),
    ("pull ../etc/passwd", 1, "name"),
    ("rm demo", 1, "ships with moegguf"),
    ("rm missing", 1, "no model named 'missing'"),
    ("push demo", 2, "push is not supported"),
    *(
        (command, 1, "no server is running at http://127.0.0.1:9;")
        for command in ("ps", "top", "top --once --json")
    ),
    ("serve --host https://localhost", 1, "http only"),
    ("serve --memory lots", 1, "--memory"),
    ("serve --expert-cache 50", 1, 'did you mean "50%"'),
    ("serve --host 203.0.113.7 --api-key k", 1, "cannot listen"),
    *(
        (f"serve --host {host}", 1, "MOEGGUF_API_KEY")
        for host in ("0.0.0.0:0", "192.168.0.1", "[::]:0")
    ),
    (
        "serve --host 0.0.0.0 --trust-network 192.168.1.7/24",
        1,
        "192.168.1.7/24 has host bits set; give networks",
    ),
    ("batch TMP/nothing", 1, "cannot read"),
    ("batch TMP/empty", 1, "no requests"),
    (
        "batch TMP/one.jsonl -o TMP/one.jsonl",
        2,
        "one.jsonl is the file of requests; name another file",
    ),
    ("batch TMP/one.jsonl -o TMP", 2, "cannot hold the answers"),
    ("batch TMP/one.jsonl --parallel 0", 2, "parallel"),
    ("batch TMP/one.jsonl -m nothing-of-that-name --local", 1, "nothing-of-that-name"),
    (
        "trace simulate TRACE --policy lro",
        1,
        "there is no policy 'lro'; known policies: lru,",
    ),
    ("trace simulate TRACE --predictor skip", 1, "--model"),
    (
        "trace simulate TRACE --model MODEL",
        1,
        "was recorded from another model (moegguf demo)",
    ),
    (
        "trace simulate TRACE --expert-cache 0%",
        1,
        "each above 0% and up to 100%, but contains '0%'",
    ),
    (
        "trace simulate TRACE --strategy promo",
        1,
        "there is no strategy 'promo'; known strategies: none, lru,",
    ),
    (
        "trace simulate TRACE --strategy lru,moe-infinity",
        1,
        "prefetching needs a modelled",
    ),
    ("trace simulate TRACE --strategy lru --save", 1, "leave out --strategy"),
    ("trace simulate TRACE --policy vram=lru,ram=slru", 1, "--vram-cache"),
    (
        "trace simulate TRACE --vram-cache 20% --policy ram=lfu",
        1,
        "lru, lfu-decay, slru, but is 'lfu'",
    ),
    ("trace simulate TRACE --vram-cache 0%", 1, "--vram-cache must be shares"),
    ("trace simulate TRACE --vram-cache 20% --device-link fast", 1, "is not a link"),
    ("trace simulate TRACE --device-link 4GB/s", 1, "--vram-cache"),
    ("trace simulate TRACE --tensor-split 1,1", 1, "--vram-cache"),
    ("trace simulate TRACE --vram-cache 20% --tensor-split 1,x", 1, "but is '1,x'"),
    (
        "trace simulate TRACE --vram-cache 5%,5%,5% --tensor-split 1,1",
        1,
        "given for 3 devices",
    ),
    (
        "trace simulate TRACE --vram-cache 9% --device-link 4GB/s --device-link 4GB/s",
        1,
        "given 2 times, but without --tensor-split",
    ),
    (
        "trace record demo --prompts PROMPTS -o TMP/t --policy lro",
        1,
        "there is no policy 'lro'",
    ),
    (
        "trace record demo --prompts PROMPTS -o TMP/t --predictor skp",
        1,
        "there is no predictor 'skp'",
    ),
    ("trace record demo --prompts PROMPTS -o no/folder/t.npz", 1, "there is no folder"),
    ("trace record demo --prompts PROMPTS -o PROMPTS", 1, "would overwrite"),
    (
        "trace record demo --prompts PROMPTS -o /dev/stdout",
        1,
        "--out must name a file, but '/dev/stdout' is not",
    ),
    (
        "trace record demo --prompts TMP/empty -o TMP/t",
        1,
        "has no prompt; write at least one",
    ),
]


@pytest.mark.parametrize(
    ("command", "code", "words"),
    ERRORS,
    ids=lambda each: str(each) if str(each)[3:] else "",
)
def test_errors_are_one_sentence_with_an_exit_code_and_leave_no_file(
    mine: Mine,
    recorded: Path,
    prompts: Path,
    tiny: TinyModel,
    tmp_path: Path,
    command: str,
    code: int,
    words: str,
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "empty").touch()
    (folder / "one.jsonl").write_bytes(jsonl([request("a")]))
    known = {
        "TRACE": str(recorded),
        "MODEL": str(tiny()),
        "PROMPTS": str(prompts),
        "TMP": str(folder),
    }
    given = [
        re.sub(r"\b(TRACE|MODEL|PROMPTS|TMP)\b", lambda found: known[found[1]], word)
        for word in split(command)
    ]
    extra = dict(word.split("=") for word in given if word.startswith("MOEGGUF_"))
    done = mine(*(word for word in given if not word.startswith("MOEGGUF_")), **extra)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.fullmatch(r"error: .+[.?']\n", done.stderr)
    assert words in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "one.jsonl"]
