"""Tests `moegguf learn`: its sources of prompts, its table, its errors, and the learned
files that `show` lists."""

import json
import re
import signal
from pathlib import Path

import pytest
from servers import Command, started
from waiting import until

from moegguf.controller.artifacts import Artifacts
from moegguf.gguf.experts import read_layout
from moegguf.learning.learn import LEARNERS
from moegguf.models.sources import demo_path
from moegguf.serving.responses import ResponseStore
from moegguf.trace.prompts import read_prompts


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Returns environment variables that set MOEGGUF_HOME to a folder that does not
    exist yet."""
    return {"MOEGGUF_HOME": str(tmp_path / "home")}


def folder_of(home: dict[str, str]) -> Path:
    return (
        Path(home["MOEGGUF_HOME"])
        / "models"
        / Artifacts(read_layout(demo_path())).fingerprint
    )


def test_learn_from_a_trace_saves_files_that_show_lists(
    here: Command, recorded: Path, home: dict[str, str]
) -> None:
    done = here(
        "learn",
        "demo",
        "--trace",
        recorded,
        "--strategy",
        "duoserve,moe-infinity",
        **home,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("saved in ")) <= 80
    assert lines[1].split() == [
        "strategy", "tokens", "seconds", "validation", "right", "popularity", "hits", "LRU",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[2:4]] == ["duoserve", "moe-infinity"]
    assert "next: moegguf run demo --strategy duoserve" in done.stdout
    assert (
        "moegguf bench -m demo --strategy moegguf,lru,duoserve,moe-infinity"
        in done.stdout
    )
    assert "duoserve: epoch" in done.stderr or "duoserve ..." in done.stderr
    files = {path.name for path in folder_of(home).iterdir()}
    assert files == {
        f"{name}.safetensors"
        for name in ("affinity", "popularity", "expert-mlp", "eamc")
    }
    shown = json.loads(here("show", "demo", "--json", **home).stdout)["learnt"]
    by_name = {one["predictor"]: one for one in shown}
    assert by_name["expert-mlp"]["path"].startswith(home["MOEGGUF_HOME"])
    assert 0 < by_name["expert-mlp"]["right"] <= 1
    assert re.search(
        r"expert-mlp +for duoserve +\d+ tokens, \d+% right",
        here("show", "demo", **home).stdout,
    )


def test_learn_from_prompts_records_and_saves_one_strategy(
    here: Command, home: dict[str, str], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(f"What is expert number {n}?" for n in range(6)))
    flags = ("--prompts", texts, "-n", 6, "--strategy", "moe-infinity", "--json")
    done = here("learn", "demo", *flags, **home)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["strategy"] == "moe-infinity" and found["requests"] == 5
    assert "thousands give better predictions" in done.stderr
    assert [path.name for path in folder_of(home).iterdir()] == ["eamc.safetensors"]
    assert list((Path(home["MOEGGUF_HOME"]) / "cache").glob("learn-*")) == []


def test_learn_from_server_reads_its_stored_responses(
    here: Command, home: dict[str, str]
) -> None:
    flags = (
        "learn",
        "demo",
        "--from-server",
        "-n",
        6,
        "--strategy",
        "moe-infinity",
        "--json",
    )
    refused = here(*flags, **home)
    assert (
        refused.returncode == 1
        and "responses to clients without a key, but none are stored" in refused.stderr
    )
    off = here(*flags, MOEGGUF_RESPONSES_AGE="0", **home)
    assert (
        off.returncode == 1
        and "with MOEGGUF_RESPONSES_AGE=0 no responses are stored" in off.stderr
    )
    store = ResponseStore(Path(home["MOEGGUF_HOME"]) / "responses", 3600)
    for n in range(5):
        turn = [
            {"role": "user", "content": f"Question {n}?"},
            {"role": "assistant", "content": "An answer."},
        ]
        store.add({"id": f"resp_{n}"}, None, turn)
    assert store.turns()[0] == "Question 0?\n\nAn answer."
    busy = here(*flags, **home)
    assert (
        busy.returncode == 1
        and "a running server has its stored responses open; stop the server first"
        in busy.stderr
    )
    store.close()
    done = here(*flags, **home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["requests"] == 4


def test_learn_refuses_invalid_options_before_any_work(
    here: Command, recorded: Path, home: dict[str, str]
) -> None:
    for flags, rule in (
        (
            ("--strategy", "lru"),
            "the strategy 'lru' needs no learning; these strategies do: promoe, expertflow",
        ),
        (
            ("--trace", recorded, "--from-server"),
            "--trace and --from-server cannot be given together",
        ),
    ):
        done = here("learn", "demo", *flags, **home)
        assert done.returncode == 1 and rule in " ".join(done.stderr.split())
    assert not folder_of(home).exists()


def test_an_interrupted_learn_leaves_no_file(home: dict[str, str]) -> None:
    cache = Path(home["MOEGGUF_HOME"]) / "cache"
    with started("learn", "demo", "--strategy", "promoe", "-t", 1, **home) as process:
        # Passes are recorded.
        until(lambda: any(path.stat().st_size for path in cache.glob("learn-*/*")), 60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "recording ...\n")
    assert list(cache.glob("learn-*")) == []
    assert not list(folder_of(home).glob("*"))


def test_the_texts_of_the_package_have_four_kinds() -> None:
    from moegguf.cli.learn import TEXTS

    prompts = read_prompts(TEXTS)
    kinds = {prompt.label for prompt in prompts}
    assert kinds == {"text", "chat", "code", "languages"}
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 32


def test_help_of_learn_names_every_learnable_strategy() -> None:
    from command_help import help_of

    assert all(name in help_of("learn") for name in LEARNERS)
