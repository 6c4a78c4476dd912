"""Formats the short run's results as a plain-text table: each figure's predicted range
and its measured median.

A median outside the predicted range is marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.gpu.short_plan import ANSWER, PROMPT, SAME, SLOTS, STOP, Part, Step
from tools.gpu.steps import Outcome

# A second run repeats a part whose fastest turn is faster than its slowest by more than
# this share.
DIFFERENT = 0.05
NONE = "-"
WIDTHS = (44, 38, 15, 26)
BASE = "llama.cpp, resident"  # a part's name
# A figure's name: a copy moves one matrix, about 0.9 MB in step Q3.
COPIES = "from pinned memory, 900 kB each, GB/s"
# Counters in the table, by name: (name in the table, factor, unit).
COUNTERS = {
    "ns": ("time", 1e-3, ", us"),
    "n": ("number", 1, ""),
    "hook_ns": ("hook", 1e-3, ", us"),
    "stall_ns": ("stall", 1e-3, ", us"),
    "forecast_scored": ("layers predicted in the graph", 1, ""),
    "prefetch_started": ("prefetches", 1, ""),
}

Outcomes = Mapping[str, Outcome]


def figures_of(part: Part, outcome: Outcome) -> dict[str, float]:
    """Returns {figure's name in the table: value} of an outcome. The kind "facts" has
    no figures."""
    values = outcome.get("values", {})
    if part.kind in ("micro", "batches", "tests"):
        return dict(values)
    if part.kind != "measure":
        return {}
    device, prompts = (
        values.get(timed, {}).get("VRAM", {}) for timed in ("steady", "prompt")
    )
    found = {
        ANSWER: values.get("steady_tokens_per_s"),
        PROMPT: values.get("prompt_tokens_per_s"),
        "first 64 tokens, t/s": values.get("first_tokens_per_s"),
        "cold prompt, t/s": values.get("cold_prompt_tokens_per_s"),
        SLOTS: values.get("slots_share"),
        "tokens in a pass, at most": values.get("n_ubatch"),
        "hits": device.get("hit_rate"),
        "MB a token": _megabytes(device.get("bytes_per_token")),
        "hits in prompts": prompts.get("hit_rate"),
        "MB a prompt token": _megabytes(prompts.get("bytes_per_token")),
        "every expert has a slot (1) or not (0)": values.get("complete"),
        "load, s": values.get("load_s"),
    }
    for timed, token in (("steady", "token"), ("prompt", "prompt token")):
        for place, counted in values.get(timed, {}).items():
            for name, (what, factor, unit) in COUNTERS.items():
                figure = f"{place}, {what} a {token}{unit}"
                value = counted.get(f"{name}_per_token")
                if value or (value is not None and figure in part.predicted):
                    found[figure] = value * factor
    return {name: value for name, value in found.items() if value is not None}


def turns_of(step: Step, part: Part, outcomes: Outcomes) -> list[Outcome]:
    """Returns the outcomes of a part, one for each turn that has an outcome."""
    named = (f"{step.name}/{part.name}/{turn}" for turn in range(1, step.n_turns + 1))
    return [outcomes[name] for name in named if name in outcomes]


def turns_differ(part: Part, turns: Sequence[Outcome]) -> bool:
    """Returns True if the highest answer speed exceeds the lowest by more than the
    share DIFFERENT.

    With fewer than two measured turns, returns False.
    """
    speeds = [
        figures[ANSWER]
        for turn in turns
        if ANSWER in (figures := figures_of(part, turn))
    ]
    return len(speeds) > 1 and max(speeds) > (1 + DIFFERENT) * min(speeds)


def _resident(plan: Sequence[Step], part: Part, outcomes: Outcomes) -> list[int]:
    """Returns the tokens that plain llama.cpp generated with the part's model when the
    whole model was on the device; [] if unknown."""
    for step in plan:
        for other in step.parts:
            case = other.case
            if (
                other.model == part.model
                and case
                and case.system == "llama.cpp"
                and case.limit_bytes is None
            ):
                found = (
                    turn.get("values", {}).get("tokens", [])
                    for turn in turns_of(step, other, outcomes)
                )
                return max(found, key=len, default=[])
    return []


def _n_same(tokens: Sequence[int], others: Sequence[int]) -> int:
    return next(
        (
            i
            for i, pair in enumerate(zip(tokens, others, strict=False))
            if pair[0] != pair[1]
        ),
        len(tokens),
    )


def measured(
    plan: Sequence[Step], step: Step, part: Part, outcomes: Outcomes
) -> dict[str, list[float]]:
    """Returns {figure's name: its measured values, one per turn} of a part. STOP has
    one value for all turns."""
    found = dict[str, list[float]]()
    for outcome in turns_of(step, part, outcomes):
        for name, value in figures_of(part, outcome).items():
            found.setdefault(name, []).append(value)
    resident = _resident(plan, part, outcomes) if part.kind == "measure" else []
    for outcome in turns_of(step, part, outcomes):
        if resident and (tokens := outcome.get("values", {}).get("tokens")):
            found.setdefault(SAME, []).append(_n_same(tokens, resident))
    if (us := _stop_us(step, part, found, outcomes)) is not None:
        found[STOP] = [us]
    return found


def _stop_us(
    step: Step, part: Part, own: Mapping[str, list[float]], outcomes: Outcomes
) -> float | None:
    """Returns the figure STOP in microseconds: (time per token - BASE's time per token
    - copy time) / layers.

    Copy time is the time to copy a token's bytes at the speed COPIES. Returns None if
    the plan predicts no STOP for this part, or a speed or the number of layers is
    unknown.
    """
    base = next((other for other in step.parts if other.name == BASE), None)
    if STOP not in part.predicted or base is None or ANSWER not in own:
        return None
    speeds = [
        figures_of(base, turn).get(ANSWER) for turn in turns_of(step, base, outcomes)
    ]
    resident = [speed for speed in speeds if speed]
    gb_per_s = outcomes.get("facts/copies/1", {}).get("values", {}).get(COPIES)
    if not resident or not gb_per_s or not part.n_layer:
        return None
    bytes_us = statistics.median(own.get("MB a token", [0.0])) / gb_per_s * 1e3
    return (
        1e6 / statistics.median(own[ANSWER])
        - 1e6 / statistics.median(resident)
        - bytes_us
    ) / part.n_layer


def _megabytes(n_bytes: float | None) -> float | None:
    return None if n_bytes is None else n_bytes / 1e6


def table(plan: Sequence[Step], outcomes: Outcomes, is_rehearsal: bool = False) -> str:
    """Returns the facts about the machine, then the table. Parts without an outcome are
    shown as "not reached".

    is_rehearsal: True if the device is simulated. Predicted ranges are then printed,
    but not compared with the figures.
    """
    lines = [*_facts(outcomes), _line("what", "figure", "predicted", "measured", "")]
    for step in plan:
        lines += ["", f"{step.name}: {step.question}"]
        for part in step.parts:
            lines += _rows(plan, step, part, outcomes, is_rehearsal)
    return "\n".join(lines) + "\n"


def _rows(
    plan: Sequence[Step], step: Step, part: Part, outcomes: Outcomes, is_rehearsal: bool
) -> Iterator[str]:
    turns = turns_of(step, part, outcomes)
    if not turns:
        yield _line(part.name, "", "", "not reached", "")
        return
    found = measured(plan, step, part, outcomes)
    names = (
        [*part.predicted, *(name for name in found if name not in part.predicted)]
        if found
        else []
    )
    rows = [
        (name, _predicted(part, name), _measured(found.get(name, []))) for name in names
    ]
    for status in dict.fromkeys(
        str(turn["status"]) for turn in turns if turn["status"] != "done"
    ):
        reason = next(
            (turn.get("error", "") for turn in turns if turn["status"] == status), ""
        )
        rows.append((status, "", " ".join(reason.split())[-200:]))
    rows += [(note, "", "") for note in _planned(turns)]
    for i, row in enumerate(rows or [("done", "", "")]):
        verdict = (
            _verdict(part, row[0], found[row[0]], is_rehearsal)
            if row[0] in found
            else ""
        )
        yield _line("" if i else part.name, *row, verdict)


def _planned(turns: Sequence[Outcome]) -> Iterator[str]:
    """Yields one line with the placement that moegguf's planner chose, and the speeds
    that it predicted, from the first turn that recorded them."""
    for turn in turns:
        values = turn.get("values", {})
        if predicted := values.get("predicted"):
            speeds = (
                f"{kind} {values['predicted_prompts'][kind]:.0f} and {speed:.0f}"
                for kind, speed in predicted.items()
                if kind != "chosen"
            )
            yield (
                f"planner: {values['placement']} of these, prompt and answer, t/s:"
                f" {', '.join(speeds)}"
            )
            return


def _predicted(part: Part, name: str) -> str:
    if name not in part.predicted:
        return ""
    least, most = part.predicted[name]
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"


def _measured(values: Sequence[float]) -> str:
    if not values:
        return NONE
    middle = f"{statistics.median(values):.4g}"
    return (
        f"{middle} ({min(values):.4g} to {max(values):.4g})"
        if len(values) > 1
        else middle
    )


def _verdict(part: Part, name: str, values: Sequence[float], is_rehearsal: bool) -> str:
    if name not in part.predicted:
        return ""
    least, most = part.predicted[name]
    if is_rehearsal and least < most:
        return ""
    return "" if least <= statistics.median(values) <= most else "NOT AS PREDICTED"


def _line(*cells: str) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)]
    return "  ".join([*padded, *cells[len(WIDTHS) :]]).rstrip()


def _facts(outcomes: Outcomes) -> Iterator[str]:
    values: Mapping[str, Any] = outcomes.get("facts/the machine/1", {}).get(
        "values", {}
    )
    for name, value in values.items():
        yield f"{name}: {value}"
    yield ""
