"""Counters and times of one model since its load: `later - earlier` gives the counters
of the interval between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from operator import add, sub
from typing import Any, TypeVar

PRESENT_VALUES = frozenset({
    "n_slots", "n_experts", "slots_used", "pool_bytes", "staging_bytes", "n_threads", "bytes_per_s", "is_dropped",
})  # fmt: skip
PARTS = ("tiers", "drives")  # fields of `Stats` that are tuples of figures
VRAM, RAM, CPU = "VRAM", "RAM", "CPU"  # names of tiers


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Statistics of slots. Counts and times start when the model is loaded.

    A lookup is one distinct (layer, expert) in one pass. While all experts of a tier
    are complete in their own slots, the router's ids are read only for a listener, or
    while the store is watched (`Store.watch`). If they are not read, all choices of a
    layer are counted as distinct experts, up to its number of experts.

    Attributes:
        lookups: experts that passes needed.
        hits_ready: lookups that found the whole expert in a slot.
        hits_late: lookups that found the expert on its way to a slot.
        misses: lookups that found neither.
        evictions: evicted experts, including those evicted when the number of slots was reduced.
        bytes_missed: bytes moved into the slots for misses; in `Stats`, bytes that were read from the file.
        bytes_prefetched: bytes moved into the slots for prefetches, and to fill free slots; in `Stats`, bytes that were
            read from the file.
        stall_s: seconds that compute threads spent waiting for experts.
        slots_used: slots that hold an expert now.
        n_slots: slots that can be used now.
        pool_bytes: memory of these slots.
    """

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
        """Lookups that found their expert in a slot, or on its way to one."""
        return self.hits_ready + self.hits_late

    @property
    def hit_rate(self) -> float:
        """Share of lookups that found their expert in a slot, or on its way to one; 0.0
        if there were no lookups."""
        return _ratio(self.hits, self.lookups)


