"""Splits a trace into sets of whole requests. A request is never divided, because
neighbouring tokens use similar experts."""

from __future__ import annotations

import numpy as np
from numpy.random import default_rng

from moegguf.native.events import Bools
from moegguf.trace.trace import Trace

# Share of the requests that are not used for training, but to measure the accuracy
# after each epoch.
VALIDATION_SHARE = 0.1


def held_out(trace: Trace, share: float, seed: int) -> list[int]:
    """Returns the requests to leave out of training: about `share` of the requests with
    each label. For a label with several requests, at least one request is left out and
    at least one stays. The only request of a label stays. If every label has only one
    request, all requests are treated as if they had the same label."""
    rng = default_rng(seed)
    groups = trace.by_kind()
    if all(len(sequences) == 1 for sequences in groups):
        groups = [trace.sequences()]
    picked: list[int] = []
    for sequences in groups:
        n_all = len(sequences)
        n = max(1, round(share * n_all))
        n = min(n, n_all - 1)
        order = rng.permutation(sequences)
        picked += order[:n].tolist()
    return sorted(picked)


def validation_tokens(trace: Trace, seed: int) -> Bools:
    """Returns (n_tokens,): True for tokens of the validation requests, which are not
    used for training."""
    held = held_out(trace, VALIDATION_SHARE, seed)
    return np.isin(trace.sequence_of, held)
