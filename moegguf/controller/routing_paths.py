"""What each of several sequences will use next: its predicted routing path, by name, for the token scheduler.

ExpertFlow predicts paths with a network (section 3.1); the token-id table and the sequence's own last tokens are
cheaper. A predictor of one sequence is `Predictor.fork`ed for each.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.predictors import make_predictor
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import Announcement, Float32s, Int32s, Phase, RoutingEvent

RECENT_HALF_LIFE_TOKENS = 4.0
PATHS = ("recent", "token-id", "routing-path")


class RoutingPaths:
    """Follows sequences, and predicts what each of them uses next. Calls come from one thread at a time."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self._paths: dict[int, Float32s | None] = {}

    def observe(self, event: RoutingEvent) -> None:
        """A layer was routed, of one sequence or several."""

    def expect(self, sequence: int, tokens: Int32s) -> None:
        """These tokens of a sequence are evaluated next, whenever that is; once for each of its tokens."""

    def path(self, sequence: int) -> Float32s | None:
        """(n_moe_layer, n_expert): the probability that the sequence uses an expert next; None: unknown."""
        return self._paths.get(sequence)

    def forget(self, sequence: int) -> None:
        """The sequence has ended."""
        self._paths.pop(sequence, None)


class RecentPaths(RoutingPaths):
    """A sequence goes on as it did: how often its last tokens used an expert, each half as much after
    RECENT_HALF_LIFE_TOKENS.
    """

    name: ClassVar[str] = "recent"

    def __init__(self, shape: MoeShape, half_life_tokens: float = RECENT_HALF_LIFE_TOKENS) -> None:
        super().__init__(shape)
        self._kept = np.float32(np.exp2(-1 / half_life_tokens))

    def observe(self, event: RoutingEvent) -> None:
        """Counts the last token of each sequence that decodes."""
        row = self.shape.row_of.get(event.il)
        if row is None or event.expert_ids.max(initial=0) >= self.shape.n_expert:
            return
        for part in event.parts():
            ids = event.expert_ids[part.rows][-1]
            shares = self._paths.get(part.sequence)
            if shares is None:
                shares = np.zeros((len(self.shape.layers), self.shape.n_expert), np.float32)
                self._paths[part.sequence] = shares
            shares[row] *= self._kept
            shares[row, ids[ids >= 0]] += 1 - self._kept


class PredictedPaths(RoutingPaths):
    """Paths from the tokens themselves, by a predictor that needs nothing else and knows all layers at once."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor.shape)
        self._predictor = predictor
        self._followers: dict[int, Predictor] = {}

    def expect(self, sequence: int, tokens: Int32s) -> None:
        """Predicts; the path is unknown where the predictor has no answer for a layer."""
        follower = self._followers.get(sequence) or self._predictor.fork() or self._predictor
        self._followers[sequence] = follower
        follower.announce(Announcement(0, sequence, Phase.DECODE, tokens))
        predicted = (follower.predict(il, row + 1) for row, il in enumerate(self.shape.layers))
        rows = [row for row in predicted if row is not None]
        self._paths[sequence] = np.stack(rows) if len(rows) == len(self.shape.layers) else None

    def forget(self, sequence: int) -> None:
        """The sequence has ended."""
        super().forget(sequence)
        self._followers.pop(sequence, None)


def make_paths(name: str, shape: MoeShape, artifacts: Artifacts) -> RoutingPaths:
    """The predicted paths of this name (`PATHS`). Raises OptionError for an unknown name, or without a trained file."""
    if name == RecentPaths.name:
        return RecentPaths(shape)
    if name not in PATHS:
        raise OptionError(f"there are no routing paths {name!r}; known are {', '.join(PATHS)}.")
    return PredictedPaths(make_predictor(name, shape, artifacts))