@dataclass(frozen=True)
class TierStats(Lookups):
    """Figures of one tier. `name` is "VRAM" for slots of a device and "RAM" for slots
    of the host.

    "CPU" stands for the slots of layers that a device leaves to the CPU. `device` is
    ggml's name for the device that reads experts from the slots, or copies from them.
    The tier "RAM" below "VRAM" counts only the lookups that missed in VRAM. Its
    `stall_s` is the time spent waiting for reads from the file.
    """

    name: str
    device: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The name and the device, which identify the same tier in an earlier
        `Stats`."""
        return self.name, self.device


@dataclass(frozen=True)
class DriveStats:
    """Figures of one copy of the model's files: the file itself (`name` "file"), or a
    mirror ("mirror 1"). Two fields are current values, not counters: `bytes_per_s`, the
    measured speed, and `is_dropped`, which is True after a failure of the copy."""

    name: str
    reads: int = 0
    bytes_read: int = 0
    bytes_per_s: int = 0
    is_dropped: bool = False

    @property
    def key(self) -> str:
        """The name, which identifies the same copy in an earlier `Stats`."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Stats(Lookups):
    """Figures of one model since the model was loaded. Times are in seconds, and sizes
    are in bytes.

    The figures of look-ups and slots describe the tier from which layers read experts.

    Attributes:
        tokens: number of evaluated tokens.
        passes: number of evaluated passes.
        reads: number of reads from the model's files.
        read_retries: number of reads that failed and were repeated.
        read_errors: number of reads that failed permanently.
        prefetch_requested: number of requested prefetches of experts.
        prefetch_started: number of prefetches whose first read began.
        prefetch_useful: number of prefetched experts that were complete at their first look-up.
        prefetch_late: number of prefetched experts that were incomplete at their first look-up.
        prefetch_wasted: number of prefetched experts that were evicted without a use.
        prefetch_dropped: number of requested prefetches that never got a slot, for example because the requests came
            too late.
        events_dropped: number of routing events that were dropped because the listener was too slow, or memory ran out.
        hook_s: time that the store spent on routing events, without stalls.
        read_s: time of all reads, summed over the reader threads.
        upload_s: time of writing experts into slots, summed over threads.
        eval_s: time of all passes.
        n_experts: number of experts in all layers of the model.
        n_threads: number of compute threads that was last chosen for passes.
        staging_bytes: size of the staging tensors, through which devices process prompts.
        bytes_staged: number of bytes that were copied into staging tensors.
        staging_copy_s: time of copies into staging tensors.
        staging_stall_s: time for which layers waited for copies into staging tensors, and for the reads before these
            copies.
        draft_passes: number of evaluations of a sequence with a draft.
        drafted_tokens: number of tokens in drafts.
        accepted_tokens: number of drafted tokens that the model then also sampled.
        tiers: figures of each tier, beginning with the tier from which layers read experts.
        drives: figures of each copy of the model's files, if the model has mirrors.
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
    drives: tuple[DriveStats, ...] = ()

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
        """True if layers read experts from slots in a device's memory."""
        return bool(self.tiers) and self.tiers[0].name == VRAM

    @property
    def below(self) -> TierStats | None:
        """Figures of the tier in RAM from which a device's tier is filled; None if
        there is no such tier."""
        return next((tier for tier in self.tiers[1:] if tier.name == RAM), None)

    @property
    def on_cpu(self) -> TierStats | None:
        """Figures of the slots for layers that a device leaves to the CPU; None if
        there are no such slots."""
        return next((tier for tier in self.tiers[1:] if tier.name == CPU), None)

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from the model's files: on demand, for prefetches, and
        to fill free slots."""
        return self.bytes_missed + self.bytes_prefetched

    @property
    def bytes_per_token(self) -> float:
        """Number of bytes read from the model's files per evaluated token."""
        return _ratio(self.bytes_read, self.tokens)

    @property
    def bytes_per_accepted_token(self) -> float:
        """Number of bytes read from the model's files per evaluated token. Rejected
        tokens of drafts are not counted."""
        return _ratio(
            self.bytes_read, self.tokens - self.drafted_tokens + self.accepted_tokens
        )

    @property
    def draft_acceptance(self) -> float:
        """Share of drafted tokens that the model then also sampled."""
        return _ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def tokens_per_draft_pass(self) -> float:
        """Average number of tokens that a pass with a draft adds to an answer: the
        accepted tokens and one more token."""
        return 1 + _ratio(self.accepted_tokens, self.draft_passes)

    @property
    def stall_per_token_s(self) -> float:
        """Seconds per evaluated token for which computation waited for experts, on the
        CPU or on a device."""
        return _ratio(self.stall_s, self.tokens)

    @property
    def hook_per_token_s(self) -> float:
        """Seconds per evaluated token that the store spent on routing events, without
        stalls."""
        return _ratio(self.hook_s, self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Evaluated tokens per second of evaluation time, including the tokens of
        prompts."""
        return _ratio(self.tokens, self.eval_s)

    @property
    def staging_overlap(self) -> float:
        """Share of the time of copies into staging tensors during which no layer
        waited: 1 - staging_stall_s / staging_copy_s, but at least 0. The value is 0.0
        if there were no copies."""
        if not self.staging_copy_s:
            return 0.0
        return max(0.0, 1 - _ratio(self.staging_stall_s, self.staging_copy_s))

    def link_bound_share(self, link_bytes_per_s: float) -> float:
        """Returns the time that computation and a copy of the missed bytes at this link
        speed would take one after the other, as a share of the measured evaluation
        time.

        If the share is 1, only the processor and the link limit the speed. If the share
        is more than 1, some bytes were copied while layers were running. The share is
        (compute time + missed bytes / link_bytes_per_s) / evaluation time, and the
        compute time is the evaluation time without stalls.
        """
        least_s = (
            self.eval_s - self.stall_s + _ratio(self.bytes_missed, link_bytes_per_s)
        )
        return _ratio(least_s, self.eval_s)

    def as_dict(self) -> dict[str, Any]:
        """Returns the counters and derived figures as a dictionary that can be encoded
        as JSON."""
        return asdict(self) | {name: getattr(self, name) for name in _DERIVED}


_DERIVED = (
    "hit_rate", "bytes_read", "bytes_per_token", "stall_per_token_s", "hook_per_token_s", "tokens_per_s",
    "staging_overlap", "bytes_per_accepted_token", "draft_acceptance", "tokens_per_draft_pass",
)  # fmt: skip


Figures = TypeVar("Figures", "Stats", "TierStats", "DriveStats")


def _combined(
    now: Figures, before: Figures, operator: Callable[[Any, Any], Any]
) -> Figures:
    """Returns `now` with each counter combined, by `operator`, with the same counter of
    `before`. PRESENT_VALUES stay unchanged. Counters of a tier or of a copy of the
    files are combined only if `before` also has this tier or copy."""
    pairs = {
        each.name: (getattr(now, each.name), getattr(before, each.name))
        for each in fields(now)
    }
    fixed = PRESENT_VALUES | {"name", "device", *PARTS}
    changed = {
        name: operator(*pair) for name, pair in pairs.items() if name not in fixed
    }
    for name in PARTS if isinstance(now, Stats) else ():
        parts = pairs[name][0]
        known = {part.key: part for part in pairs[name][1]}
        changed[name] = tuple(
            part
            if (like := known.get(part.key)) is None
            else _combined(part, like, operator)
            for part in parts
        )
    return replace(now, **changed)
