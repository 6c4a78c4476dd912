"""Splits a trace into sets of whole requests. A request is never divided, because
neighbouring tokens use similar experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moegguf.trace.trace import Trace


def held_out(trace: Trace, share: float, seed: int) -> list[int]:
    """Returns the requests to leave out of training: about `share` of the requests with
    each label. For a label with several requests, at least one request is left out and
    at least one stays. The only request of a label stays. If every label has only one
    request, all requests are treated as if they had the same label."""
    rng = np.random.default_rng(seed)
    kinds: dict[str, list[int]] = {}
    for sequence in trace.sequences():
        kinds.setdefault(trace.header.labels.get(sequence, ""), []).append(sequence)
    groups = list(kinds.values())
    if all(len(sequences) == 1 for sequences in groups):
        groups = [trace.sequences()]
    picked: list[int] = []
    for sequences in groups:
        n = min(len(sequences) - 1, max(1, round(share * len(sequences))))
        picked += rng.permutation(sequences)[:n].tolist()
    return sorted(picked)


def validation_tokens(
    trace: Trace, seed: int, share: float = 0.1
) -> npt.NDArray[np.bool_]:
    """Returns (n_tokens,): True for tokens of the validation requests, which are not
    used for training."""
    return np.isin(trace.sequence_of, held_out(trace, share, seed))
