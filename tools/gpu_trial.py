#!/usr/bin/env python3
"""Measure moegguf and plain llama.cpp on a GPU, in steps that fit into calls of limited
time.

The trial builds the library for the card, and tests there that logits are identical. It
writes models of real shapes with published locality. Then it measures moegguf and
llama.cpp: everything on the card, several values of -ncmoe, and -cmoe. Memory limits
imitate cards of 8 and 16 GB. Without the build, all steps take 25 minutes in total.
Outcomes are saved, and each call continues where the last one stopped. A step that
fails ends the call, and the next call runs it again.

python tools/gpu_trial.py --pack FOLDER    # for a machine without a network: copy FOLDER there, and
python3 FOLDER/gpu_trial.py --work trial   # repeat this call there until it prints that everything is done
python tools/gpu_trial.py --work trial     # the same trial on this machine, from these sources
python tools/gpu_trial.py --work trial --only model/,measure/    # no tests
python tools/gpu_trial.py --work small --backend software        # rehearsal: tiny models on software Vulkan
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moegguf.engine.machine import count_cpus
from moegguf.processor import read_processor
from moegguf.quantities import parse_duration
from tools.gpu.build import (
    ROOT,
    Backend,
    build,
    cuda,
    library_of,
    nvcc,
    of_processes,
    vulkan,
)
from tools.gpu.case import Case, read_parts
from tools.gpu.facts import card
from tools.gpu.pack import pack
from tools.gpu.rig import FULL, Model, Rig, small
from tools.gpu.steps import (
    REFUSED,
    Outcome,
    State,
    Step,
    StepError,
    UnfinishedError,
    is_among,
    run_steps,
)
from tools.gpu.table import table
from tools.vulkan_tests import software_drivers

DEVICES = {"cuda": "CUDA0", "software": "Vulkan0"}
AGAIN = 75  # exit status EX_TEMPFAIL: there are more steps, call again
MEASURE_S, TEST_S, MODEL_S, SHORT_S = 180.0, 300.0, 180.0, 30.0
IDENTITY = {
    "resizes": "test_budgets_changed_while_decoding_keep_the_logits",
    "passes": "test_passes_of_any_width_give_the_gpus_own_logits",
    "quantisations": "test_every_quantisation",
    "architectures": "test_every_architecture_gives_the_gpus_own_logits",
}
NO_MEMORY = re.compile(
    r".*(?:out of memory|failed to allocate|unable to allocate|OutOfDeviceMemory).*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Trial:
    """A trial: its folder, its models and measurements (`rig`), the device, and the
    build of the library."""

    work: Path
    rig: Rig
    device: str
    backend: Backend
    library: Path | None  # folder of an existing build; None: the trial builds one

    def steps(self) -> Iterator[Step]:
        """Yields the steps of the trial, in order. The build is left out if `library`
        is given."""
        yield Step("facts", self._facts, SHORT_S)
        if self.library is None:
            yield Step("build", self._build, SHORT_S)
        for name in (*IDENTITY, "the rest"):
            yield Step(f"identity/{name}", functools.partial(self._test, name), TEST_S)
        for model in self.rig.models:
            yield Step(
                f"model/{model.preset}", functools.partial(self._make, model), MODEL_S
            )
            for name, case in self.rig.cases(
                model, self._models, self.device, count_cpus()
            ):
                step = f"measure/{model.preset}/{name}"
                yield Step(
                    step, functools.partial(self._measure, step, case), MEASURE_S
                )
            yield Step(
                f"delete/{model.preset}", functools.partial(self._delete, model), 0.0
            )

    @property
    def _models(self) -> Path:
        return self.work / "models"

    def _facts(self, _left_s: float) -> Outcome:
        facts: dict[str, Any] = {
            "device": self.device,
            "CPU": read_processor().model,
            "threads": count_cpus(),
        }
        if self.backend.name == "cuda":
            facts |= card()
            compiler = subprocess.run(
                [nvcc(), "--version"], capture_output=True, text=True
            ).stdout.splitlines()
            facts["nvcc"] = next(
                (line.strip() for line in compiler if "release" in line), ""
            )
        return facts

    def _build(self, left_s: float) -> Outcome:
        try:
            build(self.backend, left_s)
        except subprocess.TimeoutExpired:
            raise UnfinishedError from None
        except subprocess.CalledProcessError as error:
            raise StepError(str(error)) from None
        return {"library": str(library_of(self.backend))}

    def _test(self, name: str, left_s: float) -> Outcome:
        chosen = IDENTITY.get(name) or f"not ({' or '.join(IDENTITY.values())})"
        arguments = [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "tests/live/test_gpu.py",
            "-k",
            chosen,
        ]
        done = self._python(f"identity-{name}", arguments, left_s)
        lines = (done.stdout or "").strip().splitlines()
        summary = lines[-1] if lines else ""
        if done.returncode or " passed" not in summary:
            raise StepError("\n".join([f"exit status {done.returncode}", *lines[-60:]]))
        return {"summary": summary}

    def _make(self, model: Model, left_s: float) -> Outcome:
        self._models.mkdir(exist_ok=True)
        free = shutil.disk_usage(self._models).free
        if free < model.n_bytes * 1.05:
            raise StepError(
                f"{model.n_bytes / 1e9:.0f} GB are needed in {self._models}, {free / 1e9:.0f} are free"
            )
        file = str(model.file(self._models))
        script = str(ROOT / "tools/make_model.py")
        done = self._python(
            f"model-{model.preset}",
            [script, "--preset", model.preset, "--quant", model.quant, "-o", file],
            left_s,
        )
        if done.returncode:
            raise StepError(done.stderr[-2000:])
        return {"bytes": model.n_bytes}

    def _measure(self, step: str, case: Case, left_s: float) -> Outcome:
        hooks = {"MOEGGUF_HOOKS": "1" if case.system == "moegguf" else "0"}
        return self._result(
            step,
            ["-m", "tools.gpu.measure", case.as_json()],
            min(left_s, MEASURE_S),
            hooks,
        )

    def _delete(self, model: Model, _left_s: float) -> Outcome:
        model.file(self._models).unlink(missing_ok=True)
        return {}

    def _result(
        self,
        name: str,
        arguments: list[str],
        left_s: float,
        environment: dict[str, str],
    ) -> Outcome:
        """Runs Python and returns the outcome that it prints as JSON, or a REFUSED
        outcome if memory ran out.

        Raises StepError for any other failure.
        """
        done = self._python(name, arguments, left_s, environment)
        outcome = read_parts(done.stdout)
        if done.returncode or not outcome:
            outcome.setdefault(
                "error", f"exit status {done.returncode}: {done.stderr[-2000:]}"
            )
        if "error" not in outcome:
            return outcome
        if refused := NO_MEMORY.search(done.stderr):
            return {REFUSED: f"does not fit ({refused[0].strip()})"}
        raise StepError(outcome["error"])

    def _python(
        self,
        name: str,
        arguments: list[str],
        timeout_s: float,
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python with these arguments in the source folder, and kills the process
        after `timeout_s` seconds.

        Also saves the process's stderr to a file in log/.
        """
        own = of_processes(self.library or library_of(self.backend), self.work / "home")
        log = self.work / "log" / (re.sub(r"[^\w.-]+", "_", name) + ".txt")
        log.parent.mkdir(exist_ok=True)
        with log.open("w+", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ | self.backend.environment | own | (environment or {}),
            )  # fmt: skip
            try:
                out, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out = process.communicate()[0]
                print(f"\nended after {timeout_s:.0f} s", file=errors)
            errors.seek(0)
            return subprocess.CompletedProcess(
                arguments, process.returncode, out, errors.read()
            )


