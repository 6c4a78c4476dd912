"""Formats the results of `moegguf trace`: prints tables on stdout, and converts rows to
CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Any

from rich.text import Text

from moegguf.controller.policies import LRU
from moegguf.controller.strategies import OWN
from moegguf.quantities import human_bytes
from moegguf.terminal.tables import print_columns, print_renderable
from moegguf.trace.analysis import Row, gap_closed_by
from moegguf.trace.belady import BELADY
from moegguf.trace.simulate import RAM, STAGING, VRAM, SimResult
from moegguf.trace.summary import TraceSummary

WIDTH = 80

Line = Sequence[str]


def print_table(
    title: str, names: Sequence[str], lines: Iterable[Line], n_left: int = 1
) -> None:
    """Prints a table. The first `n_left` columns are left-aligned, the others
    right-aligned. Empty columns are left out."""
    lines = list(lines)
    filled = [
        column for column in range(len(names)) if any(line[column] for line in lines)
    ]
    shown = [[line[column] for column in filled] for line in (names, *lines)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    between = 2 if sum(widths) + 2 * len(widths) <= WIDTH else 1
    print_renderable(Text(title, style="bold"))
    print_columns(
        shown[0], shown[1:], between, sum(column < n_left for column in filled), "dim"
    )


def print_notes(*notes: str) -> None:
    """Prints each note on its own dim line, below a table."""
    for note in notes:
        print_renderable(Text(note, style="dim"))


def print_simulation(rows: Sequence[Row], used: str) -> None:
    """Prints a table of hit rates, with a line for each combination of strategy, policy
    and predictor, and a column for each budget.

    Further tables of this form show stalls and speeds if a link was modelled, and the
    use of prefetched experts if there was prefetching.
    """
    title = "Hit rate of decoded tokens, by share of the experts that fits"
    tables: list[tuple[str, Callable[[Row], str]]] = [
        (title, lambda row: f"{row.decode_hit_rate:.1%}{_gap(rows, row)}")
    ]
    simulated = [row.simulated for row in rows if row.simulated is not None]
    if any(found.t_per_s is not None for found in simulated):
        tables.append(("Stall per decoded token in ms, on the modelled link", _stall))
        tables.append(("Decoded tokens per second, on the modelled link", _speed))
    if any(found.whole.bytes_prefetched for found in simulated):
        tables.append(("Bytes fetched ahead per byte of them that was used", _moved))
    if any(found.prefetch_accuracy is not None for found in simulated):
        tables.append(("Experts used of those fetched ahead", _accuracy))
    shares = list(dict.fromkeys(row.share for row in rows))
    by_key = {(*_decided(row), row.share): row for row in rows}
    for title, cell in tables:
        lines = []
        for strategy, policy, predictor in dict.fromkeys(map(_decided, rows)):
            cells = [
                cell(by_key[strategy, policy, predictor, share]) for share in shares
            ]
            lines.append(
                [strategy, policy, "" if predictor == "none" else predictor, *cells]
            )
        budgets = (f"{100 * share:.4g}%" for share in shares)
        print_table(title, ["strategy", "policy", "predictor", *budgets], lines, 3)
        print_notes("")
    notes = [f"replayed: {used}"]
    if any(row.strategy for row in rows):
        notes.append(
            "not modelled: time of predictors, and computing an expert before the layer's others are there"
        )
    if any((row.policy, row.predictor) == ("locality", "none") for row in rows):
        notes.append("locality without a predictor is decayed LFU")
    if any(_gap(rows, row) for row in rows):
        notes.append(
            "+10%: closes a tenth of the distance from LRU to Belady, the offline bound"
        )
    print_notes(*notes)


def as_csv(rows: Sequence[Row]) -> str:
    """Returns the rows as CSV with a header: strategy, policy and predictor, budget,
    rates, and all counters. Belady's bound has no counters."""
    lines = [_csv_line(row) for row in rows]
    names = dict.fromkeys(name for line in lines for name in line)
    out = StringIO()
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _csv_line(row: Row) -> dict[str, Any]:
    names = (
        "strategy",
        "policy",
        "predictor",
        "share",
        "ram_share",
        "n_slots",
        "hit_rate",
        "decode_hit_rate",
    )
    line = {name: getattr(row, name) for name in names}
    result = row.simulated
    if result is None:
        return line
    return {
        **line,
        "prefetch_accuracy": result.prefetch_accuracy,
        "t_per_s": result.t_per_s,
        **{f"decode_{name}": n for name, n in vars(result.decode).items()},
        **result.counters,
    }


