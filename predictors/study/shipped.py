"""Computes three figures of a trace in this repository. A test replays the trace and
compares the figures.

    python -m predictors.study.shipped --from build/evidence/demo/reporting.trace   # records the trace and its figures
    python -m predictors.study.shipped                                              # its figures alone

The trace contains a few requests to the demo. If a change to the code changes a figure,
other results may change as well. In this case, record the figures again and increase
CODE_VERSION in predictors/study/regenerate.py. Pages then mark the results that an
earlier version recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moegguf.controller.artifacts import Artifacts
from moegguf.trace.format import read, write
from moegguf.trace.simulate import slots_of
from predictors.commands import new_parser, write_json
from predictors.study.common import Study
from predictors.study.figures import RESULTS
from predictors.study.intervals import median_ratio, paired_estimate
from predictors.study.papers import BARE, LINKS, System, Workload, strategy

TRACE = RESULTS / "shipped.trace"
FIGURES = TRACE.with_suffix(".json")
# Number of requests in the trace, and maximum number of tokens per request.
N_REQUESTS, N_TOKENS = 4, 96
SHARE = 0.25
# Systems that use only counts and no matrices, so their figures do not depend on how a
# CPU rounds.
SYSTEMS = {
    "none": System("lru", store=BARE),
    "algorithm 1": System("sparsity", store=BARE),
    "token table": strategy("promoe")._replace(predictor="token-id"),
}


def cut(recording: Path) -> None:
    """Writes the trace: the first N_TOKENS tokens of each of a recording's first
    N_REQUESTS requests, without inputs and weights."""
    trace = read(recording)
    kept = np.zeros(trace.n_tokens, np.bool_)
    for sequence in trace.sequences()[:N_REQUESTS]:
        kept[np.flatnonzero(trace.sequence_of == sequence)[:N_TOKENS]] = True
    write(TRACE, replace(trace.keep(kept), inputs=None, weights=None))


def replayed() -> dict[str, float]:
    """Returns the three figures. The first request only warms the cache.

    - LRU, ready: the share of look-ups that find the expert in memory.
    - algorithm 1: the number of experts read per token with MoE-Infinity's eviction.
    - token table: the speed of ProMoE's prefetching with the predictor `token-id`, relative to no prefetching.
    """
    trace = read(TRACE)
    demo = Path(__file__).parents[1] / "demo"
    study = Study(
        trace, Artifacts(None, trace.header.fingerprint, demo, only_folder=True)
    )
    first, *others = trace.sequences()
    workload = Workload.of(
        replace(study, trace=trace.select(others)), trace.select([first])
    )
    of = workload.systems(SYSTEMS, slots_of(trace.shape, SHARE), LINKS["promoe"])
    speed = paired_estimate(
        [of[name]["token_ms"] for name in ("none", "token table")], median_ratio
    )
    return {
        "LRU, ready": of["none"]["ready"],
        "algorithm 1, experts moved a token": of["algorithm 1"]["experts"],
        "token table, times as fast": round(speed.value, 6),
    }


def main(given: Sequence[str] | None = None) -> int:
    """Computes and writes the figures; returns the exit status."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--from",
        dest="recording",
        type=Path,
        metavar="FILE",
        help="cut the trace from this one first",
    )
    args = parser.parse_args(given)
    if args.recording:
        cut(args.recording)
    write_json(FIGURES, replayed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
