"""What the store gives its listener, as plain numpy: tokens and routing. No ctypes here, no library needed."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class Phase(IntEnum):
    """Which half of a request a pass belongs to: reading the prompt, or producing tokens one by one."""

    PREFILL = 0
    DECODE = 1


class Part(NamedTuple):
    """The tokens of one sequence and phase: `rows`, their indices in ascending order, or all of them."""

    sequence: int
    phase: Phase
    rows: npt.NDArray[np.intp] | slice


class Announcement(NamedTuple):
    """Tokens that are about to be evaluated, before their first routing event. May become several passes (ubatches).

    `sequence` counts requests: each has its own. `tokens` is (n_tokens,). sequences, phases, outputs (n_tokens,): each
    token's sequence and phase, and whether its logits are wanted; None where all are of `sequence` and `phase`. Of
    several, `sequence` is the first token's, and `phase` is DECODE where some of them decode: a controller acts for
    these.
    """

    sequence: int
    phase: Phase
    tokens: Int32s
    sequences: Int32s | None = None
    phases: Int32s | None = None
    outputs: Int32s | None = None

    def parts(self) -> list[Part]:
        """The tokens by sequence and phase."""
        return _parts(self, len(self.tokens))


class RoutingEvent(NamedTuple):
    """What the router chose at layer `il` in one pass.

    expert_ids (n_tokens, n_expert_used); weights the same shape, the factors the experts' outputs get, or None when not
    listened for; inputs (n_tokens, n_embd), the vectors that entered the router, or None. `first_token` is the pass's
    first token within its announcement; -1 when its tokens were never announced. llama.cpp computes the last layer
    only for tokens whose logits are wanted: n_tokens may be smaller there, and these are the pass's last tokens unless
    their announcement says which. sequences, phases (n_tokens,): of these tokens, None where all are of `sequence` and
    `phase`, which are the announcement's.
    """

    pass_: int
    time_ns: int
    sequence: int
    phase: Phase
    first_token: int
    il: int
    expert_ids: Int32s
    weights: Float32s | None = None
    inputs: Float32s | None = None
    sequences: Int32s | None = None
    phases: Int32s | None = None

    def parts(self) -> list[Part]:
        """The tokens by sequence and phase."""
        return _parts(self, len(self.expert_ids))


def _parts(event: Announcement | RoutingEvent, n_tokens: int) -> list[Part]:
    """In order of first appearance."""
    if event.sequences is None or event.phases is None:
        return [Part(event.sequence, event.phase, slice(0, n_tokens))]
    rows: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(event.sequences.tolist(), event.phases.tolist(), strict=True)):
        rows.setdefault(key, []).append(row)
    return [Part(sequence, Phase(phase), np.array(of, np.intp)) for (sequence, phase), of in rows.items()]