def print_summary(found: TraceSummary) -> None:
    """Prints the facts about a trace, one per line."""
    shape = found.shape
    kinds = ", ".join(f"{n} {label}" for label, n in found.kinds.items() if label)
    lines = [
        ("model", found.model),
        ("fingerprint", found.fingerprint),
        ("layers", f"{len(shape.layers)} with experts of {shape.n_layer}"),
        ("experts", f"{shape.n_expert}; a token uses {shape.n_expert_used}"),
        ("bytes of an expert", human_bytes(shape.expert_bytes)),
        ("requests", f"{found.n_requests:,}" + f" ({kinds})" * bool(kinds)),
        ("tokens", f"{found.n_tokens:,}; {found.n_decoded:,} of them were decoded"),
        ("also recorded", ", ".join(found.recorded)),
        (
            "reuse",
            f"{found.reuse:.1%} of a decoded token's experts were used by the token before",
        ),
        (
            "concentration",
            f"{found.top_tenth:.1%} of uses are of the most used tenth of the experts",
        ),
    ]
    print_table("Trace", ("", ""), [line for line in lines if line[1]], 2)


def print_tiers(rows: Sequence[Row], used: str) -> None:
    """Prints a table with several lines for each combination of policy, predictor, VRAM
    budget and RAM budget. The first line has the counts in VRAM. Lines for each device
    follow if there are several, then a line for RAM."""
    names = (
        "policy",
        "predictor",
        "budget",
        "tier",
        "hit rate",
        "MB/token",
        "evicted",
        "stall ms",
        "t/s",
    )
    print_table(
        "Decoded tokens, by tier",
        names,
        [line for row in rows for line in _tier_lines(row)],
        4,
    )
    replayed = {row.share: row.simulated for row in rows if row.simulated is not None}
    notes = [
        "",
        f"replayed: {used}",
        "RAM: look-ups are what VRAM missed, evictions and stall per token, MB came in",
    ]
    if any(found.t_per_s is not None for found in replayed.values()):
        notes.append(
            "stall ms: of RAM, as long as something was still to be read from the file"
        )
    for share, found in replayed.items():
        figures = found.tiers.get(STAGING)
        if figures and figures.bytes_in:
            text = f"prompts staged, of {100 * share:.4g}%: {figures.bytes_in / 1e6:.2f} MB"
            if figures.copy_ns:
                overlap = max(0.0, 1 - figures.stall_ns / figures.copy_ns)
                text += f", {overlap:.0%} of the time while computing"
            notes.append(text)
    print_notes(*notes)


def _tier_lines(row: Row) -> Iterable[Line]:
    """Yields a line for each tier, with its hit rate and with counts per decoded token.
    The first line also has the policy, the predictor and the speed."""
    assert row.simulated is not None
    n_tokens = max(1, row.simulated.decode.tokens)
    speed = row.simulated.t_per_s
    shares = {VRAM: row.share, **row.devices, RAM: row.ram_share or 0.0}
    for name, share in shares.items():
        tier = row.simulated.decode_tiers[name]
        first = name == VRAM
        decided = (
            [row.policy, "" if row.predictor == "none" else row.predictor]
            if first
            else ["", ""]
        )
        yield [
            *decided, f"{100 * share:.4g}%", name, f"{tier.hit_rate:.1%}", f"{tier.bytes_in / n_tokens / 1e6:.2f}",
            f"{tier.evictions / n_tokens:.2f}", "" if speed is None else f"{tier.stall_ns / n_tokens / 1e6:.2f}",
            f"{speed:.1f}" if first and speed is not None else "",
        ]  # fmt: skip


def _decided(row: Row) -> tuple[str, str, str]:
    """Returns (strategy, policy, predictor) of a row. The policy and the predictor are
    "" for moegguf's own strategy. This strategy chooses them for each budget, so it has
    one line in a table."""
    return (
        (row.strategy, "", "")
        if row.strategy == OWN
        else (row.strategy, row.policy, row.predictor)
    )


def _gap(rows: Sequence[Row], row: Row) -> str:
    """Returns the share of the gap between LRU and Belady's bound that a row closes, as
    text.

    Returns "" for LRU and Belady themselves, and if the gap is zero or unknown. Also
    returns "" for rows with prefetching, because the bound applies only to eviction,
    and prefetching can exceed it.
    """
    ahead = row.simulated is not None and row.simulated.whole.bytes_prefetched > 0
    closed = (
        None if ahead or row.policy in (LRU.name, BELADY) else gap_closed_by(rows, row)
    )
    return "" if closed is None else f" {closed:+4.0%}"


def _simulated(
    figure: Callable[[SimResult], float | None], digits: int
) -> Callable[[Row], str]:
    """Returns a function that formats a number of a row's simulation, or returns "" if
    the row has no such number."""

    def cell(row: Row) -> str:
        found = None if row.simulated is None else figure(row.simulated)
        return "" if found is None else f"{found:.{digits}f}"

    return cell


_stall = _simulated(
    lambda result: result.decode.stall_ns / max(1, result.decode.tokens) / 1e6, 2
)
_moved = _simulated(lambda result: result.whole.moved_per_useful, 2)
_accuracy = _simulated(lambda result: result.prefetch_accuracy, 3)
_speed = _simulated(lambda result: result.t_per_s, 1)
