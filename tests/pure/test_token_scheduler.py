"""The token scheduler: tokens with similar routing paths end up in the same batch, and batches stay equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import SMALL, random_trace

from moegguf.errors import OptionError
from moegguf.native.events import Phase
from moegguf.trace.token_scheduler import _units, experts_per_batch, measure, schedule, similarities


def path(*experts: int, n_expert: int = 8) -> np.ndarray:
    """One layer's experts per argument."""
    return np.arange(n_expert) == np.array(experts)[:, np.newaxis]


def two_kinds() -> np.ndarray:
    """Tokens 0, 2, 5, 7 use expert 0, then one of 1-3; the others expert 4, then one of 5-7."""
    return np.stack([path(0, 1), path(4, 5), path(0, 2), path(4, 6), path(4, 7), path(0, 3), path(4, 5), path(0, 1)])


def test_similarity_is_the_share_of_equal_entries() -> None:
    paths = np.stack([path(0, 1), path(0, 2), path(3, 4), path(0, 1)])
    expected = np.array([[16, 14, 12, 16], [14, 16, 12, 14], [12, 12, 16, 12], [16, 14, 12, 16]]) / 16
    np.testing.assert_allclose(similarities(paths), expected, rtol=1e-6)


def test_tokens_with_disjoint_experts_are_separated() -> None:
    for seed in range(20):
        assert sorted(batch.tolist() for batch in schedule(two_kinds(), 2, seed)) == [[0, 2, 5, 7], [1, 3, 4, 6]]


def test_three_kinds_make_three_batches() -> None:
    kinds = np.stack([path(0, 1), path(2, 3), path(4, 5)])
    paths = kinds[[0, 1, 2, 2, 1, 0, 1, 0, 2]]
    batches = schedule(paths, 3, seed=1)
    assert sorted(batch.tolist() for batch in batches) == [[0, 5, 7], [1, 4, 6], [2, 3, 8]]


def test_experts_per_batch_counts_distinct_experts() -> None:
    paths = two_kinds()
    in_order = [np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7])]
    by_kind = [np.array([0, 2, 5, 7]), np.array([1, 3, 4, 6])]
    assert experts_per_batch(paths, in_order) == (2 + 4 + 2 + 4) / 2
    assert experts_per_batch(paths, by_kind) == 4


def test_the_same_seed_gives_the_same_batches() -> None:
    paths = np.random.default_rng(5).random((33, 4, 16)) < 0.2
    one, other = schedule(paths, 4, 7), schedule(paths, 4, 7)
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


@given(st.data())
def test_every_token_has_one_batch_and_batches_are_equal(data: st.DataObject) -> None:
    n_tokens = data.draw(st.integers(1, 24))
    n_batches = data.draw(st.integers(1, n_tokens))
    seed = data.draw(st.integers(0, 2**31))
    paths = np.random.default_rng(seed).random((n_tokens, 2, 4)) < data.draw(st.sampled_from([0, 0.3, 1]))
    batches = schedule(paths, n_batches, seed)
    assert sorted(np.concatenate(batches).tolist()) == list(range(n_tokens))
    assert {len(batch) for batch in batches} <= {n_tokens // n_batches, -(-n_tokens // n_batches)}


@pytest.mark.parametrize("n_batches", [0, 9, -1])
def test_a_number_of_batches_that_cannot_be_is_refused(n_batches: int) -> None:
    with pytest.raises(OptionError, match="between 1 and the 8 tokens"):
        schedule(two_kinds(), n_batches, 0)


def test_recorded_paths_leave_out_what_was_not_computed() -> None:
    trace = random_trace(n_sequences=1, n_prefill=4, n_decode=2)
    paths = trace.paths(np.arange(trace.n_tokens))
    assert paths.shape == (6, len(SMALL.layers), SMALL.n_expert)
    assert not paths[:3, -1].any()  # the prompt's last layer is computed for its last token only
    assert (paths[3:].sum(axis=2) == SMALL.n_expert_used).all()
    assert paths[4, 2, trace.expert_ids[2, 4]].all()


def test_scheduling_saves_experts_where_requests_differ_in_kind() -> None:
    trace = random_trace(n_sequences=16, n_prefill=0, n_decode=8, structure=1.0)
    effect = measure(trace, 4)
    assert len(_units(trace, 8)) == 2 * 8
    assert effect.scheduled < 0.97 * effect.shuffled
    assert effect.scheduled < effect.in_order


def test_only_decode_tokens_of_different_requests_are_batched() -> None:
    trace = random_trace(n_sequences=6, n_prefill=8, n_decode=3)
    assert len(_units(trace, 4)) == 3  # four of the six requests at each step; a unit of two is incomplete
    assert (trace.decode().pass_phase == Phase.DECODE).all()
    assert measure(trace.decode(), 2) == measure(trace, 2)


@pytest.mark.parametrize("batch_size", [3, 0, -2])
def test_too_few_requests_for_two_batches_are_refused(batch_size: int) -> None:
    with pytest.raises(OptionError, match="two batches"):
        measure(random_trace(n_sequences=4, n_decode=2), batch_size)
