"""Counts how many experts per pass ExpertFlow's token scheduler saves. The requests of
a trace are replayed in batches, in four orders.

python -m predictors.study.schedule routing.npz --model demo --paths token-id
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import typer

from moegguf.cli.bench import parse_ints
from moegguf.cli.options import AsJson
from moegguf.cli.trace import File, parse_shares, showing_progress
from moegguf.cli.trace_tables import print_notes, print_table
from moegguf.terminal.tables import print_json
from moegguf.trace.analysis import Progress, step_reporter
from moegguf.trace.simulate import slots_of
from predictors.study.common import Study, run
from predictors.study.flags import Folder, ModelFile, Shares, Tokens
from predictors.study.scheduling import OrderEffect, compare

# {requests per batch: the effects of the four orders}.
Effects = dict[int, list[OrderEffect]]


def compare_orders(
    study: Study,
    batch_sizes: Sequence[int],
    paths: str,
    shares: Sequence[float],
    policy: str,
    progress: Progress,
) -> Effects:
    """Compares orders of requests for each batch size. `paths` names the kind of
    predicted paths (`PATHS`).

    Raises OptionError for an unknown name, or if the trace has too few requests for a
    batch size.
    """
    study.paths(paths)  # raises OptionError for unknown paths before the work begins
    slots = {share: slots_of(study.trace.shape, share) for share in shares}
    step = step_reporter(progress, "batches", len(batch_sizes))
    found = Effects()
    for size in batch_sizes:
        step(f"of {size} requests")
        found[size] = compare(
            study.trace,
            size,
            partial(study.paths, paths),
            slots,
            partial(study.policy, policy),
        )
    return found


def schedule(
    file: File,
    batch: Annotated[
        str,
        typer.Option(
            "--batch", metavar="SIZES", help="Requests per batch, separated by commas."
        ),
    ] = "4,8,16",
    paths: Annotated[
        str,
        typer.Option(
            "--paths",
            metavar="NAME",
            help="Paths predicted from: recent, token-id or routing-path.",
        ),
    ] = "recent",
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="Eviction policy.")
    ] = "next-use",
    expert_cache: Shares = "25%,50%",
    tokens: Tokens = 0,
    model: ModelFile = None,
    predictors: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Decode the requests of TRACE in batches and count the experts: ExpertFlow's token
    scheduler.

    Batches by oracle (by what was recorded), by predicted paths, at random, and first
    in, first out.
    """
    sizes = list(dict.fromkeys(parse_ints([batch], "--batch")))
    shares = parse_shares(expert_cache)
    full = Study.load(file, model, predictors)
    part = full.limited(tokens)
    with showing_progress() as progress:
        found = compare_orders(part, sizes, paths, shares, policy, progress)
    used = f"{policy}; paths: {paths}; {part.sample_size(full)}"
    print_json(found) if as_json else print_schedule(found, used)


def print_schedule(found: Mapping[int, Sequence[OrderEffect]], used: str) -> None:
    """Prints a table with a row for each batch size and order of requests."""
    names = ["batch", "order", "experts", "saved", "us/step"]
    for share in next(
        (effect.replays for effects in found.values() for effect in effects), {}
    ):
        names += [f"hits {share:.0%}", "MB/token"]
    print_table(
        "Experts of a pass, by who shares it",
        names,
        [
            _line(size, effects, effect)
            for size, effects in found.items()
            for effect in effects
        ],
        2,
    )
    print_notes(
        "",
        f"replayed: {used}",
        "saved: beside fifo; us/step: of the scheduler, prediction included",
        "oracle: by routing that nobody knows in advance: a bound, no scheduler",
    )


def _line(size: int, effects: Sequence[OrderEffect], effect: OrderEffect) -> list[str]:
    fifo = next(other for other in effects if other.order == "fifo")
    time_us = "" if effect.us_per_step is None else f"{effect.us_per_step:.0f}"
    line = [
        str(size),
        effect.order,
        f"{effect.experts:.1f}",
        f"{1 - effect.experts / fifo.experts:.1%}",
        time_us,
    ]
    for replay in effect.replays.values():
        decode = replay.decode
        line += [
            f"{decode.hit_rate:.1%}",
            f"{decode.bytes_missed / max(1, decode.tokens) / 1e6:.2f}",
        ]
    return line


if __name__ == "__main__":
    sys.exit(run(schedule))