def backend_named(name: str) -> Backend:
    """Returns the backend to build: Vulkan with a software driver if `name` is
    "software", else CUDA for this card.

    Raises SystemExit if the driver, the card or the CUDA compiler is missing.
    """
    if name == "software":
        driver = next(software_drivers(), None)
        if driver is None:
            raise SystemExit(
                "error: there is no software Vulkan here; on Debian and Ubuntu: mesa-vulkan-drivers"
            )
        return vulkan(driver)
    try:
        architecture = card()["compute_cap"].replace(".", "")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"error: there is no card of NVIDIA's here ({error}); see --backend"
        ) from None
    try:
        return cuda(architecture)
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None


def write_results(folder: Path, state: State) -> None:
    """Writes all outcomes to results.json, and the table to results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(state.outcomes, indent=1))
    (folder / "results.md").write_text(table(state.outcomes))


def arguments() -> argparse.Namespace:
    """Returns the parsed options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pack",
        type=Path,
        metavar="FOLDER",
        help="make a folder for a machine without a network",
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="FOLDER",
        help="for builds, models, outcomes: some 30 GB",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="for results.json, results.md; default: --work",
    )
    parser.add_argument(
        "--time-limit",
        default="9m",
        metavar="TIME",
        help="of this call; steps take up to 7 minutes",
    )
    parser.add_argument(
        "--backend",
        choices=DEVICES,
        default="cuda",
        help="software: tiny models on software Vulkan",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="ggml's name; default: the backend's first"
    )
    parser.add_argument(
        "--library",
        type=Path,
        metavar="FOLDER",
        help="a build with that backend; nothing is built",
    )
    parser.add_argument(
        "--only", default="", metavar="STEP,...", help="only these; STEP/: all below"
    )
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        metavar="STEP",
        help="repeat it; STEP/: all below",
    )
    args = parser.parse_args()
    if (args.pack is None) == (args.work is None):
        parser.error("--pack or --work is needed")
    return args


def trial(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Runs the trial's steps. Returns 0 if all steps are done, AGAIN if some are left,
    and 1 if a step failed."""
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rig = FULL if args.backend == "cuda" else small()
    library = args.library.resolve() if args.library else None
    of = Trial(
        work,
        rig,
        args.device or DEVICES[args.backend],
        backend_named(args.backend),
        library,
    )
    state = State(work / "state.json")
    state.forget(args.again)

    def say_and_write(text: str) -> None:
        # Every time, because the call may be killed at any time.
        write_results(args.results or work, state)
        say(text)

    chosen = tuple(filter(None, args.only.split(",")))
    steps = [step for step in of.steps() if not chosen or is_among(step.name, chosen)]
    try:
        done = run_steps(steps, state, parse_duration(args.time_limit), say_and_write)
    except StepError as error:
        say(f"error: {error}\ncall again once this is mended")
        return 1
    finally:
        write_results(args.results or work, state)
    say(
        f"everything is done: {args.results or work}/results.md"
        if done
        else "there is more to do: call again"
    )
    return 0 if done else AGAIN


def main() -> int:
    """Runs the program with the command line's options. Returns the exit status."""
    args = arguments()
    if args.pack is not None:
        try:
            print(f"{pack(args.pack) / 1e6:.1f} MB in {args.pack}")
        except (ValueError, OSError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    return trial(args, functools.partial(print, flush=True))


if __name__ == "__main__":
    sys.exit(main())
