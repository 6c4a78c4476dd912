#!/usr/bin/env python3
"""Measure decode on a quiet machine and beside busy processes: governed and fixed numbers of threads, llama.cpp.

Each round runs every system once per load, in turn, for some seconds each; medians are printed, and shares of the first
system on the quiet machine. Give the processors that are to be used, the busy processes run on the same ones:

taskset -c 0,1 python tools/busy_bench.py demo
taskset -c 0,1 python tools/busy_bench.py model.gguf --expert-cache 50% --seconds 8 --loads quiet,busy,two
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moegguf import Llama

SPIN = "while True: pass"
BURSTS = """
import time
while True:
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        pass
    time.sleep(0.02)
"""
LOADS: dict[str, list[str]] = {
    "quiet": [], "busy": [SPIN], "pinned": [SPIN], "two": [SPIN, SPIN], "bursts": [BURSTS], "niced": [SPIN], "pair": [],
}  # fmt: skip
PREFIX = {"pinned": ["taskset", "-c", str(max(os.sched_getaffinity(0)))], "niced": ["nice", "-n", "19"]}
SYSTEMS = ("2", "auto", "1", "llama.cpp")


class Child:
    """A process with one loaded model, which decodes when it is told to."""

    def __init__(self, args: argparse.Namespace, system: str) -> None:
        environment = os.environ | ({"MOEGGUF_HOOKS": "0"} if system == "llama.cpp" else {})
        command = [sys.executable, __file__, args.model, "--child", system, "--expert-cache", args.expert_cache]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, seconds: float) -> None:
        """Starts decoding for so many seconds."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)

    def result(self) -> dict[str, float]:
        """The figures of what `send` started."""
        assert self._process.stdout is not None
        figures: dict[str, float] = json.loads(self._process.stdout.readline())
        return figures

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(args: argparse.Namespace) -> None:
    """Decodes for the seconds that each line of stdin gives, and writes figures."""
    from moegguf import Llama

    n_threads = int(args.child) if args.child.isdigit() else None
    options: dict[str, Any] = {"n_ctx": 1024, "n_threads": n_threads, "verbose": False}
    with Llama(args.model, expert_cache=args.expert_cache, context_store=0, **options) as llm:
        for line in sys.stdin:
            print(json.dumps(decode(llm, float(line))), flush=True)


def decode(llm: Llama, seconds: float) -> dict[str, float]:
    """Tokens per second of a prompt of 256 tokens and of what follows, and the mean number of threads."""
    llm.reset()
    tokens = [50 + 7919 * i % 1000 for i in range(256)]
    start_s = time.perf_counter()
    llm.eval(tokens)
    prompt_s = time.perf_counter() - start_s
    counts: list[int] = []
    start_s = time.perf_counter()
    while (passed_s := time.perf_counter() - start_s) < seconds:
        if llm.n_tokens == 1000:
            llm.n_tokens = 256  # decoded again from there
        llm.eval([tokens[len(counts) % 256]])
        counts.append(llm.stats().n_threads)
    return {"decode": len(counts) / passed_s, "prompt": 256 / prompt_s, "threads": statistics.fmean(counts)}


@contextmanager
def load(name: str) -> Iterator[None]:
    """The processes of a load, settled."""
    processes = [subprocess.Popen([*PREFIX.get(name, []), sys.executable, "-c", code]) for code in LOADS[name]]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_round(children: dict[str, list[Child]], name: str, seconds: float) -> dict[str, dict[str, float]]:
    """{system: figures} beside one load. "pair": two models of the same system decode at once, their speeds added."""
    figures = {}
    for system, pair in children.items():
        working = pair if name == "pair" else pair[:1]
        with load(name):
            for child in working:
                child.send(seconds)
            results = [child.result() for child in working]
        figures[system] = {key: sum(result[key] for result in results) for key in results[0]}
    return figures


def table(figures: dict[str, dict[str, list[dict[str, float]]]]) -> Iterator[str]:
    """Lines of medians; shares are of the first system beside the first load."""
    reference = 0.0
    yield f"{'load':9}{'threads':>11}{'decode t/s':>12}{'share':>7}{'prompt t/s':>12}{'computing':>11}"
    for name, by_system in figures.items():
        for system, rounds in by_system.items():
            decode, prompt, threads = (statistics.median(r[key] for r in rounds) for key in rounds[0])
            reference = reference or decode
            yield f"{name:9}{system:>11}{decode:12.1f}{decode / reference:7.3f}{prompt:12.1f}{threads:11.2f}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--expert-cache", default="100%")
    parser.add_argument("--seconds", type=float, default=2.0, help="of decoding per system, load and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="quiet,busy,pinned", help=f"of {', '.join(LOADS)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="numbers of threads, auto, llama.cpp (all)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args)
        return 0
    names = args.loads.split(",")
    n_children = 2 if "pair" in names else 1
    children = {system: [Child(args, system) for _ in range(n_children)] for system in args.systems.split(",")}
    figures: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in names}
    for _ in range(args.rounds):
        for name in names:
            for system, result in run_round(children, name, args.seconds).items():
                figures[name].setdefault(system, []).append(result)
    for child in [child for pair in children.values() for child in pair]:
        child.close()
    print("\n".join(table(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
