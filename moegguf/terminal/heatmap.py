"""Which experts are in memory and which of them work, as a picture of letters: rows are layers, columns experts.

Pure: arrays in, rich text out. Experts and layers are joined where there are more of them than the place allows.
Letters alone tell it all, so that it can be read without colours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.text import Text

Counts = npt.NDArray[np.unsignedinteger]

ABSENT, GONE, COMING, FEW, IDLE, USED, USED_ALL, FETCHED = "·", "○", "~", "░", "▒", "▓", "█", "+"

STYLES = {
    ABSENT: "bright_black",
    GONE: "red",
    COMING: "yellow",
    FEW: "blue",
    IDLE: "blue",
    USED: "green",
    USED_ALL: "green",
    FETCHED: "bright_yellow",
}
LEGEND = (
    (ABSENT, "on disk"),
    (COMING, "on its way"),
    (FEW + IDLE, "in memory (some, all)"),
    (USED + USED_ALL, "used"),
    (FETCHED, "used, just fetched"),
    (GONE, "used, on disk again"),
)
LEAST_COLUMNS = 8


def heatmap(
    state: Counts,
    uses: Counts,
    loads: Counts,
    layers: Sequence[int],
    *,
    width: int,
    height: int | None = None,
) -> Text:
    """The picture, at most `width` cells wide and `height` lines high.

    Args:
        state: (n_rows, n_expert): 0 absent, 1 on its way, 2 there.
        uses, loads: (n_rows, n_expert): look-ups and fetches in the time that the picture is about.
        layers: the number of each row's layer.
        width: cells of a line, with the layers' numbers; at least LEAST_COLUMNS experts are shown anyway.
        height: lines; None for one per layer.
    """
    if not state.size:
        return Text("no layers with experts")
    label = len(str(max(layers))) + 1
    rows = _groups(state.shape[0], max(1, height) if height else state.shape[0])
    columns = _groups(state.shape[1], max(LEAST_COLUMNS, width - label))
    cells = _letters(state, uses, loads, rows, columns)
    picture = Text(no_wrap=True, overflow="crop", end="")
    for row, line in zip(rows, cells, strict=True):
        if picture:
            picture.append("\n")
        picture.append(f"{layers[row]:>{label - 1}} ", "bright_black")
        _append_runs(picture, line)
    return picture


def legend(width: int) -> Text:
    """What the letters mean, on as many lines as `width` needs."""
    text, column = Text(end=""), 0
    for letters, meaning in LEGEND:
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


def joined(n: int, room: int) -> int:
    """How many of `n` share a cell where there is room for `room`."""
    return -(-n // max(1, room))


def _groups(n: int, room: int) -> npt.NDArray[np.intp]:
    """Where each group begins."""
    return np.arange(0, n, joined(n, room))


def _letters(
    state: Counts, uses: Counts, loads: Counts, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]
) -> list[list[str]]:
    def total(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        return np.add.reduceat(np.add.reduceat(values.astype(np.intp), rows, axis=0), columns, axis=1)

    is_there, is_used = state == 2, uses > 0
    there, full = total(is_there) > 0, total(is_there) == total(np.ones(state.shape, bool))
    used, fetched = total(is_there & is_used) > 0, total(is_there & (loads > 0)) > 0
    coming, gone = total(state == 1) > 0, total(is_used & ~is_there) > 0
    letters = np.select(
        [fetched, used & full, used, full, there, coming, gone],
        [FETCHED, USED_ALL, USED, IDLE, FEW, COMING, GONE],
        default=ABSENT,
    )
    return [list(map(str, row)) for row in letters]


def _append_runs(text: Text, line: list[str]) -> None:
    """One span of style for each run of the same letter: terminals draw these fastest."""
    start = 0
    for end in range(1, len(line) + 1):
        if end == len(line) or line[end] != line[start]:
            text.append(line[start] * (end - start), STYLES[line[start]])
            start = end
