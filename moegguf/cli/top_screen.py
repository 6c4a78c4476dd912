"""What `moegguf top` shows of each model: figures now and since it was loaded, lines over time, the map of experts.

Plain facts of `/live` in, rich text out. Knows nothing of where they come from.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from moegguf.terminal.heatmap import heatmap, legend
from moegguf.terminal.units import moment, size

Facts = dict[str, Any]
Bytes = npt.NDArray[np.uint8]

BLOCKS = "▁▂▃▄▅▆▇█"
KEPT = 60  # points of a line
LEAST_MAP = 3  # lines
NARROW, WIDE = 60, 76  # cells
HEAD = 6  # lines of a model besides its map: name, four figures, a blank line
GAUGES = ("tokens", "lookups", "hits", "bytes_read", "stall_s", "eval_s")


class Model:
    """A loaded model as it was seen so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: Facts = {}
        self.view: Facts = {}
        self.hit_rates: deque[float] = deque(maxlen=KEPT)
        self.speeds: deque[float] = deque(maxlen=KEPT)
        self.now: dict[str, float] | None = None  # what was counted while it last computed
        self.state = self.uses = self.loads = np.zeros((0, 0), np.uint8)
        self._before: dict[str, float] | None = None

    @property
    def total(self) -> dict[str, float]:
        """What was counted since it was loaded."""
        stats = self.facts.get("stats") or self.view.get("stats") or {}
        counted = {name: float(stats.get(name, 0)) for name in GAUGES}
        return counted | {"hits": float(stats.get("hits_ready", 0) + stats.get("hits_late", 0))}

    def take(self, facts: Facts, view: Facts | None) -> None:
        """The newest facts, and a view when there is one."""
        self.facts = facts
        if view is None:
            return
        self.view = view
        if "stats" not in facts:
            self.facts = {**facts, "stats": view["stats"]}
        shape = len(view["layers"]), view["n_expert"]
        state, uses, loads = (_array(view[name], shape) for name in ("state", "uses", "loads"))
        same = self.state.shape == shape
        self.state = state
        # Until they are shown: views come as often as they like, and frames when there is time.
        self.uses = np.maximum(self.uses, uses) if same else uses
        self.loads = np.maximum(self.loads, loads) if same else loads
        self._count()

    def _count(self) -> None:
        total, before = self.total, self._before
        if before is None or total["tokens"] < before["tokens"]:
            self._before = total
            return
        delta = {name: total[name] - before[name] for name in GAUGES}
        if not delta["lookups"] and not delta["tokens"]:
            return
        self._before, self.now = total, delta
        if delta["lookups"]:
            self.hit_rates.append(delta["hits"] / delta["lookups"])
        if speed := self.view.get("tokens_per_s"):
            self.speeds.append(speed)

    def shown(self) -> None:
        """The activity so far is on the screen; the next frame begins anew."""
        self.uses, self.loads = np.zeros_like(self.uses), np.zeros_like(self.loads)

    def title(self, width: int) -> Text:
        """Its name, and what it does and takes."""
        facts = self.facts
        busy = facts.get("busy") or self.view.get("busy")
        doing = "stopping" if facts.get("stopping") else "busy" if busy else "idle"
        parts = [doing, *([f"{facts['queue']} waiting"] if facts.get("queue") else [])]
        parts += [size(facts.get("size_bytes", 0)), f"{facts.get('n_ctx', 0):,} tokens of context"]
        expires = facts.get("expires")
        parts.append(f"leaves {moment(datetime.fromisoformat(expires))}" if expires else "stays")
        text = Text(self.name, style="bold", no_wrap=True, overflow="ellipsis")
        text.append("  " + " · ".join(parts), style="not bold bright_black")
        text.truncate(width, overflow="ellipsis")
        return text

    def figures(self, width: int) -> Table:
        """Four rows: now, since it was loaded, and over time where there is room."""
        now, total = self.now or dict.fromkeys(GAUGES, 0.0), self.total
        table = Table.grid(padding=(0, 1 if width < NARROW else 2, 0, 0))
        table.add_column(style="bright_black", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="bold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, style="green")
        room = min(KEPT, width - 46)
        speed = self.speeds[-1] if self.speeds else None
        resident = f"{int((self.state == 2).sum()):,} of {self.state.size:,} experts in memory"
        rows: Sequence[tuple[str, str, str, str]] = (
            ("hit rate", _percent(now["hits"], now["lookups"]), _percent(total["hits"], total["lookups"]),
             spark(self.hit_rates, room, 1.0)),
            ("speed", _speed(speed), "", spark(self.speeds, room)),
            ("read/token", _read(now), _read(total), ""),
            ("waited", _share(now), _share(total), resident if width >= WIDE else ""),
        )  # fmt: skip
        for label, current, since, line in rows:
            table.add_row(label, current, Text(since and f"{since} since load", style="bright_black"), line)
        return table

    def map(self, width: int, height: int | None) -> Text:
        """The picture of its experts."""
        layers = self.view.get("layers", ())
        if not self.state.size:
            return Text("no experts" if self.view else "no view yet", style="bright_black")
        return heatmap(self.state, self.uses, self.loads, layers, width=width, height=height)


class Screen:
    """All models, as much of them as fits. `height` None: everything."""

    def __init__(self, url: str, models: Iterable[Model], *, height: int | None, keys: str = "") -> None:
        self.url = url
        self.models = list(models)
        self.height = height
        self.keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield self._head(width)
        yield Text("")
        if not self.models:
            yield Text("No model is loaded. `moegguf run MODEL` or any request loads one.", style="bright_black")
            return
        key = legend(width)
        key.no_wrap, key.overflow = True, "ellipsis"
        yield from self._bodies(width, key.plain.count("\n") + 1)
        yield key

    def _head(self, width: int) -> Text:
        n = len(self.models)
        text = Text(f"moegguf top  {self.url}  {n} model{'s' * (n != 1)}", no_wrap=True, overflow="ellipsis")
        text.stylize("bold", 0, len("moegguf top"))
        gap = width - text.cell_len - len(self.keys)
        if self.keys and gap >= 2:
            text.append(" " * gap + self.keys, style="bright_black")
        return text

    def _bodies(self, width: int, n_legend: int) -> Iterable[Group]:
        """The models: maps share the lines that are left, and those at the end do without when there are too few."""
        left = None if self.height is None else self.height - 2 - n_legend
        for n_after, model in zip(range(len(self.models) - 1, -1, -1), self.models, strict=True):
            room = None if left is None else (left - n_after * HEAD) // (n_after + 1) - HEAD
            parts: list[Any] = [model.title(width), model.figures(width)]
            if room is None or room >= LEAST_MAP:
                parts.append(picture := model.map(width, room))
                left = None if left is None else left - picture.plain.count("\n") - 1
            left = None if left is None else left - HEAD
            yield Group(*parts, Text(""))


def spark(values: Sequence[float] | deque[float], room: int, most: float | None = None) -> str:
    """The last `room` values as blocks, from 0 to `most` (default: the largest)."""
    shown = list(values)[-room:] if room > 0 else []
    top = most or max(shown, default=0.0) or 1.0
    return "".join(BLOCKS[round(min(max(value / top, 0.0), 1.0) * (len(BLOCKS) - 1))] for value in shown)


def state_rows(view: Facts) -> list[str]:
    """A string of 0, 1, 2 per layer: absent, on its way, there."""
    shape = len(view["layers"]), view["n_expert"]
    return ["".join(map(str, row)) for row in _array(view["state"], shape).tolist()]


def _array(text: str, shape: tuple[int, int]) -> Bytes:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _share(counted: dict[str, float]) -> str:
    """Of the time that was computed, what was spent waiting for bytes."""
    return _percent(min(counted["stall_s"], counted["eval_s"]), counted["eval_s"])


def _speed(value: float | None) -> str:
    return f"{value:,.1f} t/s" if value is not None else "-"


def _read(counted: dict[str, float]) -> str:
    return size(counted["bytes_read"] / counted["tokens"]) if counted["tokens"] else "-"
