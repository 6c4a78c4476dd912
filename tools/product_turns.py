"""Compares the CPU time of one product of experts between moegguf's kernels and
llama.cpp's.

Three processes with one thread each stay loaded and run in turn. The first uses
llama.cpp's kernels from the same build (MOEGGUF_KERNELS=upstream), the second moegguf's
fastest kernels for this CPU, and the third moegguf's kernels for CPUs without AVX-512.
A layer has 128 experts of 768 x 2048, and a token uses 8 of them. A prompt has 512
tokens. Each decoded token uses different random experts, so that most weights come from
memory, not from a cache.

Usage: python tools/product_turns.py [TYPE ...] [--rounds N] [--interleaved] Prints each
type's speed relative to llama.cpp for prompts and decoding: the median over rounds,
with the minimum and maximum in brackets. TYPE is ggml's name for a type. Without TYPE,
the program measures every type that ggml can make quickly.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moegguf.bench.turns import take_turns
from tools.width_check import Ggml, silence

N_IN, N_OUT, N_EXPERT, N_USED = 2048, 768, 128, 8
KERNELS = {"llama.cpp": "upstream", "AVX-512": "", "AVX2": "avx2"}
# {kind of pass: (tokens per pass, passes per turn)}.
PASSES = {"prompt": (512, 1), "decode": (1, 30)}
TYPES = (
    "q8_0",
    "q5_0",
    "q5_1",
    "q4_1",
    "q2_K",
    "q3_K",
    "q4_0",
    "q4_K",
    "q5_K",
    "q6_K",
    "iq4_nl",
    "mxfp4",
)


def turns(
    ggml: Ggml, ggml_type: int, is_interleaved: bool, n_tokens: int, n_passes: int
) -> Iterator[float]:
    """Runs turns of `n_passes` passes endlessly. Yields each turn's mean CPU time per
    pass, in seconds.

    Weights are interleaved only if `is_interleaved` is True and the kernels can
    multiply interleaved weights of this type.
    """
    random = np.random.default_rng(1)
    one = ggml.quantized(ggml_type, random.standard_normal((N_OUT, N_IN)))
    values = random.standard_normal((n_tokens, 1, N_IN)).astype(np.float32)
    chosen = (
        random.random((n_passes, n_tokens, N_EXPERT))
        .argsort(axis=2)[:, :, :N_USED]
        .astype(np.int32)
    )
    for buffer_type in [ggml.interleaved, None] if is_interleaved else [None]:
        graph = ggml.graph(buffer_type)
        weights = graph.input(
            ggml_type, (N_EXPERT, N_OUT, N_IN), one * N_EXPERT, is_weight=True
        )
        x, ids = graph.array(values), graph.array(chosen[0])
        product = graph.op("mul_mat_id", weights, x, ids)
        if graph.supports(product):
            break
    compute = graph.prepare(product)
    while True:
        seconds = 0.0
        for choice in chosen:
            graph.set(ids, choice)
            began = time.process_time()
            compute()
            seconds += time.process_time() - began
        yield seconds / n_passes


def work(name: str, is_interleaved: bool) -> None:
    """Reads keys of PASSES from stdin, one per line. Runs a turn for each key, and
    prints the turn's mean CPU time per pass, in seconds.
    """
    silence()
    ggml = Ggml(1)
    started = {
        kind: turns(ggml, ggml.types[name], is_interleaved, n_tokens, n_passes)
        for kind, (n_tokens, n_passes) in PASSES.items()
    }
    for line in sys.stdin:
        print(next(started[line.strip()]), flush=True)


class Worker:
    """A child process that runs turns with one of KERNELS."""

    def __init__(self, kernels: str, name: str, is_interleaved: bool) -> None:
        command = [
            sys.executable,
            __file__,
            name,
            "--work",
            *["--interleaved"][: int(is_interleaved)],
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"MOEGGUF_KERNELS": kernels},
        )  # fmt: skip

    def turn(self, kind: str) -> float:
        """Runs one turn of this kind in the process. Returns the mean CPU time per
        pass, in seconds."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def compare(name: str, n_rounds: int, is_interleaved: bool) -> str:
    """Measures one type and returns its row of the Markdown table."""
    workers = {
        kernels: Worker(value, name, is_interleaved)
        for kernels, value in KERNELS.items()
    }
    cells = [name]
    for kind in PASSES:
        calls = {
            kernels: partial(worker.turn, kind) for kernels, worker in workers.items()
        }
        # The first turn is not counted, because it also loads weights into memory.
        take_turns(calls, 1)
        upstream, *others = take_turns(calls, n_rounds).values()
        for seconds in others:
            ratios = [a / b for a, b in zip(upstream, seconds, strict=True)]
            cells.append(
                f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x)"
            )
    for worker in workers.values():
        worker.close()
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs the program with the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", default=TYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--interleaved",
        action="store_true",
        help="weights in the layout of interleaved rows",
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.types[0], options.interleaved)
    print(
        "| type | prompt, AVX-512 | prompt, AVX2 | decode, AVX-512 | decode, AVX2 |\n|---|---|---|---|---|"
    )
    for name in options.types:
        print(compare(name, options.rounds, options.interleaved), flush=True)


if __name__ == "__main__":
    main()
