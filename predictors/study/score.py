"""Computes each paper's measures for predictors on a trace. For comparison, computes
them again on a copy of the trace with the routing shuffled within each request.

python -m predictors.study.score routing.npz --model demo
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from moegguf.cli.bench import split
from moegguf.cli.options import AsJson
from moegguf.cli.trace import File, showing_progress
from moegguf.cli.trace_tables import print_notes, print_table
from moegguf.quantities import percent
from moegguf.terminal.tables import print_json
from moegguf.trace.analysis import Progress, no_progress, step_reporter
from moegguf.trace.simulate import SimOptions
from predictors.study import scoring
from predictors.study.accuracy import Figures
from predictors.study.asked import asked
from predictors.study.common import (
    DEFAULT_TOKENS,
    PredictorNames,
    Study,
    run,
    sim_options,
)
from predictors.study.flags import (
    Compute,
    Folder,
    Latency,
    LinkSpeed,
    ModelFile,
    Tokens,
)
from predictors.study.judge import DISTANCES, LRU_SHARE
from predictors.study.scoring import ScoreTable

HEADS = (
    "predictor",
    "k",
    "accuracy",
    "control",
    "all",
    "any",
    "batch",
    "moved",
    "answers",
    "GOODPRED",
)


def score_named(
    study: Study,
    names: Sequence[str],
    link: SimOptions | None = None,
    progress: Progress = no_progress,
) -> ScoreTable:
    """Computes each paper's measures for the named predictors, at the distances that
    the model's number of layers allows.

    FETCHRATE is computed only if a link is given. Raises OptionError for a predictor
    that is not available.
    """
    names = study.predictors(names)
    distances = [
        distance
        for distance in DISTANCES
        if distance < max(2, study.trace.shape.n_moe_layer)
    ]
    tables = []
    step = step_reporter(progress, "scores", len(names))
    for name in names:
        step(name)
        table = scoring.score(
            study.trace, [asked(partial(study.predictor, name))], distances, link=link
        )
        # The store computes popularity with its `token-id` predictor, whose name the
        # score would otherwise get.
        scores = tuple(replace(one, name=name) for one in table.scores)
        controls = tuple(replace(one, name=name) for one in table.controls)
        tables.append(replace(table, scores=scores, controls=controls))
    return replace(
        tables[0],
        scores=tuple(one for table in tables for one in table.scores),
        controls=tuple(one for table in tables for one in table.controls),
    )


def score(
    file: File,
    predictor: PredictorNames = ["all"],  # noqa: B006 (typer copies it)
    tokens: Tokens = DEFAULT_TOKENS,
    model: ModelFile = None,
    predictors: Folder = None,
    link: LinkSpeed = None,
    latency: Latency = 0.0,
    layer_compute: Compute = 1000.0,
    as_json: AsJson = False,
) -> None:
    """Score predictors on TRACE by the measures of each paper, beside a control:
    routing shuffled in each request."""
    full = Study.load(file, model, predictors)
    part = full.limited(tokens)
    with showing_progress() as progress:
        table = score_named(
            part, split(predictor), sim_options(link, latency, layer_compute), progress
        )
    used = part.sample_size(full)
    print_json(vars(table) | {"used": used}) if as_json else print_score(table, used)


def print_score(scores: ScoreTable, used: str) -> None:
    """Prints the table of scores, with rows by predictor and distance, and notes that
    explain the columns."""
    print_table("Predictors", HEADS, _lines(scores))
    notes = [
        "",
        f"scored: {used}",
        "k: layers ahead; at 0 the router itself, wrong by rounding only",
        "accuracy: correct among as many as are used; control: shuffled in each request",
        "all, any: routing events with every, with one expert right; batch: 8 requests",
        f"moved: bytes fetched per byte used, beside an LRU cache of {LRU_SHARE:.0%}",
        "answers: events with a prediction",
    ]
    if any(found.fetch_rates for found in scores.scores):
        notes.append(
            "GOODPRED: right, times the share of absent experts that come in time"
        )
    print_notes(*notes)


def _lines(scores: ScoreTable) -> Iterable[list[str]]:
    for found in scores.scores:
        control = scores.control_of(found.name)
        fresh = found.fresh
        has_predictions = any(figures.coverage for figures in found.means.values())
        if fresh is not None:
            yield [found.name, "0", _share(fresh.accuracy), *[""] * 7]
        for k, figures in found.means.items():
            if not figures.coverage:
                continue
            beside = control.means[k] if control else None
            batch = (found.batch_accuracy or {}).get(k)
            good = _share(found.good_pred(k))
            yield [
                found.name,
                str(k),
                *_figures(figures, beside, batch, scores.n_expert_used),
                good,
            ]
        if not has_predictions and fresh is None:
            yield [found.name, "", *[""] * 6, "none", ""]


def _figures(
    figures: Figures, control: Figures | None, batch: float | None, n_used: int
) -> list[str]:
    moved = figures.moved_per_useful[n_used - 1]
    shares = (
        figures.accuracy,
        control.accuracy if control else None,
        figures.top_k_hit,
        figures.at_least_one,
        batch,
    )
    return [
        *map(_share, shares),
        "" if moved is None else f"{moved:.2f}",
        _share(figures.coverage),
    ]


def _share(share: float | None) -> str:
    return percent(share, unknown="")


if __name__ == "__main__":
    sys.exit(run(score))
