"""Commands that only read headers, and error messages."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, Command, TinyModel, environment

from moegguf.native.abi import ABI_VERSION


def test_help_lists_the_commands_and_is_the_default(here: Command) -> None:
    explicit, bare = here("--help"), here()
    assert explicit.returncode == bare.returncode == 0
    assert explicit.stdout == bare.stdout
    for command in ("run", "batch", "estimate", "show", "doctor", "bench", "trace"):
        assert re.search(rf"^  {command}\b", explicit.stdout, re.MULTILINE)
    assert "..." not in explicit.stdout.partition("Commands:")[2]  # each command is said in a sentence that fits
    for command in ("run", "pull", "create"):
        assert not re.search(r"<\w+|\{", here(command, "--help").stdout), "names of arguments, not types of Python"


@pytest.mark.parametrize("command", ["", "run", "batch", "bench", "trace", "trace simulate"])
def test_help_imports_nothing_heavy(command: str) -> None:
    heavy = {"numpy", "llama_cpp", "rich", "psutil", "matplotlib", "safetensors", "prompt_toolkit", "jinja2",
             "prometheus_client"}  # fmt: skip
    code = (
        f"import sys\nfrom moegguf.cli.app import main\nmain([*'{command}'.split(), '--help'])\n"
        f"print(*sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("run", "--system-prompt --verbose --ctx --expert-cache --max-tokens --temperature --help"),
        ("serve", "--host --port --api-key --memory --parallel --expert-cache"),
        ("bench", "--model --n-prompt --n-gen --expert-cache --against --output"),
        ("batch", "--output --model --parallel --ctx --expert-cache"),
    ],
)
def test_a_screen_of_help_has_what_people_use_most(here: Command, command: str, flags: str) -> None:
    screen = here(command, "--help", COLUMNS="80").stdout.splitlines()[:24]
    assert [flag for flag in flags.split() if flag not in " ".join(screen)] == []


def test_bench_of_the_demo_alone_is_a_table_of_its_tests(here: Command) -> None:
    done = here("bench", "-m", "demo", "-t", "auto", "-p", "4", "-n", "2", "-r", "1", "-o", "json")
    assert [(row["n_prompt"], row["n_gen"]) for row in json.loads(done.stdout)] == [(4, 0), (0, 2)], done.stderr


def test_help_is_grouped(here: Command) -> None:
    titles = re.findall(r"^(\w+):$", here("run", "--help").stdout, re.MULTILINE)
    assert titles == ["Arguments", "Options", "Model", "Memory", "Sampling", "Output", "Research"]


def test_version(here: Command) -> None:
    import moegguf as package

    assert here("--version").stdout == f"moegguf {package.__version__}\n"


def test_show_json_agrees_with_the_layout(here: Command, tiny: TinyModel) -> None:
    from moegguf import read_layout

    path = tiny("tiny-deepseek2")
    facts, layout = json.loads(here("show", path, "--json").stdout), read_layout(path)
    assert facts["experts"]["all_bytes"] == layout.expert_bytes
    assert facts["experts"]["token_cycle_bytes"] == layout.token_cycle_bytes
    assert facts["experts"]["shared"] == layout.metadata["deepseek2.expert_shared_count"]
    assert facts["active_parameters"] < facts["parameters"]
    assert [row["share"] for row in facts["budgets"]] == [0.1, 0.25, 0.5, 1.0]


def test_estimate_prints_memory_and_reasons_and_its_json_is_the_plan(here: Command, tiny: TinyModel) -> None:
    ask = ("estimate", tiny("tiny-mix"), "--ctx", 512, "--expert-cache")
    done, whole = here(*ask, "50%"), here(*ask, "100%")
    assert done.returncode == 0, done.stderr
    for words in ("32 of 64 experts at a time (50%)", "KV cache", "hit rate", "Why", "context of 512 tokens"):
        assert words in done.stdout
    assert re.search(r"read for a token .*[KM]iB +of .*[KM]iB it touches", done.stdout)
    assert not re.search(r"\d [KMG]B\b(?!/s)", done.stdout), "one unit for sizes"
    facts, resident = (json.loads(here(*ask, share, "--json").stdout) for share in ("50%", "100%"))
    assert facts["plan"]["budget_bytes"] == 32 * facts["plan"]["slot_bytes"]
    assert 0 < facts["expected"]["hit_low"] < facts["expected"]["hit_high"] < 1 and facts["disk"]["bytes_per_s"] > 0
    assert resident["plan"]["resident"] and resident["disk"] is None and "limited by the processor" in whole.stdout


def test_estimate_promises_for_the_demo_what_was_measured_and_no_more(here: Command) -> None:
    """Answers of the demo with half of its experts hit 58 to 73 % from an empty cache, texts up to 81 %; Belady's bound
    is 86 %."""
    facts = json.loads(here("estimate", "demo", "--expert-cache", "50%", "--json").stdout)["expected"]
    assert 0.55 < facts["hit_low"] < 0.63 and 0.75 < facts["hit_high"] < 0.86
    assert "measured on this model" in facts["basis"] and "lower bound" not in facts["basis"]
    shown = here("estimate", "demo", "--expert-cache", "50%").stdout
    (speed,) = re.findall(r"speed +([\d,.]+)(?: to ([\d,.]+))? tokens/s", shown)
    for number in filter(None, speed):
        assert len(re.sub(r"[,.]", "", number).strip("0")) <= 2, "two significant digits"
    budgets = json.loads(here("show", "demo", "--json").stdout)["budgets"]
    assert [row["low"] for row in budgets] == sorted(row["low"] for row in budgets)


def test_estimate_counts_the_types_of_the_kv_cache(here: Command, tiny: TinyModel) -> None:
    def kv_bytes(*flags: str, **env: str) -> int:
        facts = json.loads(here("estimate", tiny(), "--ctx", 512, "--json", *flags, **env).stdout)
        return int(facts["plan"]["kv_bytes"])

    plain, both = kv_bytes(), kv_bytes("--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
    assert both < kv_bytes("-ctk", "q8_0") < plain
    assert kv_bytes(MOEGGUF_KV_CACHE_TYPE="q8_0") == both


def test_doctor_states_every_section(here: Command, tiny: TinyModel) -> None:
    facts = json.loads(here("doctor", tiny(), "--json").stdout)
    assert list(facts) == ["moegguf", "build", "devices", "machine", "disk", "environment"]
    assert facts["machine"]["cpus_allowed"] >= 1
    assert facts["machine"]["memory"]["available_bytes"] > 0
    assert facts["disk"]["bytes_per_s"] > 0
    assert facts["build"]["abi"] == ABI_VERSION
    assert f"llama_cpp_commit = {facts['build']['llama.cpp pin']}" in (ROOT / "patches/UPSTREAM").read_text()
    assert facts["devices"]["CPU"]["total_bytes"] > 0


def test_doctor_never_fails_for_a_missing_fact(moegguf: Command, tmp_path: Path) -> None:
    done = moegguf(
        "doctor", "no-such-model", MOEGGUF_LIBRARY=str(tmp_path), MOEGGUF_HOOKS="perhaps", LLAMA_API_KEY="hush"
    )
    assert done.returncode == 0, done.stderr
    assert "unknown: " in done.stdout
    assert "MOEGGUF_HOOKS: 'perhaps' is neither on nor off; give 1 or 0" in done.stdout
    assert "hush" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", "demmo", "hi"), 1, "did you mean 'demo'"),
        (("run", "no/such/folder.gguf", "hi"), 1, "there is no folder 'no/such'"),
        (("show", __file__), 1, ""),
        (("show",), 2, "missing argument 'MODEL'"),
        (("run", "demo", "hi", "--expert-cash", "1GiB"), 2, "--expert-cache"),
        (("run", "demo", "hi", "-n", "0"), 2, "--max-tokens"),
        (("run", "demo", "hi", "--top-p", "3"), 2, "it has to be at most 1; see"),
        (("run", "demo", "hi", "--temperature", "2000"), 2, "it has to be at most 1000; see"),
        (("run", "demo", "hi", "--top-k", "x"), 2, "it has to be a whole number; see"),
        (("estimate", "demo", "-c", "99999999999"), 1, "2147483392, but is 99999999999"),
        (("frobnicate",), 2, "no such command 'frobnicate'"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    here: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.fullmatch(r"error: .+[.?]\n", done.stderr)
    assert words in done.stderr


def test_budgets_that_are_invalid_or_too_small(here: Command, tiny: TinyModel) -> None:
    for budget, words in (("0.5", "accepted:"), ("1KiB", "give at least"), ("200%", "accepted:")):
        done = here("estimate", tiny(), "--expert-cache", budget)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_an_unexpected_error_names_its_type_and_how_to_get_its_traceback(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom moegguf.models.catalog import Catalog\nfrom moegguf.cli import app as cli\n"
        "def find(self, name): raise ZeroDivisionError('so it goes')\n"
        "Catalog.find = find\nsys.exit(cli.main(['show', 'x']))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "error: unexpected ZeroDivisionError: so it goes; run again with MOEGGUF_DEBUG=1 for the traceback.\n"
    )
    debug = subprocess.run(command, capture_output=True, text=True, env=environment(MOEGGUF_DEBUG="1"), timeout=60)
    assert "Traceback" in debug.stderr


def test_estimate_says_what_a_device_would_give_and_that_it_is_a_prediction(here: Command, tiny: TinyModel) -> None:
    device = ("--device-memory", "1.002GiB", "--device-bandwidth", "448GB/s", "--link", "24GB/s,35us")
    shown = here("estimate", tiny(), *device, "--ctx", 512)
    assert shown.returncode == 0, shown.stderr
    assert "predicted with speeds of the device as supposed" in shown.stdout and "tokens/s" in shown.stdout
    found = json.loads(here("estimate", tiny(), *device, "--ctx", 512, "--json").stdout)["placement"]
    assert {placement["kind"] for placement in found["placements"]} & {"cpu", "resident"}
    missing = here("estimate", tiny(), "--link", "24GB/s")
    assert missing.returncode == 1 and "--device-memory 8GB" in missing.stderr
    wrong = here("estimate", tiny(), *device[:4], "--link", "fast")
    assert wrong.returncode == 1 and "24GB/s,35us" in wrong.stderr
