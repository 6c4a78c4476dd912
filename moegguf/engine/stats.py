"""Counters and times of one model, cumulative: `later - earlier` gives those of a request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

PRESENT_VALUES = frozenset({"n_slots", "n_experts", "slots_used", "pool_bytes", "n_threads"})


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


@dataclass(frozen=True)
class Stats:
    """Cumulative figures of one model. A lookup is one distinct (layer, expert) in one pass.

    Times in seconds, sizes in bytes. `n_slots`, `n_experts`, `slots_used`, `pool_bytes` and
    `n_threads`, those that compute, are present values, all others counters.
    """

    tokens: int = 0
    passes: int = 0
    lookups: int = 0
    hits_ready: int = 0
    hits_late: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_missed: int = 0
    bytes_prefetched: int = 0
    reads: int = 0
    read_retries: int = 0
    read_errors: int = 0
    prefetch_requested: int = 0
    prefetch_started: int = 0
    prefetch_useful: int = 0
    prefetch_wasted: int = 0
    prefetch_dropped: int = 0
    events_dropped: int = 0
    stall_s: float = 0.0
    hook_s: float = 0.0
    read_s: float = 0.0
    upload_s: float = 0.0
    eval_s: float = 0.0
    n_slots: int = 0
    n_experts: int = 0
    slots_used: int = 0
    pool_bytes: int = 0
    n_threads: int = 0

    def __add__(self, later: Stats) -> Stats:
        return replace(later, **{name: n + getattr(later, name) for name, n in self._counters().items()})

    def __sub__(self, earlier: Stats) -> Stats:
        return replace(self, **{name: n - getattr(earlier, name) for name, n in self._counters().items()})

    def _counters(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in PRESENT_VALUES}

    @property
    def hit_rate(self) -> float:
        """Share of lookups that found their expert resident or in flight."""
        return _ratio(self.hits_ready + self.hits_late, self.lookups)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the file, on demand and by prefetch."""
        return self.bytes_missed + self.bytes_prefetched

    @property
    def bytes_per_token(self) -> float:
        """Bytes read per token evaluated."""
        return _ratio(self.bytes_read, self.tokens)

    @property
    def stall_per_token_s(self) -> float:
        """Seconds that the compute thread waited for experts, per token."""
        return _ratio(self.stall_s, self.tokens)

    @property
    def hook_per_token_s(self) -> float:
        """Seconds in the routing hook, per token."""
        return _ratio(self.hook_s, self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of evaluation, prompt tokens included."""
        return _ratio(self.tokens, self.eval_s)

    def link_bound_share(self, link_bytes_per_s: float) -> float:
        """Time that compute and the missed bytes need at link speed, as a share of the time taken.

        1: only the processor and the link limit the speed; more where computing went on while bytes came. Compute is
        evaluation time without stall; the share is (compute + bytes missed / link_bytes_per_s) / evaluation time.
        """
        least_s = self.eval_s - self.stall_s + _ratio(self.bytes_missed, link_bytes_per_s)
        return _ratio(least_s, self.eval_s)

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, for JSON."""
        derived = ("hit_rate", "bytes_read", "bytes_per_token", "stall_per_token_s", "hook_per_token_s", "tokens_per_s")
        return asdict(self) | {name: getattr(self, name) for name in derived}
