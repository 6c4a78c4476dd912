"""What the store gives its listener, as plain numpy: tokens, routing, residency. No ctypes here, no library needed."""

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


class Announcement(NamedTuple):
    """Tokens that are about to be evaluated, before their first routing event. May become several passes (ubatches).

    `sequence` counts requests: it changes when a new request begins. `tokens` is (n_tokens,).
    """

    lane: int
    sequence: int
    phase: Phase
    tokens: Int32s


class RoutingEvent(NamedTuple):
    """What the router chose at layer `il` in one pass.

    expert_ids (n_tokens, n_expert_used); weights the same shape, the factors the experts' outputs get, or None when not
    listened for; inputs (n_tokens, n_embd), the vectors that entered the router, or None. `first_token` is the pass's
    first token within its announcement; -1 when its tokens were never announced. llama.cpp computes the last layer
    only for tokens whose logits are wanted: n_tokens may be smaller there, and these are the pass's last tokens.
    """

    pass_: int
    time_ns: int
    lane: int
    sequence: int
    phase: Phase
    first_token: int
    il: int
    expert_ids: Int32s
    weights: Float32s | None = None
    inputs: Float32s | None = None


class Residency(NamedTuple):
    """Expert (il, expert) became resident in `slot`, or was evicted from it."""

    time_ns: int
    il: int
    expert: int
    slot: int
    resident: bool
