"""Runs ExpertFlow's token scheduler on a live model: while one group of sequences is
evaluated, fetches the experts for the next group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.shape import MoeShape
from moegguf.engine.llama import Llama
from moegguf.engine.session import RoutingListener, Session
from moegguf.errors import OptionError
from moegguf.generate.kv_sequences import Schedule, Step
from moegguf.generate.sequence import Sequence
from moegguf.native.events import Bools, RoutingEvent
from moegguf.native.store import ListenOptions
from predictors.study.token_scheduler import (
    RecentPaths,
    RoutingPaths,
    TokenScheduler,
    make_paths,
    statuses,
)

# The paper's dual batch: while one group is evaluated, the experts of the other group
# are fetched.
N_GROUPS = 2


class NextToken(NamedTuple):
    """The token that a sequence evaluates next, and its position."""

    token: int
    position: int


class SequenceGroups(RoutingListener):
    """Divides the sequences into two groups with similar predicted paths, and evaluates
    the groups in turn.

    No sequence waits for more than 2 * N_GROUPS - 2 steps.

    prefetch: True: while a group is evaluated, the store fetches the experts that the
    following group will probably use. The experts of a layer are requested only at this
    layer's routing event. An earlier request could evict experts of the group being
    evaluated, and would be dropped at the layer's routing event.

    The object listens to the store from the first `next_group` until `close`. Calling
    `next_group` after that makes it listen again.
    """

    listen_options = ListenOptions()

    def __init__(
        self, session: Session, paths: RoutingPaths | None = None, prefetch: bool = True
    ) -> None:
        self._session = session
        self._shape = MoeShape.of(session.layout)
        self._paths = paths or best_paths(session)
        self._scheduler = TokenScheduler(self._shape, self._paths, 1)
        # Guards the paths and _following, because events arrive on another thread.
        self._lock = threading.Lock()
        # {sequence: position of the token from which its path was predicted}.
        self._positions: dict[int, int] = {}
        self._prefetch = prefetch
        # (n_moe_layer, n_expert): experts that the following group will probably use;
        # None: nothing is prefetched
        self._following: Bools | None = None
        self._listening = False

    def next_group(self, sequences: Mapping[int, NextToken]) -> list[int]:
        """Returns the numbers of the sequences to evaluate in the next step; [] if
        `sequences` is empty."""
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
        """Updates the paths with a layer's routing. Then prefetches the experts of this
        layer that the following group will probably use."""
        with self._lock:
            self._paths.observe(event)
            following = self._following
        row = self._shape.row_of.get(event.il)
        if following is not None and row is not None:
            experts = np.flatnonzero(following[row]).astype(np.int32)
            self._session.store.prefetch(
                np.full(len(experts), event.il, np.int32), experts
            )

    def close(self) -> None:
        """Stops listening to the store. A second call has no effect."""
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

    def _predicted(self, group: list[int]) -> Bools | None:
        """Returns (n_moe_layer, n_expert): True for the experts that a group will use
        with a probability of at least 0.5.

        In each layer, only the n_expert_used * len(group) most probable experts can be
        True, plus any that tie with the last of them. Returns None if prefetching is
        off or no path is known.
        """
        likely = self._scheduler.likely(group) if self._prefetch else None
        if likely is None:
            return None
        return statuses(likely[np.newaxis], self._shape.n_expert_used * len(group))[
            0
        ] & (likely >= 0.5)


class ExpertFlow:
    """A schedule for `Engine`. Each step evaluates all prompts, and the decoding
    sequences of one group of `SequenceGroups`.
    """

    @classmethod
    def of(cls, llm: Llama) -> Schedule | None:
        """Returns the schedule for a model. Returns None if the model has no expert
        store or all of its experts are in memory, because smaller steps then save
        nothing."""
        return (
            None
            if llm.session is None or llm.plan.resident
            else cls(SequenceGroups(llm.session))
        )

    def __init__(self, groups: SequenceGroups) -> None:
        self._groups = groups

    def choose(self, running: tuple[Sequence, ...]) -> Iterable[Sequence]:
        """Returns the sequences that the next step evaluates: the next group of
        decoding sequences, and all sequences that are not decoding yet.
        """
        decoding = [answer for answer in running if answer.decodes]
        tokens = {
            answer.number: NextToken(answer.context[-1], len(answer.context))
            for answer in decoding
        }
        group = set(self._groups.next_group(tokens))
        return [
            answer
            for answer in running
            if answer.number in group or answer.number not in tokens
        ]

    def ran(self, step: Step) -> None:
        """Does nothing, because the schedule does not depend on finished steps."""

    def close(self) -> None:
        """Stops listening to the model, until the next `choose`."""
        self._groups.close()


def best_paths(session: Session) -> RoutingPaths:
    """Returns paths predicted from token ids if the model's token table exists.
    Otherwise returns paths predicted from each sequence's most recent tokens."""
    shape = MoeShape.of(session.layout)
    try:
        return make_paths("token-id", shape, Artifacts(session.layout))
    except OptionError:
        return RecentPaths(shape)
