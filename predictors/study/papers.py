"""Strategies at a paper's link and compute times, request by request: simulated, exact, the same on any machine.

An expert takes as long on the modelled link, beside a layer's compute, as in the paper. A system runs over requests
that warm its cache first and are not counted; then each counted request gives a figure of its own, so that a spread is
one over requests. What a predictor costs is not in the simulated time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moegguf.controller import weights
from moegguf.controller.collection import EamcPair
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.strategies import STRATEGIES
from moegguf.native.events import Phase
from moegguf.native.store import StoreOptions
from moegguf.trace.simulate import SimOptions, SimResult, Simulation, Span, slots_of
from moegguf.trace.trace import Trace
from predictors.study.arrange import arranged, used_experts
from predictors.study.common import Study


@dataclass(frozen=True)
class Link:
    """Times of a paper: µs that one expert takes on its link, µs of compute per layer and token, and whence."""

    expert_us: float
    layer_us: float
    source: str

    def options(self, expert_bytes: int) -> SimOptions:
        """A replay at these times."""
        return SimOptions(link_bytes_per_s=expert_bytes / self.expert_us * 1e6, layer_compute_us=self.layer_us)


LINKS = {
    "moe-infinity": Link(
        720, 4000, "table 1: DeepSeek-V2-Lite, 24 GB/s, 17.3 MB an expert; 155 - 51 ms of compute over 26 layers"
    ),
    "promoe": Link(
        750, 1030, "5.3: DS-1 in fp16, 23 GB/s, 17.3 MB an expert; 39.6 % of 67.9 ms are compute, over 26 layers"
    ),
    "expertflow": Link(
        790, 790, "none in the paper: Switch-base's experts of 18.9 MB over an A40's 24 GB/s, as much compute a layer"
    ),
    "duoserve": Link(
        3960, 1980, "6.1: Mixtral-8x7B in 4 bits, 99 MB an expert at 25 GB/s; compute, not in the paper: half of that"
    ),
}


class System(NamedTuple):
    """What is replayed: its parts, and the store's switches."""

    policy: str
    predictor: str = "none"
    prefetch: PrefetchOptions | None = None
    store: StoreOptions = StoreOptions()


BARE = STRATEGIES["none"].store
_PROMOE = STRATEGIES["promoe"]
assert isinstance(_PROMOE.prefetch, PrefetchOptions)
# What papers compare with: counting, a fixed choice of experts; and ProMoE's ablation step by step.
BASELINES = {
    "moe-infinity": {"counting": System("lfu", store=BARE), "algorithm 1 alone": System("sparsity", store=BARE)},
    "promoe": {"static": System("static", store=BARE)},
}
ABLATION = {
    "LRU, waiting for all of a layer": System("lru", store=BARE),
    "+ prefetching": System(
        "lru", "mlp", _PROMOE.prefetch, StoreOptions(chunked=False, preempt=False, overlap=False, sweep=False)
    ),
    "+ chunks": System("lru", "mlp", _PROMOE.prefetch, StoreOptions(preempt=False, overlap=False, sweep=False)),
    "+ early preemption": System("lru", "mlp", _PROMOE.prefetch, StoreOptions(overlap=False, sweep=False)),
    "+ reordering": System("lru", "mlp", _PROMOE.prefetch, StoreOptions(sweep=False)),
}


