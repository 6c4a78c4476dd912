"""Strategies at a paper's link and compute times, request by request: simulated, exact, the same on any machine.

An expert takes as long on the modelled link, beside a layer's compute, as in the paper; a pass of several tokens takes
a layer's time once, as on a GPU that is far from busy. A system runs over requests that warm its cache first and are
not counted; then each counted request gives a figure of its own, so that a spread is one over requests. What a
predictor costs is not in the simulated time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moegguf.controller import weights
from moegguf.controller.collection import Eamc
from moegguf.controller.hit_rates import UNMEASURED
from moegguf.controller.policies import AUTO
from moegguf.controller.predictors.networks import SKIP
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.strategies import STRATEGIES
from moegguf.native.events import Phase
from moegguf.native.store import StoreOptions
from moegguf.trace.simulate import SimOptions, slots_of
from moegguf.trace.trace import Trace
from predictors.study.arrange import arranged, grouped, used_experts
from predictors.study.common import Study
from predictors.study.replay import Replay


@dataclass(frozen=True)
class Link:
    """Times of a paper: µs that one expert takes on its link, µs of compute per layer and pass, and whence."""

    expert_us: float
    layer_us: float
    source: str

    def options(self, expert_bytes: int) -> SimOptions:
        """A replay at these times."""
        return SimOptions(link_bytes_per_s=expert_bytes / self.expert_us * 1e6, layer_pass_us=self.layer_us)


NAMES = {"moe-infinity": "MoE-Infinity", "promoe": "ProMoE", "expertflow": "ExpertFlow", "duoserve": "DuoServe-MoE"}
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
    """What is replayed: its parts, and the store's switches. one_layer: slots for one layer's experts and no more, so
    that the next one evicts them. next_layer: the whole next layer is fetched ahead."""

    policy: str
    predictor: str = "none"
    prefetch: PrefetchOptions | None = None
    store: StoreOptions = StoreOptions()
    one_layer: bool = False
    next_layer: bool = False


def strategy(name: str) -> System:
    """A strategy's parts; those of moegguf's own as for a model that nothing was measured of or trained for."""
    found = STRATEGIES[name]
    if found.policy == AUTO:
        return System(UNMEASURED.policy, SKIP, PrefetchOptions(), found.store)
    prefetch = found.prefetch if isinstance(found.prefetch, PrefetchOptions) else None
    return System(found.policy, found.predictor or "none", prefetch, found.store)


BARE = STRATEGIES["none"].store
_PROMOE = STRATEGIES["promoe"]
assert isinstance(_PROMOE.prefetch, PrefetchOptions)
# What papers compare with: counting, a fixed choice of experts, loading on demand or layer by layer; and ProMoE's
# ablation step by step.
BASELINES = {
    "moe-infinity": {"counting": System("lfu", store=BARE), "algorithm 1 alone": System("sparsity", store=BARE)},
    "promoe": {"static": System("static", store=BARE)},
    "expertflow": {"whole next layer": System("lru", store=BARE, next_layer=True)},
    "duoserve": {
        "on demand": System("lru", store=BARE, one_layer=True),
        "whole next layer": System("lru", store=BARE, next_layer=True),
    },
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
    """A study whose trace has requests that warm a cache, followed by the ones that are counted: of several that decode
    together the first."""

    study: Study
    counted: Sequence[int]

    @classmethod
    def of(cls, study: Study, n_warm: int, n_counted: int) -> Workload:
        """The first requests of the trace; of those counted equally many of each kind, in order of arrival."""
        sequences = study.trace.sequences()
        labels = study.trace.header.labels
        warm = sequences[:n_warm]
        rest = sequences[n_warm:]
        kinds = sorted({labels[sequence] for sequence in rest})
        of_each = -(-n_counted // len(kinds))
        chosen = sorted(s for kind in kinds for s in [s for s in rest if labels[s] == kind][:of_each])
        return cls(replace(study, trace=arranged(study.trace, [*warm, *chosen])), chosen)

    @classmethod
    def together(cls, study: Study, n_together: int, n_warm: int = 1) -> Workload:
        """All requests of the trace, so many at once: their prompts one after another, then a token of each in a pass,
        as long as all decode. The first `n_warm` groups are not counted."""
        trace = study.trace
        firsts = list[int]()
        passes = list[npt.NDArray[np.int64]]()
        sequences = trace.sequences()
        for at in range(0, len(sequences) - n_together + 1, n_together):
            group = sequences[at : at + n_together]
            firsts.append(group[0])
            for sequence in group:
                passes.append(np.flatnonzero((trace.sequence_of == sequence) & (trace.phase_of == Phase.PREFILL)))
            tokens = [np.flatnonzero((trace.sequence_of == s) & (trace.phase_of == Phase.DECODE)) for s in group]
            passes += list(np.stack([of[: min(map(len, tokens))] for of in tokens], axis=1))
        return cls(replace(study, trace=grouped(trace, passes)), firsts[n_warm:])

    def strategies(self, names: Sequence[str], share: float, link: Link) -> dict[str, dict[str, Any]]:
        """Figures of whole strategies. Raises OptionError."""
        return self.systems({name: strategy(name) for name in names}, share, link)

    def systems(self, systems: Mapping[str, System], share: float, link: Link) -> dict[str, dict[str, Any]]:
        """Figures of systems. Raises OptionError."""
        return {name: self._figures(self._replay(system, share, link)) for name, system in systems.items()}

    def _replay(self, system: System, share: float, link: Link) -> Replay:
        trace = self.study.trace
        n_slots = trace.shape.n_expert if system.one_layer else slots_of(trace.shape, share)
        options = replace(link.options(trace.shape.expert_bytes), prefetch=system.prefetch, store=system.store)
        parts = self.study.policy(system.policy), self.study.predictor(system.predictor)
        replay = Replay(trace, *parts, n_slots, options)
        replay.next_layer = system.next_layer
        return replay

    def _figures(self, replay: Replay) -> dict[str, Any]:
        """Of each counted request the milliseconds of its prompt, and per token; of their decoded tokens all together
        the others. ready: of the look-ups, those that found the expert there; late: on its way. ahead: of what was
        fetched ahead, the share that was there in time, late, and not used."""
        counted = replay.counted()
        ms = counted["sim_clock_ns"] / 1e6
        answers = [replay.passes(sequence, Phase.DECODE) for sequence in self.counted]
        decoding = np.any(answers, axis=0)
        of = {name: int(values[decoding].sum()) for name, values in counted.items()}
        n_passes = int(decoding.sum())
        started = of["prefetch_started"]
        in_time = of["prefetch_useful"]
        late = of["prefetch_late"]
        moved = of["bytes_missed"] + of["bytes_prefetched"]
        return {
            "token_ms": [round(float(ms[passes].mean()), 3) for passes in answers],
            "tokens": [int(passes.sum()) for passes in answers],
            "prompt_ms": [round(float(ms[replay.passes(s, Phase.PREFILL)].sum()), 2) for s in self.counted],
            "percentiles_ms": {str(p): round(float(np.percentile(ms[decoding], p)), 2) for p in (50, 90, 99)},
            "ready": round(of["hits_ready"] / of["lookups"], 4),
            "late": round(of["hits_late"] / of["lookups"], 4),
            "stall_ms": round(of["stall_ns"] / n_passes / 1e6, 3),
            "experts": round(moved / self.study.trace.shape.expert_bytes / n_passes, 2),
            "ahead": [round(n / started, 4) for n in (in_time, late, started - in_time - late)] if started else None,
        }


Eams = list[npt.NDArray[np.float32]]


def request_counts(trace: Trace, phase: Phase, n_windows: int = 1) -> Eams:
    """Of each request its EAMs of one phase: (n_layer, n_expert) counts of tokens, of so many windows of its tokens,
    each half of them, evenly spaced; of one: of all its tokens."""
    of = trace.sequence_of
    phases = trace.phase_of
    layers = list(trace.shape.layers)
    found = []
    for sequence in trace.sequences():
        tokens = np.flatnonzero((of == sequence) & (phases == phase))
        length = len(tokens) if n_windows == 1 else -(-len(tokens) // 2)
        for start in np.linspace(0, len(tokens) - length, n_windows).astype(int):
            counts = np.zeros(trace.shape.table, np.float32)
            counts[layers] = used_experts(trace, tokens[start : start + length]).sum(axis=0)
            found.append(counts)
    return found


def collection(trace: Trace, n_entries: int) -> Eamc:
    """MoE-Infinity's collection after the last `n_entries` requests of a trace; where there are fewer, after windows of
    its requests in place of whole ones."""
    n_windows = max(1, -(-n_entries // max(1, len(trace.sequences()))))
    eamc = Eamc(*trace.shape.table)
    for counts in request_counts(trace, Phase.DECODE, n_windows)[-n_entries:] if n_entries else ():
        eamc.add(counts)
    return eamc


def write_collections(folder: Path, traces: Sequence[Trace], n_entries: int | None = None) -> None:
    """The collection after so many requests of each trace, all where None, to where `Artifacts` finds it."""
    path = folder / "eamc.safetensors"
    path.unlink(missing_ok=True)
    if n_entries == 0:
        return
    state = np.concatenate([collection(trace, n_entries or len(trace.sequences())).state for trace in traces])
    eamc = Eamc.from_state(state, capacity=len(state))
    weights.save(path, "eamc", traces[0].header.fingerprint, traces[0].shape, eamc.weights())


def routing_digest(trace: Trace) -> str:
    """The sha256 of what is replayed: tokens, requests, phases, and the experts that routers chose. Times and inputs
    differ from one recording of the same requests to the next, in rounding at least."""
    parts = trace.tokens, trace.sequence_of, trace.phase_of, trace.expert_ids
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()
