"""Combines the states of the replicas of one model.

This module does not use Ray. application.py supplies the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moegguf.engine.stats import Stats
from moegguf.serving.events import LoadedModel, LoadedName


def total(replicas: Sequence[LoadedModel]) -> LoadedModel:
    """Combines the states of one model's replicas. Memory sizes, queue lengths,
    requests, numbers of simultaneous requests and statistics are summed, and the
    context length is the shortest one. The model is busy if any replica is busy, and
    its name never expires. All other facts are the first replica's."""
    first = replicas[0]
    return replace(
        first,
        n_ctx=min(each.n_ctx for each in replicas),
        size_bytes=sum(each.size_bytes for each in replicas),
        vram_bytes=sum(each.vram_bytes for each in replicas),
        busy=any(each.busy for each in replicas),
        queue=sum(each.queue for each in replicas),
        n_requests=sum(each.n_requests for each in replicas),
        stats=sum((each.stats for each in replicas), Stats()),
        names=(LoadedName(first.name, first.digest, None),),
        n_parallel=sum(each.n_parallel for each in replicas),
        n_answering=sum(each.n_answering for each in replicas),
    )