@dataclass(frozen=True)
class Workload:
    """A study whose trace has requests that warm a cache, followed by the ones that are counted."""

    study: Study
    counted: Sequence[int]

    @classmethod
    def of(cls, study: Study, n_warm: int, n_counted: int) -> Workload:
        """The first requests of the trace; of those counted equally many of each kind, in order of arrival."""
        sequences, labels = study.trace.sequences(), study.trace.header.labels
        warm, rest = sequences[:n_warm], sequences[n_warm:]
        kinds = sorted({labels[sequence] for sequence in rest})
        of_each = -(-n_counted // len(kinds))
        chosen = sorted(s for kind in kinds for s in [s for s in rest if labels[s] == kind][:of_each])
        return cls(replace(study, trace=arranged(study.trace, [*warm, *chosen])), chosen)

    def strategies(self, names: Sequence[str], share: float, link: Link) -> dict[str, dict[str, Any]]:
        """Figures of whole strategies. Raises OptionError."""
        options = link.options(self.study.trace.shape.expert_bytes)
        rows = self.study.simulate_strategies(names, [share], options)
        return {row.strategy: self._figures(row.simulated) for row in rows if row.simulated is not None}

    def systems(self, systems: Mapping[str, System], share: float, link: Link) -> dict[str, dict[str, Any]]:
        """Figures of systems that are no strategy. Raises OptionError."""
        options, n_slots = link.options(self.study.trace.shape.expert_bytes), slots_of(self.study.trace.shape, share)

        def run(system: System) -> SimResult:
            parts = self.study.policy(system.policy), self.study.predictor(system.predictor)
            chosen = replace(options, prefetch=system.prefetch, store=system.store)
            return Simulation(self.study.trace, *parts, n_slots, chosen).run()

        return {name: self._figures(run(system)) for name, system in systems.items()}

    def _figures(self, result: SimResult) -> dict[str, Any]:
        """Of the requests counted: of each the milliseconds per token, of all together the others."""
        spans = [result.sequences[sequence] for sequence in self.counted]
        all_ = sum(spans[1:], start=spans[0])
        late = result.counters["hits_late"] / max(1, result.counters["lookups"])
        return {
            "token_ms": [round(span.clock_ns / span.tokens / 1e6, 3) for span in spans],
            "hits": round(all_.hit_rate, 4),
            "late": round(late, 4),
            "stall_ms": round(all_.stall_ns / all_.tokens / 1e6, 3),
            "experts": round(_moved(all_) / self.study.trace.shape.expert_bytes, 2),
            "useful": round(all_.bytes_useful / all_.bytes_prefetched, 4) if all_.bytes_prefetched else None,
        }


def _moved(span: Span) -> float:
    """Bytes per token."""
    return (span.bytes_missed + span.bytes_prefetched) / span.tokens


def ratios(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """How many times as fast `other` is as `base`, request by request."""
    return [one / two for one, two in zip(base["token_ms"], other["token_ms"], strict=True)]


def spread(values: Iterable[float], decimals: int = 2) -> str:
    """Median (least to greatest)."""
    found = sorted(values)
    low, middle, high = (f"{value:.{decimals}f}" for value in (found[0], median(found), found[-1]))
    return f"{middle} ({low} to {high})"


def request_counts(trace: Trace, phase: Phase) -> list[npt.NDArray[np.float32]]:
    """Of each request its EAM of one phase: (n_layer, n_expert) counts of tokens."""
    of, phases, layers = trace.sequence_of, trace.phase_of, list(trace.shape.layers)
    found = []
    for sequence in trace.sequences():
        counts = np.zeros(trace.shape.table, np.float32)
        counts[layers] = used_experts(trace, np.flatnonzero((of == sequence) & (phases == phase))).sum(axis=0)
        found.append(counts)
    return found


def write_collection(folder: Path, trace: Trace, n_entries: int) -> None:
    """MoE-Infinity's collection after the last `n_entries` requests of a trace, where `Artifacts` finds it."""
    path = folder / "eamc.safetensors"
    path.unlink(missing_ok=True)
    if n_entries:
        pair = EamcPair.empty(*trace.shape.table)
        both = zip(request_counts(trace, Phase.PREFILL), request_counts(trace, Phase.DECODE), strict=True)
        for prefill, decode in list(both)[-n_entries:]:
            pair.add(prefill, decode)
        weights.save(path, "eamc", trace.header.fingerprint, trace.shape, pair.weights())


def file_digest(path: Path) -> str:
    """The file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
