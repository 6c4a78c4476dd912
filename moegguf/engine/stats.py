"""Counters and times of one model, cumulative: `later - earlier` has the counters of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from operator import add, sub
from typing import Any, TypeVar

PRESENT_VALUES = frozenset({
    "n_slots", "n_experts", "slots_used", "pool_bytes", "staging_bytes", "n_threads", "bytes_per_s", "is_dropped",
})  # fmt: skip
PARTS = ("tiers", "drives")  # fields of `Stats` that are figures of their own
VRAM, RAM, CPU = "VRAM", "RAM", "CPU"  # names of tiers


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Cumulative figures of slots. Bytes are those that came into them. `stall_s`: seconds that computing waited.
    `slots_used`, `n_slots` and `pool_bytes`, of the slots in use, are present values, all others counters."""

    lookups: int = 0
    hits_ready: int = 0
    hits_late: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_missed: int = 0
    bytes_prefetched: int = 0
    stall_s: float = 0.0
    slots_used: int = 0
    n_slots: int = 0
    pool_bytes: int = 0

    @property
    def hits(self) -> int:
        """Lookups that found their expert there, or on its way."""
        return self.hits_ready + self.hits_late

    @property
    def hit_rate(self) -> float:
        """Share of lookups that did."""
        return _ratio(self.hits, self.lookups)


