"""Measurements for docs/evidence/batches.md: answers to several requests at once, and
bounds on the possible gain.

    python -m predictors.study.evidence batches -m demo --expert-cache 25% --batch 1,2,4,8,16 --schedule fifo,expertflow
    python -m predictors.study.evidence bound --routing random,qwen3-30b --batch 1,8
    python -m predictors.study.evidence passes -m model.gguf --batch 1,8

`batches` answers the demo's questions, `--batch` at a time, with a new process for each
measurement. `bound` computes, for requests that decode together, the fewest bytes that
any eviction policy must read, and the bytes that the store reads with its own policy.
Its routing is drawn at random, or reuses experts as often as published for a model.
`passes` evaluates tokens of several sequences together, with every expert in memory. It
uses one thread, because other work on the machine disturbs the CPU time of a single
thread least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from moegguf import Engine
from moegguf.controller.policies import native_policies
from moegguf.controller.predictors.base import NoPrediction
from moegguf.controller.shape import MoeShape
from moegguf.engine.llama import Llama
from moegguf.engine.sequences import SequenceTokens
from moegguf.generate.request import Sampling
from moegguf.native.events import Phase
from moegguf.trace.belady import Lookups, belady
from moegguf.trace.simulate import Simulation
from moegguf.trace.trace import Trace
from predictors.commands import new_parser
from predictors.study.arrange import grouped
from predictors.study.figures import spread
from predictors.study.sequence_groups import ExpertFlow
from predictors.study.synthesize import shape_of, synthesize

QUESTIONS = Path(__file__).parents[1] / "models" / "demo_questions.jsonl"
RANDOM = "random"
SCHEDULES = {"fifo": None, "expertflow": ExpertFlow.of}


@dataclass(frozen=True)
class Batch:
    """One measurement: `n_requests` answers of at most `n_tokens` tokens each, up to
    `batch` of them at the same time.

    `schedule` is a key of SCHEDULES.
    """

    model: str
    expert_cache: str
    n_ctx: int
    batch: int
    schedule: str
    n_requests: int
    n_tokens: int

    def measured(self) -> dict[str, float]:
        """Runs `measure` in a new process, and returns its figures. Raises
        CalledProcessError."""
        command = [
            sys.executable,
            "-m",
            "predictors.study.evidence",
            "batch",
            json.dumps(vars(self)),
        ]
        return dict(
            json.loads(
                subprocess.run(
                    command, stdout=subprocess.PIPE, check=True
                ).stdout.splitlines()[-1]
            )
        )

    def measure(self) -> dict[str, float]:
        """Measures in this process, and returns the figures. They cover prompts and
        decoding, but not loading. Only the peak memory is for the whole process.
        """
        options: dict[str, Any] = {
            "expert_cache": self.expert_cache,
            "n_ctx": self.n_ctx,
        }
        with Engine(
            self.model,
            self.batch,
            schedule=SCHEDULES[self.schedule],
            context_store=0,
            draft="off",
            **options,
        ) as engine:
            prompts = list(itertools.islice(itertools.cycle(_asked()), self.n_requests))
            start_s = time.perf_counter()
            before = engine.stats()
            answers = engine.generate(
                prompts,
                [
                    Sampling(max_tokens=self.n_tokens, seed=i)
                    for i in range(len(prompts))
                ],
            )
            seconds = time.perf_counter() - start_s
            stats = engine.stats() - before
            n_layers = len(engine.llm.layout.layers)
        return {
            "ts": sum(answer.summary.answer_tokens for answer in answers) / seconds,
            "experts": stats.lookups / stats.passes / n_layers,
            "hit_rate": stats.hit_rate,
            "mb_per_token": stats.bytes_per_token / 1e6,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }


def _asked() -> list[str]:
    """Returns a prompt for each answer that the demo learns: the last question taught
    for this answer, in the chat format."""
    entries = map(json.loads, QUESTIONS.read_text("utf-8").splitlines())
    return [
        f"<|im_start|>user\n{e['ask'][-1]}<|im_end|>\n<|im_start|>assistant\n"
        for e in entries
        if "ask" in e
    ]


def batches(measurements: Sequence[Batch], rounds: int) -> str:
    """Runs every measurement once per round, and returns a table of the results. Raises
    CalledProcessError."""
    found: dict[Batch, list[dict[str, float]]] = {each: [] for each in measurements}
    for _ in range(rounds):
        for each, figures in found.items():
            figures.append(each.measured())
    return batches_table(found)


def batches_table(found: Mapping[Batch, Sequence[Mapping[str, float]]]) -> str:
    """Returns a Markdown table with a row for each batch and schedule.

    The columns show the number of experts per layer that a pass needs, the hits, bytes,
    memory and speed. The last column is the speed divided by the speed in the first
    row, round by round, as a median (minimum to maximum).
    """
    lines = [
        "| at once | schedule | experts a pass | hits | MB a token | peak MB | t/s | against the first |"
    ]
    lines.append("|---" * 8 + "|")
    first = [figures["ts"] for figures in next(iter(found.values()))]
    for each, rows in found.items():
        experts, hit_rate, mb, peak = (
            median(row[name] for row in rows)
            for name in ("experts", "hit_rate", "mb_per_token", "peak_mb")
        )
        speeds = [row["ts"] for row in rows]
        ratios = [own / other for own, other in zip(speeds, first, strict=True)]
        lines.append(
            f"| {each.batch} | {each.schedule} | {experts:.1f} | {hit_rate:.1%} | {mb:.2f} | {peak:.0f} |"
            f" {spread(speeds, 1)} | {spread(ratios, 2)} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Bound:
    """`batch` requests of `n_tokens` tokens each, decoded together, with `n_slots`
    slots for experts."""

    routing: str
    batch: int
    n_tokens: int
    n_slots: int

    def figures(self, shape: MoeShape) -> dict[str, float]:
        """Returns the figures by name.

        experts: mean number of distinct experts of a layer in a pass. hit_rate and
        mb_per_token: the highest hit rate and the fewest MB per token that any eviction
        policy can reach (Belady's). own_mb_per_token: MB per token with the store's
        eviction by next use. No expert is prefetched.
        """
        trace = together_in_passes(
            synthetic(self.routing, shape, self.n_tokens, self.batch), self.batch
        )
        lookups = Lookups.of(trace)
        best = belady(lookups, self.n_slots)
        own = Simulation(
            trace, native_policies()["next-use"], NoPrediction(shape), self.n_slots
        ).run()
        mb = shape.expert_bytes / trace.n_tokens / 1e6
        return {
            "experts": best.lookups / (len(lookups.start) - 1),
            "hit_rate": best.hit_rate,
            "mb_per_token": (best.lookups - best.hits) * mb,
            "own_mb_per_token": own.counters["misses"] * mb,
        }


def synthetic(routing: str, shape: MoeShape, n_tokens: int, n_requests: int) -> Trace:
    """Returns a trace of requests whose topics are independent of each other.

    With the routing "random", each token's experts are drawn independently.
    """
    made = synthesize(
        "qwen3-30b" if routing == RANDOM else routing, shape, n_tokens, 0, n_requests
    )
    # Every token gets the id 0, because only passes with known token ids are announced.
    made = replace(made, tokens=np.zeros(made.n_tokens, np.int32))
    if routing != RANDOM:
        return made
    random = np.random.default_rng(0)
    size = (made.n_tokens, shape.n_expert)
    ids = [
        random.random(size).argsort(axis=1)[:, : shape.n_expert_used]
        for _ in shape.layers
    ]
    return replace(made, expert_ids=np.stack(ids).astype(np.int16))


def together_in_passes(trace: Trace, n_requests: int) -> Trace:
    """Returns a trace in which each pass contains one token from every request. All
    requests must have the same length.
    """
    if n_requests == 1:
        return trace
    n_tokens = trace.n_tokens // n_requests
    return grouped(
        trace, [np.arange(n_requests) * n_tokens + at for at in range(n_tokens)]
    )


def bound_table(bounds: Sequence[Bound], shape: MoeShape) -> str:
    """Returns a Markdown table of the bounds. Bytes are also shown relative to the
    first row with the same routing."""
    lines = [
        "| routing | at once | experts of a layer | hits at most | MB a token at least | | the store's | |"
    ]
    lines.append("|---" * 8 + "|")
    first: dict[str, dict[str, float]] = {}
    for bound in bounds:
        found = bound.figures(shape)
        base = first.setdefault(bound.routing, found)
        least = found["mb_per_token"]
        own = found["own_mb_per_token"]
        lines.append(
            f"| {bound.routing} | {bound.batch} | {found['experts']:.1f} | {found['hit_rate']:.1%} | {least:.0f} |"
            f" {least / base['mb_per_token']:.2f} | {own:.0f} | {own / base['own_mb_per_token']:.2f} |"
        )
    return "\n".join(lines)


def passes(model: str, batches: Sequence[int], n_passes: int, rounds: int) -> str:
    """Measures one thread's CPU time per token in passes that contain one token from
    each of several sequences.

    `batches` lists the numbers of sequences to measure. Each round measures every
    number once. Returns a Markdown table with the shortest time of all rounds in ms.
    """
    options: dict[str, Any] = {
        "n_ctx": 1024,
        "n_threads": 1,
        "flash_attn": None,
        "verbose": False,
    }
    found: dict[int, list[float]] = {batch: [] for batch in batches}
    n_past = [0] * max(batches)
    random = np.random.default_rng(0)

    def compute(llm: Llama, batch: int) -> None:
        tokens = random.integers(llm.n_vocab(), size=batch).tolist()
        llm.context.eval_sequences(
            [
                SequenceTokens(i, [token], n_past[i], i, Phase.DECODE)
                for i, token in enumerate(tokens)
            ]
        )
        n_past[:batch] = [n + 1 for n in n_past[:batch]]

    with Llama(
        model, expert_cache="100%", n_seq_max=max(batches), context_store=0, **options
    ) as llm:
        for number, batch in itertools.product(range(rounds), batches):
            compute(llm, batch)
            start_s = time.thread_time()
            for _ in range(n_passes):
                compute(llm, batch)
            found[batch].append((time.thread_time() - start_s) / n_passes / batch * 1e3)
            text = f"round {number + 1}/{rounds}: {batch} together, {found[batch][-1]:.2f} ms a token"
            print(text, file=sys.stderr, flush=True)
    least = {batch: min(times) for batch, times in found.items()}
    rows = [
        f"| {batch} | {ms:.2f} | {least[batches[0]] / ms:.2f} |"
        for batch, ms in least.items()
    ]
    return "\n".join(
        ["| sequences | ms a token | against the first |", "|---" * 3 + "|", *rows]
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "batches", help="measure answers to the demo's questions, several at once"
    )
    one.add_argument("-m", "--model", default="demo")
    one.add_argument("--expert-cache", default="25%", metavar="BUDGET")
    one.add_argument(
        "--ctx", type=int, default=512, metavar="TOKENS", help="of each answer"
    )
    one.add_argument(
        "--batch", default="1,2,4,8,16", metavar="N,...", help="answers at once"
    )
    one.add_argument(
        "--schedule",
        default="fifo",
        metavar="NAME,...",
        help="which of them compute in a step",
    )
    one.add_argument("--requests", type=int, default=64, metavar="N")
    one.add_argument(
        "-n", type=int, default=48, metavar="TOKENS", help="most of an answer"
    )
    one.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="of every batch and schedule"
    )
    commands.add_parser("batch", help="one measurement of `batches`").add_argument(
        "measurement", type=json.loads
    )
    one = commands.add_parser(
        "bound", help="the least bytes that requests which decode together can read"
    )
    one.add_argument(
        "--routing",
        default=f"{RANDOM},qwen3-30b",
        metavar="NAME,...",
        help="or another published one",
    )
    one.add_argument(
        "--batch", default="1,2,4,8,16,32", metavar="N,...", help="requests at once"
    )
    one.add_argument("--layers", type=int, default=24, metavar="N")
    one.add_argument("--experts", type=int, default=60, metavar="N", help="of a layer")
    one.add_argument("--used", type=int, default=4, metavar="N", help="by a token")
    one.add_argument(
        "--slots",
        type=int,
        default=534,
        metavar="N",
        help="experts in memory, of all layers",
    )
    one.add_argument("--expert-mb", type=float, default=5.6, metavar="MB")
    one.add_argument(
        "-n", type=int, default=384, metavar="TOKENS", help="of each request"
    )
    one = commands.add_parser(
        "passes",
        help="compute tokens of several sequences together, every expert in memory",
    )
    one.add_argument("-m", "--model", required=True)
    one.add_argument(
        "--batch", default="1,2,4,8", metavar="N,...", help="sequences in a pass"
    )
    one.add_argument("-n", type=int, default=6, metavar="PASSES", help="of each round")
    one.add_argument(
        "--rounds", type=int, default=6, metavar="N", help="of every batch"
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    args = arguments(given)
    if args.command == "batches":
        chosen = itertools.product(
            map(int, args.batch.split(",")), args.schedule.split(",")
        )
        sizes = args.requests, args.n
        print(
            batches(
                [
                    Batch(args.model, args.expert_cache, args.ctx, *each, *sizes)
                    for each in chosen
                ],
                args.rounds,
            )
        )
    elif args.command == "batch":
        print(json.dumps(Batch(**args.measurement).measure()))
    elif args.command == "bound":
        shape = shape_of(
            "qwen3-30b",
            args.layers,
            args.experts,
            args.used,
            round(args.expert_mb * 1e6),
        )
        pairs = itertools.product(
            args.routing.split(","), map(int, args.batch.split(","))
        )
        print(
            bound_table(
                [Bound(routing, batch, args.n, args.slots) for routing, batch in pairs],
                shape,
            )
        )
    else:
        print(
            passes(
                args.model,
                [int(batch) for batch in args.batch.split(",")],
                args.n,
                args.rounds,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
