"""Formats the trial's results as a Markdown table.

Each row shows the fastest variant of a system (a way to run llama.cpp or moegguf) for
one model and memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.gpu.rig import ALL_ON_CPU, NO_LIMIT, RESIDENT, RESIDENT_STORE, SOME_ON_CPU
from tools.gpu.steps import REFUSED

HEAD = (
    "| model | limit | system | prompt t/s | first 64 t/s | decode t/s | of the best -ncmoe | of the resident store |"
    " predicted t/s | hits | MB/token |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
NONE = "–"


@dataclass(frozen=True)
class Row:
    """The result of a system's fastest variant for one model and limit. If the result
    contains the key REFUSED, nothing was measured."""

    model: str
    limit: str
    system: str
    result: Mapping[str, Any]

    @property
    def speed(self) -> float:
        """Returns the speed of steady decoding in tokens per second, or 0 if it was not
        measured."""
        return float(self.result.get("steady_tokens_per_s", 0.0))


def rows(outcomes: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Returns a row for the fastest variant of each model, limit and system.

    Outcomes of measurements are named measure/model/limit/system/variant.
    """
    best: dict[tuple[str, str, str], Row] = {}
    for name, result in outcomes.items():
        kind, _, rest = name.partition("/")
        if kind == "measure":
            model, limit, system, _ = rest.split("/", 3)
            row = Row(model, limit, system, result)
            key = row.model, row.limit, row.system
            if key not in best or row.speed > best[key].speed:
                best[key] = row
    return list(best.values())


def table(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table, then facts about the machine, summaries of the tests, and the
    reasons for missing rows."""
    found = rows(outcomes)
    by_place = {(row.model, row.limit, row.system): row for row in found}
    lines = [HEAD]
    notes = []
    for row in found:
        if REFUSED in row.result:
            notes.append(
                f"- {row.model}, {row.limit}, {row.system}: {row.result[REFUSED]}"
            )
            continue
        upstream = by_place.get((row.model, row.limit, SOME_ON_CPU))
        resident = by_place.get((row.model, NO_LIMIT, RESIDENT_STORE))
        lines.append(_line(row, upstream, resident, _prediction(found, row)))
    return (
        "\n".join(
            [
                *lines,
                *_facts(outcomes),
                *(["", "Not measured:", *notes] if notes else []),
            ]
        )
        + "\n"
    )


def _ratio(row: Row, other: Row | None) -> str:
    """Returns the row's speed divided by the speed of `other`, as text; NONE if `other`
    is missing, has no speed or is this row."""
    return (
        f"{row.speed / other.speed:.2f}x"
        if other and other.speed and other is not row
        else NONE
    )


def _line(
    row: Row, upstream: Row | None, resident: Row | None, predicted: float | None
) -> str:
    steady = (
        row.result.get("steady", {}).get("VRAM")
        or row.result.get("steady", {}).get("RAM")
        or {}
    )
    n_on_cpu = row.result.get("n_cpu_moe")
    system = f"{row.system} {n_on_cpu}" if row.system == SOME_ON_CPU else row.system
    hit_rate = steady.get("hit_rate")
    moved = steady.get("bytes_per_token")
    cells = [
        row.model, row.limit, system,
        *(f"{row.result[f'{part}_tokens_per_s']:.1f}" for part in ("prompt", "first", "steady")),
        _ratio(row, upstream),
        _ratio(row, resident),
        f"{predicted:.1f}" if predicted else NONE,
        f"{hit_rate:.1%}" if hit_rate is not None else NONE,
        f"{moved / 1e6:.1f}" if moved is not None else NONE,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _prediction(found: Sequence[Row], row: Row) -> float | None:
    """Returns the tokens per second that moegguf's planner predicted for the row, or
    None.

    For a llama.cpp row, the prediction is taken from a moegguf row of the same model.
    Both rows have the same limit, or the llama.cpp row has no limit.
    """
    if own := row.result.get("predicted"):
        return float(own["chosen"])
    kind = {RESIDENT: "resident", ALL_ON_CPU: "cpu", SOME_ON_CPU: "layers"}.get(
        row.system
    )
    same_place = [
        other
        for other in found
        if other.model == row.model and row.limit in (other.limit, NO_LIMIT)
    ]
    return next(
        (
            of[kind]
            for other in same_place
            if (of := other.result.get("predicted")) and kind in of
        ),
        None,
    )


def _facts(outcomes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields lines with the facts about the machine and the summaries of the identity
    tests."""
    facts = outcomes.get("facts", {})
    if facts:
        yield ""
        yield "; ".join(
            f"{name}: {value}" for name, value in facts.items() if name != "seconds"
        )
    for name, outcome in outcomes.items():
        if name.startswith("identity/"):
            yield ""
            yield f"{name}: {outcome['summary']}"
