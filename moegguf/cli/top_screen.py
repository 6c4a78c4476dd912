"""The screen of `moegguf top`: per model, figures now and since load, sparklines, the map of experts.

Facts of `/live` in, rich text out; no I/O.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from moegguf.quantities import human_bytes, human_time, percent
from moegguf.terminal.heatmap import heatmap, legend, tiers_line

Facts = dict[str, Any]
Bytes = npt.NDArray[np.uint8]

BLOCKS = "▁▂▃▄▅▆▇█"
HISTORY_POINTS = 60  # of a sparkline
MIN_MAP_LINES = 3
NARROW, WIDE = 60, 76  # cells
COUNTERS = ("tokens", "lookups", "hits", "bytes_read", "stall_s", "eval_s")


class ModelView:
    """What was received about one loaded model so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: Facts = {}
        self.snapshot: Facts = {}
        self.hit_rates: deque[float] = deque(maxlen=HISTORY_POINTS)
        self.speeds: deque[float] = deque(maxlen=HISTORY_POINTS)
        self.now: dict[str, float] | None = None  # counters' growth when the model last computed
        self.state = self.uses = self.loads = np.zeros((0, 0), np.uint8)
        self._before: dict[str, float] | None = None

    @property
    def stats(self) -> Facts:
        """The counters since the model was loaded, as JSON; empty while none came."""
        return self.facts.get("stats") or self.snapshot.get("stats") or {}

    @property
    def tiers(self) -> Sequence[Facts]:
        """The figures of each tier since the model was loaded, the nearest to the layers first."""
        return self.stats.get("tiers") or ()

    @property
    def in_vram(self) -> bool:
        """Whether layers compute with slots in a device's memory."""
        return bool(self.tiers) and self.tiers[0]["name"] == "VRAM"

    @property
    def total(self) -> dict[str, float]:
        """Counters since the model was loaded."""
        stats = self.stats
        counted = {name: float(stats.get(name, 0)) for name in COUNTERS}
        return counted | {"hits": float(stats.get("hits_ready", 0) + stats.get("hits_late", 0))}

    def update(self, facts: Facts, snapshot: Facts | None) -> None:
        """Takes the newest facts, and a snapshot of the experts if there is one."""
        self.facts = facts
        if snapshot is None:
            return
        self.snapshot = snapshot
        shape = len(snapshot["layers"]), snapshot["n_expert"]
        self.state, self.uses, self.loads = (_array(snapshot[name], shape) for name in ("state", "uses", "loads"))
        if not snapshot["busy"]:  # a snapshot that differs in uses alone does not come
            self.uses = self.loads = np.zeros(shape, np.uint8)
        total, before = self.total, self._before
        if before is None or total["tokens"] < before["tokens"]:
            self._before = total
            return
        grown = {name: total[name] - before[name] for name in COUNTERS}
        if not grown["lookups"] and not grown["tokens"]:
            return
        self._before, self.now = total, grown
        if grown["lookups"]:
            self.hit_rates.append(grown["hits"] / grown["lookups"])
        if speed := snapshot.get("tokens_per_s"):
            self.speeds.append(speed)

    def title(self, width: int) -> Text:
        """Name, state, queue, size, context, compute threads and expiry."""
        facts = self.facts
        busy = facts.get("busy") or self.snapshot.get("busy")
        state = "stopping" if facts.get("stopping") else "busy" if busy else "idle"
        parts = [state, *([f"{facts['queue']} waiting"] if facts.get("queue") else [])]
        parts += [human_bytes(facts.get("size_bytes", 0)), f"{facts.get('n_ctx', 0):,} tokens of context"]
        if n_threads := self.stats.get("n_threads"):
            parts.append(f"{n_threads} thread{'s' * (n_threads != 1)}")
        expires = facts.get("expires")
        parts.append(f"expires {human_time(datetime.fromisoformat(expires))}" if expires else "never expires")
        text = Text(self.name, style="bold", no_wrap=True, overflow="ellipsis")
        text.append("  " + " · ".join(parts), style="not bold bright_black")
        text.truncate(width, overflow="ellipsis")
        return text

    def figures(self, width: int) -> Table:
        """Four rows: now, since load, and over time where the width allows; a row for each of several tiers, and one
        for staging."""
        now, total = self.now or dict.fromkeys(COUNTERS, 0.0), self.total
        table = Table.grid(padding=(0, 1 if width < NARROW else 2, 0, 0))
        table.add_column(style="bright_black", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="bold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, style="green")
        spark_cells = min(HISTORY_POINTS, width - 46)
        speed = self.speeds[-1] if self.speeds else None
        resident = tiers_line(self.state, self.in_vram)
        rows: Sequence[tuple[str, str, str, str]] = (
            ("hit rate", _ratio(now["hits"], now["lookups"]), _ratio(total["hits"], total["lookups"]),
             spark(self.hit_rates, spark_cells, 1.0)),
            ("speed", "-" if speed is None else f"{speed:,.1f} t/s", "", spark(self.speeds, spark_cells)),
            ("read/token", _read(now), _read(total), ""),
            ("stall", _stall(now), _stall(total), resident if width >= WIDE else ""),
        )  # fmt: skip
        for label, current, since, line in rows:
            table.add_row(label, current, Text(since and f"{since} since load", style="bright_black"), line)
        for tier in self.tiers if len(self.tiers) > 1 else ():
            hits, n_bytes = tier["hits_ready"] + tier["hits_late"], tier["bytes_missed"] + tier["bytes_prefetched"]
            slots = f"{tier['slots_used']:,} of {tier['n_slots']:,} slots, {human_bytes(tier['pool_bytes'])}"
            moved = Text(f"{slots} · {human_bytes(n_bytes)} in, {tier['evictions']:,} evicted", style="bright_black")
            table.add_row(tier["name"], _ratio(hits, tier["lookups"]), moved)
        if n_bytes := self.stats.get("staging_bytes"):
            copied, overlap = self.stats["bytes_staged"], self.stats["staging_overlap"]  # of the copies' time
            moved = Text(f"overlapped, {human_bytes(n_bytes)} · {human_bytes(copied)} in for prompts", "bright_black")
            table.add_row("staging", percent(overlap if copied else None), moved)
        return table

    def map(self, width: int, height: int | None) -> Text:
        """The map of the experts."""
        layers = self.snapshot.get("layers", ())
        if not self.state.size:
            return Text("no experts" if self.snapshot else "no data yet", style="bright_black")
        return heatmap(self.state, self.uses, self.loads, layers, width=width, height=height, vram=self.in_vram)


class Screen:
    """All models, as far as they fit into `height` lines; None: no limit."""

    def __init__(self, url: str, models: Iterable[ModelView], *, height: int | None, keys: str = "") -> None:
        self.url = url
        self.models = list(models)
        self.height = height
        self.keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, n = options.max_width, len(self.models)
        head = Text(f"moegguf top  {self.url}  {n} model{'s' * (n != 1)}", no_wrap=True, overflow="ellipsis")
        head.stylize("bold", 0, len("moegguf top"))
        if self.keys and (gap := width - head.cell_len - len(self.keys)) >= 2:
            head.append(" " * gap + self.keys, style="bright_black")
        yield head
        yield Text("")
        if not self.models:
            yield Text("No model is loaded. `moegguf run MODEL` or any request loads one.", style="bright_black")
            return
        key = legend(width, any(model.in_vram for model in self.models))
        key.no_wrap, key.overflow = True, "ellipsis"
        yield from self._bodies(width, key.plain.count("\n") + 1)
        yield key

    def _bodies(self, width: int, n_legend: int) -> Iterable[Group]:
        """The models. Maps share the remaining lines; the last models have none when there are too few."""
        figures = [model.figures(width) for model in self.models]
        n_lines = [2 + table.row_count for table in figures]  # with a title and a blank line, without the map
        left = math.inf if self.height is None else self.height - 2 - n_legend - sum(n_lines)
        for i, model in enumerate(self.models):
            parts: list[Any] = [model.title(width), figures[i]]
            n_map = left / (len(self.models) - i)
            if n_map >= MIN_MAP_LINES:
                parts.append(drawn := model.map(width, None if n_map == math.inf else int(n_map)))
                left -= drawn.plain.count("\n") + 1
            yield Group(*parts, Text(""))


def spark(values: Sequence[float] | deque[float], n_cells: int, maximum: float | None = None) -> str:
    """A sparkline of the last `n_cells` values, from 0 to `maximum` (default: the largest)."""
    shown = list(values)[-n_cells:] if n_cells > 0 else []
    top = maximum or max(shown, default=0.0) or 1.0
    return "".join(BLOCKS[round(min(max(value / top, 0.0), 1.0) * (len(BLOCKS) - 1))] for value in shown)


def state_rows(snapshot: Facts) -> list[str]:
    """A string of digits per layer: 0 on disk, 1 in flight, 2 in RAM, 3 in VRAM."""
    shape = len(snapshot["layers"]), snapshot["n_expert"]
    return ["".join(map(str, row)) for row in _array(snapshot["state"], shape).tolist()]


def _array(text: str, shape: tuple[int, int]) -> Bytes:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


def _ratio(part: float, whole: float) -> str:
    return percent(part / whole if whole else None)


def _stall(counted: dict[str, float]) -> str:
    """The share of compute time spent waiting for bytes."""
    return _ratio(min(counted["stall_s"], counted["eval_s"]), counted["eval_s"])


def _read(counted: dict[str, float]) -> str:
    return human_bytes(counted["bytes_read"] / counted["tokens"]) if counted["tokens"] else "-"
