"""The plots of a report: each function draws numbers of tables.py with matplotlib and returns an <img> element."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from moegguf.controller.policies import LRU
from moegguf.trace.belady import BELADY
from predictors.study.report.tables import PolicyTable, Recovery, ScheduleTable, StallTable
from predictors.study.reuse import Reuse
from predictors.study.scoring import ScoreTable

HEAT, INK, MUTED = "Oranges", "black", "gray"
MAX_REQUESTS = 60  # rows of request_heatmap; more would be thinner than a pixel
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.size": 8.5, "text.parse_math": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
"""What `matplotlib.rc_context` takes while a page is drawn."""

Look = dict[str, Any]


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A colour and a marker for each name, the same in every plot of a page."""
    fixed = {BELADY: {"color": INK, "marker": "None"}, LRU.name: {"color": MUTED, "marker": "o"}}
    free = (name for name in dict.fromkeys(names) if name not in fixed)
    return fixed | {name: {"color": f"C{i % 10}", "marker": "osD^vPX<>p"[i % 10]} for i, name in enumerate(free)}


def image(figure: Figure, label: str) -> str:
    """The figure as an <img> element that needs no other file; `label` is for screen readers."""
    out = BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    data = b64encode(out.getvalue()).decode()
    return f'<img alt="{escape(label, quote=True)}" src="data:image/svg+xml;base64,{data}">'


def _figure(height: float = 3.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of the page's width and `height` inches, and its axes."""
    figure = Figure(figsize=(5.4, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False).ravel())


def _legend(axes: Axes, columns: int = 4) -> None:
    """One legend below all axes, with the artists of `axes`."""
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(1, len(labels))))


def layer_heatmap(reuse: Reuse) -> str:
    """How often each expert of each layer is used, over all requests."""
    counts = reuse.counts.sum(axis=0).astype(float)
    even = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
    figure, (axes,) = _figure(1.1 + min(3.4, 0.16 * len(counts)))
    _heat(axes, even, max(2.0, float(even.max(initial=0.0))), "use, relative to an even spread")
    axes.set(xlabel="expert", ylabel="layer")
    step = max(1, len(reuse.layers) // 8)
    axes.set_yticks(range(0, len(reuse.layers), step), [str(il) for il in reuse.layers[::step]])
    return image(figure, "Heatmap: use of each expert in each layer, relative to an even spread")


def request_heatmap(reuse: Reuse, labels: Mapping[int, str]) -> str:
    """How often the experts of the middle layer are used by each request, grouped by kind of text."""
    row = len(reuse.layers) // 2
    order = sorted(range(len(reuse.sequences)), key=lambda i: (labels.get(reuse.sequences[i], ""), i))
    if len(order) > MAX_REQUESTS:
        order = [order[i] for i in np.linspace(0, len(order) - 1, MAX_REQUESTS).astype(int)]
    counts = reuse.counts[order, row].astype(float)
    share = counts / np.maximum(counts.max(axis=1, keepdims=True), 1)
    figure, (axes,) = _figure(1.2 + min(4.0, 0.1 * len(order) + 0.4))
    _heat(axes, share, 1.0, "use, relative to the request's most used expert")
    kinds = [labels.get(reuse.sequences[i], "") for i in order]
    starts = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(kinds)) if one != other)]
    axes.set_yticks(starts, [_short(kinds[start]) or "requests" for start in starts])
    axes.set(xlabel=f"expert of layer {reuse.layers[row]}", ylabel="requests, by kind of text")
    for start in starts[1:]:
        axes.axhline(start - 0.5, color=INK, linewidth=0.7)
    return image(figure, f"Heatmap: use of the experts of layer {reuse.layers[row]} by each request")


def reuse_windows(reuse: Reuse) -> str:
    """Share of a token's experts used by the tokens before it, and the distance between uses."""
    figure, (near, again) = _figure(2.6, columns=2)
    windows = list(reuse.windows_same)
    for rates, name, style in ((reuse.windows_same, "same request", "-"), (reuse.windows_other, "another", "--")):
        near.plot(range(len(windows)), [rates[w] for w in windows], style, marker="o", label=name)
    near.set_xticks(range(len(windows)), [str(w) for w in windows])
    near.set(xlabel="in the last n tokens", title="experts used before", ylim=(0, 1))
    near.legend(loc="lower right")
    names = ["first" if d == 0 else "later" if d < 0 else f"≤{d}" for d in reuse.reuse_distances]
    again.bar(range(len(names)), list(reuse.reuse_distances.values()), width=0.75)
    again.set_xticks(range(len(names)), names, rotation=60)
    again.set(xlabel="tokens since last use", title="uses, by distance")
    for axes in (near, again):
        _percent(axes)
    return image(figure, "Lines: reuse of experts within and across requests; bars: distance between uses")


