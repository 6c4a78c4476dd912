"""Models by name on the command line: pull, list, show, cp, create, rm; and ps and stop against a server."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from command_line import Command, TinyModel
from fake_hub import FakeHub, running_hub
from servers import Server, serving

Mine = Callable[..., "CompletedProcess[str]"]


@pytest.fixture(scope="module")
def hub(tiny: TinyModel) -> Iterator[FakeHub]:
    """A hub with one repository: a small model, and a split one in a folder."""
    with running_hub() as found:
        whole, split = tiny("tiny-qwen2moe"), tiny("tiny-mix", "q4_k_m", 3)
        shards = sorted(split.parent.glob(split.name.replace("00001-of", "*-of")))
        files = {f"Q8_0/m-Q8_0-{i:05}-of-00003.gguf": shard.read_bytes() for i, shard in enumerate(shards, 1)}
        found.add("User/Moe-GGUF", {"m-Q4_K_M.gguf": whole.read_bytes(), **files})
        yield found


@pytest.fixture
def mine(here: Command, hub: FakeHub, tmp_path: Path) -> Mine:
    """The command with its own home and hub, and the address of no server."""

    def call(*arguments: object, **extra: str) -> CompletedProcess[str]:
        own = {"MOEGGUF_HOME": str(tmp_path / "own"), "MOEGGUF_HOST": "127.0.0.1:9"}
        return here(*arguments, **{**hub.environment(tmp_path / "hf"), **own, **extra})

    return call


def names(done: CompletedProcess[str]) -> list[str]:
    return [line.split()[0] for line in done.stdout.splitlines()[1:]]


def test_pull_list_show_copy_and_remove(mine: Mine) -> None:
    pulled = mine("pull", "hf.co/user/moe-gguf")
    assert (pulled.returncode, pulled.stdout) == (0, ""), pulled.stderr
    listed = mine("list")
    assert re.match(r"NAME +ID +SIZE +MODIFIED\n", listed.stdout)
    assert names(listed) == ["hf.co/User/Moe-GGUF:Q4_K_M", "demo:latest"]
    assert re.search(r"GGUF:Q4_K_M +[0-9a-f]{12} +\d[\d.]* [KM]B +.+ ago$", listed.stdout, re.MULTILINE)
    assert names(mine("ls", "DEMO")) == ["demo:latest"]
    assert mine("cp", "user/moe-gguf", "mine").stdout == "copied 'user/moe-gguf' to 'mine'\n"
    assert "qwen2moe" in mine("show", "mine").stdout
    facts = json.loads(mine("ls", "--json").stdout)
    assert {fact["name"] for fact in facts} == {"mine:latest", "hf.co/User/Moe-GGUF:Q4_K_M", "demo:latest"}
    assert mine("rm", "mine", "user/moe-gguf:q4_k_m").stdout == "deleted 'mine'\ndeleted 'user/moe-gguf:q4_k_m'\n"
    assert names(mine("list")) == ["demo:latest"]


def test_a_split_model_is_pulled_whole_and_runs(mine: Mine) -> None:
    assert mine("pull", "user/moe-gguf:q8_0").returncode == 0
    shown = mine("show", "user/moe-gguf:Q8_0", HF_HUB_OFFLINE="1")
    assert "in 3 shards" in shown.stdout, shown.stderr
    answered = mine("run", "user/moe-gguf:Q8_0", "hi", "-n", 2, "-t", 1, HF_HUB_OFFLINE="1")
    assert answered.returncode == 0, answered.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("user/missing", "there is no"),
        ("user/moe-gguf:Q2_K", "Available GGUF files"),
        ("llama3", "hf.co/"),
        ("../etc/passwd", "name"),
    ],
)
def test_a_failed_pull_is_one_line(mine: Mine, name: str, words: str) -> None:
    done = mine("pull", name)
    assert done.returncode == 1
    assert words.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_create_from_a_modelfile_and_show_its_parts(mine: Mine, tmp_path: Path) -> None:
    file = tmp_path / "Modelfile"
    file.write_text('FROM demo\nSYSTEM """Be kind."""\nPARAMETER temperature 0.25\nPARAMETER stop x\nLICENSE MIT\n')
    assert mine("create", "kind", "-f", file).returncode == 0
    assert mine("show", "kind", "--system").stdout == "Be kind.\n"
    assert mine("show", "kind", "--license").stdout == "MIT\n"
    assert "<|im_start|>" in mine("show", "kind", "--template").stdout
    assert re.search(r"^temperature +0\.25$", mine("show", "kind", "--parameters").stdout, re.MULTILINE)
    again = mine("show", "kind", "--modelfile").stdout
    file.write_text(again)
    assert mine("create", "kinder", "-f", file).returncode == 0
    assert mine("show", "kinder", "--system").stdout == "Be kind.\n"
    whole = mine("show", "kind").stdout
    assert all(part in whole for part in ("Capabilities", "Be kind.", "0.25", "MIT"))
    both = mine("show", "kind", "--system", "--license")
    assert both.returncode == 2 and "only one of" in both.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rm", "demo"), "ships with moegguf"),
        (("rm", "missing"), "no model named 'missing'"),
        (("cp", "missing", "x"), "no model named 'missing'"),
        (("push", "demo"), "push is not supported"),
        (("create", "x", "-f", "/nowhere/Modelfile"), "there is no file"),
        (("ps",), "no server is running"),
        (("stop", "demo"), "no server is running"),
    ],
)
def test_a_failed_command_is_one_line(mine: Mine, arguments: tuple[str, ...], words: str) -> None:
    done = mine(*arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Server]:
    """A server with the demo model loaded."""
    with serving(tmp_path / "server", "--expert-cache", "50%") as found:
        found.call("/api/generate", {"model": "demo", "options": {"num_thread": 1}})
        yield found


def test_ps_and_stop(loaded: Server, mine: Mine) -> None:
    there = {"MOEGGUF_HOST": loaded.url}
    shown = mine("ps", **there).stdout
    assert re.match(r"NAME +ID +SIZE +PROCESSOR +EXPERTS +HITS +CONTEXT +REUSED +UNTIL\n", shown)
    assert re.search(
        r"demo:latest +[0-9a-f]{12} +\d+ MB +100% CPU +50.0% +[-\d.%]+ +2048 +- +\d+ minutes from now", shown
    )
    assert json.loads(mine("ps", "--json", **there).stdout)[0]["name"] == "demo:latest"
    missing = mine("stop", "unknown", **there)
    assert missing.returncode == 1 and "couldn't find model 'unknown' to stop" in missing.stderr
    assert mine("stop", "demo", **there).returncode == 0
    assert names(mine("ps", **there)) == []
    assert mine("--version", **there).stderr == ""


def test_a_budget_of_a_loaded_model(loaded: Server, mine: Mine) -> None:
    there = {"MOEGGUF_HOST": loaded.url}
    assert re.search(r"demo:latest: .* for \d+ of \d+ experts", mine("budget", "demo", **there).stderr)
    done = mine("budget", "demo", "50%", **there)
    assert done.returncode == 0, done.stderr
    assert re.search(r"demo:latest: [\d.]+MiB for (\d+) of \d+ experts, [\d.]+MiB in all", done.stderr)
    more = mine("budget", "demo", "100%", **there)
    assert re.search(r"experts, the most that it was loaded with, [\d.]+MiB in all", more.stderr)
    for arguments, words in (
        (("demo", "1KiB"), "expert_cache='1.00KiB' is too small for a model that was loaded to read 512 tokens"),
        (("demo", "much"), "accepted"),
        (("unknown", "50%"), "unknown"),
    ):
        failed = mine("budget", *arguments, **there)
        assert failed.returncode == 1 and words in failed.stderr


def test_a_negative_keep_alive_keeps_a_model_for_ever(loaded: Server, mine: Mine) -> None:
    loaded.call("/api/generate", {"model": "demo", "keep_alive": -1})
    assert re.search(r"Forever$", mine("ps", MOEGGUF_HOST=loaded.url).stdout, re.MULTILINE)


def test_the_library_says_what_runs_here(mine: Mine) -> None:
    header, *rows = mine("library", "gpt-oss").stdout.splitlines()
    assert header.startswith("NAME") and [row.split()[0] for row in rows] == ["gpt-oss:20b", "gpt-oss:120b"]
    (facts,) = json.loads(mine("library", "olmoe", "--json").stdout)
    assert facts["size_bytes"] < facts["all_bytes"] and facts["hub_name"] in mine("library", "olmoe").stdout
    slow, fast = facts["tokens_per_s"] or (1, 2)
    assert 0 < slow < fast


@pytest.mark.parametrize(
    ("words", "expected"),
    [("moegguf run gpt", "gpt-oss:20b"), ("moegguf sho", "show"), ("moegguf run a --vr", "--vram-cache")],
)
def test_the_shell_completes_commands_options_and_names(mine: Mine, words: str, expected: str) -> None:
    position = str(len(words.split()) - 1)
    done = mine(_MOEGGUF_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    assert expected in done.stdout.split()
