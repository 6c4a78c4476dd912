"""Measures a small part of the evidence in minutes: `make evidence-quick`.

    python -m predictors.study.quick -o build/evidence-quick

Records the routing of the demo model for questions that it was not trained on, or reads
the trace of --trace. Replays policies, strategies and predictors on it. Writes tables
as CSV and Markdown, plots as PNG and SVG, and manifest.json, which names the version,
the trace and the simulated times. The simulator's time is virtual, so only the
recording depends on the machine. Plots need matplotlib.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moegguf import __version__
from moegguf.bench.record import RecordOptions, record
from moegguf.bench.rows import as_table
from moegguf.cli.trace_tables import as_csv
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.models.catalog import find_model
from moegguf.terminal.messages import print_message
from moegguf.trace.analysis import Row, TraceAnalysis
from moegguf.trace.prompts import Prompt
from moegguf.trace.simulate import SimOptions
from predictors.commands import write_json
from predictors.study.common import run
from predictors.study.papers import LINKS, SOURCES, routing_digest

QUESTIONS = Path(__file__).parents[1] / "models" / "demo_heldout.jsonl"
SHARES = (0.125, 0.25, 0.5, 0.75)
# Always on; without a link, every prefetched expert arrives in time.
IN_TIME = PrefetchOptions(watchdog=False)
LINK = "promoe"  # the paper whose link and compute times the replays of strategies use


def questions() -> list[Prompt]:
    """Returns a prompt for each line of the held-out questions: the first wording,
    which the demo did not learn."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    return [Prompt(json.loads(line)["ask"][0], label="question") for line in lines]


def record_demo(path: Path) -> None:
    """Records the routing of the demo model's greedy answers to `questions()`."""
    options = RecordOptions(n_predict=48, inputs=True, temperature=0)
    record(
        find_model("demo"),
        questions(),
        path,
        options,
        n_ctx=512,
        policy="lru",
        predictor="none",
        verbose=False,
    )


def replayed(analysis: TraceAnalysis) -> dict[str, list[Row]]:
    """Returns {name of a table: replays}.

    "policies" contains replays of eviction without prefetching. "strategies" contains
    whole strategies with one paper's times. "predictors" contains predictors whose
    prefetched experts all arrive in time.
    """
    timed = LINKS[LINK].options(analysis.trace.shape)
    return {
        "policies": analysis.simulate(["all"], ["none"], SHARES),
        "strategies": analysis.simulate_strategies(["all"], SHARES, timed),
        "predictors": analysis.simulate(
            ["lru"], ["all"], SHARES, SimOptions(prefetch=IN_TIME)
        ),
    }


def lines_of(table: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows of a Markdown table, each as {column: text}. The columns show
    figures for each share of experts."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = _name(table, row)
        line = lines.setdefault(name, {table: name})
        line[f"hits, {row.share:.4g}"] = f"{row.decode_hit_rate:.1%}"
        simulated = row.simulated
        if table == "strategies":
            speed = simulated.t_per_s if simulated else None
            line[f"t/s, {row.share:.4g}"] = "–" if speed is None else f"{speed:.2f}"
        elif table == "predictors":
            accuracy = simulated.prefetch_accuracy if simulated else None
            line[f"used of fetched, {row.share:.4g}"] = (
                "–" if accuracy is None else f"{accuracy:.1%}"
            )
    return list(lines.values())


def _name(table: str, row: Row) -> str:
    if row.simulated is None:
        return row.policy
    return {
        "policies": row.policy,
        "strategies": row.strategy,
        "predictors": row.predictor,
    }[table]


def plot(tables: Mapping[str, Sequence[Row]], folder: Path) -> None:
    """Draws hit rates of policies and predictors, and speeds of strategies, by share of
    experts in memory.

    Saves each plot as PNG and SVG.
    """
    from predictors.study.evidence_plots import STYLE, pyplot

    with pyplot.rc_context(STYLE):
        for table, rows in tables.items():
            figure, axes = pyplot.subplots(figsize=(4.8, 3.2))
            for name, points in _curves(table, rows).items():
                axes.plot(
                    list(points), list(points.values()), "o-", label=name, markersize=3
                )
            what = (
                "decoded tokens per second, modelled"
                if table == "strategies"
                else "hits while decoding"
            )
            axes.set(xlabel="share of the experts in memory", ylabel=what)
            axes.legend(frameon=False, fontsize=6)
            for form in ("png", "svg"):
                figure.savefig(folder / f"{table}.{form}", bbox_inches="tight", dpi=200)
            pyplot.close(figure)


def _curves(table: str, rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """Returns {name: {share of experts: value}}. The value is the hit rate, or the
    speed in the table of strategies.

    Belady's bound has no speed, so the table of strategies omits it.
    """
    curves: dict[str, dict[float, float]] = {}
    for row in rows:
        height: float | None = row.decode_hit_rate
        if table == "strategies":
            height = row.simulated.t_per_s if row.simulated else None
        if height is not None:
            curves.setdefault(_name(table, row), {})[row.share] = height
    return curves


Out = Annotated[
    Path,
    typer.Option("-o", "--out", metavar="FOLDER", help="Folder for what is written."),
]
Given = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        exists=True,
        dir_okay=False,
        help="A trace in place of the demo's recording.",
    ),
]
Model = Annotated[str, typer.Option("--model", help="The model of that trace.")]


def quick(
    out: Out = Path("build/evidence-quick"), trace: Given = None, model: Model = "demo"
) -> None:
    """Replay policies, strategies and predictors on a small trace: tables, plots and
    results in minutes."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    path = trace or out / "demo.npz"
    if trace is None:
        print_message("recording the demo ...")
        record_demo(path)
    analysis = TraceAnalysis.open(path, find_model(model))
    print_message("replaying ...")
    tables = replayed(analysis)
    text = [f"# {analysis.trace.header.model}: {analysis.sample_size(analysis)}", ""]
    for table, rows in tables.items():
        (out / f"{table}.csv").write_text(as_csv(rows), encoding="utf-8")
        text += [as_table(lines_of(table, rows)), f"![{table}]({table}.png)", ""]
    (out / "tables.md").write_text("\n".join(text), encoding="utf-8")
    plot(tables, out)
    manifest = {
        "moegguf": __version__,
        "trace": path.name,
        "routing_sha256": routing_digest(analysis.trace),
        "fingerprint": analysis.trace.header.fingerprint,
        "times": f"{LINK}: {SOURCES[LINK]}",
        "shares": SHARES,
        "machine": platform.machine(),
        "seconds": round(time.monotonic() - began),
    }
    write_json(out / "manifest.json", manifest)
    print_message(
        f"wrote {out}: tables.md, {len(tables)} tables as CSV, their plots as PNG and SVG, manifest.json"
    )


if __name__ == "__main__":
    raise SystemExit(run(quick))
