"""Steps that fit into calls of limited length: what a call does not get to, the next one does.

A step's outcome is kept in a file as soon as it is known; a step that has one is not run again. A step that fails has
none: it ends the call with its reason, and the next call tries it again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegguf.atomic_write import write_atomically

Outcome = Mapping[str, Any]
REFUSED = "refused"  # the key of an outcome that says why nothing can be measured


class UnfinishedError(Exception):
    """The time of this call is over; the step goes on from where it is when it runs again."""


class StepError(Exception):
    """The step failed, for this reason: nothing was learnt from it."""


def is_among(name: str, names: Sequence[str]) -> bool:
    """Returns whether a step is named, or lies below a name that ends in "/"."""
    return name in names or name.startswith(tuple(of for of in names if of.endswith("/")))


@dataclass(frozen=True)
class Step:
    """run(left_s) returns the outcome, or raises StepError. It is begun with at least `least_s` left."""

    name: str
    run: Callable[[float], Outcome]
    least_s: float


class State:
    """The outcomes so far, by the step's name, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[str, Outcome] = json.loads(path.read_text()) if path.exists() else {}

    def keep(self, name: str, outcome: Outcome) -> None:
        """Writes it down."""
        self.outcomes[name] = outcome
        self._write()

    def forget(self, names: Sequence[str]) -> None:
        """Lets these steps, or the steps below a name that ends in "/", run again."""
        for name in [name for name in self.outcomes if is_among(name, names)]:
            del self.outcomes[name]
        self._write()

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self.outcomes, indent=1).encode())


def run_steps(
    steps: Sequence[Step],
    state: State,
    limit_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Runs steps that have no outcome, in order, while there is time; returns whether all have one now.

    Raises StepError of the first that fails.
    """
    end = clock() + limit_s
    for step in steps:
        if step.name in state.outcomes:
            continue
        left_s = end - clock()
        if left_s < step.least_s:
            say(f"{step.name}: needs up to {step.least_s:.0f} s, {max(0, left_s):.0f} s are left; call again")
            return False
        say(step.name)
        start = clock()
        try:
            outcome = step.run(left_s)
        except UnfinishedError:
            say(f"{step.name}: not finished; call again")
            return False
        except StepError as error:
            raise StepError(f"{step.name}: {error}") from error
        state.keep(step.name, {**outcome, "seconds": round(clock() - start, 1)})
        if REFUSED in outcome:
            say(f"{step.name}: {outcome[REFUSED]}")
    return True