def hit_rates(policies: PolicyTable, look: Mapping[str, Look]) -> str:
    """Hit rate against budget, one line a policy; the best online one is thick."""
    figure, (axes,) = _figure(3.5)
    budgets = policies.budgets()
    best = {policies.best_online(budget) for budget in budgets}
    for name, rates in policies.hit_rates.items():
        known = [budget for budget in budgets if budget in rates]
        style = "-." if name in policies.offline else "--" if name == LRU.name else "-"
        width = 2.4 if name in best else 1.4
        values = [rates[budget] for budget in known]
        axes.plot([100 * budget for budget in known], values, style, label=name, linewidth=width, **look[name])
    axes.set_xticks([100 * budget for budget in budgets], [f"{budget:.0%}" for budget in budgets])
    axes.set(xlabel="budget: share of all experts that fit", ylabel="hit rate", ylim=(None, 1.0))
    _percent(axes)
    _legend(axes)
    return image(figure, "Lines: hit rate of each policy against the budget")


def accuracy(scores: ScoreTable) -> str:
    """ACCURACY against distance, one line a predictor, its control dashed in the same colour."""
    figure, (axes,) = _figure(3.5)
    look = looks(table.name for table in scores.scores)
    for tables, style in ((scores.controls, "--"), (scores.scores, "-")):
        for table in tables:
            known = {k: f.accuracy for k, f in table.means.items() if f.accuracy is not None}
            label = table.name if known and style == "-" else None
            axes.plot(list(known), list(known.values()), style, label=label, **look[table.name])
    axes.plot([], [], "--", color=MUTED, label="control, shuffled")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(scores.distances), [str(k) for k in scores.distances])
    axes.minorticks_off()
    axes.set(xlabel="distance: MoE layers ahead", ylabel="experts predicted right", ylim=(0, 1.02))
    _percent(axes)
    _legend(axes)
    return image(figure, "Lines: accuracy of each predictor against distance, controls dashed")


def stalls(table: StallTable, look: Mapping[str, Look]) -> str:
    """Stall per token against the speed of the link, both logarithmic."""
    figure, (axes,) = _figure(3.5)
    for name, row in table.stall_ms.items():
        speeds, style = sorted(row), "--" if name == table.baseline else "-"
        axes.plot(speeds, [max(row[speed], 0.01) for speed in speeds], style, label=name, **look[name])
    if table.compute_ms is not None:
        axes.axhline(table.compute_ms, color=INK, linewidth=0.9, linestyle=":", label="compute per token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(table.speeds(), [f"{speed:g}" for speed in table.speeds()])
    _log_labels(axes)
    axes.set(xlabel="link (GB/s)", ylabel="stall per token (ms)")
    _legend(axes, 3)
    return image(figure, "Lines: stall per token of each setting against the speed of the link")


def recovery(table: Recovery, look: Mapping[str, Look]) -> str:
    """Hit rate request by request, smoothed, with the change of text marked."""
    figure, (axes,) = _figure(3.2)
    for name in table.hit_rates:
        smoothed = table.smoothed(name)
        style = "-." if name == BELADY else "--" if name == LRU.name else "-"
        for part in (slice(0, table.change), slice(table.change, None)):
            label = name if part.start == 0 else None
            axes.plot(range(len(smoothed))[part], smoothed[part], style, color=look[name]["color"], label=label)
    axes.axvline(table.change - 0.5, color=INK, linewidth=1, linestyle=":")
    for place, kind, side in ((table.change - 1, table.kinds[0], "right"), (table.change, table.kinds[1], "left")):
        axes.annotate(f" {_short(kind)} ", (place, 1.0), xycoords=("data", "axes fraction"), ha=side, va="bottom")
    axes.set(xlabel="request", ylabel="hit rate, mean of 5 requests")
    _percent(axes)
    _legend(axes)
    return image(figure, "Lines: hit rate of each policy request by request around a change of text")


def schedule(table: ScheduleTable) -> str:
    """Distinct experts of a pass, for each order of requests and size of batch."""
    figure, (axes,) = _figure(2.6)
    orders = list(dict.fromkeys(order for row in table.experts.values() for order in row))
    width = 0.8 / max(1, len(orders))
    for i, order in enumerate(orders):
        places = np.arange(len(table.experts)) + (i - (len(orders) - 1) / 2) * width
        values = [row.get(order, np.nan) for row in table.experts.values()]
        axes.bar(places, values, width * 0.92, color=MUTED if order == table.baseline else f"C{i}", label=order)
    axes.set_xticks(range(len(table.experts)), [str(batch) for batch in table.experts])
    axes.set(xlabel="requests per batch", ylabel="experts of a pass")
    _legend(axes)
    return image(figure, "Bars: distinct experts of a pass for each order of requests")


def _heat(axes: Axes, values: npt.NDArray[np.float64], most: float, meaning: str) -> None:
    drawn = axes.imshow(values, cmap=HEAT, vmin=0, vmax=most, aspect="auto", interpolation="none")
    axes.grid(visible=False)
    axes.figure.colorbar(drawn, ax=axes, pad=0.015, aspect=25)
    axes.set_title(f"colour: {meaning}")  # beside the bar it is clipped


def _log_labels(axes: Axes) -> None:
    """Labels 1, 2 and 5 of each decade of a logarithmic y axis, at least two."""
    low, high = axes.get_ylim()
    margin = max(1.0, 5 / (high / low)) ** 0.5
    axes.set_ylim(low / margin, high * margin)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:23] + "…"
