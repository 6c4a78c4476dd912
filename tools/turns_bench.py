"""Prompts or decoding against llama.cpp without patches, in short turns of processes that stay loaded.

    python -m tools.turns_bench MODEL [-n 24] [-d 4096] [--rounds 24] [--kernels avx2,upstream]
    python -m tools.turns_bench MODEL -p 512 --rounds 7

Every expert is resident. On a machine whose speed changes within seconds, as a virtual one that shares memory with
others, a ratio of neighbouring turns says more than one of whole runs: it is printed with its quartiles. A process that
is not measured is stopped. --kernels: moegguf once more for each value of MOEGGUF_KERNELS.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from moegguf.bench.measure import Feed, load
from moegguf.bench.series import Spec, Test
from moegguf.bench.stock import stock_library

STEPS = 1024  # tokens after those that are not timed, before the context begins anew


class Side:
    """A process with the loaded model, stopped while it is not asked. environment: what it has of its own."""

    def __init__(self, spec: Spec, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tools.turns_bench", "--serve", spec.as_json()]
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def turn(self, n_tokens: int) -> float:
        """Seconds that so many tokens take."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        print(n_tokens, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        seconds = float(self._process.stdout.readline())
        self._process.send_signal(signal.SIGSTOP)
        return seconds


def serve(spec: Spec) -> None:
    """Answers each number of tokens on stdin with the seconds that they took: of a prompt, or one by one."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    test = spec.tests[0]
    with load(spec) as llama:
        if llama.session is not None:
            llama.session.store.drain()
        tokens, n = Feed(llama, spec).tokens(test.n_depth + STEPS, 0), STEPS
        print(0.0, file=out, flush=True)
        for line in sys.stdin:
            n_turn = int(line)
            if test.n_prompt or n + n_turn > STEPS:
                llama.reset()
                if test.n_depth:
                    llama.eval(tokens[: test.n_depth])
                n = 0
            following = tokens[test.n_depth + n : test.n_depth + n + n_turn]
            start = time.perf_counter()
            for chunk in [following] if test.n_prompt else [[token] for token in following]:
                llama.eval(chunk)
            n += n_turn
            print(time.perf_counter() - start, file=out, flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Prints tokens per second of each side, and its ratios to llama.cpp. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("-p", "--prompt", type=int, default=0, help="tokens of a prompt in place of decoding")
    parser.add_argument("-n", "--tokens", type=int, default=24, help="decoded in a turn")
    parser.add_argument("-d", "--depth", type=int, default=0, help="tokens before, not timed")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--kernels", default="", help="values of MOEGGUF_KERNELS, with commas")
    args = parser.parse_args(given)
    common = {"model": args.model, "tests": (Test(args.prompt, STEPS, args.depth),), "n_threads": os.cpu_count() or 1}
    own, stock = Spec(**common, expert_cache="100%"), Spec(**common, system="stock")
    sides = {f"moegguf, {name}": Side(own, {"MOEGGUF_KERNELS": name}) for name in filter(None, args.kernels.split(","))}
    sides["moegguf"] = Side(own, {})
    library = {"MOEGGUF_LIBRARY": str(stock_library(print)), "MOEGGUF_TRIAL_LOAD": "0", "MOEGGUF_HOOKS": "0"}
    sides["stock"] = Side(stock, library)
    n_turn, seconds = args.prompt or args.tokens, {name: list[float]() for name in sides}
    for number in range(-1, args.rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            took = sides[name].turn(n_turn)
            if number >= 0:
                seconds[name].append(took)
    for name, found in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(seconds["stock"], found, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:20} {n_turn / statistics.median(found):7.1f} t/s  {middle:.2f}x ({low:.2f}x to {high:.2f}x)")
    for side in sides.values():
        side.close()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Spec.from_json(sys.argv[2]))
    else:
        sys.exit(main())
