"""Base classes for predictors. In a pass with several sequences, the store's forecast
for an expert is the probability that at least one sequence uses the expert: 1 - prod(1
- p). Here, p is the probability for one sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, RoutingEvent
from moegguf.native.predictor import Array, NativePredictor


class Predictor(ABC):
    """Predicts the routing of the pass in progress. `NoPrediction` is the simplest
    implementation.

    One object serves one model and all of its requests. The methods are called by one
    thread at a time: `announce` before the passes of the announced tokens, and
    `observe` at each routing event. `predict` may follow each of these calls any number
    of times. No method is called while predictions have no use, for example while all
    experts have slots. A predictor must not change the arrays of an event.
    """

    name: ClassVar[str]
    # True: routing events must carry the router's input vectors.
    needs_inputs: ClassVar[bool] = False

    def __init__(self, shape: MoeShape, reach: int) -> None:
        self.shape = shape
        # Longest distance at which a layer can be predicted, counted in layers with
        # experts.
        self.reach = reach

    def announce(self, announcement: Announcement) -> None:  # noqa: B027 (optional)
        """Receives the tokens that are evaluated next. A new sequence number marks a
        new request."""

    def observe(self, event: RoutingEvent) -> None:  # noqa: B027 (optional)
        """Receives the routing event of one layer."""

    @abstractmethod
    def predict(self, il: int, distance: int) -> Float32s | None:
        """Returns probabilities (n_expert,) in [0, 1] for layer `il`, which comes
        `distance` layers with experts after the last observed layer.

        Before any routing event of the pass, the first layer with experts has distance
        1. Returns None for a layer that cannot be predicted now. The ranking of the
        probabilities matters more than their values.
        """

    def native(self) -> NativePredictor | None:
        """Returns the name and arrays from which the store computes this predictor.
        Returns None if the store cannot compute it."""
        return None


class NoPrediction(Predictor):
    """A predictor that never predicts."""

    name: ClassVar[str] = "none"

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=0)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """Returns None."""
        return None


class StorePredictor(Predictor):
    """A predictor that only the store can compute. The store finds its code by
    `name`."""

    title = ""  # name that users see; "": `name` is shown

    def __init__(
        self,
        name: str,
        shape: MoeShape,
        reach: int,
        arrays: Mapping[str, Array] | None = None,
        needs_inputs: bool = False,
    ) -> None:
        super().__init__(shape, reach)
        self.name, self.needs_inputs = name, needs_inputs  # type: ignore[misc]  # ClassVars in other classes
        # Arrays for the store; the predictor's file in moegguf/native/predictors
        # documents them
        self.arrays = arrays or {}

    def predict(self, il: int, distance: int) -> Float32s | None:
        """Returns None, because the store predicts."""
        return None

    def native(self) -> NativePredictor:
        """Returns the predictor's name and arrays, from which the store predicts."""
        return NativePredictor(self.name, self.arrays)
