"""Computes figures for the pages of docs/evidence from recorded results: as text, and
as estimates for verdicts.

A question for a figure is a string `KIND,STEP,...`. The words after STEP depend on the
kind. If a step has several settings, STEP:SETTING selects one of them. A result's name
is MODEL/STEP, and its file is in predictors/results/
(`predictors/study/regenerate.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from predictors.study.intervals import (
    Estimate,
    Statistic,
    difference_of_means,
    median_ratio,
    paired_estimate,
    ratio_of_means,
)

COMMAND = "python -m predictors.study.regenerate"
RESULTS = Path(__file__).parents[1] / "results"
FIGURE = re.compile(r"\{([^}]+)\}")
NONE = "–"
# A system has recovered if the mean slowdown of RUN requests is at most WITHIN.
WITHIN, RUN = 1.02, 3


class NotCountedError(KeyError):
    """Raised if a figure cannot be computed, usually because no result of its step is
    recorded."""

    def __str__(self) -> str:
        model, _, step = self.args[0].partition("/")
        return f"No result is recorded yet. This command records it: `{COMMAND} --model {model} --only {step}`"


class NotThereError(NotCountedError):
    """Raised if a figure is missing because the recorded result of its step does not
    contain it."""

    def __str__(self) -> str:
        return "The recorded result of this model does not contain this figure."


def read_result(name: str) -> dict[str, Any] | None:
    """Returns the recorded result with the name MODEL/STEP, or None if it does not
    exist."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else None


def figures(name: str) -> dict[str, Any]:
    """Returns the figures of a step. Raises NotCountedError."""
    found = read_result(name)
    if found is None:
        raise NotCountedError(name)
    return dict(found["figures"])


def systems(name: str) -> Mapping[str, Any]:
    """Returns {system: figures} for a step, or for one setting of a step. Raises
    NotCountedError."""
    name, _, setting = name.partition(":")
    found = figures(name)
    parts = found["settings"].get(setting) if setting else found["systems"]
    if parts is None:
        raise NotThereError(name)
    return dict(parts)


def ratios(
    base: Mapping[str, Any], other: Mapping[str, Any], of: str = "token_ms"
) -> list[float]:
    """Returns the speed of `other` divided by the speed of `base`, for each request.
    of: the field with the times."""
    return [one / two for one, two in zip(base[of], other[of], strict=True)]


def wholes(of: Mapping[str, Any]) -> list[float]:
    """Returns the time of prompt and answer together in milliseconds, for each
    request."""
    return [
        first + n * ms
        for first, n, ms in zip(
            of["prompt_ms"], of["tokens"], of["token_ms"], strict=True
        )
    ]


