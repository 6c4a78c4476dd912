"""Runs measurements on a card for less than ten minutes. `tools/gpu/short_run.sh`
starts this program.

Each part of each step is a process, and its outcome is written as soon as it is known.
A part that fails, takes too long or cannot run on this machine also has an outcome, and
the run continues. tools/gpu/short_plan.py defines the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegguf.atomic_write import write_atomically
from moegguf.engine.machine import count_cpus
from moegguf.errors import LibraryError
from moegguf.native.library import find_library
from tools.gpu.build import CARRIED, ROOT, of_processes, runtime_folders
from tools.gpu.case import read_parts
from tools.gpu.short_plan import (
    CARD,
    REHEARSAL,
    TOTAL_S,
    Part,
    Setting,
    Step,
    steps,
    switch_bits,
)
from tools.gpu.short_table import figures_of, table, turns_differ
from tools.gpu.steps import Outcome, State

# Number of bytes at the end of a process's log that are searched for an error.
LOG_BYTES = 4000
LEAST_S = 2.0  # a part starts only if at least this much time is left
NO_CARD = 3  # exit status of tools/gpu/micro.cu on a machine without a card
NO_MEMORY = re.compile(
    r"out of memory|failed to allocate|unable to allocate", re.IGNORECASE
)
# Variables for experiments.
NOT_INHERITED = ("MOEGGUF_HOOKS", "MOEGGUF_KERNELS", "MOEGGUF_SWITCHES")
FACTS = "facts/the machine/1"  # the call whose outcome `Runner.learn` reads
STATUS_OF_TEST = re.compile(r"^tests/.* (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
SETTINGS = {"card": CARD, "link": REHEARSAL}


@dataclass(frozen=True)
class Call:
    """One run of a part: the part and the number of the turn."""

    step: Step
    part: Part
    turn: int

    @property
    def name(self) -> str:
        """Returns the name under which the outcome of this call is saved."""
        return f"{self.step.name}/{self.part.name}/{self.turn}"


def calls(step: Step) -> Iterator[Call]:
    """Yields the calls of a step, turn by turn: A, B, A, B. Parts with `once` are only
    in the first turn."""
    for turn in range(1, step.n_turns + 1):
        for part in step.parts:
            if turn == 1 or not part.once:
                yield Call(step, part, turn)


def ends(plan: Sequence[Step], total_s: float) -> Iterator[tuple[Step, float]]:
    """Yields each step with its deadline in seconds: the sum of the shares up to and
    including this step, limited to `total_s`.
    """
    so_far_s = 0.0
    for step in plan:
        so_far_s += step.share_s
        yield step, min(so_far_s, total_s)


def to_repeat(plan: Sequence[Step], outcomes: Mapping[str, Outcome]) -> set[str]:
    """Returns the names of calls that a second run repeats.

    These are calls that have not succeeded, unless memory was too small, and all calls
    of a part whose turns differ in speed.
    """
    found = set[str]()
    for step in plan:
        for part in step.parts:
            named = [call.name for call in calls(step) if call.part is part]
            turns = [outcomes[name] for name in named if name in outcomes]
            if turns_differ(part, turns):
                found.update(named)
            found.update(
                name
                for name in named
                if outcomes.get(name, {}).get("status") not in ("done", "does not fit")
            )
    return found


class Runner:
    """Runs parts as child processes, and starts other processes that write the
    models."""

    def __init__(self, setting: Setting, library: Path, work: Path, log: Path) -> None:
        self._library = library
        self._models = work / "models"
        self._log = log
        self._setting = setting
        self._writers = dict[str, subprocess.Popen[bytes]]()
        self.switches = 0  # bits of the remedies in the library; `learn` sets them
        folders = [
            *map(str, runtime_folders()),
            *filter(None, [os.environ.get("LD_LIBRARY_PATH")]),
        ]
        inherited = {
            name: text for name, text in os.environ.items() if name not in NOT_INHERITED
        }
        self._environment = inherited | of_processes(library, work / "home")
        self._environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)

    def begin_models(self) -> None:
        """Starts one process for each missing model, which writes the model's file."""
        self._models.mkdir(parents=True, exist_ok=True)
        for name, (preset, quant, n_layer) in self._setting.models.items():
            file = self._setting.file(name, self._models)
            layers = ["--layers", str(n_layer)] if n_layer else []
            command = [
                "tools/make_model.py",
                "--preset",
                preset,
                "--quant",
                quant,
                *layers,
                "-o",
                str(file),
            ]
            if not file.exists():
                self._writers[name] = self._begin(command, None)

    def learn(self, facts: Outcome) -> str:
        """Sets `switches` from the outcome of the part "the machine". Returns an error
        text if the part failed or the device is missing, else ""."""
        if facts["status"] != "done":
            return str(facts.get("error", facts["status"]))
        self.switches = facts["values"]["switches"]
        names = [device.partition(":")[0] for device in facts["values"]["devices"]]
        needed = self._setting.device
        return (
            f"the library sees no {needed}, only {', '.join(names)}"
            if needed and needed not in names
            else ""
        )

    def close(self) -> None:
        """Kills the processes that are still writing models."""
        for writer in self._writers.values():
            end(writer)

    def refusal(self, part: Part) -> str:
        """Returns the reason why a part cannot run here, or "" if it can."""
        if part.needs_card and self._setting.is_simulated:
            return "needs a card"
        program = (
            "libcalls.so"
            if part.counts_calls
            else "micro"
            if part.kind == "micro"
            else ""
        )
        missing = [
            letter
            for letter in part.switches.strip("-")
            if not self.switches & switch_bits(letter)
        ]
        lacks = (
            missing
            or (program and not self.has(program))
            or (part.switches and not self.switches)
        )
        return "not built in" if lacks else ""

    def has(self, name: str) -> bool:
        """Returns True if the library's folder contains a file of this name."""
        return (self._library / name).exists()

    def run(self, part: Part, left_s: float) -> Outcome:
        """Waits for the part's model, then runs the part. Both together take at most
        `left_s` seconds. Returns the outcome."""
        start = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            if (writer := self._writers.get(part.model)) and writer.wait(left_s):
                return {
                    "status": "failed",
                    "error": f"the model was not written; see {self._log.name}",
                }
            left_s -= time.monotonic() - start
            return self._outcome(part, min(left_s, part.limit_s))
        return {"status": "no model in time"}

    def _outcome(self, part: Part, left_s: float) -> Outcome:
        log_begin = self._log.stat().st_size if self._log.exists() else 0
        try:
            process = self._begin(
                self._command(part), subprocess.PIPE, self._environment_of(part)
            )
        except OSError as error:
            return {"status": "failed", "error": str(error)}
        timed_out = False
        try:
            out, _ = process.communicate(timeout=max(left_s, 0.1))
        except subprocess.TimeoutExpired:
            timed_out = True
            end(process)
            out, _ = process.communicate()
        except BaseException:  # the whole run was interrupted
            end(process)
            raise
        text = out.decode(errors="replace")
        # The outcome has only the numbers of tests, not their errors.
        if part.kind == "tests":
            with self._log.open("a") as log:
                log.write(text)
        return outcome_of(
            part, text, process.returncode, timed_out, self._log_since(log_begin)
        )

    def _command(self, part: Part) -> list[str]:
        match part.kind:
            case "micro":
                return [str(self._library / "micro"), *part.arguments]
            case "tests":
                return [
                    "-m",
                    "pytest",
                    "-p",
                    "no:cacheprovider",
                    "-vv",
                    "--tb=short",
                    *part.arguments,
                ]
            case "facts":
                return ["-m", "tools.gpu.facts"]
        assert part.case is not None
        return ["-m", f"tools.gpu.{part.kind}", part.case.as_json()]

    def _environment_of(self, part: Part) -> dict[str, str]:
        found = dict[str, str]()
        if part.case is not None:
            found["MOEGGUF_HOOKS"] = "1" if part.case.system == "moegguf" else "0"
        if part.switches:
            found["MOEGGUF_SWITCHES"] = str(switch_bits(part.switches))
        if part.counts_calls:
            found["LD_PRELOAD"] = str(self._library / "libcalls.so")
        return found

    def _begin(
        self,
        command: list[str],
        stdout: int | None,
        environment: Mapping[str, str] = {},
    ) -> subprocess.Popen[bytes]:
        """Starts a process in a new session, so that `end` can kill it with its
        children."""
        with self._log.open("ab") as log:
            log.write(f"\n== {' '.join(command)}\n".encode())
            log.flush()
            program = [] if command[0].startswith("/") else [sys.executable]
            return subprocess.Popen(
                [*program, *command], cwd=ROOT, stdout=stdout or log, stderr=log, start_new_session=True,
                env={**self._environment, **environment},
            )  # fmt: skip

    def _log_since(self, begin: int) -> str:
        """Returns the log from byte `begin` on, but no more than its last LOG_BYTES
        bytes."""
        with self._log.open("rb") as log:
            log.seek(max(begin, self._log.stat().st_size - LOG_BYTES))
            return log.read().decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, unless the process has exited."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def named(item: str, unit: str) -> str:
    """Returns the name of a figure, with its unit unless the figure is a bool, share,
    ratio or number."""
    return item if unit in ("bool", "share", "ratio", "number") else f"{item}, {unit}"


