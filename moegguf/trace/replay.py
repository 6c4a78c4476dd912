"""A trace as arrays of routing events, many passes at a time: the input of `Lane.replay`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moegguf.native.events import Int32s, Phase
from moegguf.trace.trace import Trace

MOST_TOKENS = 4096  # of a part, so that its arrays stay small


class Part(NamedTuple):
    """Routing events of consecutive passes of one request and phase, in order.

    il, n_tokens, n_expert_used (n_events,); expert_ids: [n_tokens][n_expert_used] of each event, one after another.
    pass_tokens: the passes' tokens together, each counted at its first event.
    """

    first_pass: int
    sequence: int
    phase: Phase
    pass_tokens: int
    il: Int32s
    n_tokens: Int32s
    n_expert_used: Int32s
    expert_ids: Int32s


def parts(trace: Trace) -> Iterator[Part]:
    """The events of `trace.events()`, without announcements, weights and inputs."""
    used, computed = np.array(trace.used(), np.int64), np.array(trace.computed(), np.int64)
    for first, last in _bounds(trace):
        yield _part(trace, used, computed[first:last], first)


def _bounds(trace: Trace) -> Iterator[tuple[int, int]]:
    """First and last pass (exclusive) of each part."""
    first, tokens = 0, trace.pass_start.tolist()
    keys = list(zip(trace.pass_sequence.tolist(), trace.pass_phase.tolist(), strict=True))
    for p in range(1, trace.n_pass):
        if keys[p] != keys[first] or tokens[p + 1] - tokens[first] > MOST_TOKENS:
            yield first, p
            first = p
    if trace.n_pass > 0:
        yield first, trace.n_pass


def _part(trace: Trace, used: npt.NDArray[np.int64], computed: npt.NDArray[np.int64], first: int) -> Part:
    passes, rows = np.nonzero(computed)
    n_tokens = computed[passes, rows]
    starts = trace.pass_start[first + passes + 1] - n_tokens  # a layer leaves out a pass's first tokens
    offsets = np.cumsum(n_tokens) - n_tokens
    row = np.repeat(rows, n_tokens)
    token = np.repeat(starts - offsets, n_tokens) + np.arange(row.size)
    ids = trace.expert_ids[row, token]
    chosen = np.arange(ids.shape[1]) < used[row][:, np.newaxis]
    begins = np.diff(passes, prepend=-1) > 0
    return Part(
        first, int(trace.pass_sequence[first]), Phase(int(trace.pass_phase[first])), int(n_tokens[begins].sum()),
        np.array(trace.shape.layers, np.int32)[rows], n_tokens.astype(np.int32), used[rows].astype(np.int32),
        ids[chosen].astype(np.int32),
    )  # fmt: skip
