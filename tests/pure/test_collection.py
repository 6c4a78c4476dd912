"""The EAM collection: what matches, what is replaced, and that the incremental query is the plain one."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegguf.controller.collection import Eamc, EamcPair
from moegguf.controller.history import Counts
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Phase

SHAPE = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(0, 1, 2))


def eam(*rows: list[int]) -> Counts:
    return np.array(rows, np.float32)


def collection(*entries: Counts, capacity: int = 1000) -> Eamc:
    return Eamc.from_state(np.stack(entries), capacity)


def see(eamc: Eamc, *rows: list[int]) -> None:
    eamc.begin_pass()
    for il, row in enumerate(rows):
        eamc.add_query_row(il, np.array(row, np.float32))


# Figure 10: the new EAM4 and the collection it meets.
P1, P2, P3 = eam([0, 1], [1, 0], [0, 1]), eam([2, 0], [2, 0], [2, 0]), eam([1, 1], [0, 2], [1, 1])
P4 = eam([1, 1], [0, 2], [0, 2])


def test_a_full_collection_replaces_the_most_similar_entry_as_in_figure_10() -> None:
    eamc = collection(P1, P2, P3, capacity=3)
    distances = [1 - float((P4 * p).sum() / np.sqrt((P4**2).sum() * (p**2).sum())) for p in (P1, P2, P3)]
    assert [round(distance, 1) for distance in distances] == [0.5, 0.8, 0.1]  # printed in the figure
    assert eamc.most_similar(P4) == 2
    assert eamc.add(P4)
    np.testing.assert_array_equal(eamc.state, [P1, P2, P4])


def test_a_replaced_entry_is_matched_by_what_it_is_now() -> None:
    eamc = collection(P1, P2, P3, capacity=3)
    eamc.add(P4)
    see(eamc, [1, 1], [0, 2], [0, 2])
    assert eamc.match(1).tolist() == [2]
    see(eamc, [0, 0], [0, 0], [0, 2])
    assert eamc.match(1).tolist() == [2], "P1 would be, if the counts were still P3's"
    see(eamc, [0, 0], [0, 0], [5, 4])
    assert eamc.match(1).tolist() == [1], "P4 would be, if its norms were still P3's"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, 3e38])
def test_what_is_no_count_is_refused(bad: float) -> None:
    eamc = collection(P1)
    ream = P2.copy()
    ream[1, 1] = bad
    assert not eamc.add(ream)
    assert eamc.n_entries == 1


def test_empty_entries_are_never_stored() -> None:
    eamc = Eamc(3, 2)
    assert not eamc.add(np.zeros((3, 2), np.float32))
    assert not eamc.add(np.ones((2, 3), np.float32))  # another model's
    assert eamc.n_entries == 0
    see(eamc, [1, 0])
    assert eamc.match(3).size == 0


def test_before_any_row_nothing_matches() -> None:
    eamc = collection(P1, P2)
    see(eamc, [0, 1])
    eamc.begin_pass()
    assert eamc.match(2).size == 0


def test_a_row_counts_once_in_a_pass() -> None:
    eamc = collection(eam([3, 0], [0, 3]), eam([0, 1], [2, 0]))
    see(eamc, [1, 0], [1, 0])
    assert eamc.match(2).tolist() == [1, 0]
    eamc.add_query_row(0, np.array([1, 0], np.float32))
    assert eamc.match(2).tolist() == [1, 0], "with its first row twice it would be nearer to the first entry"


def test_of_equally_similar_entries_those_with_more_tokens_come_first() -> None:
    eamc = collection(*(eam([0, n], [n, 0]) for n in (1, 7, 3, 2)))
    see(eamc, [0, 1], [1, 0])
    assert eamc.match(2).tolist() == [1, 2]
    assert eamc.match(9).tolist() == [1, 2, 3, 0]


def test_an_entry_added_during_a_pass_waits_for_the_next() -> None:
    eamc = collection(P1)
    see(eamc, [0, 1])
    for n in range(1, 40):
        eamc.add(eam([0, n], [0, 0], [0, 0]))
    assert eamc.match(40).tolist() == [0]
    see(eamc, [0, 1])
    assert eamc.match(50).size == 40


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 40), tokens=st.sampled_from([1, 4]), wanted=st.integers(1, 9))
def test_the_incremental_query_is_the_plain_cosine(seed: int, n: int, tokens: int, wanted: int) -> None:
    rng = np.random.default_rng(seed)
    n_layer, n_expert = 5, 8
    entries = rng.poisson(rng.gamma(0.5, size=(n, n_layer, n_expert)) * 3).astype(np.float32)
    entries[:, 0, 0] += 1  # none empty
    eamc = Eamc.from_state(entries)
    query = np.zeros((n_layer, n_expert), np.float32)
    eamc.begin_pass()
    for il in rng.permutation(n_layer)[: rng.integers(1, n_layer + 1)]:
        for _ in range(tokens):
            query[il, rng.choice(n_expert, 2, replace=False)] += 1
        eamc.add_query_row(int(il), query[il])
        seen = query.any(axis=1)
        norms = np.linalg.norm(entries[:, seen].reshape(n, -1), axis=1) * np.linalg.norm(query)
        dots = (entries * query).sum(axis=(1, 2))
        cosines = np.divide(dots, norms, out=np.zeros(n), where=norms > 0)
        matches = eamc.match(wanted)
        expected = np.sort(cosines[cosines > 0])[::-1][:wanted]
        np.testing.assert_allclose(cosines[matches], expected, rtol=1e-5)
        np.testing.assert_allclose(eamc.total(matches), entries[matches].sum(axis=0))
        np.testing.assert_array_equal(eamc.total_row(matches, 2), eamc.total(matches)[2])


def test_a_state_makes_an_equal_collection_or_its_last_entries() -> None:
    eamc = collection(P1, P2, P3)
    np.testing.assert_array_equal(Eamc.from_state(eamc.state).state, eamc.state)
    np.testing.assert_array_equal(Eamc.from_state(eamc.state, capacity=2).state, [P2, P3])


def test_prefill_and_decode_are_kept_apart() -> None:
    pair = EamcPair.empty(3, 2)
    pair.add(P1, np.zeros((3, 2), np.float32))  # cancelled before its first token
    pair.add(P2, P3)
    assert (pair.prefill.n_entries, pair.decode.n_entries) == (2, 1)
    assert pair.of(Phase.PREFILL) is pair.prefill and pair.of(Phase.DECODE) is pair.decode


@pytest.mark.parametrize(("scale", "kind"), [(1, np.uint8), (40, np.uint16), (20000, np.float32), (0.5, np.float32)])
def test_what_was_saved_comes_back_exactly_and_small(scale: float, kind: type) -> None:
    entries = np.random.default_rng(1).integers(1, 9, (5, 3, 4)).astype(np.float32) * scale
    pair = EamcPair(Eamc.from_state(entries[:2]), Eamc(3, 4))
    saved = pair.weights()
    assert saved.arrays["prefill"].dtype == kind
    found = EamcPair.from_weights(SHAPE, saved)
    np.testing.assert_array_equal(found.prefill.state, pair.prefill.state)
    assert found.decode.n_entries == 0
    np.testing.assert_array_equal(EamcPair.from_weights(SHAPE, saved, capacity=1).prefill.state, entries[1:2])


@pytest.mark.parametrize(
    "arrays",
    [
        {"decode": np.full((2, 3, 4), np.nan, np.float32)},
        {"decode": np.ones((2, 3, 5), np.uint8)},
        {"decode": np.ones((3, 4), np.uint8)},
        {"more": np.zeros(1, np.uint8)},
    ],
    ids=["nan", "experts", "dimensions", "more"],
)
def test_counts_that_do_not_fit_are_refused(arrays: dict[str, npt.NDArray[np.generic]]) -> None:
    saved = EamcPair.empty(3, 4).weights()
    with pytest.raises(ValueError, match=r"must have|not finite|holds"):
        EamcPair.from_weights(SHAPE, Weights({**saved.arrays, **arrays}))
    negative = np.full((2, 3, 4), -1, np.float32)
    assert EamcPair.from_weights(SHAPE, Weights({**saved.arrays, "decode": negative})).decode.n_entries == 0
