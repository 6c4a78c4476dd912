"""Measures strategies in wall-clock time over a simulated link. The strategies take
turns, each in its own process.

    python -m predictors.study.live --paper promoe

Layers are computed on one CPU. The link, the readers, the predictors and the controller
use the other CPUs. A layer's compute time is measured here with every expert resident.
The link's speed is then set to match a ratio of the named paper. The ratio is the
transfer time of all experts that a token uses in a layer, divided by the layer's
compute time.

The requests are the reporting requests of `predictors/study/requests.py`. An answer is
an existing text that the model reads token by token. The first requests are not
counted: they warm the caches, and give moegguf time to finish its trials of
prefetching.

The program writes predictors/results/laboratory/live-PAPER.json. The machine must be
idle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from moegguf.bench.measure import load
from moegguf.bench.series import Spec, Test
from moegguf.engine.llama import Llama
from moegguf.native.events import Phase
from predictors.commands import new_parser
from predictors.study.papers import BASES, LINKS, write_collections
from predictors.study.regenerate import N_COUNTED, N_ENTRIES, write_result
from predictors.study.subjects import LABORATORY, WORK, Bench

N_WARM, N_TOKENS, SHARE = 6, 32, 0.25
RESIDENT = "resident"


@dataclass(frozen=True)
class Worker:
    """The options of a process that answers requests with one strategy over a simulated
    link."""

    model: str
    # Name of a strategy, or "NAME with PREDICTOR": this predictor replaces the
    # strategy's, and prefetching is on.
    system: str
    link: str  # the simulated link, such as "24GB/s"
    # share of the experts with a slot on the simulated device; "100%": every expert.
    share: str
    n_ctx: int

    def serve(self, requests: IO[str], answers: IO[str]) -> None:
        """Reads one request per line, {"prompt": tokens, "answer": tokens}, and
        evaluates it.

        Writes one line of JSON with the figures of each request.
        """
        strategy, _, predictor = self.system.partition(" with ")
        spec = Spec(
            self.model, (Test(self.n_ctx, 0),), strategy=strategy, n_threads=1, simulate_link=self.link,
            simulate_threads=1,
            loading={
                "expert_cache": "100%", "vram_cache": self.share, "placement": "slots", "predictor": predictor or None,
                "prefetch": True if predictor else None,
            },
        )  # fmt: skip
        with load(spec) as llm:
            for line in requests:
                _divide_processors()
                print(
                    json.dumps(_answer(llm, **json.loads(line))),
                    file=answers,
                    flush=True,
                )


def _answer(llm: Llama, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    llm.reset()
    start = time.perf_counter()
    llm.eval(prompt)
    prompt_ms = (time.perf_counter() - start) * 1e3
    before = llm.stats()
    times = []
    for token in answer:
        start = time.perf_counter()
        llm.eval([token])
        times.append((time.perf_counter() - start) * 1e3)
    stats = llm.stats() - before
    return {
        "prompt_ms": round(prompt_ms, 2),
        "token_ms": round(sum(times) / len(times), 3),
        "times_ms": [round(ms, 2) for ms in times],
        "ready": stats.hits_ready / max(1, stats.lookups),
        "late": stats.hits_late / max(1, stats.lookups),
        "stall_ms": stats.stall_per_token_s * 1e3,
        "prefetch": llm.decisions().get("prefetch", "off"),
    }


def _divide_processors() -> None:
    """Binds the process's main thread, which runs the model, to the first CPU. Binds
    all other threads to the other CPUs, if there are any.
    """
    first, *others = sorted(os.sched_getaffinity(0) | _machine())
    for task in os.listdir("/proc/self/task"):
        computes = int(task) == os.getpid()
        os.sched_setaffinity(int(task), {first} if computes or not others else others)


def _machine() -> set[int]:
    return set(range(os.cpu_count() or 1))


@contextmanager
def serving(worker: Worker) -> Iterator[subprocess.Popen[str]]:
    """Starts the worker's process. At the end of the `with` block, closes its input and
    waits for it to exit."""
    command = [
        sys.executable,
        "-m",
        "predictors.study.live",
        "--worker",
        json.dumps(vars(worker)),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(
    process: subprocess.Popen[str], request: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Sends a request and returns the figures of its answer. Raises ValueError or
    OSError if the process has exited."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


def requests_of(bench: Bench) -> list[dict[str, list[int]]]:
    """Returns the warm-up requests, then the counted requests, which are a subset of
    the requests that the simulation counts.

    Answers are cut to N_TOKENS tokens.
    """
    trace = bench.reporting.trace
    counted = bench.some(N_COUNTED).counted
    chosen = [
        *[s for s in trace.sequences() if s not in counted][:N_WARM],
        *counted[:N_COUNTED],
    ]
    phases = [
        [
            trace.tokens[(trace.sequence_of == s) & (trace.phase_of == phase)].tolist()
            for phase in Phase
        ]
        for s in chosen
    ]
    return [
        {"prompt": prompt, "answer": answer[:N_TOKENS]} for prompt, answer in phases
    ]


def layer_us(
    model: str, requests: Sequence[Mapping[str, list[int]]], n_ctx: int
) -> float:
    """Returns the compute time of all layers per token, in microseconds, with every
    expert resident.

    The result is the median over the first four requests.
    """
    with serving(Worker(model, "lru", "10GB/s", "100%", n_ctx)) as process:
        return (
            median(ask(process, request)["token_ms"] for request in requests[:4]) * 1e3
        )


def measure(bench: Bench, paper: str, systems: Sequence[str]) -> dict[str, Any]:
    """Measures every system on every request; the systems take turns. Returns the
    figures of the counted requests."""
    requests = requests_of(bench)
    shape = bench.reporting.trace.shape
    n_ctx = max(len(of["prompt"]) + len(of["answer"]) for of in requests)
    models = {name: _model(bench, trained=name in LINKS) for name in systems}
    # MoE-Infinity's collection is filled from the last learning requests.
    if "moe-infinity" in systems:
        write_collections(
            _folder(models["moe-infinity"]), [bench.learning.trace], N_ENTRIES
        )
    layer = layer_us(models[systems[0]], requests, n_ctx) / shape.n_moe_layer
    expert_us = LINKS[paper].expert_us_of(shape) / LINKS[paper].layer_us * layer
    link = f"{shape.expert_bytes / expert_us:.3f}MB/s"
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    with ExitStack() as stack:
        workers = {
            name: Worker(models[name], name, link, f"{SHARE:.0%}", n_ctx)
            for name in systems
        }
        processes = {
            name: stack.enter_context(serving(worker))
            for name, worker in workers.items()
        }
        for number, request in enumerate(requests):
            turn = number % len(systems)
            for name in [*systems[turn:], *systems[:turn]]:
                found[name].append(ask(processes[name], request))
    counted = {name: _figures(of[N_WARM:]) for name, of in found.items()}
    return {"share": SHARE, "layer_us": round(layer, 1), "expert_us": round(expert_us, 1), "link": link,
            "requests": len(requests) - N_WARM, "tokens": N_TOKENS, "systems": counted}  # fmt: skip


def _figures(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = sorted(ms for of in answers for ms in of["times_ms"])
    means = {
        name: sum(of[name] for of in answers) / len(answers)
        for name in ("ready", "late", "stall_ms")
    }
    return {
        **{name: [of[name] for of in answers] for name in ("token_ms", "prompt_ms")},
        "percentiles_ms": {
            str(p): times[min(len(times) - 1, len(times) * p // 100)]
            for p in (50, 90, 99)
        },
        **{name: round(mean, 4) for name, mean in means.items()},
        "prefetch": answers[-1]["prefetch"],
    }


def _model(bench: Bench, trained: bool) -> str:
    """Returns the path of a hard link to the laboratory model. Creates the link if it
    does not exist.

    If `trained` is True and the link is new, also copies the trained predictors into
    the folder beside it.
    """
    path = bench.work / "live" / ("trained.gguf" if trained else "bare.gguf")
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        os.link(bench.model, path)
        if trained:
            shutil.copytree(bench.predictors, _folder(str(path)), dirs_exist_ok=True)
    return str(path)


def _folder(model: str) -> Path:
    return Path(f"{model}.moegguf")


def main(given: Sequence[str] | None = None) -> int:
    """Measures strategies with the link and compute times of a paper, or runs as a
    worker. Returns the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--work", type=Path, default=WORK / LABORATORY, help="what `regenerate` made"
    )
    parser.add_argument(
        "--paper", choices=LINKS, default="promoe", help="whose times count"
    )
    parser.add_argument(
        "--systems",
        metavar="NAME,...",
        help="strategies, also such as 'promoe with skip'; default: the bases, the store's own and all papers'",
    )
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.worker:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries write to stderr, so that stdout contains only figures
        Worker(**args.worker).serve(sys.stdin, answers)
        return 0
    bench = Bench(LABORATORY, args.work)
    systems = args.systems.split(",") if args.systems else [*BASES, *LINKS]
    write_result(
        f"live-{args.paper}",
        bench,
        f"live --paper {args.paper}",
        measure(bench, args.paper, systems),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
