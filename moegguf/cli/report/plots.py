"""The plots of a report: each function takes numbers of trace/report.py and returns an SVG element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moegguf.cli.report.svg import INK, MUTED, Palette, figure, legend, styled, svg
from moegguf.controller.policies.base import LRU
from moegguf.trace.belady import BELADY
from moegguf.trace.report import PolicyTable, Recovery, ScheduleTable, StallTable
from moegguf.trace.reuse import Reuse
from moegguf.trace.score import ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAT = "#e8590c"
MAX_REQUESTS = 60  # rows of request_heatmap; more would be thinner than a pixel


@styled
def layer_heatmap(reuse: Reuse) -> str:
    """How often each expert of each layer is used, over all requests."""
    counts = reuse.counts.sum(axis=0).astype(float)
    even = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
    fig, (axes,) = figure(1.1 + min(3.4, 0.16 * len(counts)))
    most = max(2.0, float(even.max(initial=0.0)))
    _heat(axes, even, most, "use, relative to an even spread")
    axes.set(xlabel="expert", ylabel="layer")
    _layer_ticks(axes, reuse.layers)
    return svg(fig, "layers", "Heatmap: use of each expert in each layer, relative to an even spread")


@styled
def request_heatmap(reuse: Reuse, labels: Mapping[int, str]) -> str:
    """How often the experts of the middle layer are used by each request, grouped by kind of text."""
    row = len(reuse.layers) // 2
    order = sorted(range(len(reuse.sequences)), key=lambda i: (labels.get(reuse.sequences[i], ""), i))
    if len(order) > MAX_REQUESTS:
        order = [order[i] for i in np.linspace(0, len(order) - 1, MAX_REQUESTS).astype(int)]
    counts = reuse.counts[order, row].astype(float)
    share = counts / np.maximum(counts.max(axis=1, keepdims=True), 1)
    fig, (axes,) = figure(1.2 + min(4.0, 0.1 * len(order) + 0.4))
    _heat(axes, share, 1.0, "use, relative to the request's most used expert")
    axes.set(xlabel=f"expert of layer {reuse.layers[row]}", ylabel="request")
    kinds = [labels.get(reuse.sequences[i], "") for i in order]
    starts = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(kinds)) if one != other)]
    axes.set_yticks(starts, [_short(kinds[start]) or "requests" for start in starts])
    axes.set_ylabel("requests, by kind of text")
    for start in starts[1:]:
        axes.axhline(start - 0.5, color=INK, linewidth=0.7)
    return svg(fig, "requests", f"Heatmap: use of the experts of layer {reuse.layers[row]} by each request")


@styled
def reuse_windows(reuse: Reuse) -> str:
    """Share of a token's experts used by the tokens before it, and the distance between uses."""
    fig, (near, again) = figure(2.6, columns=2)
    windows = list(reuse.windows_same)
    for rates, name, style in (
        (reuse.windows_same, "same request", "-"),
        (reuse.windows_other, "another request", "--"),
    ):
        colour = HEAT if style == "-" else MUTED
        near.plot(range(len(windows)), [rates[w] for w in windows], style, marker="o", color=colour, label=name)
    near.set_xticks(range(len(windows)), [str(w) for w in windows])
    near.set(xlabel="in the last n tokens", title="experts used before", ylim=(0, 1))
    _percent(near)
    near.legend(loc="lower right")
    names = ["first" if d == 0 else "later" if d < 0 else f"≤{d}" for d in reuse.reuse_distances]
    again.bar(range(len(names)), list(reuse.reuse_distances.values()), color=HEAT, width=0.75)
    again.set_xticks(range(len(names)), names, rotation=60)
    again.set(xlabel="tokens since last use", title="uses, by distance")
    again.grid(axis="x", visible=False)
    _percent(again)
    return svg(
        fig, "reuse", "Lines: reuse of experts within a request and across requests; bars: distance between uses"
    )


@styled
def hit_rates(policies: PolicyTable, palette: Palette) -> str:
    """Hit rate against budget, one line a policy; the best online one is thick."""
    fig, (axes,) = figure(3.5)
    budgets = policies.budgets()
    best = {policies.best_online(budget) for budget in budgets}
    for name, rates in policies.hit_rates.items():
        known = [budget for budget in budgets if budget in rates]
        style = "-." if name in policies.offline else "--" if name == LRU.name else "-"
        axes.plot(
            [100 * budget for budget in known], [rates[budget] for budget in known], style, label=name,
            color=palette.colour(name), marker=palette.marker(name), linewidth=2.4 if name in best else 1.4,
        )  # fmt: skip
    axes.set_xticks([100 * budget for budget in budgets], [f"{budget:.0%}" for budget in budgets])
    axes.set(xlabel="budget: share of all experts that fit", ylabel="hit rate", ylim=(None, 1.0))
    _percent(axes)
    legend(fig, axes)
    return svg(fig, "hits", "Lines: hit rate of each policy against the budget")


