"""Tests the presets of `moegguf bench`: their figures, and the errors for wrong
settings, which list the valid ones."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from answering import DEMO
from own_process import in_own_process

from moegguf.bench import turns
from moegguf.bench.presets import PRESETS, read_settings, run_preset
from moegguf.errors import OptionError
from moegguf.generate.drafting import DraftGate
from moegguf.native import library


def rows_of(name: str, *settings: str) -> list[dict[str, Any]]:
    return json.loads(run_preset(name, str(DEMO), settings, "json"))


@pytest.mark.parametrize("prompt", [0, 16])
def test_turns_compares_each_kernel_with_stock(
    monkeypatch: pytest.MonkeyPatch, prompt: int
) -> None:
    monkeypatch.setattr(turns, "stock_library", lambda progress: library.find_library())
    settings = (
        "tokens=3",
        "rounds=2",
        "depth=8",
        "kernels=upstream",
        f"prompt={prompt}",
    )
    rows = rows_of("turns", *settings)
    assert [row["system"] for row in rows] == ["moegguf, upstream", "moegguf", "stock"]
    assert all(
        row["t/s"] > 0
        and row["lower quartile"] <= row["ratio"] <= row["upper quartile"]
        for row in rows
    )
    assert rows[-1]["ratio"] == 1.0


def test_busy_measures_every_system_beside_every_load() -> None:
    rows = rows_of(
        "busy",
        "seconds=0.02",
        "rounds=1",
        "loads=quiet,pair",
        "systems=1,auto,llama.cpp",
    )
    found = [(row["load"], row["threads"]) for row in rows]
    assert found == [
        (load, system)
        for load in ("quiet", "pair")
        for system in ("1", "auto", "llama.cpp")
    ]
    assert rows[0]["share"] == 1.0
    assert rows[0]["computing"] == 1.0
    assert all(row["decode t/s"] > 0 and row["prompt t/s"] > 0 for row in rows)


@pytest.mark.parametrize("setting", ["loads=quiet,loud", "systems=1,fast"])
def test_busy_refuses_unknown_loads_and_systems(setting: str) -> None:
    with pytest.raises(OptionError, match=r"loud|fast"):
        rows_of("busy", setting)


def test_drafts_measures_each_kind_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Drafts in every pass, regardless of measured times.
    monkeypatch.setattr(DraftGate, "begin_pass", lambda _self: True)
    monkeypatch.setattr(
        DraftGate,
        "widths",
        lambda _self, answers: [[4] * len(sources) for sources in answers],
    )
    texts = Path(__file__).with_name("repeating.json")
    rows = rows_of("drafts", f"texts={texts}", "prompts=2", "rounds=1")
    assert [row["text"] for row in rows] == ["edit", "extract", "other"]
    assert rows[0]["accepted tokens"] > 0
    assert all(row["median ratio"] > 0 for row in rows)


def test_server_gets_the_text_of_the_in_process_answer() -> None:
    rows = rows_of("server", "rounds=1")
    assert [row["way"] for row in rows] == [
        "in process",
        "create_chat_completion",
        "server",
    ]
    assert len({row["characters"] for row in rows}) == 1
    assert all(0 < row["first ms"] <= row["total ms"] for row in rows)


def test_resume_computes_one_token_of_a_known_prompt(tmp_path: Path) -> None:
    first = rows_of("resume", "tokens=300", f"folder={tmp_path}")
    with closing(
        PRESETS["resume"](str(DEMO), tokens=300, folder=str(tmp_path))
    ) as rows:
        # The first row only: the other rows would equal the rows of the first call.
        again = next(rows)
    ways = [
        "computed",
        "from memory",
        "after unloading",
        "after kill -9",
        "another question",
    ]
    assert [row["way"] for row in first] == ways
    assert again["way"] == "after kill -9"
    assert first[0]["computed"] == 300
    assert [row["computed"] for row in (*first[1:4], again)] == [1] * 4


def test_eviction_has_a_row_for_each_policy() -> None:
    rows = rows_of(
        "eviction", "slots=20", "layers=2", "experts=32", "used=4", "events=20"
    )
    assert [row["policy"] for row in rows][-2:] == ["scores", "scores, all"]
    assert all(row["miss, eviction us"] > 0 for row in rows)
    with pytest.raises(
        OptionError, match="slots is 64, but at most 32 slots can be filled"
    ):
        rows_of("eviction", "slots=64", "layers=2", "experts=32")


def test_link_measures_times_of_at_least_the_simulated_link() -> None:
    rows = in_own_process(rows_of, "link", "repetitions=5")
    assert {row["at once"] for row in rows} == {1, 2}
    assert all(row["ratio"] > 0.99 for row in rows)


def test_presets_load_without_the_test_equipment_that_a_wheel_lacks() -> None:
    code = (
        "import sys; sys.modules['moegguf.testing'] = None;"
        " from moegguf.bench.parts import link_times; next(link_times(''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LibraryError: a simulated link needs" in done.stderr


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        (
            "fast",
            "",
            "--preset must be one of turns, busy, drafts, server, resume, eviction, link, but is 'fast'",
        ),
        (
            "link",
            "speed=1",
            "the preset 'link' has no setting 'speed'; its settings are link=2GB/s,35us",
        ),
        ("link", "repetitions=x", "repetitions must be a whole number such as 100"),
        ("link", "repetitions=0", "repetitions must be above 0"),
        ("turns", "depth=-1", "depth must be at least 0"),
    ],
)
def test_read_settings_rejects_wrong_settings_and_lists_the_known(
    name: str, setting: str, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        read_settings(name, [setting])


def test_read_settings_keeps_defaults_of_unchanged_settings() -> None:
    changed = read_settings("busy", ["seconds=8", "loads=quiet,two"])
    assert changed == {
        **read_settings("busy", []),
        "seconds": 8.0,
        "loads": "quiet,two",
    }


@pytest.mark.skipif(
    not shutil.which("nm"), reason="no nm, which lists the symbols of a library"
)
def test_libmoegguf_needs_no_function_that_a_patch_adds_to_llama_cpp() -> None:
    """`--against stock` loads libmoegguf with the libraries of an unpatched
    llama.cpp."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library.find_library() / "libmoegguf.so"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    needed = set(re.findall(r"^ *U (\w+)$", listed.stdout, re.MULTILINE))
    patches = "".join(
        path.read_text() for path in Path(__file__).parents[2].glob("patches/*.patch")
    )
    added = set(re.findall(r"^\+\w.*?\b(\w+)\([^;]*\{$", patches, re.MULTILINE))
    assert "ggml_backend_sched_set_callback_version" in added
    assert "ggml_nbytes" in needed
    assert not needed & added
