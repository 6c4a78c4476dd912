"""A predictor that reads the trace it is replayed on: no predictor could be better, and none is meant.

    python -m predictors.study.oracle routing.npz --expert-cache 30% --link 1 --layer-compute 2400
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import typer

from moegguf.cli.bench import split
from moegguf.cli.options import AsJson
from moegguf.cli.trace import Compute, File, Latency, LinkSpeed, Shares, Tokens, parse_shares, showing_progress
from moegguf.cli.trace_tables import print_notes, print_simulation
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.native.events import Announcement, Float32s, RoutingEvent
from moegguf.plain import plain
from moegguf.terminal.tables import print_json
from moegguf.trace.simulate import SimOptions
from moegguf.trace.trace import Trace

ORACLE = "oracle"


class Oracle(Predictor):
    """Predicts the whole pass in progress as it was recorded, with certainty.

    It follows the tokens, not the numbers of passes, which a replay may split.
    """

    name: ClassVar[str] = ORACLE

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.shape, reach=len(trace.shape.layers))
        self._expert_ids = trace.expert_ids
        self._first = 0  # token of the pass in progress
        self._n_tokens = 0  # of that pass, as far as it has been routed
        self._pass = -1

    def announce(self, announcement: Announcement) -> None:
        """The next pass begins."""
        self._end_pass()

    def observe(self, event: RoutingEvent) -> None:
        """Counts the tokens of the pass."""
        if event.pass_ != self._pass:
            self._end_pass()
            self._pass = event.pass_
        self._n_tokens = max(self._n_tokens, len(event.expert_ids))

    def _end_pass(self) -> None:
        self._first += self._n_tokens
        self._n_tokens = 0

    def predict(self, il: int, distance: int) -> Float32s | None:
        """1 for the experts of the pass's first token, at any distance; None after the end."""
        row = self.shape.row_of.get(il)
        if row is None or self._first >= self._expert_ids.shape[1]:
            return None
        ids = self._expert_ids[row, self._first]
        probabilities = np.zeros(self.shape.n_expert, np.float32)
        probabilities[ids[ids >= 0]] = 1
        return probabilities


def main(
    file: File,
    policy: Annotated[str, typer.Option(metavar="NAMES", help="Eviction policies, separated by commas.")] = "next-use",
    expert_cache: Shares = "25%,50%",
    tokens: Tokens = 0,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    layer_compute: Compute = 0.0,
    as_json: AsJson = False,
) -> None:
    """Replay TRACE without a predictor and with the oracle, on a modelled link prefetching what it predicts."""
    from predictors.study.common import Study, link_model, sim_options

    full, modelled = Study.load(file, None, None), link_model(link, latency, layer_compute)
    part = full.limited(tokens)
    options = replace(sim_options(modelled), prefetch=PrefetchOptions()) if modelled else SimOptions()
    with showing_progress() as progress:
        rows = part.simulate(split([policy]), ["none", ORACLE], parse_shares(expert_cache), options, progress)
    if as_json:
        print_json(plain(rows))
        return
    print_simulation(rows, part.sample_size(full))
    print_notes("oracle: not a predictor; it reads the trace, and shows what the best one could do")


if __name__ == "__main__":
    from predictors.study.common import run

    sys.exit(run(main))
