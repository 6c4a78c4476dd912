"""The store's events for its listener, as plain numpy: tokens and routing. Needs no ctypes and no library."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class Phase(IntEnum):
    """The half of a request that a pass belongs to: reading the prompt, or producing tokens one by one."""

    PREFILL = 0
    DECODE = 1


class Part(NamedTuple):
    """The tokens of one sequence and phase: `rows`, their indices in ascending order, or all of them."""

    sequence: int
    phase: Phase
    rows: npt.NDArray[np.intp] | slice


class Announcement(NamedTuple):
    """Tokens that are about to be evaluated, before their first routing event. They may become several passes.

    If the tokens belong to several sequences, `sequence` is the first token's, and `phase` is DECODE if any of them
    decodes, because a controller acts for decoding tokens.
    """

    sequence: int  # number of the request
    phase: Phase
    tokens: Int32s  # (n_tokens,)
    sequences: Int32s | None = None  # (n_tokens,) sequence of each token; None: all have `sequence`
    phases: Int32s | None = None  # (n_tokens,) phase of each token; None: all have `phase`
    outputs: Int32s | None = None  # (n_tokens,) 1 for tokens whose logits are needed; None as above

    def parts(self) -> list[Part]:
        """The tokens by sequence and phase."""
        return _parts(self, len(self.tokens))


class RoutingEvent(NamedTuple):
    """The choice of the router at layer `il` in one pass.

    llama.cpp computes the last layer only for tokens whose logits are needed, so n_tokens may be smaller there. These
    are the pass's last tokens, unless their announcement has `outputs`.
    """

    pass_: int
    time_ns: int
    sequence: int  # sequence of the announcement
    phase: Phase  # phase of the announcement
    first_token: int  # index of the pass's first token in its announcement; -1: its tokens were not announced
    il: int
    expert_ids: Int32s  # (n_tokens, n_expert_used)
    weights: Float32s | None = None  # (n_tokens, n_expert_used) factors of the experts' outputs; None: not listened for
    inputs: Float32s | None = None  # (n_tokens, n_embd) vectors that entered the router; None: not listened for
    sequences: Int32s | None = None  # (n_tokens,) sequence of each token; None: all have `sequence`
    phases: Int32s | None = None  # (n_tokens,) phase of each token; None: all have `phase`

    def parts(self) -> list[Part]:
        """The tokens by sequence and phase."""
        return _parts(self, len(self.expert_ids))


def _parts(event: Announcement | RoutingEvent, n_tokens: int) -> list[Part]:
    """Returns the parts in the order of their first tokens."""
    if event.sequences is None or event.phases is None:
        return [Part(event.sequence, event.phase, slice(0, n_tokens))]
    rows: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(event.sequences.tolist(), event.phases.tolist(), strict=True)):
        rows.setdefault(key, []).append(row)
    return [Part(sequence, Phase(phase), np.array(of, np.intp)) for (sequence, phase), of in rows.items()]
