"""Tests how many of the most recent tokens can be removed from a recurrent state.

Each ubatch replaces the snapshots of the state, so earlier snapshots cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moegguf.engine.checkpoints import Checkpoints
from moegguf.engine.rollback import Rollback
from moegguf.engine.sequences import SequenceTokens
from moegguf.native.events import Phase

N_BACK = 4


def chunk(sequence: int, n_tokens: int, n_drafted: int = 0) -> SequenceTokens:
    return SequenceTokens(
        sequence, [1] * n_tokens, 0, 0, Phase.DECODE, draft=[2] * n_drafted
    )


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([chunk(0, 1)], [0, 0]),
        ([chunk(0, 3)], [2, 0]),
        ([chunk(0, 1, 3)], [3, 0]),
        ([chunk(0, 100)], [N_BACK, 0]),
        ([chunk(0, 1, 2), chunk(1, 1, 2)], [2, 2]),
        ([chunk(0, 1, 2), chunk(1, 1)], [0, 0]),
        ([chunk(2, 1), chunk(3, 1), chunk(0, 1, 2), chunk(1, 1, 2)], [2, 2]),
        ([chunk(2, 2), chunk(0, 1, 2), chunk(1, 1, 2)], [0, 0]),
        ([chunk(0, 5), chunk(1, 5)], [0, 0]),
    ],
    ids=[
        "a token",
        "tokens",
        "a draft",
        "a prompt",
        "equal lengths",
        "a token last",
        "a token first",
        "two tokens first",
        "more than an ubatch",
    ],
)
def test_note_pass_keeps_snapshots_of_the_last_tokens_of_equal_chunks(
    chunks: Sequence[SequenceTokens], expected: list[int]
) -> None:
    rollback = Rollback(N_BACK, n_ubatch=8)
    rollback.note_pass(chunks)
    assert [rollback.n_back(sequence) for sequence in range(2)] == expected


def test_snapshots_become_stale_after_a_restore_or_a_pass_of_others() -> None:
    rollback = Rollback(N_BACK, n_ubatch=8)
    rollback.note_pass([chunk(0, 3)])
    rollback.note_restored(0)
    assert rollback.n_back(0) == 0 and not rollback.can_copy(0)
    rollback.note_pass([chunk(0, 3)])
    assert rollback.n_back(0) == 2 and rollback.can_copy(0)
    rollback.note_pass([chunk(1, 3)])
    assert rollback.n_back(0) == 0 and rollback.n_back(1) == 2
    rollback.note_shared(1, 2)
    assert rollback.n_back(1) == 0 and rollback.can_copy(1)


class FakeCheckpoints(Checkpoints):
    """Records the sequences that have a checkpoint, without a context."""

    def __init__(self) -> None:
        self.saved = set[int]()

    def save(self, sequence: int) -> None:
        self.saved.add(sequence)

    def discard(self, sequence: int) -> None:
        self.saved.discard(sequence)

    def clear(self) -> None:
        self.saved.clear()


def test_a_checkpoint_of_a_drafted_sequence_lasts_until_the_next_pass() -> None:
    rollback = Rollback(0, 512, checkpoints=(checkpoints := FakeCheckpoints()))
    rollback.before_pass([chunk(0, 1, 3), chunk(1, 1), chunk(2, 1, 1)])
    assert checkpoints.saved == {0, 2}
    rollback.forget(2)
    assert checkpoints.saved == {0}
    rollback.before_pass([chunk(1, 1, 2)])
    assert checkpoints.saved == {1}
    rollback.clear()
    assert not checkpoints.saved


def test_forget_and_clear_remove_snapshots() -> None:
    rollback = Rollback(N_BACK, n_ubatch=8)
    rollback.note_pass([chunk(0, 3)])
    rollback.forget(0)
    assert rollback.n_back(0) == 0
    rollback.note_restored(0)
    rollback.clear()
    assert rollback.can_copy(0)


@pytest.mark.parametrize(
    ("sequences", "own_cells", "expected"),
    [
        ([0], False, N_BACK),
        ([0, 1], False, 3),
        ([0, 2], False, 3),
        ([0, 2], True, 0),
        ([1, 2], True, 3),
    ],
)
def test_most_lost_limits_drafts_to_one_ubatch(
    sequences: list[int], own_cells: bool, expected: int
) -> None:
    assert (
        Rollback(N_BACK, n_ubatch=8, own_cells=own_cells).most_lost(sequences)
        == expected
    )
