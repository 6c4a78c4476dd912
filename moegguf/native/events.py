"""The events that the store's listener receives: announcements of tokens, and routing
events.

The arrays in an event are numpy arrays. Events identify a sequence by the number of its
request. This module needs neither ctypes nor the native library.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class Phase(IntEnum):
    """The phase of a request: PREFILL evaluates the prompt, DECODE generates tokens."""

    PREFILL = 0
    DECODE = 1


class Part(NamedTuple):
    """The tokens of an event that belong to one sequence and one phase."""

    sequence: int
    phase: Phase
    # Indices of these tokens in the event, in ascending order.
    rows: npt.NDArray[np.intp] | slice


class Announcement(NamedTuple):
    """Tokens that are about to be evaluated, in one pass or in several. This event
    precedes their routing events.

    If the tokens belong to several sequences, `sequence` is the sequence of the first
    token. `phase` is then DECODE if any of the tokens is being decoded, because
    controllers act only while tokens are decoded.
    """

    sequence: int  # number of the request that the first token belongs to
    phase: Phase
    tokens: Int32s  # (n_tokens,)
    # (n_tokens,) sequence of each token; None: all have `sequence`.
    sequences: Int32s | None = None
    # (n_tokens,) phase of each token; None: all have `phase`.
    phases: Int32s | None = None
    # (n_tokens,) 1: the token's logits are needed; None if `sequences` is None.
    outputs: Int32s | None = None

    def parts(self) -> list[Part]:
        """Returns the announced tokens in groups, one for each sequence and phase."""
        return _parts(self, len(self.tokens))


class RoutingEvent(NamedTuple):
    """The experts that the router of layer `il` chose for the tokens of one pass.

    llama.cpp computes the last layer only for tokens whose logits are needed, so the
    last layer's event may have fewer tokens than the pass. These are the last tokens of
    the pass, unless the announcement's `outputs` marks other tokens.
    """

    pass_: int
    time_ns: int
    sequence: int  # `sequence` of the announcement
    phase: Phase  # `phase` of the announcement
    # Index of the pass's first token in its announcement; -1: not all were announced.
    first_token: int
    il: int
    expert_ids: Int32s  # (n_tokens, n_expert_used)
    # (n_tokens, n_expert_used) factors of the experts' outputs; None: not recorded.
    weights: Float32s | None = None
    # (n_tokens, n_embd) vectors that entered the router; None: not recorded.
    inputs: Float32s | None = None
    # (n_tokens,) sequence of each token; None: all have `sequence`.
    sequences: Int32s | None = None
    # (n_tokens,) phase of each token; None: all have `phase`.
    phases: Int32s | None = None

    def parts(self) -> list[Part]:
        """Returns the tokens of the event in groups, one for each sequence and
        phase."""
        return _parts(self, len(self.expert_ids))


def _parts(event: Announcement | RoutingEvent, n_tokens: int) -> list[Part]:
    """Returns the tokens of an event in groups, in the order of the groups' first
    tokens."""
    if event.sequences is None or event.phases is None:
        return [Part(event.sequence, event.phase, slice(0, n_tokens))]
    rows: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(
        zip(event.sequences.tolist(), event.phases.tolist(), strict=True)
    ):
        rows.setdefault(key, []).append(row)
    return [
        Part(sequence, Phase(phase), np.array(of, np.intp))
        for (sequence, phase), of in rows.items()
    ]
