"""Controls for measurements of predictors: an oracle, which is always right about
passes of one token, and the router itself.

The accuracy of the router with its own input shows whether the events belong to the
model. Neither control is a real predictor, because the oracle reads the routing that is
to be predicted, and the router uses an input that is known too late.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Gating, Router, Routers
from moegguf.native.events import Announcement, Float32s, RoutingEvent
from moegguf.trace.trace import Trace

ORACLE = "oracle"


class Oracle(Predictor):
    """Reads the trace that is replayed, and predicts the recorded experts of the first
    token of the pass in progress.

    Probabilities are 0 and 1. The oracle finds the pass by counting tokens, not passes,
    because a replay may split a pass.
    """

    name: ClassVar[str] = ORACLE

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.shape, reach=trace.shape.n_moe_layer)
        self._expert_ids = trace.expert_ids
        # Index, in the trace, of the first token of the pass in progress.
        self._first = 0
        self._n_tokens = 0  # number of tokens routed so far in the pass in progress
        self._pass = -1

    def announce(self, announcement: Announcement) -> None:
        """Moves on to the first token of the next pass."""
        self._end_pass()

    def observe(self, event: RoutingEvent) -> None:
        """Counts the tokens of the pass in progress."""
        if event.pass_ != self._pass:
            self._end_pass()
            self._pass = event.pass_
        self._n_tokens = max(self._n_tokens, len(event.expert_ids))

    def _end_pass(self) -> None:
        self._first += self._n_tokens
        self._n_tokens = 0

    def predict(self, il: int, distance: int) -> Float32s | None:
        """Returns 1 for the experts that the pass's first token used in this layer, and
        0 for all others.

        The distance does not matter. Returns None after the end of the trace, and for a
        layer without experts.
        """
        row = self.shape.row_of.get(il)
        if row is None or self._first >= self._expert_ids.shape[1]:
            return None
        ids = self._expert_ids[row, self._first]
        probabilities = np.zeros(self.shape.n_expert, np.float32)
        probabilities[ids[ids >= 0]] = 1
        return probabilities


class FreshGate(Predictor):
    """A control, not a real predictor: the router applied to its own layer's input, at
    distance 0.

    The accuracy must be 100 %.
    """

    name: ClassVar[str] = "fresh-gate"

    needs_inputs: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, reach=0)
        self._routers = routers
        self._input: tuple[int, Float32s] | None = None

    def announce(self, announcement: Announcement) -> None:
        """Discards the router's input, because the next pass is beginning."""
        self._input = None

    def observe(self, event: RoutingEvent) -> None:
        """Discards the earlier input, and stores the router's new input if the event
        has only one token."""
        self._input = None
        if event.inputs is not None and event.inputs.shape == (1, self.shape.n_embd):
            self._input = event.il, event.inputs[0].copy()

    def predict(self, il: int, distance: int) -> Float32s | None:
        """Returns the router's `probabilities` at distance 0, for the layer of the last
        event.

        Returns None at any other distance, for any other layer, and if no input or no
        router is known.
        """
        if (
            distance != 0
            or self._input is None
            or self._input[0] != il
            or il not in self._routers.routers
        ):
            return None
        return probabilities(self._routers, il, self._input[1])


def probabilities(routers: Routers, il: int, inputs: Float32s) -> Float32s:
    """Returns a value in [0, 1] for each expert (n_expert,), from one router input
    (n_embd,).

    llama.cpp chooses the experts with the highest values. Experts of excluded groups
    have the value 0. Scores are shifted so that none is negative. An expert whose share
    of the sum is 1 / n_expert_used has the value 0.5.
    """
    router = routers.routers[il]
    scores = _scores(routers, router, inputs)
    lowest = float(scores.min(where=np.isfinite(scores), initial=0.0))
    shares = np.maximum(scores - lowest, 0.0)
    shares *= router.n_expert_used / max(float(shares.sum()), 1e-30)
    return shares / (1.0 + shares)


def _scores(routers: Routers, router: Router, inputs: Float32s) -> Float32s:
    """Returns the scores (n_expert,) that decide which experts the router chooses; -inf
    for experts of excluded groups."""
    logits = router.matrix @ inputs
    if router.logit_bias is not None:
        logits += router.logit_bias
    scores = _gated(routers.gating, logits)
    if router.choice_bias is not None:
        scores += router.choice_bias
    if routers.n_group > 1:
        groups = scores.reshape(routers.n_group, -1)
        best = np.sort(groups)[:, -2:].sum(axis=1)
        groups[np.argsort(-best, kind="stable")[routers.n_group_used :]] = -np.inf
    return scores


def _gated(gating: Gating, logits: Float32s) -> Float32s:
    if gating == Gating.SIGMOID:
        return (0.5 * (1.0 + np.tanh(0.5 * logits))).astype(np.float32)
    if gating == Gating.SQRT_SOFTPLUS:
        return np.sqrt(np.logaddexp(np.float32(0), logits))
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
