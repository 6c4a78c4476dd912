"""Base classes of predictors. In a pass of several sequences the forecast is the probability that any of them uses an
expert, 1 - prod(1 - p)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, RoutingEvent
from moegguf.native.predictor import Array, NativePredictor


class Predictor(ABC):
    """Predicts routing of the pass in progress. The simplest implementation is `NoPrediction`.

    `needs_inputs`: events must carry the router's input vectors. `reach`: the largest distance it can predict, in MoE
    layers. One object serves one model, one request after another; calls
    come from one thread, in the order announce, (observe, predict*)*. It must copy what it keeps of an event's arrays:
    they are reused.
    """

    name: ClassVar[str]
    needs_inputs: ClassVar[bool] = False

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

    def native(self) -> NativePredictor | None:
        """Returns this predictor in the store's form; None where the store cannot compute it. It
        then needs no controller."""
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
    """One that only the store computes, by `name`. arrays: what it knows, as its file in `moegguf/native/predictors`
    says. title: its name for users, where that is another one."""

    title = ""

    def __init__(
        self,
        name: str,
        shape: MoeShape,
        reach: int,
        arrays: Mapping[str, Array] | None = None,
        needs_inputs: bool = False,
    ) -> None:
        super().__init__(shape, reach)
        self.name, self.needs_inputs = name, needs_inputs  # type: ignore[misc]  # ClassVars of others
        self.arrays = arrays or {}

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None: the store predicts."""
        return None

    def native(self) -> NativePredictor:
        """Returns the predictor's name and arrays."""
        return NativePredictor(self.name, self.arrays)
