"""`moegguf run`: stdout is the answer only, stderr everything else; exit codes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer
from chat_terminal import ANSWER, ECHO, QUESTION
from command_line import Command, TinyModel, environment
from fake_hub import FakeHub, running_hub
from servers import Server
from terminal import Terminal, control, moegguf_command

from moegguf.cli.options import hub_name, parse_threads
from moegguf.cli.run import model_and_words
from moegguf.models.catalog import demo_path

QUICK = ("-t", "1", "-c", "256")
DEMO = ("--temperature", "0", "-t", "1", "-c", "512")

OLLAMA_LINES = """\
total duration:       X
load duration:        X
prompt eval count:    N token(s)
prompt eval duration: X
prompt eval rate:     R tokens/s
eval count:           N token(s)
eval duration:        X
eval rate:            R tokens/s"""


def test_the_answer_is_all_of_stdout_and_repeats_at_temperature_0(moegguf: Command, tiny: TinyModel) -> None:
    ask = ("run", tiny(), "hello", "there", "--temperature", 0, "-n", 12, "--expert-cache", "50%", *QUICK)
    first, second = moegguf(*ask), moegguf(*ask)
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.strip()
    assert first.stdout.endswith("\n")
    assert first.stderr == ""


def test_llama_cpps_names_of_options_are_known(here: Command, tiny: TinyModel) -> None:
    sampling = ("--temp", 0.7, "--top-k", 1, "--top-p", 0.9, "--min-p", 0.05, "--repeat-penalty", 1.1, "-s", 3)
    loading = ("-ctk", "q8_0", "-ctv", "f16", "-ngl", 0, "-c", 0, "-t", 1, "--expert-cache", "50%")
    done = here("run", "-m", tiny(), "-p", "hello", "-n", 4, *sampling, *loading)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_hf_and_model_options_make_every_argument_a_word_of_the_prompt() -> None:
    assert model_and_words("hello", ["you"], None, "u/r:Q4_0") == ("hf.co/u/r:Q4_0", ["hello", "you"])
    assert model_and_words("hello", [], None, "hf.co/u/r") == ("hf.co/u/r", ["hello"])
    assert model_and_words(None, [], "m.gguf", None) == ("m.gguf", [])
    assert model_and_words("m.gguf", ["hello"], None, None) == ("m.gguf", ["hello"])
    for wrong in ("demo", "u/r/f", "u/", ""):
        with pytest.raises(typer.BadParameter, match="USER/REPOSITORY"):
            hub_name(wrong)
    with pytest.raises(typer.BadParameter, match="not both"):
        model_and_words(None, [], "m.gguf", "u/r")
    with pytest.raises(typer.BadParameter, match="moegguf list"):
        model_and_words(None, [], None, None)


def test_verbose_prints_ollamas_lines_and_then_ours(here: Command, tiny: TinyModel) -> None:
    done = here("run", tiny(), "hello", "--temperature", 0, "-n", 6, "-v", "--expert-cache", "50%", *QUICK)
    lines = done.stderr.strip().splitlines()
    shape = [re.sub(r"\d+(?= token)", "N", re.sub(r"[\d.]+(?= tokens/s)", "R", line)) for line in lines[:8]]
    shape = [re.sub(r"(?<= )(\d+m)?[\d.]+(ns|µs|ms|s)$", "X", line) for line in shape]
    assert "\n".join(shape) == OLLAMA_LINES
    labels = [line.partition(":")[0] for line in lines[8:]]
    decided = ["policy", "predictor", "prefetch", "controller"]
    assert labels == [
        "time to first token", "threads", "expert cache", "hit rate", "moved", "evictions", "stall", *decided,
    ]  # fmt: skip
    assert lines[9].split() == ["threads:", "1"]
    assert "32 of 64 experts (50%)" in lines[10]
    assert re.search(r"ram \d+\.\d%( in flight \d+\.\d%)? disk \d+\.\d% of \d+ lookups", lines[11])
    assert re.search(r"\d+\.\d\d MB from disk \(\d+\.\d\d MB/token\)", lines[12])
    assert re.search(r"\d+% of decode, \d+\.\d\d ms/token", lines[14])


def test_threads_are_a_number_or_auto(here: Command) -> None:
    assert (parse_threads("auto"), parse_threads("1"), parse_threads("512")) == (None, 1, 512)
    for text in ("0", "-1", "513", "1.5", "\u00b2", "", "many"):
        with pytest.raises(typer.BadParameter, match="1 to 512 nor 'auto'"):
            parse_threads(text)
    done = here("run", "demo", "hello", "--threads", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'auto'" in done.stderr


def test_piped_input_goes_before_the_prompt(here: Command) -> None:
    out = here("run", "demo", "moegguf do?", *DEMO, stdin="What does\n").stdout
    assert ANSWER in out
    assert here("run", "demo", *DEMO, stdin=f"{QUESTION}\n").stdout == out
    assert here("run", "demo", *QUESTION.split(), *DEMO).stdout == out


SCREEN, PIPE = "screen", "pipe"


@pytest.mark.parametrize(("stdin", "stdout", "prompt", "outcome"), [
    (SCREEN, SCREEN, "", "chat"), (SCREEN, SCREEN, QUESTION, "answer"),
    (SCREEN, PIPE, "", "usage"), (SCREEN, PIPE, QUESTION, "answer"),
    (PIPE, SCREEN, "", "answer"), (PIPE, SCREEN, QUESTION, "answer"),
    (PIPE, PIPE, "", "answer"), (PIPE, PIPE, QUESTION, "answer"),
])  # fmt: skip
def test_terminals_and_pipes(tmp_path: Path, stdin: str, stdout: str, prompt: str, outcome: str) -> None:
    command = f"{sys.executable} -m moegguf.cli.app run demo {' '.join(DEMO)}" + (f" '{prompt}'" if prompt else "")
    before = f"printf '{'Tell me.' if prompt else QUESTION}' | " if stdin == PIPE else ""
    after = f" > {tmp_path}/out" if stdout == PIPE else ""
    script = f"{before}{command} 2> {tmp_path}/err{after}; echo code $?"
    with Terminal(["/bin/sh", "-c", script], environment(MOEGGUF_HOME=str(tmp_path)), columns=200) as terminal:
        if outcome == "chat":
            terminal.prompt()
            terminal.send(control("d"))
        terminal.expect("code ")
        terminal.exit_code()
        assert f"code {2 if outcome == 'usage' else 0}" in terminal.text
        out = (tmp_path / "out").read_text() if stdout == PIPE else terminal.text
    errors = (tmp_path / "err").read_text()
    assert ("there is no prompt" in errors) == (outcome == "usage")
    assert bool(re.search(r"\w{3}", out.partition("code ")[0])) == (outcome in ("answer", "chat"))
    if outcome == "answer" and not (prompt and stdin == PIPE):
        assert out.startswith(ANSWER)


def test_a_variable_that_no_worker_could_read_is_an_error_of_the_command(here: Command) -> None:
    done = here("run", "demo", "hello", MOEGGUF_PLACEMENT="guess")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: MOEGGUF_PLACEMENT: 'guess' is none of auto, layers, slots, cpu.\n"


def test_an_empty_prompt_loads_the_model_in_a_running_server(here: Command, server: Server) -> None:
    done = here("run", "tiny", "", "--keepalive", "7m", MOEGGUF_HOST=server.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    loaded = server.call("/api/ps").json["models"]
    assert "tiny:latest" in [model["name"] for model in loaded]
    server.call("/api/generate", {"model": "tiny", "keep_alive": 0})


@pytest.mark.parametrize(("words", "printed"), [
    (["--think"], "think=True"), (["--think=high"], "think=high"), (["--think=false"], "think=False"),
    (["--think", "--insecure", "--keepalive", "5m"], "think=True"), (["--format", "json"], "format=json"),
    (['--format={"type":"object"}'], "format={'type': 'object'}"), (["--seed", "3"], "seed=3"),
    (["-n", "5"], "max_tokens=5"), (["--temperature", "0.5"], "temperature=0.5"), ([], "format=None think=None"),
])  # fmt: skip
def test_options_reach_the_model(words: list[str], printed: str) -> None:
    done = echo("settings", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert printed in done.stdout


def echo(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ECHO), "run", "demo", *arguments, *QUICK]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", env=environment(**extra), timeout=120
    )


def test_a_system_message_where_a_strategy_belongs_is_told_its_flag() -> None:
    done = echo("messages", "--system", "Be brief.")
    assert done.returncode == 2
    assert "no strategy 'Be brief.'" in " ".join(done.stderr.split()) and "--system-prompt" in done.stderr


def test_a_system_message_comes_first() -> None:
    assert echo("messages", "--system-prompt", "Be brief.").stdout == "[system: Be brief.] [user: messages]\n"


def test_a_schema_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array"}')
    assert "format={'type': 'array'}" in echo("settings", "--format", str(file)).stdout
    file.write_text("[]")
    for wrong in (str(file), str(tmp_path / "nothing"), "{", "xml"):
        done = echo("settings", "--format", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--format" in done.stderr
    assert echo("settings", "--think=maybe").returncode == 2


def test_thinking_is_plain_text_where_there_is_no_terminal() -> None:
    asked = "think: deep thought|the answer"
    assert echo(asked).stdout == "Thinking...\ndeep thought\n...done thinking.\n\nthe answer\n"
    assert echo(asked, "--hidethinking").stdout == "the answer\n"


def test_an_error_during_an_answer_has_exit_code_1() -> None:
    done = echo("fail ExpertIOError half an answer")
    assert (done.returncode, done.stdout) == (1, "half an answer\n")
    assert done.stderr == "error: as scripted\n"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A hub with the demo."""
    path = demo_path()
    with running_hub() as found:
        found.add("some/demo-GGUF", {"demo-Q4_0.gguf": path.read_bytes()})
        yield found


