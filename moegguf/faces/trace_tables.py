"""Tables of `moegguf trace` on stdout, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from moegguf.controller.report_data import plain
from moegguf.controller.score import ScoreTable
from moegguf.controller.sweep import BELADY, Row, closed_gap
from moegguf.controller.tally import Figures


def print_json(value: Any) -> None:
    """Dataclasses and numbers as JSON."""
    typer.echo(json.dumps(plain(value), indent=1, allow_nan=False))


def _show(table: Table) -> None:
    Console(width=None if Console().is_terminal else 160).print(table)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def print_simulation(rows: Sequence[Row]) -> None:
    """Hit rates of decode passes by policy and budget, and the part of the distance from LRU to Belady closed."""
    shares = list(dict.fromkeys(row.share for row in rows))
    timed = any(row.simulated is not None and row.simulated.t_per_s is not None for row in rows)
    table = Table(title="Hit rate of decode passes, and how much of the distance from LRU to Belady that closes")
    table.add_column("policy")
    table.add_column("predictor")
    for share in shares:
        table.add_column(f"{share:.0%}", justify="right")
        if timed:
            table.add_column("stall", justify="right")
            table.add_column("t/s", justify="right")
    for policy, predictor in dict.fromkeys((row.policy, row.predictor) for row in rows):
        cells = [policy, predictor]
        for share in shares:
            row = next(r for r in rows if (r.policy, r.predictor, r.share) == (policy, predictor, share))
            closed = closed_gap(rows, row)
            gap = f" ({closed:+.0%})" if closed is not None and policy not in ("lru", BELADY) else ""
            cells.append(f"{row.decode_hit_rate:.1%}{gap}")
            if timed:
                cells += _timed(row)
        table.add_row(*cells)
    _show(table)


def _timed(row: Row) -> list[str]:
    """Stall per decoded token, and decoded tokens per modelled second."""
    if row.simulated is None or row.simulated.t_per_s is None:
        return ["", ""]
    decode = row.simulated.decode
    return [f"{decode.stall_ns / max(1, decode.tokens) / 1e6:.2f} ms", f"{row.simulated.t_per_s:.1f}"]


def print_score(scores: ScoreTable) -> None:
    """A row per predictor and distance; behind the bar what it reaches on the trace without order."""
    table = Table(title=f"Predictors over {scores.tokens} decoded tokens; | without order in time")
    for name in (
        "predictor",
        "distance",
        "accuracy",
        "all right",
        "one right",
        "batch-level",
        "moved/useful",
        "coverage",
    ):
        table.add_column(name, justify="left" if name == "predictor" else "right")
    if scores.link is not None:
        table.add_column("GOODPRED", justify="right")
    for score in scores.scores:
        control = scores.control_of(score.name)
        if score.fresh is not None:
            table.add_row(score.name, "0", _percent(score.fresh.accuracy), *[""] * 5)
        for distance, figures in score.means.items():
            beside = control.means[distance] if control else None
            batch = (score.batch_accuracy or {}).get(distance)
            cells = _figures(figures, beside, batch, scores.n_expert_used)
            if scores.link is not None:
                cells.append(_percent(figures.good_pred))
            table.add_row(score.name, str(distance), *cells)
    _show(table)


def _figures(figures: Figures, control: Figures | None, batch: float | None, n_used: int) -> list[str]:
    moved = figures.moved_per_useful[n_used - 1]
    return [
        f"{_percent(figures.accuracy)} | {_percent(control.accuracy if control else None)}",
        _percent(figures.top_k_hit),
        _percent(figures.at_least_one),
        _percent(batch),
        "" if moved is None else f"{moved:.2f}",
        _percent(figures.coverage),
    ]
