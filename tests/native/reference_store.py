"""The store in plain Python. It models which expert each slot holds after each call,
without bytes and without time.

It finds a victim by comparing all slots. The policies are lru, lfu-decay and locality;
scores can replace any of them. The averages use the store's operations on 32-bit
floats in the same order, so they are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.controller.shape import MoeShape

Expert = tuple[int, int]
Float32s = npt.NDArray[np.float32]
ZERO, ONE, LEAST = np.float32(0), np.float32(1), np.float32(1e-4)
POLICIES = ("lru", "lfu-decay", "locality")
# Half-lives in tokens of the averages of policies that have scores.
HALF_LIVES = {"lfu-decay": np.float32(64), "locality": np.float32(14)}
# The score in locality of an expert that was prefetched, but not chosen by its router.
IN_VAIN = np.float32(-1e6)
# A layer number above all others: the next routed layer begins a new pass.
BETWEEN_PASSES = 1 << 30


@dataclass
class Slot:
    """A slot with an expert."""

    expert: Expert
    last_use: int
    # The read of the expert failed, and the slot becomes free when it is unpinned.
    broken: bool = False
    # The expert was prefetched since the policy was set, and has not been used yet.
    is_early: bool = False
    # The expert is early, and its layer's router has chosen other experts.
    in_vain: bool = False


class ReferenceStore:
    """A store on one device without a lower tier, with fewer slots than the model has
    experts."""

    def __init__(self, shape: MoeShape, n_slots: int) -> None:
        self.shape = shape
        self.slots: list[Slot | None] = [None] * n_slots
        self.n_usable = n_slots
        self.pinned = set[int]()
        # The last routed layer, and the number of tokens of the current pass.
        self.il, self.pass_tokens = BETWEEN_PASSES, 0
        self.scores: Float32s | None = None
        self.moment = (0, False, False)  # il, sweep, token
        self.tick = 0
        names = (
            "lookups",
            "hits_ready",
            "misses",
            "evictions",
            "bytes_missed",
            "bytes_prefetched",
        )
        self.counters = dict.fromkeys(names, 0)
        self.set_policy("lru")

    def set_policy(self, name: str) -> None:
        self.policy = name
        self.average: Float32s = np.zeros(self.shape.table, np.float32)
        # The active experts (1; the others are 0) of each layer that has a forecast and
        # is not yet routed.
        self.forecast = dict[int, Float32s]()
        for slot in filter(None, self.slots):
            slot.is_early = slot.in_vain = False

    def set_forecast(self, table: Float32s | None, known: Sequence[int] = ()) -> None:
        """Sets the probability of each expert in the layers `known`. A table of None
        removes all forecasts.

        The experts with a token's highest probabilities and all likely experts are
        active. Does nothing unless the policy is locality.
        """
        if self.policy != "locality":
            return
        self.forecast = {}
        for il in known if table is not None else ():
            highest = np.sort(table[il])[-self.shape.n_expert_used]
            is_active = (table[il] > 0) & (table[il] >= min(highest, 0.5))
            self.forecast[il] = is_active.astype(np.float32)

    def unpin(self) -> None:
        """Drops all pins and frees broken slots that were pinned.

        The store does so when a pass is cancelled, fails, ends, or reaches its next
        layer.
        """
        released, self.pinned = self.pinned, set()
        for s in released:
            slot = self.slots[s]
            if slot is not None and slot.broken:
                self.slots[s] = None

    def end_pass(self) -> None:
        self.il = BETWEEN_PASSES
        self.unpin()

    def begin(self, il: int, n_tokens: int) -> None:
        """Begins a routing event and drops all pins. A new pass begins unless `il` is
        above the last routed layer."""
        if il <= self.il:
            self.pass_tokens = n_tokens
        self.il = il
        self.unpin()

    def acquire(
        self, il: int, ids: npt.NDArray[np.int32], *, reads_fail: bool = False
    ) -> list[list[int]]:
        """Returns the slot of each id (n_tokens, n_expert_used).

        If the event has more experts than there are usable slots, nothing is evicted
        and the result is empty. In that case, experts that already have slots stay
        pinned until the next event or the end of the pass.
        """
        self.begin(il, len(ids))
        self.forecast.pop(il, None)
        for slot in filter(None, self.slots):
            slot.in_vain |= slot.is_early and slot.expert[0] == il
        self.moment = (
            il,
            len(ids) > 1 and ids.size >= 4 * self.shape.n_expert,
            self.pass_tokens == 1,
        )
        distinct = list(dict.fromkeys(ids.ravel().tolist()))
        places = {e: self.find((il, e)) for e in distinct}
        n_hits = sum(s >= 0 for s in places.values())
        for name, n in (
            ("lookups", len(distinct)),
            ("hits_ready", n_hits),
            ("misses", len(distinct) - n_hits),
        ):
            self.counters[name] += n
        for s in (s for s in places.values() if s >= 0):
            self._use(s)
            self.pinned.add(s)
        if len(distinct) > self.n_usable:
            return []
        for e in distinct:
            if places[e] < 0:
                places[e] = s = self._take((il, e))
                self.slots[s].broken = reads_fail  # type: ignore[union-attr]
                self._read("bytes_missed", reads_fail)
                self.pinned.add(s)
        half_life = HALF_LIVES.get(self.policy, ONE)
        kept = np.float32(np.exp2(np.float64(np.float32(-len(ids)) / half_life)))
        self.average[il] *= kept
        for e in ids.ravel():
            self.average[il, e] += (ONE - kept) / np.float32(len(ids))
        return [[places[e] for e in row] for row in ids.tolist()]

    def prefetch(self, expert: Expert, *, reads_fail: bool = False) -> None:
        """Reads an expert that has no slot.

        If scores or the policy's averages determine the victim, the victim is evicted
        only if its score is lower than this expert's.
        """
        s = -1
        if self.find(expert) < 0:
            s = self._take(
                expert,
                self._score(expert) + self._offset(expert[0])
                if self._ordered()
                else None,
            )
        if s >= 0:
            self._read("bytes_prefetched", reads_fail)
            self.slots[s].is_early = True  # type: ignore[union-attr]
            self.slots[s] = None if reads_fail else self.slots[s]

    def warm(self, experts: Sequence[Expert], *, reads_fail: bool = False) -> None:
        """Reads experts that have no slot into free slots, as long as there are any.
        Evicts nothing."""
        for expert in experts:
            if self.find(expert) < 0 and None in self.slots[: self.n_usable]:
                s = self._take(expert)
                self._read("bytes_prefetched", reads_fail)
                self.slots[s] = None if reads_fail else self.slots[s]

    def resize(self, n_slots: int) -> None:
        """Sets the number of usable slots, and evicts the experts in other slots. No
        pass may be running."""
        self.n_usable = n_slots
        for s in range(n_slots, len(self.slots)):
            self._evict(s)

    def residency(self) -> npt.NDArray[np.uint8]:
        """Returns (n_layer, n_expert): 2 for an expert in a slot, 0 for any other
        expert or after a failed read."""
        there = np.zeros(self.shape.table, np.uint8)
        for slot in self.slots:
            if slot is not None and not slot.broken:
                there[slot.expert] = 2
        return there

    def find(self, expert: Expert) -> int:
        return next(
            (
                s
                for s, slot in enumerate(self.slots)
                if slot is not None and slot.expert == expert
            ),
            -1,
        )

    def _evict(self, s: int) -> None:
        self.counters["evictions"] += self.slots[s] is not None
        self.slots[s] = None

    def _read(self, counter: str, fails: bool) -> None:
        self.counters[counter] += 0 if fails else self.shape.expert_bytes

    def _use(self, s: int) -> None:
        slot = self.slots[s]
        assert slot is not None
        self.tick += 1
        slot.last_use = self.tick
        slot.is_early = slot.in_vain = False

    def _take(self, expert: Expert, below: np.float32 | None = None) -> int:
        """Assigns a free slot, or else the slot of a victim with a score below `below`
        (None: of any victim).

        Returns the slot, or -1 if no slot can be assigned.
        """
        s = self._victim()
        if s < 0:
            return -1
        old = self.slots[s]
        if (
            old is not None
            and below is not None
            and not self._score(old.expert, old.in_vain) + self._offset(old.expert[0])
            < below
        ):
            return -1
        self._evict(s)
        self.slots[s] = Slot(expert, 0)
        self._use(s)
        return s

    def _victim(self) -> int:
        free = [s for s in range(self.n_usable) if self.slots[s] is None]
        if free:
            return free[0]
        il_now, sweep, _ = self.moment
        floors, pinned, ranks = (
            self._floors(),
            self.pinned,
            list[tuple[bool, tuple[Any, ...], int]](),
        )
        for il in self.shape.layers:
            held = [
                (s, slot)
                for s, slot in enumerate(self.slots)
                if slot is not None and slot.expert[0] == il
            ]
            evictable = [
                (s, slot) for s, slot in held if s not in pinned and s < self.n_usable
            ]
            if evictable:
                s, first = min(
                    evictable,
                    key=lambda of: (
                        self._score(of[1].expert, of[1].in_vain),
                        of[1].last_use,
                    ),
                )
                turn = (
                    -((il - il_now) % self.shape.n_layer or self.shape.n_layer)
                    if sweep
                    else 0
                )
                rank = (
                    self._score(first.expert, first.in_vain) + self._offset(il),
                    turn,
                    first.last_use,
                )
                ranks.append((len(held) <= floors[il], rank, s))
        return min(ranks)[2] if ranks else -1

    def _floors(self) -> dict[int, int]:
        """Returns, for each layer, the number of slots that no other layer may take.

        The numbers are 0 if there are enough slots for the experts that a token uses in
        all layers.
        """
        layers, share = list(self.shape.layers), dict[int, int]()
        scarce = self.n_usable < len(layers) * self.shape.n_expert_used
        left = max(0, self.n_usable - self.shape.n_expert_used) if scarce else 0
        for n, il in enumerate(layers):
            share[il] = left // (len(layers) - n)
            left -= share[il]
        return share

    def _ordered(self) -> bool:
        """Returns True if scores or the policy's averages determine the victim, False
        if only the last use does."""
        return self.scores is not None or (self.policy in HALF_LIVES and self.moment[2])

    def _score(self, expert: Expert, in_vain: bool = False) -> np.float32:
        if not self._ordered():
            return ZERO
        if self.scores is not None:
            return self.scores[expert]
        average = self.average[expert]
        if self.policy != "locality":
            return average
        if in_vain:
            return IN_VAIN
        wait = ONE / max(average, LEAST)
        return (
            -wait * (ONE - self.forecast[expert[0]][expert[1]])
            if expert[0] in self.forecast
            else ONE - wait
        )

    def _offset(self, il: int) -> np.float32:
        if self.scores is not None or self.policy != "locality" or not self._ordered():
            return ZERO
        ahead, n = (
            self.shape.row_of[il] - self.shape.row_of[self.moment[0]],
            len(self.shape.layers),
        )
        return -(np.float32(ahead if ahead > 0 else ahead + n) / np.float32(n))
