"""Base classes of predictors, and what several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, Int32s, RoutingEvent
from moegguf.native.predictor import NativePredictor


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

    def release(self) -> None:  # noqa: B027
        """The store predicts from now on: memory that only `predict` needs may go, after which that returns None."""


class NoPrediction(Predictor):
    """Never predicts: the default."""

    name: ClassVar[str] = "none"

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=0)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None."""
        return None


def single_choice(shape: MoeShape, event: RoutingEvent) -> Int32s | None:
    """The experts (n_expert_used,) of an event of one token; None for several tokens, or ids outside the shape."""
    if event.il not in shape.row_of or event.expert_ids.shape[0] != 1:
        return None
    ids = event.expert_ids[0]
    known = ids.size and ids.min() >= 0 and ids.max() < shape.n_expert
    return ids if known else None
