"""Tests the EAM collection: replaced entries, rejected entries, and saved arrays."""

import numpy as np
import numpy.typing as npt
import pytest

from moegguf.controller.collection import Eamc
from moegguf.controller.history import Counts
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights

SHAPE = MoeShape(n_layer=3, n_expert=4, n_expert_used=2, layers=(0, 1, 2))


def eam(*rows: list[int]) -> Counts:
    return np.array(rows, np.float32)


def collection(*entries: Counts, capacity: int = 1000) -> Eamc:
    return Eamc.from_state(np.stack(entries), capacity)


# Figure 10 of MoE-Infinity: P1, P2 and P3 are the full collection, and P4 is the new
# EAM4.
P1, P2, P3 = (
    eam([0, 1], [1, 0], [0, 1]),
    eam([2, 0], [2, 0], [2, 0]),
    eam([1, 1], [0, 2], [1, 1]),
)
P4 = eam([1, 1], [0, 2], [0, 2])


def test_full_collection_replaces_the_most_similar_entry_as_in_figure_10() -> None:
    eamc = collection(P1, P2, P3, capacity=3)
    distances = [
        1 - float((P4 * p).sum() / np.sqrt((P4**2).sum() * (p**2).sum()))
        for p in (P1, P2, P3)
    ]
    # Printed in the figure.
    assert [round(distance, 1) for distance in distances] == [0.5, 0.8, 0.1]
    assert eamc.most_similar(P4) == 2
    assert eamc.add(P4)
    np.testing.assert_array_equal(eamc.state, [P1, P2, P4])


def test_collection_arrays_contain_a_replaced_entry() -> None:
    eamc = collection(P1, P2, P3, capacity=3)
    eamc.add(P4)
    arrays, entries = eamc.arrays(), np.stack([P1, P2, P4])
    np.testing.assert_array_equal(arrays["entries"], entries)
    np.testing.assert_array_equal(arrays["columns"], entries.transpose(1, 2, 0))
    np.testing.assert_array_equal(arrays["row_norm2"], (entries**2).sum(axis=2).T)
    np.testing.assert_array_equal(arrays["tokens"], entries.sum(axis=(1, 2)))


def test_collection_add_rejects_negative_infinite_and_misshapen_counts() -> None:
    # Empty; another shape.
    eamc, others = (
        collection(P1),
        (np.zeros((3, 2), np.float32), np.ones((2, 3), np.float32)),
    )
    for bad in (
        *others,
        *(
            np.where(P2 > 0, value, 0)
            for value in (np.nan, np.inf, -np.inf, -1.0, 3e38)
        ),
    ):
        assert not eamc.add(bad.astype(np.float32))
        assert eamc.n_entries == 1


@pytest.mark.parametrize(
    ("scale", "kind"),
    [(1, np.uint8), (40, np.uint16), (20000, np.float32), (0.5, np.float32)],
)
def test_collection_weights_restore_the_entries_and_use_the_smallest_type(
    scale: float, kind: type
) -> None:
    entries = (
        np.random.default_rng(1).integers(1, 9, (5, 3, 4)).astype(np.float32) * scale
    )
    saved = Eamc.from_state(entries).weights()
    assert saved.arrays["decode"].dtype == kind
    older = Weights({**saved.arrays, "prefill": entries[:2]})
    for weights in (saved, older):
        np.testing.assert_array_equal(Eamc.from_weights(SHAPE, weights).state, entries)
    np.testing.assert_array_equal(
        Eamc.from_state(entries, capacity=1).state, entries[-1:]
    )
    assert Eamc.from_weights(SHAPE, Eamc(3, 4).weights()).n_entries == 0


@pytest.mark.parametrize(
    "arrays",
    [
        {"decode": np.full((2, 3, 4), np.nan, np.float32)},
        {"decode": np.ones((2, 3, 5), np.uint8)},
        {"decode": np.ones((3, 4), np.uint8)},
    ],
    ids=["nan", "experts", "dimensions"],
)
def test_collection_from_weights_rejects_nan_and_wrong_shapes(
    arrays: dict[str, npt.NDArray[np.generic]],
) -> None:
    with pytest.raises(ValueError, match=r"must have|not finite"):
        Eamc.from_weights(SHAPE, Weights(arrays))
    negative = np.full((2, 3, 4), -1, np.float32)
    assert Eamc.from_weights(SHAPE, Weights({"decode": negative})).n_entries == 0
