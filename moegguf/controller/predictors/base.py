"""Base classes of predictors, what several of them share, and passes of several sequences: their forecast is the
probability that any of them uses an expert, 1 - prod(1 - p)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, Part, RoutingEvent
from moegguf.native.predictor import Array, NativePredictor


class Predictor(ABC):
    """Predicts routing of the pass in progress. The simplest implementation is `NoPrediction`.

    `needs_inputs`: events must carry the router's input vectors. `needs_tokens`: tokens must be announced. `reach`:
    the largest distance it can predict, in MoE layers. One object serves one model, one request after another; calls
    come from one thread, in the order announce, (observe, predict*)*. It must copy what it keeps of an event's arrays:
    they are reused.
    """

    name: ClassVar[str]
    needs_inputs: ClassVar[bool] = False
    needs_tokens: ClassVar[bool] = False

    def __init__(self, shape: MoeShape, reach: int) -> None:
        self.shape = shape
        self.reach = reach

    def announce(self, announcement: Announcement) -> None:  # noqa: B027 (optional)
        """Tokens are evaluated next. A new `sequence` is a new request."""

    def observe(self, event: RoutingEvent) -> None:  # noqa: B027 (optional)
        """A layer was routed."""

    @abstractmethod
    def predict(self, il: int, distance: int) -> Float32s | None:
        """Probabilities (n_expert,) in [0, 1] for layer `il`, `distance` MoE layers after the last one observed.

        Before any routing event of the pass, `distance` counts from before the first MoE layer (that layer is distance
        1). None without a prediction: out of reach, or not trained for it. Their order matters more than their scale.
        """

    def fork(self) -> Predictor | None:
        """The same predictor for another sequence: shares what was learned, and follows tokens of its own.

        None for one that takes passes of several sequences as they are.
        """
        return None

    def native(self) -> NativePredictor | None:
        """The same predictor as the store computes it; None where it cannot. The store then needs no controller."""
        return None


class NoPrediction(Predictor):
    """Never predicts: the default."""

    name: ClassVar[str] = "none"

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=0)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None."""
        return None


class StorePredictor(Predictor):
    """One that only the store computes. arrays: what it knows, as its file in `moegguf/native/predictors` says."""

    def __init__(
        self,
        name: str,
        shape: MoeShape,
        reach: int,
        arrays: Mapping[str, Array] | None = None,
        *,
        needs_inputs: bool = False,
        needs_tokens: bool = False,
    ) -> None:
        super().__init__(shape, reach)
        # ClassVars of others:
        self.name, self.needs_inputs, self.needs_tokens = name, needs_inputs, needs_tokens  # type: ignore[misc]
        self.arrays = arrays or {}

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None: the store predicts."""
        return None

    def native(self) -> NativePredictor:
        """Its name and arrays."""
        return NativePredictor(self.name, self.arrays)


MOST_SEQUENCES = 64  # of a pass that is predicted, and that are followed at once


class PerSequence(Predictor):
    """Follows each sequence with a predictor of its own (`Predictor.fork`), which sees what it would see alone.

    As long as one request comes after another, `alone` sees all of them. A pass of more than MOST_SEQUENCES has no
    prediction: it uses most experts. A sequence without a prediction adds nothing to the forecast.
    """

    def __init__(self, alone: Predictor) -> None:
        super().__init__(alone.shape, alone.reach)
        # ClassVars of each class, here those of what is wrapped:
        self.name = alone.name  # type: ignore[misc]
        self.needs_inputs, self.needs_tokens = alone.needs_inputs, alone.needs_tokens  # type: ignore[misc]
        self._alone = alone
        self._followers: dict[int, Predictor] = {}  # by sequence, in order of last use
        self._present: list[Predictor] = []
        self._announced: Announcement | None = None
        self._pass = -1

    def announce(self, announcement: Announcement) -> None:
        """Passes on what each sequence evaluates."""
        parts = announcement.parts()
        self._announced, self._pass = announcement, -1
        self._set_present(parts)
        for part, follower in zip(parts, self._present, strict=False):
            tokens = announcement.tokens[part.rows]
            follower.announce(Announcement(part.sequence, part.phase, tokens))

    def observe(self, event: RoutingEvent) -> None:
        """Passes on what was routed of each sequence."""
        parts = event.parts()
        if event.pass_ != self._pass:
            self._pass = event.pass_
            self._set_present(parts)
        for part in parts:
            follower = self._followers.get(part.sequence)
            if follower is not None:
                follower.observe(_event_of(event, part, self._announced))

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The probability that any sequence of this pass uses each expert."""
        found = [row for follower in self._present if (row := follower.predict(il, distance)) is not None]
        if len(found) < 2:
            return found[0] if found else None
        unused = np.prod([1 - np.clip(row, 0, 1) for row in found], axis=0, dtype=np.float32)
        return 1 - unused

    def native(self) -> NativePredictor | None:
        """The one wrapped; the store follows each sequence likewise, and asks eight of them at most."""
        return self._alone.native()

    def _set_present(self, parts: list[Part]) -> None:
        present = dict.fromkeys(part.sequence for part in parts)
        if len(present) > MOST_SEQUENCES:
            self._present = []
            return
        if len(present) == 1 and len(self._followers) <= 1:  # one after another
            self._followers = dict.fromkeys(present, next(iter(self._followers.values()), self._alone))
        for sequence in present:
            known = self._followers.pop(sequence) if sequence in self._followers else self._alone.fork()
            self._followers[sequence] = known or self._alone
        for sequence in list(self._followers)[: max(0, len(self._followers) - MOST_SEQUENCES)]:
            del self._followers[sequence]
        self._present = [self._followers[sequence] for sequence in present]


def _event_of(event: RoutingEvent, part: Part, announced: Announcement | None) -> RoutingEvent:
    """The event of one sequence, as if it were alone."""
    if event.sequences is None:
        return event
    rows, first = part.rows, event.first_token
    if first > 0 and announced is not None and announced.sequences is not None:
        first = int(np.count_nonzero(announced.sequences[:first] == part.sequence))
    return event._replace(
        sequence=part.sequence, phase=part.phase, first_token=first, expert_ids=event.expert_ids[rows],
        weights=None if event.weights is None else event.weights[rows],
        inputs=None if event.inputs is None else event.inputs[rows], sequences=None, phases=None,
    )  # fmt: skip


def per_sequence(predictor: Predictor) -> Predictor:
    """The predictor for passes of several sequences; itself where it takes them as they are."""
    return predictor if predictor.fork() is None else PerSequence(predictor)
