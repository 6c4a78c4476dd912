"""Computes figures that describe a trace, for `moegguf trace show`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.native.events import Phase
from moegguf.trace.trace import Trace


@dataclass(frozen=True)
class TraceSummary:
    """Facts and counts about a trace."""

    model: str
    fingerprint: str
    shape: MoeShape
    settings: Mapping[str, object]
    n_requests: int
    kinds: Mapping[str, int]  # {kind of text: number of requests}
    n_passes: int
    n_tokens: int
    n_decoded: int
    # Names of the optional arrays in the trace: "weights", "inputs", both or none.
    recorded: tuple[str, ...]
    # Share of decoded tokens' experts that the request's previous token also used in
    # the same layer
    reuse: float
    # Share of all uses that belong to the most used tenth of the experts.
    top_tenth: float


def summary(trace: Trace) -> TraceSummary:
    """Counts the passes, tokens, requests and repeated uses of experts in a trace."""
    header = trace.header
    sequences = trace.sequences()
    optional = {"weights": trace.weights, "inputs": trace.inputs}
    return TraceSummary(
        model=header.model,
        fingerprint=header.fingerprint,
        shape=trace.shape,
        settings=header.settings,
        n_requests=len(sequences),
        kinds=Counter(header.labels.get(sequence, "") for sequence in sequences),
        n_passes=trace.n_pass,
        n_tokens=trace.n_tokens,
        n_decoded=int((trace.phase_of == Phase.DECODE).sum()),
        recorded=tuple(name for name, array in optional.items() if array is not None),
        reuse=_reuse(trace),
        top_tenth=_top_tenth(trace),
    )


def _reuse(trace: Trace) -> float:
    n_same = n_uses = 0
    for sequence in trace.sequences():
        of_request = trace.select([sequence])
        decoded = of_request.phase_of[1:] == Phase.DECODE
        for ids in of_request.expert_ids:
            now = ids[1:][decoded]
            before = ids[:-1][decoded]
            same = (now[:, :, np.newaxis] == before[:, np.newaxis, :]).any(axis=2)
            n_same += int((same & (now >= 0)).sum())
            n_uses += int((now >= 0).sum())
    return n_same / max(1, n_uses)


def _top_tenth(trace: Trace) -> float:
    n_expert = trace.shape.n_expert
    uses = np.concatenate(
        [np.bincount(ids[ids >= 0], minlength=n_expert) for ids in trace.expert_ids]
    )
    ordered = np.sort(uses)[::-1]
    return float(ordered[: max(1, len(ordered) // 10)].sum() / max(1, ordered.sum()))
