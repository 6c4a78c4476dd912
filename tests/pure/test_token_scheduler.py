"""Tests the token scheduler.

Tokens with similar routing paths share a batch, and batch sizes differ by at most one.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import counted
from traces import SMALL, random_trace

from moegguf.controller.predictors.counts import previous_token
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.trace.trace import Trace
from predictors.study.asked import asked
from predictors.study.scheduling import OrderEffect, balanced_groups, compare
from predictors.study.token_scheduler import (
    PredictedPaths,
    RecentPaths,
    RoutingPaths,
    TokenScheduler,
    statuses,
)


def path(*experts: int, n_expert: int = 8) -> np.ndarray:
    """Returns a routing path (n_layer, n_expert) of booleans. Each argument is the
    expert of one layer."""
    return np.arange(n_expert) == np.array(experts)[:, np.newaxis]


def two_kinds() -> np.ndarray:
    """Returns the paths of eight tokens. Tokens 0, 2, 5 and 7 use expert 0 first, then
    one of 1 to 3.

    The other tokens use expert 4 first, then one of 5 to 7.
    """
    return np.stack(
        [
            path(0, 1),
            path(4, 5),
            path(0, 2),
            path(4, 6),
            path(4, 7),
            path(0, 3),
            path(4, 5),
            path(0, 1),
        ]
    )


def test_balanced_groups_separates_tokens_with_disjoint_experts() -> None:
    for seed in range(20):
        assert sorted(
            batch.tolist() for batch in balanced_groups(two_kinds(), 2, seed)
        ) == [[0, 2, 5, 7], [1, 3, 4, 6]]


@given(st.data())
def test_balanced_groups_puts_every_token_into_one_of_equal_batches(
    data: st.DataObject,
) -> None:
    n_tokens = data.draw(st.integers(1, 24))
    n_batches = data.draw(st.integers(1, n_tokens))
    seed = data.draw(st.integers(0, 2**31))
    paths = np.random.default_rng(seed).random((n_tokens, 2, 4)) < data.draw(
        st.sampled_from([0, 0.3, 1])
    )
    batches, again = (balanced_groups(paths, n_batches, seed) for _ in range(2))
    assert all(map(np.array_equal, batches, again))
    assert sorted(np.concatenate(batches).tolist()) == list(range(n_tokens))
    assert {len(batch) for batch in batches} <= {
        n_tokens // n_batches,
        -(-n_tokens // n_batches),
    }


@pytest.mark.parametrize(("n_batches", "batch_size"), [(0, 3), (9, 0), (-1, -2)])
def test_balanced_groups_and_order_effects_reject_impossible_batches(
    n_batches: int, batch_size: int
) -> None:
    with pytest.raises(OptionError, match="between 1 and the 8 tokens"):
        balanced_groups(two_kinds(), n_batches, 0)
    with pytest.raises(OptionError, match="two batches"):
        effects(random_trace(n_sequences=4, n_decode=2), batch_size)


def effects(
    trace: Trace, batch_size: int, slots: dict[float, int] | None = None
) -> dict[str, OrderEffect]:
    found = compare(trace, batch_size, lambda: RecentPaths(trace.shape), slots or {})
    return {effect.order: effect for effect in found}


def test_oracle_and_predicted_orders_need_fewer_experts_than_random() -> None:
    found = effects(
        random_trace(n_sequences=16, n_prefill=0, n_decode=8, structure=1.0), 4
    )
    assert found["oracle"].experts < 0.97 * found["random"].experts
    assert found["oracle"].experts < found["fifo"].experts
    assert (
        found["oracle"].experts <= found["predicted"].experts < found["random"].experts
    )
    assert (
        found["predicted"].us_per_step is not None
        and found["oracle"].us_per_step is None
    )


def test_order_effects_replay_equal_tokens_in_every_order() -> None:
    trace = random_trace(n_sequences=9, n_prefill=4, n_decode=6)
    found = effects(trace, 2, {0.5: 40, 1.0: 80})
    assert list(found) == ["oracle", "predicted", "random", "fifo"]
    for effect in found.values():
        assert {replay.whole.tokens for replay in effect.replays.values()} == {8 * 6}
        lookups = effect.replays[1.0].whole.lookups
        assert effect.experts == pytest.approx(lookups / (8 * 6 / 2))
    assert (
        found["oracle"].replays[1.0].counters["misses"]
        == found["fifo"].replays[1.0].counters["misses"]
    )


class FixedPaths(RoutingPaths):
    """Routing paths that the test passes in."""

    def __init__(self, paths: np.ndarray | dict[int, np.ndarray]) -> None:
        super().__init__(SMALL)
        self._paths |= (
            dict(enumerate(paths)) if isinstance(paths, np.ndarray) else paths
        )

    def path(self, sequence: int) -> np.ndarray | None:
        found = super().path(sequence)
        return None if found is None else found.astype(np.float32)


TWO_LAYERS = MoeShape(n_layer=2, n_expert=8, n_expert_used=1, layers=(0, 1))


def test_next_group_selects_one_kind_and_unknown_sequences_by_arrival() -> None:
    scheduler = TokenScheduler(TWO_LAYERS, FixedPaths(two_kinds()), 4)
    first = scheduler.next_group(range(8))
    following = scheduler.following
    second = scheduler.next_group(range(8))
    assert sorted([sorted(first), sorted(second)]) == [[0, 2, 5, 7], [1, 3, 4, 6]]
    assert following == second and scheduler.following == []
    scheduler = TokenScheduler(TWO_LAYERS, FixedPaths({}), 2)
    assert [scheduler.next_group([5, 6, 7, 8]) for _ in range(4)] == [
        [5, 6],
        [7, 8],
    ] * 2


def test_likely_unites_probabilities_of_a_group_and_statuses_take_the_top() -> None:
    paths = FixedPaths({0: np.full((2, 8), 0.5), 1: np.full((2, 8), 0.2)})
    likely = TokenScheduler(TWO_LAYERS, paths, 2).likely([0, 1, 9])
    np.testing.assert_allclose(likely, np.full((2, 8), 0.6), rtol=1e-6)
    assert TokenScheduler(TWO_LAYERS, paths, 2).likely([9]) is None
    paths = np.array([[[0.1, 0.7, 0.2, 0.6], [0, 0.5, 0, 0]]], np.float32)
    assert statuses(paths, 2).tolist() == [
        [[False, True, False, True], [False, True, False, False]]
    ]


@given(st.data())
def test_next_group_bounds_the_wait_of_each_sequence(data: st.DataObject) -> None:
    size, rng = (
        data.draw(st.integers(1, 5)),
        np.random.default_rng(data.draw(st.integers(0, 99))),
    )
    paths = FixedPaths({})
    scheduler = TokenScheduler(TWO_LAYERS, paths, size)
    running, waits, most, arrived = list[int](), dict[int, int](), 0, 0
    for _ in range(60):
        for _ in range(int(rng.integers(0, 3))):
            running.append(arrived)
            paths._paths[arrived] = rng.random((2, 8))
            waits[arrived], arrived = 0, arrived + 1
        if len(running) > 12 or (running and rng.random() < 0.3):
            ended = running.pop(int(rng.integers(len(running))))
            paths.forget(ended)
        if not running:
            continue
        most = max(most, -(-len(running) // size))
        group = scheduler.next_group(running)
        assert (
            group
            and len(group) <= size
            and set(group) <= set(running)
            and len(set(group)) == len(group)
        )
        for sequence in running:
            waits[sequence] = 0 if sequence in group else waits[sequence] + 1
            assert waits[sequence] <= max(0, 2 * most - 2)


def test_recent_paths_follow_each_sequence_separately() -> None:
    paths = RecentPaths(TWO_LAYERS, half_life_tokens=1.0)
    for pass_ in range(2):
        for il in range(2):
            ids = np.array([[3], [4 + pass_]], np.int32)
            phases = np.ones(2, np.int32)
            paths.observe(RoutingEvent(
                pass_, 0, 7, Phase.DECODE, 0, il, ids, sequences=np.array([7, 9], np.int32), phases=phases
            ))  # fmt: skip
    steady, changed = paths.path(7), paths.path(9)
    assert steady is not None and changed is not None
    assert steady[0, 3] == pytest.approx(0.75) and steady.sum() == pytest.approx(1.5)
    assert changed[1, 4:6].tolist() == pytest.approx([0.25, 0.5])
    paths.forget(7)
    assert paths.path(7) is None and paths.path(8) is None


def test_predicted_paths_equal_the_predictions_of_each_sequence() -> None:
    trace = random_trace(n_sequences=6, n_prefill=0, n_decode=20)
    table = asked(lambda: counted("token-id", trace))
    paths = PredictedPaths(table)
    for sequence, token in ((1, 5), (2, 9)):
        paths.expect(sequence, np.array([token], np.int32))
    for sequence, token in ((1, 5), (2, 9)):
        table.announce(
            Announcement(sequence, Phase.DECODE, np.array([token], np.int32))
        )
        expected = [table.predict(il, 1) for il in SMALL.layers]
        np.testing.assert_array_equal(paths.path(sequence), np.stack(expected))  # type: ignore[arg-type]
    paths.forget(1)
    assert paths.path(1) is None and paths.path(3) is None
    without_answer = PredictedPaths(asked(lambda: previous_token(SMALL)))
    without_answer.expect(1, np.array([5], np.int32))
    assert without_answer.path(1) is None