def outcome_of(
    part: Part, text: str, exit_status: int, timed_out: bool, log: str
) -> Outcome:
    """Returns the outcome of a process from its output `text`, exit status and log.

    The values that were printed before a failure or timeout are kept.
    """
    values: dict[str, Any]
    if part.kind == "tests":
        found = STATUS_OF_TEST.findall(text)
        failed = found.count("FAILED") + found.count("ERROR")
        values = (
            {
                "passed": found.count("PASSED"),
                "failed": failed,
                "skipped": found.count("SKIPPED"),
            }
            if found
            else {}
        )
    elif part.kind in ("micro", "batches"):
        lines = [read_parts(line) for line in text.splitlines()]
        values = {
            named(line["item"], line["unit"]): line["value"]
            for line in lines
            if "item" in line
        }
    else:
        values = read_parts(text)
    error = values.pop("error", "")
    outcome: dict[str, Any] = {"values": values} if values else {}
    if timed_out:
        return outcome | {"status": "timed out"}
    if exit_status == NO_CARD and part.kind == "micro":
        return outcome | {"status": "needs a card"}
    if (error or exit_status) and NO_MEMORY.search(log):
        return outcome | {"status": "does not fit"}
    if error or (exit_status and part.kind != "tests") or not values:
        return outcome | {
            "status": "failed",
            "error": error or f"exit status {exit_status}: {log[-800:]}",
        }
    return outcome | {"status": "done"}


