"""Computes how much prefetching could save with a perfect predictor: an oracle that
reads the replayed trace.

python -m predictors.study.oracle routing.npz --expert-cache 30% --link 1
--layer-compute 2400
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from moegguf.cli.bench import split
from moegguf.cli.options import AsJson
from moegguf.cli.trace import File, parse_shares, showing_progress
from moegguf.cli.trace_tables import print_notes, print_simulation
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.terminal.tables import print_json
from moegguf.trace.simulate import SimOptions
from predictors.study.common import Study, run, sim_options
from predictors.study.controls import ORACLE
from predictors.study.flags import Compute, Latency, LinkSpeed, Shares, Tokens


def main(
    file: File,
    policy: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Eviction policies, separated by commas."),
    ] = "next-use",
    expert_cache: Shares = "25%,50%",
    tokens: Tokens = 0,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    layer_compute: Compute = 0.0,
    as_json: AsJson = False,
) -> None:
    """Replay TRACE without a predictor and with the oracle, on a modelled link
    prefetching what it predicts."""
    full = Study.load(file, None, None)
    modelled = sim_options(link, latency, layer_compute)
    part = full.limited(tokens)
    options = (
        replace(modelled, prefetch=PrefetchOptions()) if modelled else SimOptions()
    )
    with showing_progress() as progress:
        rows = part.simulate(
            split([policy]),
            ["none", ORACLE],
            parse_shares(expert_cache),
            options,
            progress,
        )
    if as_json:
        print_json(rows)
        return
    print_simulation(rows, part.sample_size(full))
    print_notes(
        "oracle: not a predictor; it reads the trace, and shows what the best one could do"
    )


if __name__ == "__main__":
    sys.exit(run(main))
