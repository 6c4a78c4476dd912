"""ExpertFlow's token scheduler on a running model: while a group of sequences computes, the next one's experts come."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.llama import Llama
from moegguf.engine.session import RoutingListener, Session
from moegguf.errors import OptionError
from moegguf.generate.kv_sequences import Schedule, Step
from moegguf.generate.sequence import Sequence
from moegguf.native.events import RoutingEvent
from moegguf.native.store import ListenOptions
from predictors.study.token_scheduler import RecentPaths, RoutingPaths, TokenScheduler, make_paths, statuses

N_GROUPS = 2  # the paper's dual batch: while one computes, the other's experts are fetched


class NextToken(NamedTuple):
    """The token that a sequence evaluates next, and its position."""

    token: int
    position: int


class SequenceGroups(RoutingListener):
    """Half of the sequences at a time, those with similar predicted paths, then the other half. None waits for more
    than 2 * N_GROUPS - 2 steps.

    prefetch: while a group computes, what the following one is predicted to use is fetched, layer after layer, once the
    layer was computed: before that, experts of its own would have to go, and a routing event drops what is requested
    for its layer. It listens to the store from the first `next_group` until `close`, which may be followed by another.
    """

    listen_options = ListenOptions()

    def __init__(self, session: Session, paths: RoutingPaths | None = None, prefetch: bool = True) -> None:
        self._session = session
        self._shape = MoeShape.of(session.layout)
        self._paths = paths or best_paths(session)
        self._scheduler = TokenScheduler(self._shape, self._paths, 1)
        self._lock = threading.Lock()  # of the paths: events come on another thread
        self._positions: dict[int, int] = {}  # by sequence, of the token that its path was last predicted from
        self._prefetch = prefetch
        self._following: npt.NDArray[np.bool_] | None = None  # what the following group is predicted to use
        self._listening = False

    def next_group(self, sequences: Mapping[int, NextToken]) -> list[int]:
        """Those of `sequences` that compute now."""
        if not self._listening:
            self._listening = True
            self._session.listeners.add(self)
        with self._lock:
            self._expect(sequences)
            if not sequences:
                self._following = None
                return []
            self._scheduler.group_size = -(-len(sequences) // N_GROUPS)
            group = self._scheduler.next_group(list(sequences))
            self._following = self._predicted(self._scheduler.following)
            return group

    def observe(self, event: RoutingEvent) -> None:
        """Follows the sequences, and requests what is needed next of a layer that was computed."""
        with self._lock:
            self._paths.observe(event)
            following = self._following
        row = self._shape.row_of.get(event.il)
        if following is not None and row is not None:
            experts = np.flatnonzero(following[row]).astype(np.int32)
            self._session.store.prefetch(np.full(len(experts), event.il, np.int32), experts)

    def close(self) -> None:
        """Listens no longer. Twice is harmless."""
        if self._listening:
            self._listening = False
            self._session.listeners.remove(self)

    def _expect(self, sequences: Mapping[int, NextToken]) -> None:
        for ended in self._positions.keys() - sequences.keys():
            self._paths.forget(ended)
            del self._positions[ended]
        for sequence, (token, position) in sequences.items():
            if self._positions.get(sequence) != position:
                self._positions[sequence] = position
                self._paths.expect(sequence, np.array([token], np.int32))

    def _predicted(self, group: list[int]) -> npt.NDArray[np.bool_] | None:
        """(n_moe_layer, n_expert): what the group is more likely than not to use, at most as much as it can."""
        likely = self._scheduler.likely(group) if self._prefetch else None
        if likely is None:
            return None
        return statuses(likely[np.newaxis], self._shape.n_expert_used * len(group))[0] & (likely >= 0.5)


class ExpertFlow:
    """A schedule for `Engine`: one group of the sequences that decode computes (`SequenceGroups`); prompts take part in
    every step."""

    @classmethod
    def of(cls, llm: Llama) -> Schedule | None:
        """The schedule for a model; None for one whose experts are all in memory, which gains nothing by smaller
        steps."""
        return None if llm.session is None or llm.plan.resident else cls(SequenceGroups(llm.session))

    def __init__(self, groups: SequenceGroups) -> None:
        self._groups = groups

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
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


def best_paths(session: Session) -> RoutingPaths:
    """From the token ids where the model's table is known, else from each sequence's last tokens."""
    shape = MoeShape.of(session.layout)
    try:
        return make_paths("token-id", shape, Artifacts(session.layout))
    except OptionError:
        return RecentPaths(shape)
