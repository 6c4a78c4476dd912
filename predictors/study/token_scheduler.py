"""ExpertFlow's token scheduler (sections 3.3 and 4.2): chooses the sequences of the
next step by predicted paths.

A path is the set of experts that a token uses in each layer. The paper's network
predicts paths (section 3.1). Cheaper predictions come from the token-id table or from
the sequence's most recent tokens.

Balanced K-means (section 3.3.3) splits all running sequences into groups with similar
predicted paths. Each step evaluates one group. When all groups have been evaluated, the
sequences are split again. The paper merges and re-indexes the KV cache. This is not
necessary here, because llama.cpp finds the cells of a sequence by its id.

With n sequences in groups of at most m, no sequence waits more than 2 * ceil(n / m) - 2
steps between two of its own steps. This longest wait occurs if a sequence's group is
the first in one round and the last in the next. A sequence that arrives during a round
joins the next round.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.predictors import make_predictor
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import (
    Announcement,
    Bools,
    Float32s,
    Int32s,
    Int64s,
    Phase,
    RoutingEvent,
)
from predictors.study.asked import asked

RECENT_HALF_LIFE_TOKENS = 4.0
PATHS = ("recent", "token-id", "routing-path")


class RoutingPaths:
    """Base class: follows sequences, and predicts the experts that each sequence uses
    next. Only one thread may call it at a time."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self._paths: dict[int, Float32s | None] = {}

    def observe(self, event: RoutingEvent) -> None:
        """Receives a layer's routing for one or several sequences. The base class
        ignores it."""

    def expect(self, sequence: int, tokens: Int32s) -> None:
        """Receives the tokens that a sequence evaluates in its next step. The caller
        passes each token only once. The base class ignores the tokens."""

    def path(self, sequence: int) -> Float32s | None:
        """Returns (n_moe_layer, n_expert): for each expert, the probability that the
        sequence uses it next. Returns None if the path is unknown."""
        return self._paths.get(sequence)

    def forget(self, sequence: int) -> None:
        """Discards what is stored about a sequence that has ended."""
        self._paths.pop(sequence, None)


class RecentPaths(RoutingPaths):
    """Predicts that a sequence will reuse the experts of its most recent tokens.

    The probability of an expert is a running mean of its uses. The weight of a token in
    this mean halves after `half_life_tokens` further tokens. If a pass contains several
    tokens of a sequence, only the last one is used.
    """

    name: ClassVar[str] = "recent"

    def __init__(
        self, shape: MoeShape, half_life_tokens: float = RECENT_HALF_LIFE_TOKENS
    ) -> None:
        super().__init__(shape)
        self._kept = np.float32(np.exp2(-1 / half_life_tokens))

    def observe(self, event: RoutingEvent) -> None:
        """Updates the path of each sequence in the event with the experts that the
        sequence's last token used."""
        row = self.shape.row_of.get(event.il)
        if row is None or event.expert_ids.max(initial=0) >= self.shape.n_expert:
            return
        for part in event.parts():
            ids = event.expert_ids[part.rows][-1]
            shares = self._paths.get(part.sequence)
            if shares is None:
                shares = np.zeros(
                    (self.shape.n_moe_layer, self.shape.n_expert), np.float32
                )
                self._paths[part.sequence] = shares
            shares[row] *= self._kept
            shares[row, ids[ids >= 0]] += 1 - self._kept


class PredictedPaths(RoutingPaths):
    """Predicts paths with a predictor that needs only tokens and predicts all layers at
    once."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor.shape)
        self._predictor = predictor
        self._followers: dict[int, Predictor] = {}

    def expect(self, sequence: int, tokens: Int32s) -> None:
        """Predicts the path of a sequence. The path is unknown if the predictor returns
        None for some layer."""
        follower = self._followers.get(sequence) or copy.deepcopy(self._predictor)
        self._followers[sequence] = follower
        follower.announce(Announcement(sequence, Phase.DECODE, tokens))
        predicted = (
            follower.predict(il, row + 1) for row, il in enumerate(self.shape.layers)
        )
        rows = [row for row in predicted if row is not None]
        self._paths[sequence] = (
            np.stack(rows) if len(rows) == self.shape.n_moe_layer else None
        )

    def forget(self, sequence: int) -> None:
        """Discards what is stored about a sequence that has ended."""
        super().forget(sequence)
        self._followers.pop(sequence, None)


def make_paths(name: str, shape: MoeShape, artifacts: Artifacts) -> RoutingPaths:
    """Returns a new `RoutingPaths` of the kind `name`, one of PATHS. Raises OptionError
    if the name is unknown or the predictor's file is missing."""
    if name == RecentPaths.name:
        return RecentPaths(shape)
    if name not in PATHS:
        raise OptionError(
            f"there are no routing paths {name!r}; known paths: {', '.join(PATHS)}."
        )
    return PredictedPaths(asked(partial(make_predictor, name, shape, artifacts)))


# Maximum number of K-means rounds of a split that starts from the medoids of the
# previous split.
ROUNDS = 2
MAX_ROUNDS = 10

_ONES = np.unpackbits(
    np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2), axis=1
).sum(axis=1, dtype=np.uint8)

Paths = Bools  # (n_tokens, n_moe_layer, n_expert)
Indices = Int64s


