"""Reads the state of a model's experts from a server's JSON, and prints it as a map."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from moegguf.engine.stats import Stats
from moegguf.serving.events import Snapshot
from moegguf.serving.wire import build
from moegguf.terminal.heatmap import (
    MIN_COLUMNS,
    group_size,
    heatmap,
    legend,
    tiers_line,
)
from moegguf.terminal.messages import print_message
from moegguf.terminal.statistics import staged

Bytes = npt.NDArray[np.uint8]


def read_stats(found: dict[str, Any]) -> Stats:
    """Returns the counters in a server's JSON. Raises WorkerError if the JSON does not
    have the expected form."""
    return build(Stats, _fields_of(Stats, found))


def read_snapshot(found: dict[str, Any]) -> Snapshot:
    """Returns the snapshot of a model's experts in a response of `/live`. Raises
    WorkerError if the JSON does not have the expected form."""
    counters = {"stats": _fields_of(Stats, found["stats"])} if "stats" in found else {}
    return build(Snapshot, _fields_of(Snapshot, found | counters))


def _fields_of(
    kind: type[Stats] | type[Snapshot], found: dict[str, Any]
) -> dict[str, Any]:
    """Returns the entries of `found` that are fields of the dataclass `kind`. Newer
    servers may send more entries."""
    return {
        field.name: found[field.name] for field in fields(kind) if field.name in found
    }


def maps_of(snapshot: Snapshot) -> tuple[Bytes, Bytes, Bytes]:
    """Returns the state, the uses and the loads of the experts as uint8 arrays of shape
    (n_layers, n_expert). The snapshot must come from `Snapshot.since`, and n_layers
    counts only layers with experts."""
    shape, parts = (
        (len(snapshot.layers), snapshot.n_expert),
        (snapshot.state, snapshot.uses, snapshot.loads),
    )
    state, uses, loads = (
        np.frombuffer(part, np.uint8).reshape(shape) for part in parts
    )
    return state, uses, loads


def print_map(snapshot: Snapshot) -> None:
    """Prints a map of the experts on stderr, as wide as the terminal. Also prints where
    the experts are, and the hit rate."""
    maps, stats, n_expert = maps_of(snapshot), snapshot.stats, snapshot.n_expert
    console = Console(stderr=True, highlight=False)
    width = console.width - 1
    n = group_size(
        n_expert, max(MIN_COLUMNS, width - len(str(max(snapshot.layers))) - 1)
    )
    console.print(
        f"{snapshot.model}: layers down, experts across"
        + (f", {n} to a letter" if n > 1 else "")
    )
    console.print(heatmap(*maps, snapshot.layers, width=width, vram=stats.in_vram))
    console.print(legend(width, stats.in_vram))
    print_message(
        f"{tiers_line(maps[0], stats.in_vram)}; hit rate {stats.hit_rate:.1%}"
    )
    if stats.staging_bytes:
        print_message(f"Prompts staged since load: {staged(stats)}.")
