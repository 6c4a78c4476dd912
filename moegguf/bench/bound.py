"""Computes the bound of a measurement: the maximum number of tokens per second that its
file, slots, link and computation allow.

There are three kinds of work: reading experts from the file, copying experts to a
device, and computation. The bound assumes that they overlap completely, so the slowest
kind determines the bound. `fewest_bytes` computes the bytes that every policy must read
from the routing of the measured tokens and the contents of the slots at the beginning.
To record this routing, the same tokens are evaluated again, without timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from moegguf.engine.cost import ModelBytes
from moegguf.engine.machine import memory_read_speed
from moegguf.engine.stats import CPU
from moegguf.native.events import Int64s
from moegguf.native.store import Tier
from moegguf.quantities import parse_link
from moegguf.trace.belady import Lookups, fewest_bytes

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama
    from moegguf.engine.session import Session
    from moegguf.trace.trace import Trace

# Value in `Store.residency` for an expert that is completely loaded into a slot.
IN_SLOT = 2
LIMITS = {
    "reads": "bound_read_ms_per_token",
    "copies": "bound_copy_ms_per_token",
    "computing": "bound_compute_ms_per_token",
}
"""{kind of work that may limit the speed: the figure in FIGURES that holds the time of
this work per token}."""
FIGURES = (
    "bound_ts", "bound_reached_pct", "bound_read_mb_per_token", *LIMITS.values(), "bound_weights_ms_per_token",
    "bound_memory_gb_per_s",
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    """The experts that are completely loaded into slots when a repetition begins. Each
    expert is identified by its key in `Lookups`: (index of its layer among the layers
    with experts) * n_expert + expert."""

    everywhere: Int64s  # experts in a slot of any tier
    computing: Int64s  # experts in a slot of the first tier, which layers read from


@dataclass(frozen=True)
class LeastBytes:
    """The bytes that every policy must move at least to evaluate the tokens of a
    repetition."""

    read: int  # bytes of experts that must be read from the file
    # Bytes of experts that must be copied to a device; 0: none, or unknown copy speed.
    copied: int = 0
    # Bytes of weights that computation reads from memory. Each pass reads its experts
    # and all other weights once, except tables in which it only looks up rows.
    weights: int = 0


@dataclass(frozen=True)
class LinkSpeeds:
    """Speeds in bytes per second. A speed of 0 means that the speed is unknown; times
    computed from it are 0."""

    disk: float  # speed of reads from the file
    copies: float = 0.0  # speed of copies from RAM to a device
    memory: float = 0.0  # speed of reads from RAM


def bound_figures(
    least: LeastBytes, speeds: LinkSpeeds, n_tokens: int, taken_s: float, idle_s: float
) -> dict[str, float]:
    """Returns the values of FIGURES for `n_tokens` tokens that took `taken_s` seconds.
    `idle_s` is the part of this time, in seconds, that does not count as computation:
    stalls, and the time spent in the store's hooks."""

    def ms_per_token(n_bytes: int, bytes_per_s: float) -> float:
        return n_bytes / bytes_per_s / n_tokens * 1e3 if bytes_per_s else 0.0

    taken_ms = taken_s / n_tokens * 1e3
    read_ms = ms_per_token(least.read, speeds.disk)
    copy_ms = ms_per_token(least.copied, speeds.copies)
    compute_ms = max(0.0, taken_ms - idle_s / n_tokens * 1e3)
    bound_ms = max(read_ms, copy_ms, compute_ms)
    return {
        "bound_ts": 1e3 / bound_ms,
        "bound_reached_pct": bound_ms / taken_ms * 100,
        "bound_read_mb_per_token": least.read / n_tokens / 1e6,
        "bound_read_ms_per_token": read_ms,
        "bound_copy_ms_per_token": copy_ms,
        "bound_compute_ms_per_token": compute_ms,
        "bound_weights_ms_per_token": ms_per_token(least.weights, speeds.memory),
        "bound_memory_gb_per_s": speeds.memory / 1e9,
    }


def bound_by(figures: Mapping[str, float]) -> str:
    """Returns the kind of work in LIMITS that takes longest, and therefore determines
    the bound."""
    return max(LIMITS, key=lambda name: figures[LIMITS[name]])


class Bounds:
    """Computes the bounds of measurements with a model that has slots. `simulate_link`
    describes the link to the simulated device, such as "24GB/s,35us"; None if no device
    is simulated."""

    def __init__(
        self, llama: Llama, session: Session, simulate_link: str | None = None
    ) -> None:
        self._llama = llama
        self._session = session
        # Bytes per second, like `_memory`; 0: unknown, or no experts are copied to a
        # device.
        self._copies = 0.0
        self._memory = 0.0
        devices = {device.name or CPU for device in session.store.devices}
        if not llama.plan.on_device and devices == {CPU}:
            self._memory = memory_read_speed(llama.n_threads)
        elif len(devices) == 1 and CPU not in devices:
            if simulate_link:
                self._copies = parse_link(simulate_link).bytes_per_s
            elif llama.plan.placement:
                self._copies = llama.plan.placement.speeds.copies.bytes_per_s

    def held(self) -> Held:
        """Waits until all transfers have finished. Returns the experts that are then in
        slots."""
        store = self._session.store
        store.drain()
        rows = [layer.il for layer in self._session.layout.layers]
        there = [store.residency(tier)[rows] == IN_SLOT for tier in store.tiers]
        return Held(
            np.flatnonzero(np.logical_or.reduce(there)), np.flatnonzero(there[0])
        )

    def record(self, evaluate: Callable[[], object]) -> Trace:
        """Calls `evaluate`, which evaluates tokens, and returns the recorded routing of
        these tokens."""
        from moegguf.controller.artifacts import Artifacts
        from moegguf.engine.recording import Recording
        from moegguf.trace.format import read

        with TemporaryDirectory() as folder:
            path = Path(folder, "routing.npz")
            recording = Recording(self._session, Artifacts(self._llama.layout), path)
            try:
                evaluate()
            except BaseException:
                recording.discard()
                raise
            recording.close()
            return read(path)

    def least_bytes(self, routing: Trace, held: Held) -> LeastBytes:
        """Returns the bytes that this routing needs at least if only the experts in
        `held` are in slots at the beginning."""
        store = self._session.store
        lookups = Lookups.of(routing)
        sizes = np.array(
            [layer.expert_bytes for layer in self._session.layout.layers], np.int64
        )
        key_bytes = np.repeat(sizes, routing.shape.n_expert)
        slots = {tier: store.tier(tier)["n_slots_usable"] for tier in store.tiers}
        copied = (
            fewest_bytes(lookups, slots[Tier.COMPUTE], held.computing, key_bytes)
            if self._copies
            else 0
        )
        used_bytes = int(key_bytes[lookups.keys].sum())
        return LeastBytes(
            read=fewest_bytes(lookups, sum(slots.values()), held.everywhere, key_bytes),
            copied=copied,
            weights=used_bytes
            + routing.n_pass * ModelBytes.of(self._llama.layout).dense_bytes,
        )

    def speeds(self, disk_bytes_per_s: float) -> LinkSpeeds:
        """Returns the speeds for `bound_figures`."""
        return LinkSpeeds(disk_bytes_per_s, self._copies, self._memory)
