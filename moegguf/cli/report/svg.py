"""Plots as SVG for embedding: no external references, unique ids, colours that follow the page's theme."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, ParamSpec

from moegguf.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Parameters = ParamSpec("Parameters")

# Placeholders while matplotlib draws; replaced by the page's CSS variables.
INK, MUTED, GRID = "#010203", "#010204", "#010205"
_THEMED = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}

# Readable on white and on near black; with the markers distinguishable for most colour-blind readers.
_COLOURS = tuple("#2f7de1 #e8590c #2b9348 #d6336c #0c9fb0 #8b5cf6 #b07d12 #9c5a8b #5c940d #7a8b99".split())
_MARKERS = "osD^vPX<>p"
_FIXED = {"belady": (INK, "None"), "lru": (MUTED, "o")}

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moegguf",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "image.composite_image": False,
    "text.parse_math": False,
}


class Palette:
    """A colour and a marker for each name, the same in every plot of a page."""

    def __init__(self, names: Iterable[str]) -> None:
        free = iter([(colour, _MARKERS[i % len(_MARKERS)]) for i, colour in enumerate(_COLOURS * 4)])
        self._styles = {name: _FIXED.get(name) or next(free, (MUTED, "o")) for name in dict.fromkeys(names)}

    def colour(self, name: str) -> str:
        """The colour of a line or bar."""
        return self._styles.get(name, (MUTED, "o"))[0]

    def marker(self, name: str) -> str:
        """The marker of a line's points."""
        return self._styles.get(name, (MUTED, "o"))[1]


def require_matplotlib() -> None:
    """Raises OptionError when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401 (whether it is there)
    except ImportError as error:
        raise OptionError(
            "a report needs matplotlib, which is not installed; run: pip install 'moegguf[report]'"
        ) from error


def styled(plot: Callable[Parameters, str]) -> Callable[Parameters, str]:
    """Runs a plot function under the page's rcParams, which matplotlib reads while artists are added."""

    @wraps(plot)
    def drawn(*args: Parameters.args, **kwargs: Parameters.kwargs) -> str:
        require_matplotlib()
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return plot(*args, **kwargs)

    return drawn


def figure(height: float = 3.0, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of the page's width and `height` inches, and its axes row by row. For `styled` functions."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    fig = Figure(figsize=(5.4, height), layout="constrained")
    FigureCanvasSVG(fig)
    axes = fig.subplots(rows, columns, squeeze=False)
    return fig, list(axes.ravel())


def legend(fig: Figure, axes: Axes, columns: int = 4) -> None:
    """One legend below all axes, with the artists of `axes`."""
    handles, labels = axes.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(1, len(labels))))


def svg(fig: Figure, prefix: str, label: str) -> str:
    """The figure as an <svg> element. `prefix` makes its ids unique; `label` is for screen readers."""
    out = StringIO()
    fig.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'url\(#|href="#', lambda match: f"{match.group()}{prefix}-", text)
    for placeholder, themed in _THEMED.items():
        text = text.replace(placeholder, themed)
    root, rest = text.split(">", 1)
    root = re.sub(r' (width|height|version)="[^"]*"', "", root)
    return f'{root} role="img" aria-label="{escape(label, quote=True)}">{rest}'