@styled
def accuracy(scores: ScoreTable) -> str:
    """ACCURACY against distance, one line a predictor, its control dashed in the same colour."""
    palette = Palette(table.name for table in scores.scores)
    fig, (axes,) = figure(3.5)
    for tables, style in ((scores.controls, "--"), (scores.scores, "-")):
        for table in tables:
            known = [(k, f.accuracy) for k, f in table.means.items() if f.accuracy is not None]
            if not known:
                continue
            axes.plot(
                [k for k, _ in known], [value for _, value in known], style, color=palette.colour(table.name),
                marker=palette.marker(table.name), alpha=1 if style == "-" else 0.65,
                linewidth=1.8 if style == "-" else 1, label=table.name if style == "-" else None,
            )  # fmt: skip
    axes.plot([], [], "--", color=MUTED, linewidth=1, label="control, shuffled")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(scores.distances), [str(k) for k in scores.distances])
    axes.minorticks_off()
    axes.set(xlabel="distance: MoE layers ahead", ylabel="experts predicted right", ylim=(0, 1.02))
    _percent(axes)
    legend(fig, axes)
    return svg(fig, "accuracy", "Lines: accuracy of each predictor against distance, controls dashed")


@styled
def stalls(table: StallTable, palette: Palette) -> str:
    """Stall per token against the speed of the link, both logarithmic."""
    fig, (axes,) = figure(3.5)
    least = 0.01
    for name, row in table.stall_ms.items():
        speeds = sorted(row)
        axes.plot(
            speeds, [max(row[speed], least) for speed in speeds], "--" if name == table.baseline else "-", label=name,
            color=palette.colour(name), marker=palette.marker(name),
        )  # fmt: skip
    if table.compute_ms is not None:
        axes.axhline(table.compute_ms, color=INK, linewidth=0.9, linestyle=":", label="compute per token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(table.speeds(), [f"{speed:g}" for speed in table.speeds()])
    _log_labels(axes)
    axes.set(xlabel="link (GB/s)", ylabel="stall per token (ms)")
    legend(fig, axes, 3)
    return svg(fig, "stalls", "Lines: stall per token of each setting against the speed of the link")


@styled
def recovery(table: Recovery, palette: Palette) -> str:
    """Hit rate request by request, smoothed, with the change of text marked."""
    fig, (axes,) = figure(3.2)
    for name in table.hit_rates:
        smoothed = table.smoothed(name)
        style = "-." if name == BELADY else "--" if name == LRU.name else "-"
        for part in (slice(0, table.change), slice(table.change, None)):
            places = list(range(len(smoothed)))[part]
            label = name if part.start == 0 else None
            axes.plot(places, smoothed[part], style, color=palette.colour(name), label=label)
    axes.axvline(table.change - 0.5, color=INK, linewidth=1, linestyle=":")
    for place, kind, side in ((table.change - 1, table.kinds[0], "right"), (table.change, table.kinds[1], "left")):
        axes.annotate(
            f" {_short(kind)} ", (place, 1.0), xycoords=("data", "axes fraction"), ha=side, va="bottom", fontsize=8
        )
    axes.set(xlabel="request", ylabel="hit rate, mean of 5 requests")
    _percent(axes)
    legend(fig, axes)
    return svg(fig, "recovery", "Lines: hit rate of each policy request by request around a change of text")


@styled
def schedule(table: ScheduleTable) -> str:
    """Distinct experts of a pass, for each order of requests and size of batch."""
    fig, (axes,) = figure(2.6)
    orders = list(dict.fromkeys(order for row in table.experts.values() for order in row))
    palette = Palette(order for order in orders if order != table.baseline)
    width = 0.8 / max(1, len(orders))
    for i, order in enumerate(orders):
        places = np.arange(len(table.experts)) + (i - (len(orders) - 1) / 2) * width
        values = [row.get(order, np.nan) for row in table.experts.values()]
        colour = MUTED if order == table.baseline else palette.colour(order)
        axes.bar(places, values, width * 0.92, color=colour, label=order)
    axes.set_xticks(range(len(table.experts)), [str(batch) for batch in table.experts])
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="requests per batch", ylabel="experts of a pass")
    legend(fig, axes)
    return svg(fig, "schedule", "Bars: distinct experts of a pass for each order of requests")


def _heat(axes: Axes, values: npt.NDArray[np.float64], most: float, meaning: str) -> None:
    """An image whose opacity is the value, so that it fits light and dark pages."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    clear = to_rgba(HEAT, 0.0)
    colours = LinearSegmentedColormap.from_list("ink", [clear, to_rgba(HEAT, 1.0)])
    image = axes.imshow(values, cmap=colours, vmin=0, vmax=most, aspect="auto", interpolation="none")
    axes.grid(visible=False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.015, aspect=25)
    axes.set_title(f"colour: {meaning}")  # beside the bar it is clipped
    bar.outline.set_visible(False)


def _log_labels(axes: Axes) -> None:
    """Labels 1, 2 and 5 of each decade of a logarithmic y axis, at least two."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.get_ylim()
    margin = max(1.0, 5 / (high / low)) ** 0.5
    axes.set_ylim(low / margin, high * margin)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def _layer_ticks(axes: Axes, layers: Sequence[int]) -> None:
    step = max(1, len(layers) // 8)
    axes.set_yticks(range(0, len(layers), step), [str(il) for il in layers[::step]])


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:23] + "…"
