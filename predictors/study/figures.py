"""Figures that the pages ask for, out of the recorded results: as text, and as numbers that verdicts are taken by.

A question is `KIND,STEP,...`, and what follows depends on its kind; STEP/SETTING is one setting of a step that has
several. Results lie in predictors/results/ (`predictors/study/regenerate.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
FIGURE = re.compile(r"\{([^}]+)\}")
NONE = "–"
WITHIN, RUN = 1.02, 3  # of what has recovered: the mean over so many requests


class NotCountedError(KeyError):
    """Nothing is recorded of a step."""

    def __str__(self) -> str:
        return f"not counted yet: `python -m predictors.study.regenerate --only {self.args[0]}`"


def read_result(name: str) -> dict[str, Any] | None:
    """What was recorded; None where nothing was."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else None


def figures(step: str) -> dict[str, Any]:
    """What a step counted. Raises NotCountedError."""
    found = read_result(step)
    if found is None:
        raise NotCountedError(step)
    return dict(found["figures"])


def systems(step: str) -> Mapping[str, Any]:
    """{system: its figures} of a step, or of one of its settings."""
    name, _, setting = step.partition("/")
    found = figures(name)
    return dict(found["settings"][setting] if setting else found["systems"])


def ratios(base: Mapping[str, Any], other: Mapping[str, Any], of: str = "token_ms") -> list[float]:
    """How many times as fast `other` is as `base`, request by request: with tokens, or with prompts."""
    return [one / two for one, two in zip(base[of], other[of], strict=True)]


def wholes(of: Mapping[str, Any]) -> list[float]:
    """Milliseconds of each request's prompt and answer."""
    return [first + n * ms for first, n, ms in zip(of["prompt_ms"], of["tokens"], of["token_ms"], strict=True)]


def spread(values: Sequence[float], decimals: int = 2) -> str:
    """Median (least to greatest)."""
    low, middle, high = (f"{value:.{decimals}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def percent(share: float | None) -> str:
    """One decimal."""
    return NONE if share is None else f"{share:.1%}".replace("%", " %")


def text_of(text: str) -> str:
    """The text with every question in braces answered."""
    return FIGURE.sub(lambda found: _text(*found[1].split(",")), text)


def number_of(question: str) -> float:
    """The answer as a number; of several requests the median."""
    kind, step, *keys = question.split(",")
    return NUMBERS[kind](step, keys)


def _text(kind: str, step: str, *keys: str) -> str:
    if kind in RATIOS:
        return spread(RATIOS[kind](step, keys)) + "x"
    if kind == "spread":
        return spread([100 * value for value in _at(figures(step), keys)], 0) + " %"
    if kind == "medians":
        return ", ".join(f"{median(_speeds(f'{step}/{name}', keys)):.2f}x" for name in figures(step)["settings"])
    if kind == "readies":
        return ", ".join(percent(of[keys[0]]["ready"]) for of in figures(step)["settings"].values())
    if kind == "recovery":
        found = [_recovered(of) for of in figures(step)["kinds"].values()]
        back = [n for n in found if n is not None]
        return f"{min(back)} to {max(back)} (in {len(back)} of {len(found)} kinds)"
    value = NUMBERS[kind](step, keys)
    if kind in ("share", "ahead", "saved"):
        return percent(value)
    return f"{value:.2f}x" if kind in ("stall", "tail", "loss", "median") else f"{value:.2f}".rstrip("0").rstrip(".")


def _at(found: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def _number(step: str, keys: Sequence[str]) -> float:
    found = _at(figures(step), keys)
    if found is None:
        raise NotCountedError(step)
    return float(found)


def _base(step: str, keys: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The system that is compared with, or the first, and the one asked for."""
    found = systems(step)
    return found[keys[1] if keys[1:] else next(iter(found))], found[keys[0]]


def _speeds(step: str, keys: Sequence[str]) -> list[float]:
    return ratios(*_base(step, keys))


def _stall(step: str, keys: Sequence[str]) -> float:
    base, own = _base(step, keys)
    return float(base["stall_ms"] / own["stall_ms"])


def _tail(step: str, keys: Sequence[str]) -> float:
    """The 99th percentile of tokens over the mean."""
    own = systems(step)[keys[0]]
    return float(own["percentiles_ms"]["99"] / fmean(own["token_ms"]))


def _less(step: str, keys: Sequence[str]) -> float:
    """The second of two figures, less the first."""
    half = len(keys) // 2
    found = figures(step)
    return float(_at(found, keys[half:]) - _at(found, keys[:half]))


def _saved(step: str, keys: Sequence[str]) -> float:
    orders = figures(step)["at_once"][keys[0]]
    return float(1 - orders[keys[1]]["experts"] / orders["fifo"]["experts"])


def _recovered(of: Mapping[str, Sequence[float]]) -> int | None:
    """Requests after a shift until RUN of them take at most WITHIN times what they take where the kind was known; None
    where that does not come among those that were counted."""
    slower = [shifted / known for shifted, known in zip(of["shifted_ms"], of["known_ms"], strict=True)]
    runs = [fmean(slower[at : at + RUN]) for at in range(len(slower) - RUN + 1)]
    return next((at for at, ratio in enumerate(runs) if ratio <= WITHIN), None)


def _loss(step: str, keys: Sequence[str]) -> float:
    """The first request after a shift beside itself where its kind was known, the median over kinds."""
    return median(of["shifted_ms"][0] / of["known_ms"][0] for of in figures(step)["kinds"].values())


def _regained(step: str, keys: Sequence[str]) -> float:
    """Requests until the last kind had recovered, times -1. Raises NotCountedError where one did not among those that
    were counted."""
    found = [_recovered(of) for of in figures(step)["kinds"].values()]
    if None in found:
        raise NotCountedError(step)
    return -max(n for n in found if n is not None)


RATIOS: dict[str, Callable[[str, Sequence[str]], list[float]]] = {
    "speed": _speeds,
    "first": lambda step, keys: ratios(*_base(step, keys), of="prompt_ms"),
    "whole": lambda step, keys: [a / b for a, b in zip(*map(wholes, _base(step, keys)), strict=True)],
}
NUMBERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    **{kind: lambda step, keys, of=of: median(of(step, keys)) for kind, of in RATIOS.items()},  # type: ignore[misc]
    "median": lambda step, keys: median(_speeds(step, keys)),
    "mean_speed": lambda step, keys: fmean(median(_speeds(f"{step}/{n}", keys)) for n in figures(step)["settings"]),
    "stall": _stall,
    "tail": _tail,
    "below_tail": lambda step, keys: -_tail(step, keys),
    "ahead": lambda step, keys: float(systems(step)[keys[0]]["ahead"][int(keys[1])]),
    "share": _number,
    "number": _number,
    "below": lambda step, keys: -_number(step, keys),
    "unused": lambda step, keys: 1 - median(_at(figures(step), keys)),
    "less": _less,
    "saved": _saved,
    "loss": _loss,
    "regained": _regained,
}