def run(
    plan: Sequence[Step],
    state: State,
    runner: Runner,
    total_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs every call without an outcome, as long as its step has time left. Stops
    early if the part "the machine" fails or the device is missing."""
    begin = clock()
    for step, end_s in ends(plan, total_s):
        say(f"{clock() - begin:5.0f} s  {step.name}: {step.question}")
        for call in calls(step):
            if call.name in state.outcomes:
                continue
            start = clock()
            left_s = begin + end_s - start
            if refusal := runner.refusal(call.part) or (
                "no time" if left_s < LEAST_S else ""
            ):
                state.keep(call.name, {"status": refusal})
                say(f"{start - begin:5.0f} s    {call.part.name}: {refusal}")
                continue
            outcome = runner.run(call.part, left_s)
            state.keep(call.name, {**outcome, "seconds": round(clock() - start, 1)})
            told = figures_of(call.part, outcome)
            figures = "; ".join(
                f"{name} {value:.4g}" for name, value in list(told.items())[:4]
            )
            error = " ".join(outcome.get("error", "").split())[-200:]
            said = "; ".join(filter(None, (outcome["status"], error, figures)))
            say(f"{clock() - begin:5.0f} s    {call.part.name}: {said}")
            if call.part.kind == "facts" and (lacking := runner.learn(outcome)):
                say(
                    f"error: {lacking}; nothing else is measured, and the time is left for another run"
                )
                return


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("short-run"),
        help="for results.json, results.txt, log.txt",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/tmp/moegguf-short-run"),
        help="for models: 16 GB",
    )
    parser.add_argument(
        "--library",
        type=Path,
        help="folder of the library (default: the build of `make check-cuda`)",
    )
    parser.add_argument(
        "--backend",
        choices=SETTINGS,
        default="card",
        help="link: tiny models, simulated device",
    )
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help="after which the last step ends"
    )
    parser.add_argument(
        "--after",
        type=Path,
        metavar="FILE",
        help="results.json of a run, whose gaps are filled",
    )
    parser.add_argument(
        "--only", default="", metavar="STEP,...", help="only these steps"
    )
    return parser.parse_args(given)


def library_folder(setting: Setting) -> Path:
    """Returns the default folder of the library: the build of `make check-cuda`.
    Without this build, a rehearsal uses the library of `make`, if there is one. That
    library has no `micro` and no `libcalls.so`."""
    if setting.is_simulated and not (CARRIED / "libmoegguf.so").exists():
        with suppress(LibraryError):
            return find_library()
    return CARRIED


def main(given: Sequence[str] | None = None) -> int:
    """Runs the steps that the command line chooses. Returns 0 even if parts failed:
    results.txt shows the failures."""
    args = arguments(given)
    setting = SETTINGS[args.backend]
    out = args.out.resolve()
    work = args.work.resolve()
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    n_threads = 1 if setting.is_simulated else count_cpus()
    chosen = [*filter(None, args.only.split(","))]
    plan = [
        step
        for step in steps(setting, work / "models", n_threads)
        if not chosen or step.name in (*chosen, "facts")
    ]
    state = State(out / "results.json")
    if args.after:
        state.outcomes = json.loads(args.after.read_text())
        state.forget([*to_repeat(plan, state.outcomes)])
    # Every run reads the device and the switches, also a run that continues another.
    state.forget([FACTS])

    def text_of_results() -> str:
        head = (
            "A rehearsal: its figures mean nothing.\n" if setting.is_simulated else ""
        )
        return head + table(plan, state.outcomes, is_rehearsal=setting.is_simulated)

    def say(text: str) -> None:
        print(text, flush=True)
        write_atomically(out / "results.txt", text_of_results().encode())

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    library = args.library or library_folder(setting)
    runner = Runner(setting, library.resolve(), work, out / "log.txt")
    runner.begin_models()
    try:
        run(plan, state, runner, args.seconds, say)
    finally:
        runner.close()
    say(f"\n{text_of_results()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
