"""Offline replays of a trace's lookups, with the store's rules: Belady's optimum, and LRU as a cross-check.

Rules: one lookup per distinct expert of a gate; all of them are resident at once; one pool over all layers; nothing is
fetched ahead and nothing bypasses the pool. No store, no native library.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import Phase
from moegguf.trace.trace import Trace

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Replayed:
    """Lookups and hits in all, and of the decode passes; {sequence: (lookups, hits)}."""

    lookups: int
    hits: int
    evictions: int
    decode_lookups: int
    decode_hits: int
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def misses(self) -> int:
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.lookups)

    @property
    def decode_hit_rate(self) -> float:
        return self.decode_hits / max(1, self.decode_lookups)


@dataclass(frozen=True)
class Lookups:
    """A trace as gates of distinct experts: gate g looks up keys[start[g]:start[g + 1]], in order of first choice.

    A key is row * n_expert + expert, with row the layer's place among those with experts. next_use (n_lookups,): the
    gate of the same key's next lookup, n_gates when there is none.
    """

    shape: MoeShape
    keys: Ints
    start: Ints
    next_use: Ints
    decode: npt.NDArray[np.bool_]  # (n_gates,)
    sequence: Ints  # (n_gates,)

    @classmethod
    def of(cls, trace: Trace) -> Lookups:
        """Gates in live order: pass by pass, layer by layer."""
        n_row, n_expert = len(trace.shape.layers), trace.shape.n_expert
        pass_of = np.repeat(np.arange(trace.n_pass), np.diff(trace.pass_start))
        ids = trace.expert_ids.astype(np.int64)
        event = np.broadcast_to((pass_of * n_row)[:, None] + np.arange(n_row)[:, None, None], ids.shape)
        keys = ids + np.arange(n_row)[:, None, None] * n_expert
        there = ids >= 0
        order = np.argsort(event[there], kind="stable")  # within a gate: tokens in order, choices in order
        events, keys = event[there][order], keys[there][order]
        _, first = np.unique(events * (n_row * n_expert) + keys, return_index=True)
        first.sort()
        events, keys = events[first], keys[first]
        used, start = np.unique(events, return_index=True)
        number = np.repeat(np.arange(len(used)), np.diff(np.append(start, len(keys))))
        passes = used // n_row
        return cls(
            trace.shape, keys, np.append(start, len(keys)).astype(np.int64), _next_use(keys, number, len(used)),
            trace.pass_phase[passes] == Phase.DECODE, trace.pass_sequence[passes].astype(np.int64),
        )  # fmt: skip

    def check(self, n_slots: int) -> None:
        """Raises OptionError when a gate needs more than n_slots at once."""
        widest = int(np.diff(self.start).max(initial=0))
        if n_slots < max(1, widest):
            raise OptionError(f"a pass of this trace needs {widest} experts of a layer at once, of {n_slots} slots.")

    def counted(self, hits: list[int], evictions: int) -> Replayed:
        """The result, from the hits of every gate."""
        looked_up, hit = np.diff(self.start), np.array(hits, np.int64)
        sequences = {
            int(s): (int(looked_up[self.sequence == s].sum()), int(hit[self.sequence == s].sum()))
            for s in dict.fromkeys(self.sequence.tolist())
        }
        decode = self.decode
        return Replayed(
            int(looked_up.sum()),
            int(hit.sum()),
            evictions,
            int(looked_up[decode].sum()),
            int(hit[decode].sum()),
            sequences,
        )


def _next_use(keys: Ints, events: Ints, never: int) -> Ints:
    order = np.argsort(keys, kind="stable")
    out = np.full(len(keys), never, np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    out[order[:-1][same]] = events[order[1:]][same]
    return out


def belady(lookups: Lookups, n_slots: int) -> Replayed:
    """The most hits any policy can have: out goes the resident whose next use is farthest (Belady 1966).

    Experts of the gate in progress are due now, so they are never the farthest. Raises OptionError when a gate does not
    fit.
    """
    lookups.check(n_slots)
    keys, start, next_use = lookups.keys.tolist(), lookups.start.tolist(), lookups.next_use.tolist()
    due: dict[int, int] = {}  # of residents
    farthest: list[tuple[int, int]] = []  # (-due, key); stale entries are passed over
    hits, evictions = [0] * (len(start) - 1), 0
    for g in range(len(start) - 1):
        n_hits, event = 0, range(start[g], start[g + 1])
        for i in event:
            n_hits += keys[i] in due
        for i in event:
            if keys[i] in due:
                continue
            if len(due) >= n_slots:
                evictions += 1
                _evict(farthest, due)
            due[keys[i]] = g
        for i in event:
            due[keys[i]] = next_use[i]
            heapq.heappush(farthest, (-next_use[i], keys[i]))
        hits[g] = n_hits
    return lookups.counted(hits, evictions)


def _evict(farthest: list[tuple[int, int]], due: dict[int, int]) -> None:
    while True:
        negative, key = heapq.heappop(farthest)
        if due.get(key) == -negative:
            del due[key]
            return
