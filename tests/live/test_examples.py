"""Tests that each program in examples/ runs and prints output that matches the patterns
in PRINTED. Also runs the program of README.md."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frontends.servers import serving

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
MOST_LINES = 65  # lines of at most 88 columns
ROUTER = (
    "The router is a small matrix in each layer. It scores all experts for a token, "
    "and the few with the highest scores"
)
EXPERT = "An expert is a small feed-forward network inside a layer, made of three matrices: gate, up and down."

# Regular expressions that each program's output must contain, in this order. Figures
# such as hit rates may vary.
PRINTED = {
    "chat": (
        r"> What is an expert\?",
        re.escape(EXPERT),
        r"> What is a router\?",
        re.escape(ROUTER),
        r"[1-9]\d* of \d+ tokens of the last prompt were reused\.",
    ),
    "streaming": (
        r"(0[^|]*\||1[^|]*\|){40,}",
        r"0: I am the demo model of moegguf",
        r"1: moegguf runs Mixture-of-Experts models",
    ),
    "structured_output": (
        r"\{'part': '(expert|router|cache)', 'description': '.{0,40}', 'layers': [1-9]\d?\}",
        r"fields: part, description, layers",
    ),
    "tool_calls": (
        r"temperature_in\(\{'city': '(Oslo|Paris)'\}\) -> \{\"degrees\": (4|12)\}",
        r"answer: \w+",
    ),
    "batch_of_prompts": (
        r"1 at once: \d+ tokens, \d+ experts were read\.",
        r"8 at once: \d+ tokens, \d+ experts were read\.",
        re.escape(f"an expert: {EXPERT}"),
    ),
    "moving_budget": (
        r"100%: 192 slots, [\d.]+ MB, \d+% hits, \d+ misses",
        r"50%: 96 slots, [\d.]+ MB, \d+% hits, [1-9]\d* misses",
        r"10%: 19 slots, [\d.]+ MB, \d+% hits, [1-9]\d* misses",
        r"equal answers: True",
    ),
    "policy": (
        r"lru: \d+% hits, [1-9]\d* evictions",
        r"MostUsed: \d+% hits, [1-9]\d* evictions",
        r"equal answers: True",
    ),
    "predictor": (r"predictor: Followers", r"[1-9]\d* experts were fetched ahead, \d+ of them were used\."),
    "import_trace": (
        r"3 requests, 240 tokens",
        r"\d+% of a token's experts were used by the token before",
        r"lru: \d+% hits in 16 slots",
        r"next-use: \d+% hits in 16 slots",
        r"belady: \d+% hits in 16 slots",
    ),
    "trace_and_plot": (
        r"\d+ passes over \d+ tokens",
        r"lru: \d+% hits in 48 slots",
        r"next-use: \d+% hits in 48 slots",
        r"belady: \d+% hits in 48 slots",
        r"wrote .*routing\.png and routing\.svg",
    ),
    "openai_client": (r"models: .*demo", re.escape(ROUTER), r"(\w|\s)+\|.*\|"),
}  # fmt: skip


def run(
    program: str, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs an example in `folder`. Asserts that its exit code is 0, and returns the
    completed process."""
    done = subprocess.run(
        [sys.executable, FOLDER / f"{program}.py", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MOEGGUF_HOME": str(folder / "home"),
            "MPLCONFIGDIR": str(folder),
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done


def check_printed(program: str, text: str) -> None:
    """Asserts that the output `text` contains the program's patterns in order."""
    begin = 0
    for pattern in PRINTED[program]:
        found = re.compile(pattern).search(text, begin)
        assert found, f"{pattern!r} is missing in {text[begin:]!r}"
        begin = found.end()


def test_each_example_has_patterns_and_a_line_in_the_readme() -> None:
    listed = re.findall(
        r"^\| \[(\w+)\.py\]\(\1\.py\) \|",
        (FOLDER / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert sorted(listed) == PROGRAMS == sorted(PRINTED)
    assert len(PROGRAMS) == 11


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_example_is_short_and_documents_its_output(program: str) -> None:
    text = (FOLDER / f"{program}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    about = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"^(Prints|Writes) ", about, re.MULTILINE)


@pytest.mark.parametrize(
    "program",
    [name for name in PROGRAMS if name not in ("openai_client", "trace_and_plot")],
)
def test_each_example_prints_its_patterns(program: str, tmp_path: Path) -> None:
    done = run(program, tmp_path)
    assert done.stderr == ""
    check_printed(program, done.stdout)
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


def test_trace_and_plot_writes_into_the_given_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    folder.mkdir()
    check_printed("trace_and_plot", run("trace_and_plot", tmp_path, str(folder)).stdout)
    assert {path.name for path in folder.iterdir()} == {
        "routing.npz",
        "routing.png",
        "routing.svg",
    }
    assert (folder / "routing.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "routing.svg").read_text(encoding="utf-8")


def test_openai_client_prints_answers_of_a_local_server(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    with serving(tmp_path / "server", "--expert-cache", "50%") as server:
        text = run("openai_client", tmp_path, server.url).stdout
    check_printed("openai_client", text)
    whole, parts = text.splitlines()[1:]
    assert parts.replace("|", "") == whole


def test_the_readme_program_prints_short_answers_about_moegguf(tmp_path: Path) -> None:
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(
        r"```python\n(from moegguf import .*?)```", readme, re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MOEGGUF_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    about, hit_rate, *answers = done.stdout.splitlines()
    assert about.startswith("moegguf runs Mixture-of-Experts models") and re.fullmatch(
        r"hit rate \d+%", hit_rate
    )
    assert len(answers) == 2 and all(10 < len(answer) < 400 for answer in answers)
    assert "demo model" in answers[0] and "expert" in answers[1].lower()