class TokenScheduler:
    """Forms groups of at most `group_size` sequences. The groups depend only on the
    earlier calls and the predicted paths."""

    def __init__(self, shape: MoeShape, paths: RoutingPaths, group_size: int) -> None:
        self.shape = shape
        self.paths = paths
        self.group_size = max(1, group_size)
        # Groups that have not yet been evaluated in this round.
        self._round: list[list[int]] = []
        # The most central sequence of each group of the last split.
        self._medoids: list[int] = []

    def next_group(self, running: Sequence[int]) -> list[int]:
        """Returns the sequences of `running` that the next step evaluates. `running`
        must not be empty."""
        present = set(running)
        self._round = [
            left
            for group in self._round
            if (left := [s for s in group if s in present])
        ]
        if not self._round:
            self._round = self._split(list(running))
        return self._round.pop(0)

    @property
    def following(self) -> list[int]:
        """The group to evaluate after the group last returned by `next_group`; empty if
        it depends on a new split."""
        return list(self._round[0]) if self._round else []

    def likely(self, sequences: Sequence[int]) -> Float32s | None:
        """Returns (n_moe_layer, n_expert): for each expert, the probability that at
        least one of these sequences uses it next.

        Sequences without a known path are left out. Returns None if no path is known.
        """
        known = [
            path
            for sequence in sequences
            if (path := self.paths.path(sequence)) is not None
        ]
        return (
            1 - np.prod([1 - path for path in known], axis=0, dtype=np.float32)
            if known
            else None
        )

    def _split(self, running: list[int]) -> list[list[int]]:
        """Splits sequences into groups with similar paths. If there is only one group
        or a path is unknown, splits them in the order of `running`."""
        n_groups = -(-len(running) // self.group_size)
        known = [
            path
            for sequence in running
            if (path := self.paths.path(sequence)) is not None
        ]
        if n_groups == 1 or len(known) < len(running):
            return [part.tolist() for part in np.array_split(running, n_groups)]
        similarity = similarities(statuses(np.stack(known), self.shape.n_expert_used))
        medoids = self._first_medoids(similarity, n_groups, running)
        groups = clustered(similarity, medoids, ROUNDS)
        self._medoids = [running[i] for i in _medoids(similarity, groups).tolist()]
        return [[running[i] for i in group.tolist()] for group in groups]

    def _first_medoids(
        self, similarity: Float32s, n_groups: int, running: list[int]
    ) -> Indices:
        """Returns the sequences from which the clustering starts, as indices in
        `running`. These are the medoids of the last split that are still running. If
        there are too few, adds the sequences that are least similar to the chosen
        ones."""
        place = {sequence: i for i, sequence in enumerate(running)}
        chosen = [place[sequence] for sequence in self._medoids if sequence in place][
            :n_groups
        ]
        while len(chosen) < n_groups:
            nearest = (
                similarity[:, chosen].max(axis=1) if chosen else similarity.sum(axis=1)
            )
            nearest[chosen] = np.inf
            chosen.append(int(np.argmin(nearest)))
        return np.array(chosen, np.int64)


def statuses(probabilities: Float32s, n_expert_used: int) -> Bools:
    """Returns True for active experts and False for idle experts, as ExpertFlow
    predicts them (section 3.1).

    probabilities (..., n_expert). The n_expert_used most probable experts of a layer
    are active, plus any that tie with the last of them. An expert with probability 0 is
    idle.
    """
    k = min(n_expert_used, probabilities.shape[-1])
    kth = np.partition(probabilities, -k, axis=-1)[..., -k, np.newaxis]
    return np.asarray((probabilities >= kth) & (probabilities > 0))


def similarities(paths: Paths) -> Float32s:
    """Returns 1 - Hamming distance / size of a path, for each pair of tokens:
    (n_tokens, n_tokens).

    This is the usual form of formula 6, which is missing from the available text. The
    function compares bits in the calling thread. A matrix product would start threads
    that compete with the threads that run the model.
    """
    flat = np.packbits(paths.reshape(len(paths), -1), axis=1)
    words = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2))).view(np.uint16)
    distances = np.array(
        [_ONES[words ^ row].sum(axis=1, dtype=np.int64) for row in words]
    )
    return (1 - distances / max(1, paths[0].size)).astype(np.float32)


def clustered(
    similarity: Float32s, centroids: Indices, most_rounds: int = MAX_ROUNDS
) -> list[Indices]:
    """Returns the ascending indices of each group's tokens. Group sizes differ by at
    most one.

    `centroids` are the tokens from which the groups start. In each round, a group's new
    centroid is its token that is most similar to the group's other tokens. The rounds
    end when no centroid changes, or after `most_rounds` rounds. similarity (n_tokens,
    n_tokens).
    """
    for _ in range(most_rounds):
        groups = _balanced(similarity[:, centroids])
        medoids = _medoids(similarity, groups)
        if np.array_equal(medoids, centroids):
            break
        centroids = medoids
    return groups


def _balanced(similarity: Float32s) -> list[Indices]:
    """Returns the ascending indices of each group's tokens. Tokens whose second-best
    group would be much worse choose first.

    similarity (n_tokens, n_groups): similarity of each token to each centroid.
    """
    n_tokens, n_groups = similarity.shape
    preferences = np.argsort(-similarity, axis=1, kind="stable")
    ordered = np.take_along_axis(similarity, preferences, axis=1)
    regret = ordered[:, 0] - ordered[:, min(1, n_groups - 1)]
    # `larger` groups have one more token than `least`.
    least, larger = divmod(n_tokens, n_groups)
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    for token in np.argsort(-regret, kind="stable").tolist():
        for group in preferences[token].tolist():
            full = len(groups[group]) - least
            if full < 0 or (full == 0 and larger > 0):
                larger -= full == 0
                groups[group].append(token)
                break
    return [np.sort(np.array(group, np.int64)) for group in groups]


def _medoids(similarity: Float32s, groups: list[Indices]) -> Indices:
    """Returns the token of each group that is most similar to the group's other
    tokens."""
    return np.array(
        [
            group[np.argmax(similarity[np.ix_(group, group)].sum(axis=1))]
            for group in groups
        ],
        np.int64,
    )