def test_a_missing_model_is_pulled_first(here: Command, hub: FakeHub, tmp_path: Path) -> None:
    names = hub.environment(tmp_path)
    for _ in range(2):
        done = here("run", "hf.co/some/demo-GGUF", QUESTION, *DEMO, **names)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(ANSWER)
        assert done.stderr == ""
    assert len(hub.gets("demo-Q4_0.gguf")) == 1
    missing = here("run", "hf.co/some/other-GGUF", QUESTION, *DEMO, **names)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("error: ")


def test_a_pull_is_shown_on_a_terminal(hub: FakeHub, tmp_path: Path) -> None:
    command = moegguf_command("run", "some/demo-GGUF", QUESTION, *DEMO)
    with Terminal(command, environment(**hub.environment(tmp_path))) as terminal:
        assert terminal.exit_code() == 0
        assert "pulling manifest" in terminal.text
        assert re.search(r"pulling [0-9a-f]{12}: +100% ━+", terminal.text)
        assert "success" in terminal.text
        assert ANSWER[:60] in terminal.text


def test_stdout_is_utf8_whatever_the_locale_says(tiny: TinyModel) -> None:
    command = [sys.executable, "-m", "moegguf.cli.app", "run", str(tiny()), "é", "-n", "40", "--seed", "1", *QUICK]
    done = subprocess.run(
        command, capture_output=True, env=environment(PYTHONIOENCODING="ascii"), timeout=120, input=b""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8")


def test_a_low_budget_warns_in_one_line(here: Command, tiny: TinyModel) -> None:
    done = here("run", tiny("tiny-mix"), "hello", "-n", 2, "--expert-cache", "10%", *QUICK)
    assert done.returncode == 0
    assert re.fullmatch(r"warning: .* hit rate will be low\n", done.stderr)


def test_the_first_word_comes_within_two_seconds() -> None:
    """Two seconds of processor time: other jobs share this machine."""
    command = [sys.executable, "-m", "moegguf.cli.app", "run", "demo", "hi", "-t", "1", "-n", "1"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment())
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert used.ru_utime + used.ru_stime < 2


def test_a_closed_pipe_ends_quietly(tiny: TinyModel) -> None:
    command = [sys.executable, "-m", "moegguf.cli.app", "run", str(tiny()), "hello", "-n", "100", *QUICK]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(60) != 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("stubborn mule", "mule mule"), ("progress", "reading the prompt 1,024/6,300 tokens · 47 t/s · 1m53s left")],
)
def test_ctrl_c_ends_an_answer_that_cannot_be_stopped_and_a_long_prompt(prompt: str, shown: str) -> None:
    with Terminal([sys.executable, str(ECHO), "run", "demo", prompt, *QUICK], environment()) as terminal:
        terminal.expect(shown)
        terminal.send(control("c"))
        assert terminal.exit_code() == 130
        assert "reading" not in terminal.text


