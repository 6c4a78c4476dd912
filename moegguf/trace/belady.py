"""Belady's optimum (Belady 1966): an offline replay of a trace's lookups with the store's rules.

Rules: one lookup per distinct expert of a routing event; one pool over all layers; no prefetching.
`belady` holds all experts of an event at once, as slots do. `least_misses` may also compute with an
expert that gets no slot (bypass), as streamed prompts do. No policy reads fewer experts, whatever it
knows. No store, no native library.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moegguf.errors import OptionError
from moegguf.native.events import Phase
from moegguf.trace.trace import Trace

BELADY = "belady"  # its name among policies

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReplayCounts:
    """Lookups and hits of all passes, and of the decode passes."""

    lookups: int
    hits: int
    decode_lookups: int
    decode_hits: int

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0 to 1; 0 without lookups."""
        return self.hits / max(1, self.lookups)

    @property
    def decode_hit_rate(self) -> float:
        """`hit_rate` of the decode passes."""
        return self.decode_hits / max(1, self.decode_lookups)


def gap_closed(rate: float | None, lru: float | None, bound: float | None) -> float | None:
    """Share of the gap between the hit rates of LRU and Belady's bound that a rate closes; None without a gap."""
    if rate is None or lru is None or bound is None or bound - lru <= 1e-9:
        return None
    return (rate - lru) / (bound - lru)


@dataclass(frozen=True)
class Lookups:
    """A trace as events of distinct experts: event i looks up keys[start[i]:start[i + 1]], in order of first choice.

    A key is row * n_expert + expert, with row the layer's index among those with experts. next_use (n_lookups,): the
    event of the same key's next lookup, n_events when there is none. decode (n_events,).
    """

    keys: Ints
    start: Ints
    next_use: Ints
    decode: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, trace: Trace) -> Lookups:
        """Events in live order: pass by pass, layer by layer."""
        n_row = len(trace.shape.layers)
        n_expert = trace.shape.n_expert
        pass_of = np.repeat(np.arange(trace.n_pass), np.diff(trace.pass_start))
        ids = trace.expert_ids.astype(np.int64)
        event = np.broadcast_to((pass_of * n_row)[:, None] + np.arange(n_row)[:, None, None], ids.shape)
        keys = ids + np.arange(n_row)[:, None, None] * n_expert
        present = ids >= 0
        order = np.argsort(event[present], kind="stable")  # within an event: tokens in order, choices in order
        events = event[present][order]
        keys = keys[present][order]
        _, first = np.unique(events * (n_row * n_expert) + keys, return_index=True)
        first.sort()
        events = events[first]
        keys = keys[first]
        used, start = np.unique(events, return_index=True)
        ordinals = np.repeat(np.arange(len(used)), np.diff(np.append(start, len(keys))))
        return cls(
            keys, np.append(start, len(keys)).astype(np.int64), _next_use(keys, ordinals, len(used)),
            trace.pass_phase[used // n_row] == Phase.DECODE,
        )  # fmt: skip


def _next_use(keys: Ints, events: Ints, never: int) -> Ints:
    order = np.argsort(keys, kind="stable")
    out = np.full(len(keys), never, np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    out[order[:-1][same]] = events[order[1:]][same]
    return out


def belady(lookups: Lookups, n_slots: int) -> ReplayCounts:
    """The most hits any policy can have: evicts the resident whose next use is farthest.

    Experts of the current event are due now, so they are never the farthest. Raises OptionError when an event does not
    fit.
    """
    looked_up = np.diff(lookups.start)
    widest = int(looked_up.max(initial=0))
    if n_slots < max(1, widest):
        raise OptionError(f"a pass of this trace needs {widest} experts of a layer at once, of {n_slots} slots.")
    hit = ~_missed(lookups, n_slots)
    decode = np.repeat(lookups.decode, looked_up)
    return ReplayCounts(*(int(n) for n in (len(hit), hit.sum(), decode.sum(), hit[decode].sum())))


def least_misses(lookups: Lookups, n_slots: int, resident: Iterable[int] = ()) -> Ints:
    """Returns the keys of the experts that have to be read. No policy reads fewer, with bypass or without.

    A key that is read twice is there twice. resident: keys that have slots at the beginning.
    """
    return lookups.keys[_missed(lookups, n_slots, resident, bypass=True)]


def _missed(
    lookups: Lookups, n_slots: int, resident: Iterable[int] = (), bypass: bool = False
) -> npt.NDArray[np.bool_]:
    """Returns which lookups (n_lookups,) miss when the resident goes whose next use is farthest.
    bypass: also where this is an expert of the current event."""
    keys = lookups.keys.tolist()
    start = lookups.start.tolist()
    next_use = lookups.next_use.tolist()
    n_events = len(lookups.decode)
    first_use: dict[int, int] = {}
    for event in reversed(range(n_events)):
        first_use |= dict.fromkeys(keys[start[event] : start[event + 1]], event)
    due = {key: first_use.get(key, n_events) for key in resident}  # key -> event of its next use, of residents
    farthest = [(-event, key) for key, event in due.items()]  # outdated entries are skipped
    heapq.heapify(farthest)
    missed = np.zeros(len(keys), np.bool_)
    for event in range(n_events):
        span = range(start[event], start[event + 1])
        for i in span:
            missed[i] = keys[i] not in due
            due[keys[i]] = event
        if not bypass:
            _evict(farthest, due, n_slots)
        for i in span:
            due[keys[i]] = next_use[i]
            heapq.heappush(farthest, (-next_use[i], keys[i]))
        if bypass:
            _evict(farthest, due, n_slots)
    return missed


def _evict(farthest: list[tuple[int, int]], due: dict[int, int], n_slots: int) -> None:
    """Removes the residents whose next use is farthest until `n_slots` are left."""
    while len(due) > n_slots:
        negative, key = heapq.heappop(farthest)
        if due.get(key) == -negative:
            del due[key]
