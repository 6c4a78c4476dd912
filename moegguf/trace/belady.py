"""Belady's optimum (Belady 1966): replays a trace's lookups with the fewest possible
misses.

Rules: each distinct expert of a routing event is one lookup; all layers share one pool;
there is no prefetching. `belady` needs a slot for every expert of an event at the same
time. In `least_misses` and `fewest_bytes`, an expert may be computed without keeping a
slot (bypass), as for streamed prompts. Under these rules, no policy has fewer misses
with this number of slots. This module does not use the store or the native library.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from moegguf.errors import OptionError
from moegguf.native.events import Bools, Int64s, Phase
from moegguf.trace.trace import Trace

BELADY = "belady"  # name of the bound in tables of policies


@dataclass(frozen=True)
class ReplayCounts:
    """Counts of lookups and hits, in all passes and in the decode passes."""

    lookups: int
    hits: int
    decode_lookups: int
    decode_hits: int

    @property
    def hit_rate(self) -> float:
        """Hits per lookup in all passes, 0 to 1; 0 if there are no lookups."""
        return self.hits / max(1, self.lookups)

    @property
    def decode_hit_rate(self) -> float:
        """Hits per lookup in the decode passes, 0 to 1; 0 if there are no lookups."""
        return self.decode_hits / max(1, self.decode_lookups)


def gap_closed(
    rate: float | None, lru: float | None, bound: float | None
) -> float | None:
    """Returns the share of the gap between LRU's hit rate and Belady's bound that
    `rate` closes: 0 for LRU, 1 for the bound. Returns None if there is no gap, or if an
    argument is None."""
    if rate is None or lru is None or bound is None or bound - lru <= 1e-9:
        return None
    return (rate - lru) / (bound - lru)


@dataclass(frozen=True)
class Lookups:
    """A trace as a sequence of routing events. Event i looks up the distinct experts
    keys[start[i]:start[i + 1]], in the order in which they first occur in the event."""

    # (n_lookups,) (index of the layer among the layers with experts) * n_expert +
    # expert.
    keys: Int64s
    start: Int64s  # (n_events + 1,)
    # (n_lookups,) index of the next event that looks up the same key; n_events if there
    # is none.
    next_use: Int64s
    # (n_events,) True: the event belongs to a decode pass.
    decode: Bools

    @classmethod
    def of(cls, trace: Trace) -> Lookups:
        """Returns the events of a trace in the order of the live run: pass by pass, and
        layer by layer within a pass. Events without an expert are left out."""
        n_row = trace.shape.n_moe_layer
        n_expert = trace.shape.n_expert
        pass_of = np.repeat(np.arange(trace.n_pass), np.diff(trace.pass_start))
        ids = trace.expert_ids.astype(np.int64)
        event = np.broadcast_to(
            (pass_of * n_row)[:, None] + np.arange(n_row)[:, None, None], ids.shape
        )
        keys = ids + np.arange(n_row)[:, None, None] * n_expert
        present = ids >= 0
        # A stable sort keeps the order within an event.
        order = np.argsort(event[present], kind="stable")
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

    def select(self, chosen: Bools) -> Lookups:
        """Returns the look-ups for which `chosen`, an array (n_lookups,), is True.
        Events without them are empty."""
        before = np.append(0, np.cumsum(chosen))
        return replace(
            self,
            keys=self.keys[chosen],
            start=before[self.start],
            next_use=self.next_use[chosen],
        )


def _next_use(keys: Int64s, events: Int64s, never: int) -> Int64s:
    order = np.argsort(keys, kind="stable")
    out = np.full(len(keys), never, np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    out[order[:-1][same]] = events[order[1:]][same]
    return out


def belady(lookups: Lookups, n_slots: int) -> ReplayCounts:
    """Returns the counts of a replay that starts with empty slots and evicts the expert
    whose next use is farthest in the future. No policy can have more hits under the
    rules of this module.

    The experts of the current event are never evicted. Raises OptionError if an event
    needs more than `n_slots` experts, or if `n_slots` is below 1.
    """
    looked_up = np.diff(lookups.start)
    widest = int(looked_up.max(initial=1))
    if n_slots < widest:
        raise OptionError(
            f"a pass of this trace needs {widest} experts of a layer at once, but there are {n_slots} slots; give more."
        )
    hit = ~_missed(lookups, n_slots)
    decode = np.repeat(lookups.decode, looked_up)
    return ReplayCounts(
        *(int(n) for n in (len(hit), hit.sum(), decode.sum(), hit[decode].sum()))
    )


def least_misses(
    lookups: Lookups, n_slots: int, resident: Iterable[int] = ()
) -> Int64s:
    """Returns the keys of the fewest experts that must be read, in the order in which
    they are read. No policy can read fewer experts, with or without bypass.

    An expert that must be read twice appears twice. resident: keys of the experts that
    have slots at the start.
    """
    return lookups.keys[_missed(lookups, n_slots, resident, bypass=True)]


def fewest_bytes(
    lookups: Lookups, n_slots: int, resident: Int64s, key_bytes: Int64s
) -> int:
    """Returns the number of bytes that every policy must read at least, with or without
    bypass. If all experts have the same size, some policy reads exactly this number.

    resident: as in `least_misses`. key_bytes: {key: size of the expert}, as an array.

    An expert of size s counts once for each size up to s, with the difference from the
    next smaller size. For each size, no policy misses less often on the experts of at
    least this size than `least_misses` with only these experts.
    """
    n_bytes = smaller = 0
    for size in np.unique(key_bytes).tolist():
        large = key_bytes >= size
        misses = least_misses(
            lookups.select(large[lookups.keys]),
            n_slots,
            resident[large[resident]].tolist(),
        )
        n_bytes += (size - smaller) * len(misses)
        smaller = size
    return n_bytes


def _missed(
    lookups: Lookups, n_slots: int, resident: Iterable[int] = (), bypass: bool = False
) -> Bools:
    """Returns an array (n_lookups,): True for each lookup that misses. Evicts the
    expert whose next use is farthest in the future. With `bypass`, that may be an
    expert of the current event."""
    keys = lookups.keys.tolist()
    start = lookups.start.tolist()
    next_use = lookups.next_use.tolist()
    n_events = len(lookups.decode)
    first_use: dict[int, int] = {}
    for event in reversed(range(n_events)):
        first_use |= dict.fromkeys(keys[start[event] : start[event + 1]], event)
    # Expert with a slot -> event of its next use.
    due = {key: first_use.get(key, n_events) for key in resident}
    # Heap of (-event of the next use, expert); an entry that differs from `due` is
    # outdated and ignored
    farthest = [(-event, key) for key, event in due.items()]
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
    """Removes from `due` the experts whose next use is farthest in the future, until
    only `n_slots` experts are left."""
    while len(due) > n_slots:
        negative, key = heapq.heappop(farthest)
        if due.get(key) == -negative:
            del due[key]