@pytest.mark.parametrize(("after", "is_shown"), [("", True), ("> /dev/null", True), ("| cat", False)])
def test_progress_is_shown_unless_the_answer_goes_into_a_pipe(after: str, is_shown: bool) -> None:
    script = f"{sys.executable} {ECHO} run demo hello {' '.join(QUICK)} {after}"
    with Terminal(["/bin/sh", "-c", script], environment()) as terminal:
        assert terminal.exit_code() == 0
        assert (b"\x1b[" in terminal.raw) is is_shown
        assert ("hello" in terminal.text) is ("null" not in after)


def begun_answer() -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """`moegguf run` with an answer that does not end, and its worker."""
    endless = '{"type": "string", "minLength": 100000}'
    command = [sys.executable, "-m", "moegguf.cli.app", "run", "demo", QUESTION, "--format", endless, *QUICK]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout
    process.stdout.read(1)
    (worker,) = psutil.Process(process.pid).children()
    return process, worker


def test_no_worker_outlives_a_killed_command() -> None:
    process, worker = begun_answer()
    with process:
        process.kill()
    assert psutil.wait_procs([worker], timeout=30)[1] == []


def test_a_worker_that_dies_ends_the_answer_with_an_error() -> None:
    process, worker = begun_answer()
    with process:
        worker.kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(rb"error: the model's worker process has ended \(killed by SIGKILL\);.*\n", stderr)


def test_one_answer_on_a_terminal_is_wrapped() -> None:
    with Terminal(
        [sys.executable, str(ECHO), "run", "demo", "one two three four five six seven eight nine", *QUICK],
        environment(), columns=40,
    ) as terminal:  # fmt: skip
        assert terminal.exit_code() == 0
        assert terminal.text == "one two three four five six seven eight\nnine"