@dataclass(frozen=True)
class TierStats(Lookups):
    """Figures of one tier. `name` is "VRAM" for slots of a device and "RAM" for slots of the host.

    "CPU" has the slots with which the CPU computes the layers that a device leaves to it. `device` is ggml's name of
    the device that computes with the slots, or copies from them. A tier below another one counts the lookups that
    missed there, and `stall_s` is the time in which a matrix was still to be read from the file.
    """

    name: str
    device: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The name and the device, which are equal for figures of one tier at different times."""
        return self.name, self.device


@dataclass(frozen=True)
class DriveStats:
    """Figures of one copy of the model's files: its own (`name` "file"), or a mirror ("mirror 1"). `bytes_per_s`, as
    measured while it was read, and `is_dropped`, since it failed, are present values."""

    name: str
    reads: int = 0
    bytes_read: int = 0
    bytes_per_s: int = 0
    is_dropped: bool = False

    @property
    def key(self) -> str:
        """The name: what the figures of two times are of the same copy by."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Stats(Lookups):
    """Cumulative figures of one model, in seconds and bytes.

    `n_slots`, `slots_used`, `pool_bytes`, `n_experts`, `staging_bytes` and `n_threads` are present values. A lookup is
    one distinct (layer, expert) in one pass. While every expert is in memory, ids are not read, and the choices of
    several tokens count as distinct. `hit_rate` is the share of lookups that found their expert there, or on its way.

    If layers compute on a device, lookups and slots are its tier's. `tiers` has the figures of each tier, the nearest
    to the layers first. Prompts are staged there: `bytes_staged` were copied into tensors of `staging_bytes` in
    `staging_copy_s`. Layers waited `staging_stall_s` for these copies and the reads before them.

    `draft_passes` counts evaluations of a sequence with a draft, `drafted_tokens` their tokens, and `accepted_tokens`
    the tokens among them that were sampled, too. A prefetched expert that was looked up counts as useful if all of it
    was there, and as late if some of it was still to come.
    """

    tokens: int = 0
    passes: int = 0
    reads: int = 0
    read_retries: int = 0
    read_errors: int = 0
    prefetch_requested: int = 0
    prefetch_started: int = 0
    prefetch_useful: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_dropped: int = 0
    events_dropped: int = 0
    hook_s: float = 0.0
    read_s: float = 0.0
    upload_s: float = 0.0
    eval_s: float = 0.0
    n_experts: int = 0
    n_threads: int = 0
    staging_bytes: int = 0
    bytes_staged: int = 0
    staging_copy_s: float = 0.0
    staging_stall_s: float = 0.0
    draft_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tiers: tuple[TierStats, ...] = ()
    drives: tuple[DriveStats, ...] = ()  # figures of each copy, if the model has mirrors

    def __add__(self, later: Stats) -> Stats:
        added = _combined(later, self, add)
        kept = dict[str, Any]()
        for name in PARTS:
            known = {part.key for part in getattr(later, name)}
            gone = tuple(part for part in getattr(self, name) if part.key not in known)
            kept[name] = getattr(added, name) + gone
        return replace(added, **kept)

    def __sub__(self, earlier: Stats) -> Stats:
        return _combined(self, earlier, sub)

    @property
    def in_vram(self) -> bool:
        """True if layers compute with slots in a device's memory."""
        return bool(self.tiers) and self.tiers[0].name == VRAM

    @property
    def below(self) -> TierStats | None:
        """The tier in RAM below a device's, if there is one."""
        return next((tier for tier in self.tiers[1:] if tier.name == RAM), None)

    @property
    def on_cpu(self) -> TierStats | None:
        """The slots of layers that a device leaves to the CPU, if there are any."""
        return next((tier for tier in self.tiers[1:] if tier.name == CPU), None)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the file, on demand and by prefetch."""
        return self.bytes_missed + self.bytes_prefetched

    @property
    def bytes_per_token(self) -> float:
        """Bytes read per token evaluated."""
        return _ratio(self.bytes_read, self.tokens)

    @property
    def bytes_per_accepted_token(self) -> float:
        """Bytes read per token evaluated that was no refused draft."""
        return _ratio(self.bytes_read, self.tokens - self.drafted_tokens + self.accepted_tokens)

    @property
    def draft_acceptance(self) -> float:
        """Share of drafted tokens that were sampled, too."""
        return _ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def tokens_per_draft_pass(self) -> float:
        """Tokens of an answer by a pass with a draft."""
        return 1 + _ratio(self.accepted_tokens, self.draft_passes)

    @property
    def stall_per_token_s(self) -> float:
        """Seconds that the compute thread waited for experts, and a device for the CPU's, per token."""
        return _ratio(self.stall_s, self.tokens)

    @property
    def hook_per_token_s(self) -> float:
        """Seconds in the routing hook, per token."""
        return _ratio(self.hook_s, self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of evaluation, prompt tokens included."""
        return _ratio(self.tokens, self.eval_s)

    @property
    def staging_overlap(self) -> float:
        """Share of the time of copies for prompts in which no layer waited: for them, or for reads behind them."""
        return max(0.0, 1 - _ratio(self.staging_stall_s, self.staging_copy_s)) if self.staging_copy_s else 0.0

    def link_bound_share(self, link_bytes_per_s: float) -> float:
        """Time that compute and the missed bytes need at link speed, as a share of the time taken.

        1: only the processor and the link limit the speed; more where computing went on while bytes came. Compute is
        evaluation time without stall; the share is (compute + bytes missed / link_bytes_per_s) / evaluation time.
        """
        least_s = self.eval_s - self.stall_s + _ratio(self.bytes_missed, link_bytes_per_s)
        return _ratio(least_s, self.eval_s)

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in _DERIVED}


_DERIVED = (
    "hit_rate", "bytes_read", "bytes_per_token", "stall_per_token_s", "hook_per_token_s", "tokens_per_s",
    "staging_overlap", "bytes_per_accepted_token", "draft_acceptance", "tokens_per_draft_pass",
)  # fmt: skip


Figures = TypeVar("Figures", "Stats", "TierStats", "DriveStats")


def _combined(now: Figures, before: Figures, operator: Callable[[Any, Any], Any]) -> Figures:
    """Returns `now` with each counter combined with the counter of `before`, also of each tier and copy of the files
    that is in both."""
    pairs = {each.name: (getattr(now, each.name), getattr(before, each.name)) for each in fields(now)}
    fixed = PRESENT_VALUES | {"name", "device", *PARTS}
    changed = {name: operator(*pair) for name, pair in pairs.items() if name not in fixed}
    for name in PARTS if isinstance(now, Stats) else ():
        parts, known = pairs[name][0], {part.key: part for part in pairs[name][1]}
        changed[name] = tuple(
            part if (like := known.get(part.key)) is None else _combined(part, like, operator) for part in parts
        )
    return replace(now, **changed)
