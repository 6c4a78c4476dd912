"""ExpertFlow's token scheduler (sections 3.3 and 4.2): which of the running sequences compute in the next step.

All running sequences are split into groups of similar predicted paths, and each step computes one group; when all have
computed, they are split anew. KV stays where it is, by sequence id: that is the paper's merge and re-index.

With n sequences in groups of at most m no sequence waits more than 2 * ceil(n / m) - 2 steps between two of its own: it
may compute first in one round and last in the next. Those that arrive within a round join the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moegguf.controller.grouping import Indices, clustered, similarities
from moegguf.controller.routing_paths import RoutingPaths
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Float32s

ROUNDS = 2  # of K-means each time: it goes on from the last round's groups


class TokenScheduler:
    """Groups of at most `group_size` sequences. Deterministic, from what it was asked and what the paths predict."""

    def __init__(self, shape: MoeShape, paths: RoutingPaths, group_size: int) -> None:
        self.shape = shape
        self.paths = paths
        self.group_size = max(1, group_size)
        self._round: list[list[int]] = []  # groups that have not computed in this round
        self._medoids: list[int] = []  # a sequence of each group of the last round

    def next_group(self, running: Sequence[int]) -> list[int]:
        """The sequences that compute now, some of `running` (which is not empty)."""
        present = set(running)
        self._round = [left for group in self._round if (left := [s for s in group if s in present])]
        if not self._round:
            self._round = self._split(list(running))
        return self._round.pop(0)

    @property
    def following(self) -> list[int]:
        """The group that computes next, if it is known yet: what may be fetched meanwhile."""
        return list(self._round[0]) if self._round else []

    def likely(self, sequences: Sequence[int]) -> Float32s | None:
        """(n_moe_layer, n_expert): the probability that any of these sequences uses an expert next; None: unknown."""
        known = [path for sequence in sequences if (path := self.paths.path(sequence)) is not None]
        return 1 - np.prod([1 - path for path in known], axis=0, dtype=np.float32) if known else None

    def _split(self, running: list[int]) -> list[list[int]]:
        """Groups by similarity; of sequences that nothing is known about, and of one group, in order of arrival."""
        n_groups = -(-len(running) // self.group_size)
        known = [path for sequence in running if (path := self.paths.path(sequence)) is not None]
        if n_groups == 1 or len(known) < len(running):
            return [part.tolist() for part in np.array_split(running, n_groups)]
        similarity = similarities(statuses(np.stack(known), self.shape.n_expert_used))
        medoids = self._first_medoids(similarity, n_groups, running)
        groups = clustered(similarity, medoids, ROUNDS)
        self._medoids = [running[_central(similarity, group)] for group in groups]
        return [[running[i] for i in group.tolist()] for group in groups]

    def _first_medoids(self, similarity: Float32s, n_groups: int, running: list[int]) -> Indices:
        """Those of the last round that still run; the others as far as can be from all before."""
        place = {sequence: i for i, sequence in enumerate(running)}
        chosen = [place[sequence] for sequence in self._medoids if sequence in place][:n_groups]
        while len(chosen) < n_groups:
            nearest = similarity[:, chosen].max(axis=1) if chosen else similarity.sum(axis=1)
            nearest[chosen] = np.inf
            chosen.append(int(np.argmin(nearest)))
        return np.array(chosen, np.int64)


def statuses(paths: Float32s, n_expert_used: int) -> npt.NDArray[np.bool_]:
    """Paths (n, n_moe_layer, n_expert) as ExpertFlow predicts them (section 3.1): of each layer the n_expert_used
    likeliest experts are active, the others idle.
    """
    k = min(n_expert_used, paths.shape[2])
    kth = np.partition(paths, -k, axis=2)[:, :, -k, np.newaxis]
    return (paths >= kth) & (paths > 0)


def _central(similarity: Float32s, group: Indices) -> int:
    return int(group[np.argmax(similarity[np.ix_(group, group)].sum(axis=1))])
