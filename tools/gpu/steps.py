"""Runs a list of steps over several calls of a program. Each call is limited in time.

The outcome of a step is saved in a file as soon as it is known, and a step with an
outcome is not run again. A step that raises an error has no outcome: the call ends, and
the next call runs the step again.
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
# Key in the outcome of a step that could not be measured; the value is the reason.
REFUSED = "refused"


class UnfinishedError(Exception):
    """The step ran out of time. The step's next run continues where this run
    stopped."""


class StepError(Exception):
    """The step failed and has no outcome. The error's message is the reason."""


def is_among(name: str, names: Sequence[str]) -> bool:
    """Returns True if `names` contains the step's name, or a prefix of it that ends in
    "/"."""
    return name in names or name.startswith(
        tuple(of for of in names if of.endswith("/"))
    )


@dataclass(frozen=True)
class Step:
    """A step: `run` is called with the remaining seconds, and returns the outcome or
    raises StepError or UnfinishedError.

    The step begins only if at least `least_s` seconds remain.
    """

    name: str
    run: Callable[[float], Outcome]
    least_s: float


class State:
    """The outcomes so far by step name, saved in a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[str, Outcome] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    def keep(self, name: str, outcome: Outcome) -> None:
        """Adds the outcome of a step and saves the file."""
        self.outcomes[name] = outcome
        self._write()

    def forget(self, names: Sequence[str]) -> None:
        """Deletes the outcomes of these steps, so that they run again. "model/" stands
        for all steps whose names begin with it."""
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
    """Runs the steps that have no outcome, in order, within `limit_s`. Returns True if
    all steps then have an outcome.

    Raises StepError if a step fails.
    """
    end = clock() + limit_s
    for step in steps:
        if step.name in state.outcomes:
            continue
        left_s = end - clock()
        if left_s < step.least_s:
            say(
                f"{step.name}: needs up to {step.least_s:.0f} s, {max(0, left_s):.0f} s are left; call again"
            )
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
