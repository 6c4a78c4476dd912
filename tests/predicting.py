"""ProMoE's ACCURACY (section 4.1) for tests: the share of the n_expert_used likeliest experts that are right."""

from __future__ import annotations

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.native.events import Announcement, RoutingEvent
from moegguf.trace.trace import Trace


def accuracy(predictor: Predictor, trace: Trace, distance: int) -> float:
    """Over the decode passes of `trace`, every layer predicted `distance` MoE layers before; 0 when it says nothing."""
    right = total = 0
    promised: dict[int, set[int]] = {}
    for event in trace.decode().events():
        if isinstance(event, Announcement):
            predictor.announce(event)
            promised = {}
            continue
        predictor.observe(event)
        _promise(predictor, event, distance, promised)
        if event.il in promised:
            right += len(promised[event.il] & set(event.expert_ids[0].tolist()))
            total += event.expert_ids.shape[1]
    return right / max(1, total)


def _promise(predictor: Predictor, gate: RoutingEvent, distance: int, promised: dict[int, set[int]]) -> None:
    il = predictor.shape.layer_after(gate.il, distance)
    probabilities = None if il is None else predictor.predict(il, distance)
    if il is not None and probabilities is not None:
        assert probabilities.shape == (predictor.shape.n_expert,)
        assert probabilities.min() >= 0 and probabilities.max() <= 1
        promised[il] = set(np.argsort(-probabilities, kind="stable")[: gate.expert_ids.shape[1]].tolist())
