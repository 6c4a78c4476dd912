"""Keeps recurrent states from before passes with drafts.

Models need these states if llama.cpp cannot roll their states back.

If a token of a draft is rejected, the sequence returns to its checkpoint, the state
from before the pass. The accepted tokens of the draft are then evaluated again.

A second sequence of the context has the checkpoint. Saving a checkpoint copies no
bytes, because both sequences use one state. If a second sequence uses a state,
llama.cpp writes the next state of the first sequence to another place. The context
therefore needs memory for twice as many states.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moegguf.engine.memory_parts import CELLS, RECURRENT, MemoryParts


@dataclass
class Checkpoints:
    """The checkpoints of a context; a sequence has at most one."""

    # Access to the context's memory, which must consist of cells and recurrent states.
    parts: MemoryParts
    # Number of sequences that can have a checkpoint; the context must have twice as
    # many sequences.
    n_seq_max: int
    # {sequence: number of tokens before its checkpoint}.
    _ends: dict[int, int] = field(default_factory=dict, init=False)

    def save(self, sequence: int) -> None:
        """Makes the current state of a sequence its checkpoint. The sequence must have
        a state and no checkpoint."""
        self.parts.copy(RECURRENT, sequence, self.n_seq_max + sequence)
        self._ends[sequence] = self.parts.end(CELLS, sequence)

    def restore(self, sequence: int, n_tokens: int) -> int | None:
        """Returns a sequence to its checkpoint if the checkpoint is after at most
        `n_tokens` tokens, and removes the checkpoint. Returns the number of tokens that
        the sequence then has, or None if nothing was restored."""
        end = self._ends.get(sequence)
        if (
            end is None
            or not 0 < end <= n_tokens
            or self.parts.end(CELLS, sequence) < end
        ):
            return None
        self.parts.remove(CELLS, sequence, end)
        self.parts.remove(RECURRENT, sequence)
        self.parts.copy(RECURRENT, self.n_seq_max + sequence, sequence)
        self.discard(sequence)
        return end

    def discard(self, sequence: int) -> None:
        """Removes the checkpoint of a sequence, if it has one."""
        if self._ends.pop(sequence, None) is not None:
            self.parts.remove(RECURRENT, self.n_seq_max + sequence)

    def clear(self) -> None:
        """Removes the checkpoints of all sequences."""
        for sequence in [*self._ends]:
            self.discard(sequence)
