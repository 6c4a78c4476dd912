"""Compares processes that have each loaded a model and take turns running it. `python
-m moegguf.bench.turns '<spec as JSON>'` runs one such process.

A process is stopped while other processes have their turn. On a machine whose speed
changes within seconds, a ratio of neighbouring turns is more reliable than a ratio of
whole runs.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from moegguf.bench.measure import Feed, load, open_result
from moegguf.bench.series import Spec, Test, environment_of
from moegguf.bench.stock import stock_library
from moegguf.child import child_command
from moegguf.engine.llama import Llama
from moegguf.errors import MoeggufError, OptionError
from moegguf.options import BUDGETS

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
Figures = dict[str, float]
Row = dict[str, Any]

# Number of tokens that a context holds: in `beside_load` in total, in `against_stock`
# in addition to the depth and the prompt. A full context is truncated to the position
# at which decoding began.
CONTEXT_TOKENS = 1024
PROMPT_TOKENS = 256  # length of a turn's prompt in `beside_load`, in tokens

SPIN = [sys.executable, "-c", "while True: pass"]
BURSTS = """
import time
while True:
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        pass
    time.sleep(0.02)
"""
LOADS: dict[str, list[list[str]]] = {
    "quiet": [],
    "busy": [SPIN],
    "pinned": [["taskset", "-c", "LAST", *SPIN]],
    "two": [SPIN, SPIN],
    "bursts": [[sys.executable, "-c", BURSTS]],
    "niced": [["nice", "-n", "19", *SPIN]],
    # No extra process; two processes of the same system decode at the same time.
    "pair": [],
}
"""{name of a load: the commands of its processes}. LAST stands for the number of the
last processor that this process may use."""


@dataclass(frozen=True)
class Turn:
    """The work of one turn."""

    n_depth: int = 0  # tokens in the context before the turn, not timed
    n_prompt: int = 0  # tokens of the prompt, evaluated together
    # Minimum number of tokens that are decoded one by one after the prompt.
    n_gen: int = 0
    seconds: float = 0.0  # minimum duration of decoding, in seconds


class Side:
    """One of the compared processes, with a loaded model. The process is stopped
    between its turns."""

    def __init__(self, spec: Spec, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [*child_command("moegguf.bench.turns"), spec.as_json()],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # Waits for the first result, which comes when the model is loaded.
        self.result()

    def start(self, turn: Turn) -> None:
        """Resumes the stopped process, and starts a turn."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        print(json.dumps(asdict(turn)), file=self._process.stdin, flush=True)

    def result(self) -> Figures:
        """Waits until the turn ends, and stops the process. Returns the turn's figures.
        Raises MoeggufError if the turn failed or the process has exited."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        figures: dict[str, Any] = (
            json.loads(line)
            if line
            else {"error": "a measuring process exited; see its messages, and retry."}
        )
        if "error" in figures:
            raise MoeggufError(figures["error"])
        self._process.send_signal(signal.SIGSTOP)
        return figures

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.communicate()


def take_turn(llama: Llama, tokens: Sequence[int], turn: Turn) -> Figures:
    """Runs a turn. Returns the prompt time and the decoding time in seconds, the number
    of decoded tokens, and the mean number of threads during decoding (0 for a turn
    without `seconds`)."""
    if not 0 < turn.n_depth <= llama.n_tokens or not llama.context.truncate(
        turn.n_depth
    ):
        llama.reset()
        if turn.n_depth:
            llama.eval(tokens[: turn.n_depth])
    begin = turn.n_depth + turn.n_prompt
    start_s = time.perf_counter()
    if turn.n_prompt:
        llama.eval(tokens[turn.n_depth : begin])
    prompt_s = time.perf_counter() - start_s
    n_decoded = 0
    threads = []
    start_s = time.perf_counter()
    while n_decoded < turn.n_gen or time.perf_counter() - start_s < turn.seconds:
        if llama.n_tokens == len(tokens):
            llama.context.truncate(begin)
        llama.eval([tokens[llama.n_tokens]])
        n_decoded += 1
        if turn.seconds:
            threads.append(llama.stats().n_threads)
    decode_s = time.perf_counter() - start_s
    mean_threads = statistics.fmean(threads) if threads else 0.0
    return {
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "n_decoded": n_decoded,
        "threads": mean_threads,
    }


def serve(spec: Spec, lines: Iterable[str]) -> Iterator[Figures]:
    """Loads a model, and yields an empty result. Then runs the turn that each line of
    `lines` describes (a `Turn` as JSON), and yields its figures."""
    with load(spec) as llama:
        if llama.session is not None:
            llama.session.store.drain()
        tokens = Feed(llama, spec).tokens(spec.tests[0].n_tokens, 0)
        yield {}
        for line in lines:
            yield take_turn(llama, tokens, Turn(**json.loads(line)))


def take_turns(
    calls: Mapping[Key, Callable[[], Result]], rounds: int
) -> dict[Key, list[Result]]:
    """Calls each function once per round. The rounds alternate between the reverse
    order and the order of `calls`. Returns {name: results of its calls}."""
    results: dict[Key, list[Result]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            results[name].append(calls[name]())
    return results


def against_stock(
    model: str,
    *,
    prompt: int = 0,
    tokens: int = 24,
    depth: int = 0,
    rounds: int = 24,
    kernels: str = "",
) -> Iterator[Row]:
    """Yields a row for each system: its tokens per second, and its speed relative to
    stock in neighbouring turns (median and quartiles).

    The speed is the prompt speed if `prompt` is above 0, otherwise the decoding speed.
    Every expert is in memory. `kernels` is a list of values of MOEGGUF_KERNELS,
    separated by commas; moegguf also runs with each of them.
    """
    test = Test(prompt, CONTEXT_TOKENS, depth)
    own = Spec(
        model, (test,), loading={BUDGETS["RAM"]: "100%"}, n_threads=os.cpu_count() or 1
    )
    stock = Spec(model, (test,), system="stock", n_threads=os.cpu_count() or 1)
    library = stock_library(lambda text: print(text, file=sys.stderr))
    turn = Turn(depth, prompt, 0 if prompt else tokens)
    sides = {
        f"moegguf, {name}": (own, environment_of(own) | {"MOEGGUF_KERNELS": name})
        for name in kernels.split(",")
        if name
    }
    sides["moegguf"] = own, environment_of(own)
    sides["stock"] = stock, environment_of(stock, library)
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(closing(Side(*side)))
            for name, side in sides.items()
        }

        def seconds_of(side: Side) -> float:
            side.start(turn)
            figures = side.result()
            return figures["prompt_s"] if prompt else figures["decode_s"]

        calls = {name: partial(seconds_of, side) for name, side in opened.items()}
        take_turns(calls, 1)  # fills the caches; these turns are not measured
        seconds = take_turns(calls, rounds)
    for name, found in seconds.items():
        ratios = [
            theirs / ours for theirs, ours in zip(seconds["stock"], found, strict=True)
        ]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        speed = (prompt or tokens) / statistics.median(found)
        yield {
            "system": name,
            "t/s": speed,
            "ratio": middle,
            "lower quartile": low,
            "upper quartile": high,
        }


@contextmanager
def busy_processes(load_name: str) -> Iterator[None]:
    """Runs the processes of the load `load_name` (a key of LOADS) in the background
    while the `with` block runs."""
    last = str(max(os.sched_getaffinity(0)))
    commands = [
        [last if word == "LAST" else word for word in command]
        for command in LOADS[load_name]
    ]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def beside_load(
    model: str,
    *,
    expert_cache: str = "100%",
    seconds: float = 2.0,
    rounds: int = 3,
    loads: str = "quiet,busy,pinned",
    systems: str = "2,auto,1,llama.cpp",
) -> Iterator[Row]:
    """Yields a row for each system under each load, with median speeds. "share" is the
    decoding speed divided by the decoding speed in the first row. `systems` is a
    comma-separated list: thread counts for moegguf, "auto" (the count follows the load)
    and "llama.cpp" (one thread for each processor)."""
    names = loads.split(",")
    known = systems.split(",")
    if not set(names) <= LOADS.keys():
        raise OptionError(
            f"loads may list only {', '.join(LOADS)}, separated by commas, but is {loads!r}."
        )
    if wrong := [
        name
        for name in known
        if not name.isdigit() and name not in ("auto", "llama.cpp")
    ]:
        raise OptionError(
            "systems may list only numbers of threads, auto and llama.cpp, separated by commas, but contains"
            f" {wrong[0]!r}."
        )
    with ExitStack() as stack:
        opened = {}
        for system in known:
            spec = Spec(
                model,
                (Test(PROMPT_TOKENS, CONTEXT_TOKENS - PROMPT_TOKENS),),
                system="mmap" if system == "llama.cpp" else "moegguf",
                loading={BUDGETS["RAM"]: expert_cache},
                n_threads=int(system) if system.isdigit() else 0,
            )
            for copy in range(2 if "pair" in names else 1):
                opened[system, copy] = stack.enter_context(
                    closing(Side(spec, environment_of(spec)))
                )

        def speeds_of(load_name: str, system: str) -> Figures:
            working = [
                opened[system, copy] for copy in range(2 if load_name == "pair" else 1)
            ]
            with busy_processes(load_name):
                for side in working:
                    side.start(Turn(n_prompt=PROMPT_TOKENS, seconds=seconds))
                found = [side.result() for side in working]
            return {
                "decode": sum(
                    figures["n_decoded"] / figures["decode_s"] for figures in found
                ),
                "prompt": sum(PROMPT_TOKENS / figures["prompt_s"] for figures in found),
                "threads": sum(figures["threads"] for figures in found),
            }

        pairs = [(load_name, system) for load_name in names for system in known]
        turns = take_turns({pair: partial(speeds_of, *pair) for pair in pairs}, rounds)
    reference = 0.0
    for (load_name, system), found in turns.items():
        decode, prompt, threads = (
            statistics.median(figures[key] for figures in found) for key in found[0]
        )
        reference = reference or decode
        yield {
            "load": load_name,
            "threads": system,
            "decode t/s": decode,
            "share": decode / reference,
            "prompt t/s": prompt,
            "computing": threads,
        }


if __name__ == "__main__":
    out = open_result()
    try:
        for figures in serve(Spec.from_json(sys.argv[1]), sys.stdin):
            print(json.dumps(figures), file=out, flush=True)
    except MoeggufError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
