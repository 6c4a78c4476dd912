"""Draws a map of a model's experts as text. The map shows where each expert is and
whether it was used. Rows are layers, columns are experts.

If the width or height is too small, several experts or layers share a cell. Each state
has its own symbol, so the map can also be read without colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from rich.text import Text

Counts = npt.NDArray[np.unsignedinteger]

ABSENT, EVICTED, IN_FLIGHT, SOME_RESIDENT, RESIDENT, USED, USED_ALL, FETCHED = (
    "·",
    "○",
    "~",
    "░",
    "▒",
    "▓",
    "█",
    "+",
)
# Drawn if VRAM has slots: some experts of the cell are in RAM, and none is in VRAM.
SOME_IN_RAM = ":"
ALL_IN_RAM = "%"
IN_RAM, IN_VRAM = 2, 3  # values of `state`

STYLES = {
    ABSENT: "bright_black",
    EVICTED: "red",
    IN_FLIGHT: "yellow",
    SOME_RESIDENT: "blue",
    RESIDENT: "blue",
    SOME_IN_RAM: "cyan",
    ALL_IN_RAM: "cyan",
    USED: "green",
    USED_ALL: "green",
    FETCHED: "bright_yellow",
}
LEGEND = (
    (ABSENT, "on disk"),
    (IN_FLIGHT, "in flight"),
    (SOME_RESIDENT + RESIDENT, "in memory (some, all)"),
    (USED + USED_ALL, "used"),
    (FETCHED, "used, just fetched"),
    (EVICTED, "used, evicted"),
)
VRAM_LEGEND = (
    *LEGEND[:2],
    (SOME_IN_RAM + ALL_IN_RAM, "in RAM (some, all)"),
    (SOME_RESIDENT + RESIDENT, "in VRAM (some, all)"),
    *LEGEND[3:5],
    (EVICTED, "used, evicted from VRAM"),
)
MIN_COLUMNS = 8


def heatmap(
    state: Counts,
    uses: Counts,
    loads: Counts,
    layers: Sequence[int],
    *,
    width: int,
    height: int | None = None,
    vram: bool = False,
) -> Text:
    """Returns the map, at most `width` characters wide and `height` lines high.

    Args:
        state: (n_rows, n_expert): 0 on disk, 1 in flight, 2 in RAM, 3 in VRAM.
        uses, loads: (n_rows, n_expert): lookups and fetches in the period shown.
        layers: il of the layer in each row.
        width: characters of a line, including the layer index. If that leaves room for fewer than MIN_COLUMNS columns,
            lines may be longer, with up to MIN_COLUMNS columns.
        height: maximum number of lines; None or 0: one line for each layer.
        vram: True if VRAM has slots; only experts in VRAM then count as resident.
    """
    if not state.size:
        return Text("no layers with experts")
    label = len(str(max(layers))) + 1
    n_cells = (
        max(1, height) if height else state.shape[0],
        max(MIN_COLUMNS, width - label),
    )
    rows, columns = (
        np.arange(0, n, group_size(n, cells))
        for n, cells in zip(state.shape, n_cells, strict=True)
    )

    def total(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        return np.add.reduceat(
            np.add.reduceat(values.astype(np.intp), rows, axis=0), columns, axis=1
        )

    is_resident = state >= (IN_VRAM if vram else IN_RAM)
    is_used = uses > 0
    n_all = total(np.ones(state.shape, bool))
    n_resident = total(is_resident)
    n_in_ram = total((state == IN_RAM) & vram)
    every = n_resident == n_all
    used = total(is_resident & is_used) > 0
    letters = np.select(
        [
            total(is_resident & (loads > 0)) > 0, used & every, used, every, n_resident > 0, total(state == 1) > 0,
            total(is_used & ~is_resident) > 0, n_in_ram == n_all, n_in_ram > 0,
        ],
        [FETCHED, USED_ALL, USED, RESIDENT, SOME_RESIDENT, IN_FLIGHT, EVICTED, ALL_IN_RAM, SOME_IN_RAM],
        default=ABSENT,
    )  # fmt: skip
    drawn = Text(no_wrap=True, overflow="crop", end="")
    for row, line in zip(rows, letters, strict=True):
        if drawn:
            drawn.append("\n")
        drawn.append(f"{layers[row]:>{label - 1}} ", "bright_black")
        # One span is added for each run of equal symbols, because few spans are drawn
        # faster.
        for letter, run in groupby(map(str, line)):
            drawn.append("".join(run), STYLES[letter])
    return drawn


def legend(width: int, vram: bool = False) -> Text:
    """Returns the meaning of the symbols, wrapped to `width` characters. `vram`: True
    if VRAM has slots."""
    text = Text(end="")
    column = 0
    for letters, meaning in VRAM_LEGEND if vram else LEGEND:
        part = f"{letters} {meaning}"
        if column and column + 3 + len(part) > width:
            text.append("\n")
            column = 0
        elif column:
            text.append("   ")
            column += 3
        text.append(letters, STYLES[letters[-1]]).append(f" {meaning}")
        column += len(part)
    return text


def tiers_line(state: Counts, vram: bool) -> str:
    """Returns a line such as "5 of 8 experts in memory" or "3 of 8 in VRAM, 2 in RAM
    only".

    If VRAM holds whole layers, the line is "5 of 16 experts in RAM, 8 in VRAM". `vram`:
    True if VRAM has slots.
    """
    n_ram, n_vram = (int((state == tier).sum()) for tier in (IN_RAM, IN_VRAM))
    if vram:
        return f"{n_vram:,} of {state.size:,} in VRAM, {n_ram:,} in RAM only"
    if n_vram:  # VRAM holds whole layers
        return f"{n_ram:,} of {state.size:,} experts in RAM, {n_vram:,} in VRAM"
    return f"{n_ram:,} of {state.size:,} experts in memory"


def group_size(n: int, n_cells: int) -> int:
    """Returns the smallest number of items per cell with which `n` items fit into
    `n_cells` cells."""
    return -(-n // max(1, n_cells))
