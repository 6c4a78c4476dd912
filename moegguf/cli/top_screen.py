"""The screen of `moegguf top`. For each model it shows the current numbers, the numbers
since the model was loaded, sparklines, and the map of experts.

The module turns facts from `/live` into texts for the package rich, and does no I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from moegguf.chat.experts import maps_of, read_snapshot, read_stats
from moegguf.engine.stats import Lookups, Stats
from moegguf.quantities import human_bytes, human_time, percent
from moegguf.serving.events import Snapshot
from moegguf.terminal.heatmap import heatmap, legend, tiers_line

Facts = dict[str, Any]

BLOCKS = "▁▂▃▄▅▆▇█"
HISTORY_POINTS = 60  # maximum number of points of a sparkline
MIN_MAP_LINES = 3
# Screen widths in characters. Below NARROW, the columns of numbers are closer together.
# From WIDE on, the number of experts in each kind of memory is shown.
NARROW, WIDE = 60, 76


class ModelView:
    """The facts about one loaded model that were received so far.

    `stats` are the statistics since the model was loaded. `now` is the growth of
    `stats` over the last interval between snapshots in which the model was active.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: Facts = {}
        self.snapshot: Snapshot | None = None
        self.stats, self.now = Stats(), Stats()
        self.hit_rates: deque[float] = deque(maxlen=HISTORY_POINTS)
        self.speeds: deque[float] = deque(maxlen=HISTORY_POINTS)
        self._before: Stats | None = None

    def update(self, facts: Facts, snapshot: Facts | None) -> None:
        """Stores the newest facts, and a snapshot of the experts if there is one.
        Updates the statistics. If the snapshot shows activity since the previous
        snapshot, adds points to the sparklines."""
        self.facts = facts
        if snapshot is None:
            self.stats = read_stats(facts["stats"])
            return
        self.snapshot = found = read_snapshot(snapshot)
        # Clears uses and loads now, since the server sends no further snapshot of an
        # idle model.
        if not found.busy:
            none = bytes(len(found.state))
            self.snapshot = replace(found, uses=none, loads=none)
        self.stats, before = found.stats, self._before
        if before is None or found.stats.tokens < before.tokens:
            self._before = found.stats
            return
        grown = found.stats - before
        if not grown.lookups and not grown.tokens:
            return
        self._before, self.now = found.stats, grown
        if grown.lookups:
            self.hit_rates.append(grown.hit_rate)
        if found.tokens_per_s:
            self.speeds.append(found.tokens_per_s)

    def title(self, width: int) -> Text:
        """Returns the model's title: name, state, queue, size, context, threads and
        expiry. Leaves out parts that do not fit into `width` characters: first the
        threads, then the size, expiry, context and queue."""
        facts = self.facts
        busy = facts.get("busy") or (self.snapshot and self.snapshot.busy)
        state = "stopping" if facts.get("stopping") else "busy" if busy else "idle"
        queue, expires = facts.get("queue"), facts.get("expires")
        n_threads = self.stats.n_threads
        until = expires and human_time(datetime.fromisoformat(expires))
        parts = {
            "state": state,
            "queue": f"{queue} waiting" if queue else "",
            "size": human_bytes(facts.get("size_bytes", 0)),
            "context": f"{facts.get('n_ctx', 0):,} tokens of context",
            "threads": f"{n_threads} thread{'s' * (n_threads != 1)}"
            if n_threads
            else "",
            "expiry": f"expires {until}" if until else "never expires",
        }
        text = Text(self.name, style="bold", no_wrap=True, overflow="ellipsis")
        about = ""
        for name in ("", "threads", "size", "expiry", "context", "queue"):
            parts.pop(name, "")
            about = "  " + " · ".join(filter(None, parts.values()))
            if text.cell_len + cell_len(about) <= width:
                break
        text.append(about, style="not bold bright_black")
        text.truncate(width, overflow="ellipsis")
        return text

    def figures(self, width: int) -> list[Table]:
        """Returns two tables of numbers. The first has the hit rate, bytes read per token and stall, now
        and since the model was loaded, and the latest speed.

        Sparklines are added if the width leaves space for them. The second table has a
        row for each tier if there are several, and a row for staging if prompts are
        staged.
        """
        now, total = self.now, self.stats
        padding = (0, 1 if width < NARROW else 2, 0, 0)
        table, tiers = Table.grid(padding=padding), Table.grid(padding=padding)
        for grid in (table, tiers):
            grid.add_column(style="bright_black", no_wrap=True, min_width=10)
            grid.add_column(justify="right", no_wrap=True, style="bold", min_width=5)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, style="green")
        tiers.add_column(no_wrap=True)
        spark_cells = min(HISTORY_POINTS, width - 46)
        speed = f"{self.speeds[-1]:,.1f} t/s" if self.speeds else "-"
        resident = (
            tiers_line(maps_of(self.snapshot)[0], total.in_vram)
            if self.snapshot and width >= WIDE
            else ""
        )
        rows: Sequence[tuple[str, str, str, str]] = (
            (
                "hit rate",
                _hit_rate(now),
                _hit_rate(total),
                spark(self.hit_rates, spark_cells, 1.0),
            ),
            ("speed", speed, "", spark(self.speeds, spark_cells)),
            ("read/token", _read(now), _read(total), ""),
            ("stall", _stall(now), _stall(total), resident),
        )
        for label, current, since, line in rows:
            table.add_row(
                label,
                current,
                Text(since and f"{since} since load", style="bright_black"),
                line,
            )
        for tier in total.tiers if len(total.tiers) > 1 else ():
            slots = f"{tier.slots_used:,} of {tier.n_slots:,} slots, {human_bytes(tier.pool_bytes)}"
            n_bytes = human_bytes(tier.bytes_missed + tier.bytes_prefetched)
            moved = Text(
                f"{slots} · {n_bytes} in, {tier.evictions:,} evicted",
                style="bright_black",
            )
            tiers.add_row(tier.name, _hit_rate(tier), moved)
        if total.staging_bytes:
            sizes = f"{human_bytes(total.staging_bytes)} · {human_bytes(total.bytes_staged)} in for prompts"
            # The share of the copying time during which no layer waited.
            overlap = percent(total.staging_overlap if total.bytes_staged else None)
            tiers.add_row(
                "staging", overlap, Text(f"overlapped, {sizes}", "bright_black")
            )
        return [table, tiers]

    def map(self, width: int, height: int | None) -> Text:
        """Returns the map of the model's experts, or a message if there are no experts
        or no snapshot yet."""
        if self.snapshot is None or not self.snapshot.layers:
            return Text(
                "no experts" if self.snapshot else "no data yet", style="bright_black"
            )
        maps, layers = maps_of(self.snapshot), self.snapshot.layers
        return heatmap(
            *maps, layers, width=width, height=height, vram=self.stats.in_vram
        )


