"""Draws the plots of docs/evidence/ from recorded results. Needs matplotlib (the extra
`lab`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from predictors.study.figures import figures, read_result, speed_of
from predictors.study.papers import LINKS, NAMES
from predictors.study.subjects import DEEP, DEMO, LABORATORY, SUBJECTS
from tools.models.locality import LOCALITIES

matplotlib.use("svg")
from matplotlib import pyplot

# ProMoE's figure 8: {distance in layers: accuracy}.
PUBLISHED_SKIP = {"ProMoE, DeepSeek-V2-Lite": {1: 0.905, 8: 0.545}}
STYLE = {"svg.hashsalt": "moegguf", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False,
         "axes.spines.right": False}  # fmt: skip


def draw(folder: Path) -> None:
    """Writes each plot whose results are recorded. Identical results produce identical
    files."""
    with pyplot.rc_context(STYLE):
        if read_result(f"{LABORATORY}/hits") and read_result(f"{LABORATORY}/accuracy"):
            _save(_model(), folder / "laboratory-model.svg")
        steps = {f"link-{paper}": (NAMES[paper], paper) for paper in LINKS}
        for step, (title, file) in (
            steps | {"ablation": ("ProMoE, step by step", "promoe-steps")}
        ).items():
            found = [
                name
                for name in (DEMO, DEEP, LABORATORY)
                if read_result(f"{name}/{step}")
            ]
            if found:
                _save(
                    _speeds(found, step, f"{title}: 25 % of the experts"),
                    folder / f"{file}.svg",
                )


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)


def _model() -> Any:
    """Plots the laboratory model's LRU hit rates by share of experts, and the accuracy
    of the predictor `skip` by distance.

    Both plots also show published values of other models.
    """
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 2.6))
    own = {
        float(share): rate
        for share, rate in figures(f"{LABORATORY}/hits")["lru"].items()
    }
    left.plot(
        list(own),
        list(own.values()),
        "o-",
        color="black",
        label="laboratory model, 8 of 64",
    )
    for name, marker in (("qwen3-30b", "^"), ("glm", "s"), ("olmoe", "*")):
        known = LOCALITIES[name]
        rates = {share: rate for share, rate in known.hit_rates.items() if share >= 0.1}
        label = f"{known.model}, {known.n_expert_used} of {known.n_expert}"
        left.plot(list(rates), list(rates.values()), marker, label=label)
    left.set(
        xlabel="share of the experts in memory",
        ylabel="hits of LRU while decoding",
        ylim=(0, 1),
    )
    left.legend(frameon=False, fontsize=7)
    skip = {
        int(k): of["accuracy"]
        for k, of in figures(f"{LABORATORY}/accuracy")["skip"].items()
    }
    right.plot(
        list(skip), list(skip.values()), "o-", color="black", label="laboratory model"
    )
    for name, found in PUBLISHED_SKIP.items():
        right.plot(list(found), list(found.values()), "^", label=name)
    right.set(
        xlabel="layers ahead", ylabel="skip: right of those asked for", ylim=(0, 1)
    )
    right.legend(frameon=False, fontsize=7)
    return figure


def _speeds(names: Sequence[str], step: str, title: str) -> Any:
    """Plots each system's speed relative to the base, for each model: the median over
    requests, and its interval.

    The base is the system "none" if the step includes it, and otherwise the step's
    first system.
    """
    figure, axes = pyplot.subplots(
        len(names), squeeze=False, sharex=True, layout="constrained"
    )
    height = 0.4
    for axis, name in zip(axes[:, 0], names, strict=True):
        of_name = figures(f"{name}/{step}")["systems"]
        base = "none" if "none" in of_name else next(iter(of_name))
        for place, system in enumerate(of_name):
            found = speed_of(f"{name}/{step}", system, base)
            axis.barh(place, found.value, color="0.75")
            axis.plot(
                [found.low, found.high], [place, place], color="black", linewidth=1
            )
        axis.set_yticks(range(len(of_name)), list(of_name))
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=0.5)
        axis.set_title(f"{title}, {SUBJECTS[name].title}")
        height += 0.4 + 0.24 * len(of_name)
    axis.set_xlabel(
        "speed against LRU without prefetching; lines: the interval over requests"
    )
    figure.set_size_inches(5.4, height)
    return figure
