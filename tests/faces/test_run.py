"""`moegguf run`: stdout is the answer and nothing else, stderr the rest, the exit code says how it went."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from commanding import Command, TinyModel, environment

QUICK = ("-t", "1", "-c", "256")

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


def test_a_seed_repeats_an_answer_and_no_seed_does_not(moegguf: Command, tiny: TinyModel) -> None:
    ask = ("run", tiny(), "hello", "-n", 16, "--expert-cache", "100%", *QUICK)
    assert moegguf(*ask, "--seed", 7).stdout == moegguf(*ask, "--seed", 7).stdout
    assert moegguf(*ask).stdout != moegguf(*ask).stdout


def test_verbose_prints_ollamas_lines_and_then_the_expert_caches(moegguf: Command, tiny: TinyModel) -> None:
    done = moegguf("run", tiny(), "hello", "--temperature", 0, "-n", 6, "-v", "--expert-cache", "50%", *QUICK)
    lines = done.stderr.strip().splitlines()
    shape = [re.sub(r"\d+(?= token)", "N", re.sub(r"[\d.]+(?= tokens/s)", "R", line)) for line in lines[:8]]
    shape = [re.sub(r"(?<= )(\d+m)?[\d.]+(ns|µs|ms|s)$", "X", line) for line in shape]
    assert "\n".join(shape) == OLLAMA_LINES
    labels = [line.partition(":")[0] for line in lines[8:]]
    assert labels == ["expert cache", "hit rate", "misses", "evictions", "read", "read per token", "stall per token"]
    assert "32 of 64 experts (50%)" in lines[8]


def test_what_is_piped_in_goes_before_the_prompt(moegguf: Command, tiny: TinyModel) -> None:
    ask = ("run", tiny(), "--temperature", 0, "-n", 8, "--expert-cache", "100%", *QUICK)
    together = moegguf(*ask, "first line\n\nthe question")
    assert moegguf(*ask, "the question", stdin="first line\n").stdout == together.stdout
    assert moegguf(*ask, stdin="first line\n\nthe question\n").stdout == together.stdout
    assert moegguf(*ask, "the question").stdout != together.stdout


def test_no_prompt_and_no_terminal_is_a_mistake_of_usage(moegguf: Command, tiny: TinyModel) -> None:
    done = moegguf("run", tiny())
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no prompt" in done.stderr
    assert done.stderr.startswith("error: ")


def test_stdout_is_utf8_whatever_the_locale_says(tiny: TinyModel) -> None:
    command = [sys.executable, "-m", "moegguf.faces.cli", "run", str(tiny()), "é", "-n", "40", "--seed", "1", *QUICK]
    done = subprocess.run(
        command, capture_output=True, env=environment(PYTHONIOENCODING="ascii"), timeout=120, input=b""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8")


def test_a_low_budget_warns_in_one_line(moegguf: Command, tiny: TinyModel) -> None:
    done = moegguf("run", tiny("tiny-mix"), "hello", "-n", 2, "--expert-cache", "10%", *QUICK)
    assert done.returncode == 0
    assert re.fullmatch(r"warning: .* hit rate will be low\n", done.stderr)


def test_a_prompt_longer_than_the_context_says_so(moegguf: Command, tiny: TinyModel) -> None:
    done = moegguf("run", tiny(), "word " * 400, "-c", 64, "-t", 1)
    assert done.returncode == 1
    assert re.fullmatch(r"error: the prompt has \d+ tokens, but the context holds \d+; .*\n", done.stderr)


def test_a_closed_pipe_ends_quietly(tiny: TinyModel) -> None:
    command = [sys.executable, "-m", "moegguf.faces.cli", "run", str(tiny()), "hello", "-n", "100", *QUICK]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(60) != 0
        assert process.stderr.read() == b""


SLOW_DISK = """
import sys
from moegguf.native import library
from moegguf.faces import cli, run
load = run.load
def slow_once_loaded(*arguments):
    loaded = load(*arguments)
    library.arm_fault("slow_read", 1, sticky=True)
    print("loaded", file=sys.stderr, flush=True)
    return loaded
run.load = slow_once_loaded
sys.exit(cli.main())
"""


def test_ctrl_c_ends_an_answer_that_waits_for_a_slow_disk(tiny: TinyModel, tmp_path: Path) -> None:
    script = tmp_path / "slow_disk.py"
    script.write_text(SLOW_DISK)
    command = [sys.executable, str(script), "run", str(tiny("tiny-mix")), "hello", "--expert-cache", "25%", *QUICK]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr
        assert process.stderr.readline() == b"loaded\n"
        time.sleep(1)
        begin = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
        assert time.monotonic() - begin < 5  # well under a second on an idle machine
        assert process.stderr.read() == b""