class Screen:
    """The whole screen. Maps of experts are shortened or left out, so that the screen
    fits into `height` lines if possible. `height` None: no limit."""

    def __init__(
        self,
        url: str,
        models: Iterable[ModelView],
        *,
        height: int | None,
        keys: str = "",
    ) -> None:
        self.url = url
        self.models = list(models)
        self.height = height
        self.keys = keys

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        width, n = options.max_width, len(self.models)
        head = Text(
            f"moegguf top  {self.url}  {n} model{'s' * (n != 1)}",
            no_wrap=True,
            overflow="ellipsis",
        )
        head.stylize("bold", 0, len("moegguf top"))
        if self.keys and (gap := width - head.cell_len - len(self.keys)) >= 2:
            head.append(" " * gap + self.keys, style="bright_black")
        yield head
        yield Text("")
        if not self.models:
            yield Text(
                "No model is loaded. `moegguf run MODEL` or any request loads one.",
                style="bright_black",
            )
            return
        key = legend(width, any(model.stats.in_vram for model in self.models))
        key.no_wrap, key.overflow, key.end = True, "ellipsis", "\n"
        yield from self._bodies(width, key.plain.count("\n") + 1)
        yield key

    def _bodies(self, width: int, n_legend: int) -> Iterable[Group]:
        """Yields the title, the figures and the map of each model. The maps share the
        remaining lines. If too few lines remain, the last models have no map, or no
        model has one."""
        figures = [model.figures(width) for model in self.models]
        # 2 for the title and a blank line.
        n_lines = [2 + sum(table.row_count for table in each) for each in figures]
        left = (
            math.inf
            if self.height is None
            else self.height - 2 - n_legend - sum(n_lines)
        )
        for i, model in enumerate(self.models):
            parts: list[Any] = [model.title(width), *figures[i]]
            n_map = max(left / (len(self.models) - i), MIN_MAP_LINES)
            if n_map <= left:
                parts.append(
                    drawn := model.map(width, None if n_map == math.inf else int(n_map))
                )
                left -= drawn.plain.count("\n") + 1
            yield Group(*parts, Text(""))


def spark(
    values: Sequence[float] | deque[float], n_cells: int, maximum: float | None = None
) -> str:
    """Returns a sparkline of the last `n_cells` values, from 0 to `maximum` (None: the
    largest of these values)."""
    shown = list(values)[-n_cells:] if n_cells > 0 else []
    top = maximum or max(shown, default=0.0) or 1.0
    return "".join(
        BLOCKS[round(min(max(value / top, 0.0), 1.0) * (len(BLOCKS) - 1))]
        for value in shown
    )


def _hit_rate(counted: Lookups) -> str:
    return percent(counted.hit_rate if counted.lookups else None)


def _stall(counted: Stats) -> str:
    """Returns the share of the compute time that layers spent waiting for experts, as
    text. The text is "-" if nothing was computed."""
    return percent(
        min(1.0, counted.stall_s / counted.eval_s) if counted.eval_s else None
    )


def _read(counted: Stats) -> str:
    return human_bytes(counted.bytes_per_token) if counted.tokens else "-"
