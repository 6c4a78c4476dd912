"""Which of the running sequences compute in a step: all, those that ExpertFlow's token scheduler groups, or whichever
of both is faster. The loop (batching.py) asks before, and tells after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moegguf.engine.sequence_groups import NextToken, SequenceGroups
from moegguf.generate.answer import BatchedAnswer
from moegguf.settings import parse_choice

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

TRIAL_STEPS = 8  # of the schedule that is not in use; at half its speed they cost a hundredth of a period
LOST_STEPS = 2  # of them, when it takes more than LOST_RATIO times as long for a token: the trial ends
LOST_RATIO = 2
PERIOD_STEPS = 256  # between trials
MIN_GAIN = 0.03  # of the time of a token, twice in a row, to change


@dataclass(frozen=True)
class Step:
    """A step that was computed: the sequences that took part, their tokens together, and how long it took."""

    answers: tuple[BatchedAnswer, ...]
    n_tokens: int
    seconds: float


class Schedule(Protocol):
    """Chooses who computes. Both methods are called on the loop's thread, and must not take long."""

    def choose(self, running: Sequence[BatchedAnswer]) -> Sequence[BatchedAnswer]:
        """Those of `running` (never empty, oldest first) that compute in the next step, in the order in which prompts
        share the step's budget. Who is left out keeps its place in the KV cache. Where none is chosen, all compute."""

    def ran(self, step: Step) -> None:
        """A step was computed."""


class Fifo:
    """All of them, the oldest prompts first."""

    def choose(self, running: Sequence[BatchedAnswer]) -> Sequence[BatchedAnswer]:
        """All of `running`."""
        return running

    def ran(self, step: Step) -> None:
        """Nothing depends on it."""


class ExpertFlow:
    """One group of the sequences that decode computes (`SequenceGroups`); prompts take part in every step."""

    def __init__(self, groups: SequenceGroups) -> None:
        self._groups = groups

    def choose(self, running: Sequence[BatchedAnswer]) -> Sequence[BatchedAnswer]:
        """Those of `running` that compute next."""
        decoding = [answer for answer in running if answer.decodes]
        tokens = {answer.number: NextToken(answer.context[-1], len(answer.context)) for answer in decoding}
        group = set(self._groups.next_group(tokens))
        return [answer for answer in running if answer.number in group or answer.number not in tokens]

    def ran(self, step: Step) -> None:
        """Nothing depends on it."""

    def close(self) -> None:
        """Listens to the model no longer, until it is asked again."""
        self._groups.close()


class Auto:
    """First in, first out, or ExpertFlow, whichever is faster: every PERIOD_STEPS, TRIAL_STEPS by the other one.

    Compared is the time per token, of steps in which all sequences decode. The other is taken when it was faster by
    MIN_GAIN twice in a row. What is far slower is left after LOST_STEPS, so that trials cost less than 3 % up to an
    eighth of the speed.
    """

    def __init__(self, fifo: Schedule, grouped: ExpertFlow) -> None:
        self._fifo, self._grouped = fifo, grouped
        self._current: Schedule = fifo
        self._trying = False
        self._steps: list[tuple[float, int]] = []  # seconds and tokens, since the last change
        self._before_s = 0.0  # a token took, before the trial
        self._wins = 0

    @property
    def current(self) -> Schedule:
        """The schedule in use, or being tried."""
        return self._other() if self._trying else self._current

    def choose(self, running: Sequence[BatchedAnswer]) -> Sequence[BatchedAnswer]:
        """Those of `running` that compute next."""
        return self.current.choose(running)

    def ran(self, step: Step) -> None:
        """Counts the step, and begins or ends a trial."""
        if step.n_tokens != len(step.answers) or len(step.answers) == 0:
            return
        self._steps.append((step.seconds, step.n_tokens))
        n_steps = len(self._steps)
        is_lost = n_steps >= LOST_STEPS and _token_s(self._steps) > LOST_RATIO * self._before_s
        if self._trying and (n_steps == TRIAL_STEPS or is_lost):
            self._end_trial()
        elif not self._trying and n_steps == PERIOD_STEPS:
            self._before_s = _token_s(self._steps[-4 * TRIAL_STEPS :])
            self._begin(trying=True)

    def close(self) -> None:
        """Listens to the model no longer, until it is asked again."""
        self._grouped.close()

    def _other(self) -> Schedule:
        return self._fifo if self._current is self._grouped else self._grouped

    def _end_trial(self) -> None:
        faster = _token_s(self._steps) < (1 - MIN_GAIN) * self._before_s
        self._wins = self._wins + 1 if faster else 0
        if self._wins == 2:
            self._current, self._wins = self._other(), 0
        self._begin(trying=False)

    def _begin(self, *, trying: bool) -> None:
        self._trying = trying
        self._steps.clear()
        if self.current is not self._grouped:
            self._grouped.close()  # costs nothing meanwhile


def _token_s(steps: Sequence[tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in steps) / sum(tokens for _, tokens in steps)


def make_schedule(name: str, llm: Llama) -> Fifo | ExpertFlow | Auto:
    """The schedule of this name (`moegguf.options.SCHEDULES`) for a loop. Raises OptionError.

    A model whose experts are all in memory, or that has none, gains nothing by smaller steps: it is always "fifo".
    """
    if parse_choice("schedule", name) == "fifo" or llm.session is None or llm.plan.resident:
        return Fifo()
    grouped = ExpertFlow(SequenceGroups(llm.session))
    return grouped if name == "expertflow" else Auto(Fifo(), grouped)
