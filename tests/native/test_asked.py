"""Tests the store's predictors, one layer at a time: on an example from a paper, and on
random traces with structure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from oracles import accuracy, counted, routers_of
from test_predictors import SHAPE, expert_mlp, path_arrays, routing_path
from traces import hidden_routers, random_trace, routed

from moegguf.controller.collection import Eamc
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.counts import previous_token
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.predictors.networks import skip
from moegguf.controller.shape import MoeShape
from moegguf.native.events import Announcement, Phase, RoutingEvent
from predictors.study.arrange import shuffled
from predictors.study.asked import asked
from predictors.study.controls import FreshGate

FOUR = MoeShape(n_layer=4, n_expert=2, n_expert_used=1, layers=(0, 1, 2, 3))
# MoE-Infinity's figure 5, before layer proximity. The printed numbers imply four layers
# of two experts. Layers 0 and 1 are routed (l = 1). The counts of the two matched EAMs
# are added. ONE_TOKEN comes from a request of one token. It agrees with the routed
# layers, too (all three cosines are 1), but is not matched, because entries with more
# tokens come first.
ONE_TOKEN = [[0, 1], [1, 0], [1, 0], [1, 0]]
MATCHED = [[0, 2], [2, 0], [2, 0], [0, 2]], [[0, 3], [3, 0], [0, 3], [1, 2]]
# The shares of the two experts, in layer 2 and in layer 3.
AGGREGATED = [[0.4, 0.6], [0.2, 0.8]]


def announce(
    predictor: Predictor, *tokens: int, sequence: int = 0, phase: Phase = Phase.DECODE
) -> None:
    predictor.announce(Announcement(sequence, phase, np.array(tokens, np.int32)))


def test_eamc_predictor_reproduces_figure_5_of_moe_infinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moegguf.controller.predictors.eamc.N_MATCHES", 2)
    eamc = Eamc.from_state(np.array([ONE_TOKEN, *MATCHED], np.float32))
    predictor = asked(lambda: EamcPredictor(FOUR, eamc))
    announce(predictor, 0)
    predictor.observe(routed(0, 1))
    predictor.observe(routed(1, 0))
    np.testing.assert_allclose(
        [predictor.predict(il, il - 1) for il in (2, 3)], AGGREGATED, rtol=1e-6
    )


def hits_by_request(
    predictor: Predictor, kinds: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    """Returns the hit rate of each request, with predictions one layer ahead.

    `kinds` lists kinds of requests; each has 60 requests, which are replayed in this
    order.
    """
    trace = random_trace(n_sequences=120, n_prefill=0, n_decode=12, seed=3, n_labels=2)
    k, rates = trace.shape.n_expert_used, []
    for sequence in (s for kind in kinds for s in range(kind, 120, 2)):
        hits = total = 0
        for p in np.flatnonzero(trace.pass_sequence == sequence).tolist():
            announce(predictor, 0, sequence=sequence)
            for il, chosen in zip(
                trace.shape.layers, trace.expert_ids[:, p].astype(np.int32), strict=True
            ):
                guess = predictor.predict(il, 1)
                if il != trace.shape.layers[0]:
                    hits += (
                        0
                        if guess is None
                        else np.isin(np.argsort(-guess)[:k], chosen).sum()
                    )
                    total += k
                predictor.observe(
                    RoutingEvent(p, 0, sequence, Phase.DECODE, 0, il, chosen[None])
                )
        rates.append(hits / total)
    return np.array(rates)


def test_eamc_below_capacity_recovers_within_50_requests_of_another_text_kind() -> None:
    """Compares two predictors by their hit rates on requests 25 to 50 of one kind.

    The first predictor has seen requests of another kind before, and the second one has
    not.
    """
    shape = random_trace(n_sequences=1).shape

    def rates(*kinds: int) -> npt.NDArray[np.float64]:
        return hits_by_request(
            asked(lambda: EamcPredictor(shape, Eamc(*shape.table, 120))), kinds
        )

    changed, fresh = rates(0, 1), rates(1)
    assert fresh[0] < fresh[25:50].mean()  # the hit rate has improved
    assert changed[85:110].mean() > 0.9 * fresh[25:50].mean()


@pytest.mark.parametrize(("kind", "gain"), [("affinity", 0.03), ("token-id", 0.1)])
def test_counted_predictors_beat_shuffled_controls_on_held_out_sequences(
    kind: str, gain: float
) -> None:
    trace = random_trace(n_sequences=16, n_decode=40)
    seen, unseen = trace.select(range(12)), trace.select(range(12, 16))
    learned = accuracy(asked(lambda: counted(kind, seen)), unseen, 1)
    assert (
        learned
        > accuracy(
            asked(lambda: counted(kind, shuffled(seen, 0))), shuffled(unseen, 1), 1
        )
        + gain
    )
    assert (
        learned
        > accuracy(asked(lambda: counted("popularity", seen)), unseen, 1)
        > 2 / 16 + 0.05
    )
    assert accuracy(asked(lambda: previous_token(trace.shape)), unseen, 1) > 2 / 16


def test_fresh_gate_is_always_right_and_skip_gets_worse_with_distance() -> None:
    trace = random_trace(n_sequences=6, with_inputs=True, structure=1.0, seed=1)
    real = routers_of(trace.shape, hidden_routers(trace.shape, 1))
    assert accuracy(FreshGate(trace.shape, real), trace, 0) == 1.0
    found = [
        accuracy(asked(lambda: skip(trace.shape, real)), trace, distance)
        for distance in (1, 2, 3, 4)
    ]
    assert all(near > far for near, far in pairwise(found))
    assert found[-1] > 2 / 16  # still better than guessing


def test_expert_mlp_predicts_nothing_after_a_layer_was_left_out() -> None:
    predictor, (first, second, third, *_) = asked(expert_mlp), SHAPE.layers
    announce(predictor, 0)
    predictor.observe(routed(first, 1, 2, 3))
    assert predictor.predict(second, 1) is not None
    predictor.observe(routed(third, 1, 2, 3))
    assert predictor.predict(SHAPE.layers[3], 1) is None


def table(predictor: Predictor) -> list[npt.NDArray[np.float32] | None]:
    """Returns a routing path's prediction for each layer. The caller has not yet
    observed any layer of the current pass."""
    return [
        predictor.predict(il, distance)
        for distance, il in enumerate(SHAPE.layers, start=1)
    ]


def no_tokens(predictor: Predictor) -> None:
    """Lets the predictor observe all layers of a pass that was not announced."""
    for il in SHAPE.layers:
        predictor.observe(routed(il, 1, 2, 3, pass_=1, first_token=-1))


@pytest.mark.parametrize("between", [
    lambda found: announce(found, 1, 2, SHAPE.n_vocab), lambda found: announce(found, -1), no_tokens,
], ids=["outside", "negative", "not announced"])  # fmt: skip
def test_routing_path_predicts_nothing_after_unknown_tokens(
    between: Callable[[Predictor], None],
) -> None:
    predictor = asked(routing_path)
    announce(predictor, 1)
    for il in SHAPE.layers:
        predictor.observe(routed(il, 1, 2, 3))
    between(predictor)
    assert table(predictor) == [None] * len(SHAPE.layers)
    announce(predictor, 2)
    assert all(row is not None for row in table(predictor))


def test_routing_path_forgets_tokens_of_other_requests_and_keeps_the_prompt() -> None:
    window = len(path_arrays()["window"])
    used, fresh, prompted = (asked(routing_path) for _ in range(3))
    for token in (1, 2, 3):
        announce(used, token)
    announce(prompted, *range(window), phase=Phase.PREFILL)
    for predictor in (used, fresh, prompted):
        announce(predictor, 4, sequence=int(predictor is not prompted))
    np.testing.assert_array_equal(table(used), table(fresh))
    assert not np.array_equal(table(prompted), table(fresh))
