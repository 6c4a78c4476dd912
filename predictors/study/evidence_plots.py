"""The plots of docs/evidence/, of recorded results. Needs matplotlib (the extra `lab`)."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

from predictors.study.figures import figures, ratios, read_result
from predictors.study.papers import LINKS, NAMES
from tools.models.locality import LOCALITIES

matplotlib.use("svg")
from matplotlib import pyplot

PUBLISHED_SKIP = {"ProMoE, DeepSeek-V2-Lite": {1: 0.905, 8: 0.545}}  # figure 8
STYLE = {"svg.hashsalt": "moegguf", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False,
         "axes.spines.right": False}  # fmt: skip


def draw(folder: Path) -> None:
    """Writes every plot, the same bytes from the same results."""
    with pyplot.rc_context(STYLE):
        if read_result("hits") and read_result("accuracy"):
            _save(_model(), folder / "laboratory-model.svg")
        for paper in filter(lambda paper: read_result(f"link-{paper}"), LINKS):
            _save(_speeds(f"link-{paper}", f"{NAMES[paper]}: 25 % of the experts"), folder / f"{paper}.svg")
        if read_result("ablation"):
            _save(_speeds("ablation", "ProMoE, step by step: 25 % of the experts"), folder / "promoe-steps.svg")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    pyplot.close(figure)


def _model() -> Any:
    """Hit rates of LRU by share, and skip's accuracy by distance, beside what was published."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 2.6))
    own = {float(share): rate for share, rate in figures("hits")["lru"].items()}
    left.plot(list(own), list(own.values()), "o-", color="black", label="laboratory model, 8 of 64")
    for name, marker in (("qwen3-30b", "^"), ("glm", "s"), ("olmoe", "*")):
        known = LOCALITIES[name]
        rates = {share: rate for share, rate in known.hit_rates.items() if share >= 0.1}
        label = f"{known.model}, {known.n_expert_used} of {known.n_expert}"
        left.plot(list(rates), list(rates.values()), marker, label=label)
    left.set(xlabel="share of the experts in memory", ylabel="hits of LRU while decoding", ylim=(0, 1))
    left.legend(frameon=False, fontsize=7)
    skip = {int(k): of["accuracy"] for k, of in figures("accuracy")["skip"].items()}
    right.plot(list(skip), list(skip.values()), "o-", color="black", label="laboratory model")
    for name, found in PUBLISHED_SKIP.items():
        right.plot(list(found), list(found.values()), "^", label=name)
    right.set(xlabel="layers ahead", ylabel="skip: right of those asked for", ylim=(0, 1))
    right.legend(frameon=False, fontsize=7)
    return figure


def _speeds(step: str, title: str) -> Any:
    """Speed of each system against the papers' base: median over requests, from the least to the greatest."""
    systems = figures(step)["systems"]
    base = systems.get("none") or next(iter(systems.values()))
    figure, axis = pyplot.subplots(figsize=(5.4, 0.5 + 0.24 * len(systems)))
    for place, of in enumerate(systems.values()):
        found = ratios(base, of)
        axis.barh(place, median(found), color="0.75")
        axis.plot([min(found), max(found)], [place, place], color="black", linewidth=1)
    axis.set_yticks(range(len(systems)), list(systems))
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.5)
    axis.set(xlabel="speed against LRU without prefetching; lines: least to greatest of the requests", title=title)
    return figure
