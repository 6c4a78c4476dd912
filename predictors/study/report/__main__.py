"""Writes an HTML report on a trace: heatmaps, reuse, hit rates with Belady's bound, accuracy, stalls, recovery.

python -m predictors.study.report routing.npz --model demo -o report.html
"""

from __future__ import annotations

import sys

from moegguf.cli.trace import (
    DEFAULT_SHARES,
    Compute,
    File,
    Folder,
    ModelFile,
    Out,
    Shares,
    Tokens,
    check_writable,
    parse_shares,
    showing_progress,
)
from moegguf.engine.machine import read_machine
from moegguf.terminal.messages import print_message
from predictors.study.common import DEFAULT_TOKENS, Study, run
from predictors.study.report.build import build_report
from predictors.study.report.page import write_report


def report(
    file: File,
    out: Out,
    expert_cache: Shares = DEFAULT_SHARES,
    tokens: Tokens = DEFAULT_TOKENS,
    model: ModelFile = None,
    predictors: Folder = None,
    layer_compute: Compute = 1000.0,
) -> None:
    """Write an HTML report on TRACE. Every policy and predictor is replayed, which takes a minute or two."""
    check_writable(out, file)
    shares, study = parse_shares(expert_cache), Study.load(file, model, predictors)
    print_message(f"replaying and scoring {study.limited(tokens).sample_size(study)}")
    with showing_progress() as progress:
        made = build_report(study, shares, layer_compute, tokens, read_machine().cpu_model, progress)
    write_report(out, made)
    print_message(f"wrote {out}")


if __name__ == "__main__":
    sys.exit(run(report))
