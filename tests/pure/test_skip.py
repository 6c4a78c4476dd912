"""Skip prediction with real routers, and the fresh gate, whose accuracy must be 1."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from oracles import accuracy
from traces import hidden_routers, random_trace

from moegguf.controller.predictors.router_inputs import Skip
from moegguf.controller.shape import MoeShape
from moegguf.gguf.routers import Gating, Router, Routers
from moegguf.native.events import Announcement, Float32s, Phase, RoutingEvent
from predictors.study.fresh_gate import FreshGate

SHAPE = MoeShape(n_layer=4, n_expert=4, n_expert_used=1, layers=(1, 3), n_embd=4, n_vocab=8)


def routers(shape: MoeShape, matrices: Float32s) -> Routers:
    rows = zip(shape.layers, matrices, strict=True)
    return Routers(Gating.SOFTMAX, {il: Router(shape.n_expert_used, matrix) for il, matrix in rows})


def routed(il: int, inputs: list[list[float]] | None) -> RoutingEvent:
    vectors = None if inputs is None else np.array(inputs, np.float32)
    n_tokens = 1 if inputs is None else len(inputs)
    return RoutingEvent(0, 0, 0, 0, Phase.DECODE, 0, il, np.zeros((n_tokens, 1), np.int32), None, vectors)


def test_the_input_goes_through_the_later_layers_router() -> None:
    identity = np.eye(4, dtype=np.float32)
    skip = Skip(SHAPE, routers(SHAPE, np.stack([identity, identity[::-1]])))
    skip.observe(routed(1, [[0, 0, 5, 0]]))
    probabilities = skip.predict(3, 1)
    assert probabilities is not None and probabilities.argmax() == 1  # turned round by layer 3's matrix
    assert skip.predict(1, 0) is None
    assert skip.predict(3, 2) is None
    assert skip.predict(0, 1) is None


def test_the_fresh_gate_predicts_at_distance_0_only() -> None:
    fresh = FreshGate(SHAPE, routers(SHAPE, np.stack([np.eye(4, dtype=np.float32)] * 2)))
    fresh.observe(routed(3, [[0, 7, 0, 0]]))
    probabilities = fresh.predict(3, 0)
    assert probabilities is not None and probabilities.argmax() == 1
    assert fresh.predict(3, 1) is None
    assert fresh.reach == 0


@pytest.mark.parametrize(
    "invalid",
    [
        routed(1, None),
        routed(1, [[1, 2, 3, 4], [1, 2, 3, 4]]),
        routed(1, [[1, 2, 3]]),
        routed(1, [[1, 2, 3, float("nan")]]),
        routed(0, [[1, 2, 3, 4]]),
        routed(99, [[1, 2, 3, 4]]),
    ],
)
def test_no_prediction_after_invalid_events(invalid: RoutingEvent) -> None:
    skip = Skip(SHAPE, routers(SHAPE, np.ones((2, 4, 4), np.float32)))
    skip.observe(routed(1, [[1, 2, 3, 4]]))
    assert skip.predict(3, 1) is not None
    skip.observe(invalid)
    assert skip.predict(3, 1) is None


def test_a_new_pass_discards_the_last_input_and_events_may_reuse_their_arrays() -> None:
    skip = Skip(SHAPE, routers(SHAPE, np.stack([np.eye(4, dtype=np.float32)] * 2)))
    reused = routed(1, [[9, 0, 0, 0]])
    skip.observe(reused)
    assert reused.inputs is not None
    reused.inputs[:] = 0
    probabilities = skip.predict(3, 1)
    assert probabilities is not None and probabilities.argmax() == 0
    skip.announce(Announcement(0, 0, Phase.DECODE, np.zeros(1, np.int32)))
    assert skip.predict(3, 1) is None


def test_on_a_trace_the_fresh_gate_is_always_right_and_skip_gets_worse_with_distance() -> None:
    trace = random_trace(n_sequences=6, with_inputs=True, structure=1.0, seed=1)
    real = routers(trace.shape, hidden_routers(trace.shape, 1))
    assert accuracy(FreshGate(trace.shape, real), trace, 0) == 1.0
    found = [accuracy(Skip(trace.shape, real), trace, distance) for distance in (1, 2, 3, 4)]
    assert all(near > far for near, far in pairwise(found))
    assert found[-1] > 2 / 16  # still better than guessing
