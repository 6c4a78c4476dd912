"""What a predictor is. It hears announcements and gates, and says which experts a later layer of this pass will use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Float32s, RoutingEvent


class Predictor(ABC):
    """Predicts routing of the pass in progress. The simplest implementation is `NoPrediction`.

    `needs_inputs`: gates must carry the router's input vectors. `needs_tokens`: tokens must be announced. `reach`:
    how many MoE layers ahead it can look. One object serves one model, one request after another; calls come from one
    thread, in the order announce, (observe, predict*)*. It must not keep the arrays of a gate: they may be reused.
    """

    name: ClassVar[str]
    needs_inputs: ClassVar[bool] = False
    needs_tokens: ClassVar[bool] = False

    def __init__(self, shape: MoeShape, reach: int) -> None:
        self.shape = shape
        self.reach = reach

    def announce(self, announcement: Announcement) -> None:  # noqa: B027 (nothing to do is a fine answer)
        """Tokens are about to be evaluated. A new `sequence` is a new request."""

    def observe(self, event: RoutingEvent) -> None:  # noqa: B027
        """A layer's routing has become known."""

    @abstractmethod
    def predict(self, il: int, distance: int) -> Float32s | None:
        """Likelihoods (n_expert,) in [0, 1] for layer `il`, `distance` MoE layers after the last one observed.

        Before any gate of the pass, `distance` counts from just before the first MoE layer (that layer is distance 1).
        None when it has nothing to say: out of reach, or not trained for this. The order matters more than the scale.
        """


class NoPrediction(Predictor):
    """Says nothing. What runs when no predictor is chosen."""

    name: ClassVar[str] = "none"

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape, reach=0)

    def predict(self, il: int, distance: int) -> Float32s | None:
        return None