def spread(values: Sequence[float], decimals: int = 2) -> str:
    """Returns the text "median (minimum to maximum)"."""
    low, middle, high = (
        f"{value:.{decimals}f}" for value in (min(values), median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def percent(share: float | None) -> str:
    """Returns a share as a percentage with one decimal; "–" for None."""
    return NONE if share is None else f"{share:.1%}".replace("%", " %")


def text_of(text: str, model: str) -> str:
    """Returns the text with every question in braces replaced by its answer for a
    model.

    Leaves out each sentence that contains a question without an answer. Raises
    NotCountedError if no sentence is left.
    """
    sentences = list[str]()
    missing = list[NotCountedError]()
    for sentence in re.split(r"(?<=\.) ", text):
        try:
            sentences.append(
                FIGURE.sub(lambda found: _text(*_parts(found[1], model)), sentence)
            )
        except NotCountedError as error:
            missing.append(error)
    if not sentences:
        raise missing[0]
    return " ".join(sentences)


def estimate_of(question: str, model: str) -> Estimate:
    """Returns the answer to a question, with its interval. Raises NotCountedError.

    A figure that is not computed over requests has no interval.
    """
    kind, name, *keys = _parts(question, model)
    if kind in PAIRED:
        return PAIRED[kind](name, keys).estimate
    return Estimate.plain(NUMBERS[kind](name, keys))


def speed_of(name: str, system: str, base: str) -> Estimate:
    """Returns the speed of a system relative to the system `base`: the median over
    requests, with its interval.

    `name` is MODEL/STEP or MODEL/STEP:SETTING. Raises NotCountedError.
    """
    return _speeds(name, [system, base]).estimate


def steps_of(text: str) -> set[str]:
    """Returns the names of the steps in the questions in braces.

    A text without braces that begins with a word, a comma and no space counts as a
    question.
    """
    questions = FIGURE.findall(text) or ([text] if re.match(r"\w+,\S", text) else [])
    return {question.split(",")[1].partition(":")[0] for question in questions}


def _parts(question: str, model: str) -> tuple[str, ...]:
    kind, step, *keys = question.split(",")
    return kind, f"{model}/{step}", *keys


def interval(found: Estimate, decimals: int = 2) -> str:
    """Returns the figure as text, followed by its interval, if any, in brackets."""
    value, low, high = (
        f"{one:.{decimals}f}" for one in (found.value, found.low, found.high)
    )
    return value if found.low == found.high else f"{value} [{low} to {high}]"


def _text(kind: str, name: str, *keys: str) -> str:
    if kind == "points":
        points = PAIRED[kind](name, keys).estimate
        return interval(
            Estimate(*(100 * one for one in (points.value, points.low, points.high))), 1
        )
    if kind in PAIRED:
        return interval(PAIRED[kind](name, keys).estimate)
    if kind == "spread":
        shares = [100 * value for value in _at(name, keys)]
        return (
            f"{min(shares):.0f} to {max(shares):.0f} % (median {median(shares):.0f} %)"
        )
    if kind == "recovery":
        found_n = [_recovered(of) for of in figures(name)["kinds"].values()]
        back = [n for n in found_n if n is not None]
        if not back:
            return "more requests than were counted"
        return f"{min(back)} to {max(back)} requests for {len(back)} of {len(found_n)} kinds of text"
    value = NUMBERS[kind](name, keys)
    if kind in ("share", "ahead", "saved"):
        return percent(value)
    return (
        f"{value:.2f}"
        if kind in ("tail", "loss")
        else f"{value:,.2f}".rstrip("0").rstrip(".")
    )


def _at(name: str, keys: Sequence[str]) -> Any:
    """Follows the keys into a result, one after another, and returns the figure found
    there. Raises NotThereError."""
    found: Any = figures(name)
    try:
        for key in keys:
            found = found[int(key)] if isinstance(found, list) else found[key]
    except (KeyError, IndexError):
        raise NotThereError(name) from None
    return found


def _number(name: str, keys: Sequence[str]) -> float:
    found = _at(name, keys)
    if found is None:
        raise NotThereError(name)
    return float(found)


@dataclass(frozen=True)
class Paired:
    """A statistic of several columns of figures. Item n of each column belongs to the
    same request."""

    columns: list[Sequence[float]]
    statistic: Statistic

    @property
    def estimate(self) -> Estimate:
        """The statistic and its interval."""
        return paired_estimate(self.columns, self.statistic)


def _base(
    name: str, keys: Sequence[str]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the figures of the baseline, and the figures of the system keys[0].
    Raises NotCountedError.

    The baseline is the system keys[1], or the step's first system if `keys` has only one
    item.
    """
    found = systems(name)
    base = keys[1] if keys[1:] else next(iter(found))
    if base not in found or keys[0] not in found:
        raise NotThereError(name)
    return found[base], found[keys[0]]


def _speeds(name: str, keys: Sequence[str]) -> Paired:
    return Paired([of["token_ms"] for of in _base(name, keys)], median_ratio)


def _prompts(name: str, keys: Sequence[str]) -> Paired:
    return Paired([of["prompt_ms"] for of in _base(name, keys)], median_ratio)


def _wholes(name: str, keys: Sequence[str]) -> Paired:
    return Paired([wholes(of) for of in _base(name, keys)], median_ratio)


def _by_request(of: Mapping[str, Any], name: str) -> Sequence[float]:
    """Returns a figure for each request. If only one figure for all requests is
    recorded, returns a list that contains only this figure."""
    return of["by_request"][name] if "by_request" in of else [of[name]]


def _of_each(
    measure: str, statistic: Statistic
) -> Callable[[str, Sequence[str]], Paired]:
    """Returns a function that creates a `Paired` of the base and the system, with one
    measure for each request."""
    return lambda name, keys: Paired(
        [_by_request(of, measure) for of in _base(name, keys)], statistic
    )


def _points(name: str, keys: Sequence[str]) -> Paired:
    """Returns the system's share of ready experts minus the base's, each averaged over
    requests."""
    base, own = _base(name, keys)
    return Paired(
        [_by_request(own, "ready"), _by_request(base, "ready")], difference_of_means
    )


def _mean_speed(name: str, keys: Sequence[str]) -> Paired:
    """Returns the system's speed relative to the base, averaged over the settings of a
    step."""
    pairs = [
        _speeds(f"{name}:{setting}", keys).columns
        for setting in figures(name)["settings"]
    ]
    return Paired([column for pair in pairs for column in pair], median_ratio)


def _tail(name: str, keys: Sequence[str]) -> float:
    """Returns the 99th percentile of token times, divided by the mean over requests of
    the time per token."""
    own = systems(name)[keys[0]]
    return float(own["percentiles_ms"]["99"] / fmean(own["token_ms"]))


def _less(name: str, keys: Sequence[str]) -> float:
    """Returns the difference of two figures: the second minus the first. Each half of
    `keys` identifies one figure."""
    half = len(keys) // 2
    return _number(name, keys[half:]) - _number(name, keys[:half])


def _steadier(name: str, keys: Sequence[str]) -> float:
    """Returns the base's loss minus the system's loss from the first setting to the
    second.

    A loss is the drop in the share of ready experts.
    """
    own, base, first, second = keys
    lost = [_number(name, ["settings", first, of, "ready"]) - _number(name, ["settings", second, of, "ready"])
            for of in (base, own)]  # fmt: skip
    return lost[0] - lost[1]


def _saved(name: str, keys: Sequence[str]) -> float:
    orders = _at(name, ["at_once", keys[0]])
    return float(1 - orders[keys[1]]["experts"] / orders["fifo"]["experts"])


def _recovered(of: Mapping[str, Sequence[float]]) -> int | None:
    """Returns the number of requests between a change in the kind of text and recovery;
    None if there was no recovery.

    A request's time is divided by its time when the collection already knows the kind.
    Recovery begins with the first of RUN successive requests for which the mean of this
    ratio is at most WITHIN.
    """
    slower = [
        shifted / known
        for shifted, known in zip(of["shifted_ms"], of["known_ms"], strict=True)
    ]
    runs = [fmean(slower[at : at + RUN]) for at in range(len(slower) - RUN + 1)]
    return next((at for at, ratio in enumerate(runs) if ratio <= WITHIN), None)


def _loss(name: str, keys: Sequence[str]) -> float:
    """Returns the slowdown of the first request after the kind of text changes: the
    median over the kinds.

    The slowdown is the request's time divided by its time when the collection already
    knows the kind.
    """
    return median(
        of["shifted_ms"][0] / of["known_ms"][0]
        for of in figures(name)["kinds"].values()
    )


def _regained(name: str, keys: Sequence[str]) -> float:
    """Returns the largest number of requests before recovery among all kinds of text,
    times -1.

    The number is negative because verdicts treat larger figures as better. Raises
    NotCountedError if a kind did not recover within the counted requests.
    """
    found = [_recovered(of) for of in figures(name)["kinds"].values()]
    if None in found:
        raise NotCountedError(name)
    return -float(max(n for n in found if n is not None))


PAIRED: dict[str, Callable[[str, Sequence[str]], Paired]] = {
    "speed": _speeds,
    "first": _prompts,
    "whole": _wholes,
    "mean_speed": _mean_speed,
    "stall": _of_each("stall_ms", ratio_of_means),
    "moved": _of_each("experts", ratio_of_means),
    "points": _points,
}
NUMBERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "tail": _tail,
    "below_tail": lambda name, keys: -_tail(name, keys),
    "ahead": lambda name, keys: _number(name, ["systems", keys[0], "ahead", keys[1]]),
    "share": _number,
    "number": _number,
    "below": lambda name, keys: -_number(name, keys),
    "unused": lambda name, keys: 1 - median(_at(name, keys)),
    "less": _less,
    "steadier": _steadier,
    "saved": _saved,
    "loss": _loss,
    "regained": _regained,
}
