"""Tracks, for a model with a recurrent state, by how many tokens each sequence of a
context can be rolled back.

llama.cpp keeps a snapshot of the state before each of the last tokens of a sequence's
last ubatch. It does not check that a snapshot belongs to the token that the caller
names. Snapshots from before a short ubatch may remain, but are stale. Snapshots of
sequences whose state was moved for another ubatch are stale, too. This module keeps
track of the valid snapshots.

For other architectures, llama.cpp keeps no snapshots. `checkpoints` then saves the
states before each pass with drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from moegguf.engine.checkpoints import Checkpoints
from moegguf.engine.sequences import SequenceTokens


@dataclass
class Rollback:
    """The valid snapshots of a context."""

    n_rs_seq: int  # snapshots of each sequence for which the context has memory
    n_ubatch: int  # maximum number of tokens in an ubatch
    # True: the sequences of an ubatch must have consecutive numbers.
    own_cells: bool = False
    checkpoints: Checkpoints | None = None  # None: the context has no checkpoints
    # {sequence: number of tokens by which it can be rolled back}.
    _n_back: dict[int, int] = field(default_factory=dict, init=False)
    # Sequences that were rolled back: until their next pass their state is a snapshot.
    _restored: set[int] = field(default_factory=set, init=False)

    def most_lost(self, sequences: Sequence[int]) -> int:
        """Returns the maximum number of tokens by which each of these sequences can be
        rolled back after a pass. The pass must end with these sequences, in this order
        and with the same number of tokens each. Each sequence before them must have one
        token in the pass."""
        first = sequences[0]
        if self.own_cells and [*sequences] != [*range(first, first + len(sequences))]:
            return 0
        return max(0, min(self.n_rs_seq, self.n_ubatch // len(sequences) - 1))

    def before_pass(self, chunks: Sequence[SequenceTokens]) -> None:
        """Saves a checkpoint of each sequence that has a draft in the next pass, and
        removes all other checkpoints. Does nothing for a context without
        checkpoints."""
        if self.checkpoints is None:
            return
        self.checkpoints.clear()
        for chunk in chunks:
            if chunk.draft:
                self.checkpoints.save(chunk.sequence)

    def note_pass(self, chunks: Sequence[SequenceTokens]) -> None:
        """Records that a pass has evaluated these tokens.

        Only sequences of the pass's last ubatch have snapshots then, because an ubatch
        moves the states of other sequences. llama.cpp first evaluates the sequences
        that have one token left. It does not divide the last `n_rs_seq` + 1 tokens of
        the other sequences.
        """
        self._restored.difference_update(chunk.sequence for chunk in chunks)
        self._n_back.clear()
        length = chunks[-1].n_evaluated
        n_last = sum(
            1
            for _ in itertools.takewhile(
                lambda chunk: chunk.n_evaluated == length, reversed(chunks)
            )
        )
        last = [chunk.sequence for chunk in chunks[-n_last:]]
        if len(chunks) == 1:
            self._n_back[last[0]] = min(self.n_rs_seq, length - 1)
        elif length - 1 <= self.most_lost(last) and all(
            chunk.n_evaluated == 1 for chunk in chunks[:-n_last]
        ):
            self._n_back = dict.fromkeys(last, length - 1)

    def n_back(self, sequence: int) -> int:
        """Returns the number of tokens by which a sequence can be rolled back now."""
        return self._n_back.get(sequence, 0)

    def note_restored(self, sequence: int) -> None:
        """Records that a sequence was rolled back. The sequence cannot be rolled back
        again until its next pass."""
        self._n_back.pop(sequence, None)
        self._restored.add(sequence)

    def can_copy(self, sequence: int) -> bool:
        """Returns True if the state of a sequence can be copied. After a rollback,
        llama.cpp would copy a different state."""
        return sequence not in self._restored

    def note_shared(self, *sequences: int) -> None:
        """Records that sequences share a state. None of them can be rolled back,
        because the other sequences would be rolled back, too."""
        for sequence in sequences:
            self._n_back.pop(sequence, None)

    def forget(self, sequence: int) -> None:
        """Records that a sequence is empty, or that another state was written into
        it."""
        self._n_back.pop(sequence, None)
        self._restored.discard(sequence)
        if self.checkpoints is not None:
            self.checkpoints.discard(sequence)

    def clear(self) -> None:
        """Records that every sequence is empty."""
        self._n_back.clear()
        self._restored.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()
