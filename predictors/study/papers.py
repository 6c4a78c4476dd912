"""Simulates strategies with the link and compute times of a paper. Results are exact
and do not depend on the machine.

A token uses several experts of a layer. Their transfer time over the modelled link,
divided by the layer's compute time, is the same as in the paper. A pass of several
tokens takes a layer's compute time only once, as on a GPU with little load. Some
requests first fill a system's cache and are not counted. Each counted request has its
own figure, so that intervals over requests can be computed. Simulated time does not
include the cost of a predictor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moegguf.bench.series import VARIANTS
from moegguf.controller import weights
from moegguf.controller.collection import Eamc
from moegguf.controller.hit_rates import UNMEASURED
from moegguf.controller.policies import AUTO
from moegguf.controller.predictors.networks import SKIP
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.controller.strategies import EVERY_LAYER, STRATEGIES
from moegguf.native.events import Bools, Float32s, Int32s, Int64s, Phase
from moegguf.native.store import StoreOptions
from moegguf.trace.simulate import SimOptions
from moegguf.trace.trace import Trace
from predictors.study.arrange import arranged, grouped, joined, used_experts
from predictors.study.common import Study
from predictors.study.replay import Replay


@dataclass(frozen=True)
class Link:
    """The link and compute times of a paper."""

    # Transfer time of one expert over the paper's link, in microseconds.
    expert_us: float
    layer_us: float  # compute time of a layer in a pass, in microseconds
    # Number of experts of a layer that a token of the paper's model uses.
    n_expert_used: int

    def expert_us_of(self, shape: MoeShape) -> float:
        """Returns the transfer time of one expert of this shape, in microseconds.

        Transferring all experts that a token uses in one layer takes as long as in the
        paper.
        """
        return self.expert_us * self.n_expert_used / shape.n_expert_used

    def options(self, shape: MoeShape) -> SimOptions:
        """Returns the options of a replay with these transfer and compute times."""
        link_bytes_per_s = shape.expert_bytes / self.expert_us_of(shape) * 1e6
        return SimOptions(
            link_bytes_per_s=link_bytes_per_s, layer_pass_us=self.layer_us
        )


NAMES = {
    "moe-infinity": "MoE-Infinity",
    "promoe": "ProMoE",
    "expertflow": "ExpertFlow",
    "duoserve": "DuoServe-MoE",
}
LINKS = {
    "moe-infinity": Link(720, 4000, 6),
    "promoe": Link(750, 1030, 6),
    "expertflow": Link(790, 790, 1),
    "duoserve": Link(3960, 1980, 2),
}
# Sources of the times in LINKS. The texts are not settings, so correcting a text does
# not make recorded results outdated.
SOURCES = {
    "moe-infinity": (
        "table 1: DeepSeek-V2-Lite, 6 experts a token, 24 GB/s; not in the paper: 17.3 MB an expert; 155 - 51 ms of"
        " compute over 26 layers"
    ),
    "promoe": (
        "2.2: DS-1 in fp16, 6 experts a token, 23 GB/s; not in the paper: 17.3 MB an expert; 39.6 % of 67.9 ms are"
        " compute, over 26 layers"
    ),
    "expertflow": (
        "none in the paper: Switch-base's experts of 18.9 MB, one a token, over an A40's 24 GB/s, as much compute a"
        " layer"
    ),
    "duoserve": (
        "6.1: Mixtral-8x7B in 4 bits, 2 experts a token, PCIe 4.0; not in the paper: 99 MB an expert, 25 GB/s, and"
        " compute of half of an expert's time"
    ),
}


class System(NamedTuple):
    """A system to replay: its parts, and the store's switches."""

    policy: str
    predictor: str = "none"
    prefetch: PrefetchOptions | None = None
    store: StoreOptions = StoreOptions()
    # True: prefetches all experts of the next layer instead of predicting.
    next_layer: bool = False

    def settings(self) -> dict[str, Any]:
        """Returns the parts that identify the system, by name. Options are reduced to
        the fields that differ from their defaults."""
        prefetch = None if self.prefetch is None else changed(self.prefetch)
        parts = self._asdict() | {"prefetch": prefetch, "store": changed(self.store)}
        return parts


def changed(options: Any) -> dict[str, Any]:
    """Returns {name: value} for the fields of a dataclass object that differ from their
    defaults."""
    defaults = vars(type(options)())
    return {
        name: value for name, value in vars(options).items() if value != defaults[name]
    }


def strategy(name: str) -> System:
    """Returns the parts of a strategy.

    For moegguf's own strategy, returns the parts for a model without measurements and
    without trained predictors.
    """
    found = STRATEGIES[name]
    if found.policy == AUTO:
        return System(UNMEASURED.policy, SKIP, PrefetchOptions(), found.store)
    prefetch = found.prefetch if isinstance(found.prefetch, PrefetchOptions) else None
    return System(found.policy, found.predictor or "none", prefetch, found.store)


BASES = ("none", "lru", "moegguf")
BARE = STRATEGIES["none"].store
# A miss is read only after all experts that were requested earlier, possibly a whole
# layer.
WAITING = replace(BARE, chunked=False, preempt=False, demand_first=False)
NEXT_LAYER = {
    "whole next layer": System("lru", store=BARE, next_layer=True),
    "whole next layer first": System("lru", store=WAITING, next_layer=True),
}
# The papers' baselines: eviction by counting, a fixed choice of experts, and loading on
# demand or layer by layer. Each baseline has as many slots as the strategy with which
# it is compared.
BASELINES = {
    "moe-infinity": {
        "counting": System("lfu", store=BARE),
        "algorithm 1 alone": System("sparsity", store=BARE),
    },
    "promoe": {"static": System("static", store=BARE)},
    "expertflow": NEXT_LAYER,
    # Prompts read each expert only once, as in Accelerate, even if there are few slots.
    "duoserve": {
        "on demand": System("lru", store=StoreOptions(stream=True)),
        **NEXT_LAYER,
    },
}
_PROMOE = strategy("promoe")


def _step(variant: str) -> System:
    """Returns ProMoE's strategy with the store options of `VARIANTS[variant]`.

    The option `sweep` is off. This option changes which experts the store prefetches
    and evicts during prompts.
    """
    return _PROMOE._replace(
        store=StoreOptions(**VARIANTS[variant]["store"], sweep=False)
    )


# The steps of ProMoE's figure 13, beginning with its base. Misses wait for prefetches
# until early preemption is added. Reordered inference affects only prompts here (the
# store's sweep), because the simulator computes a layer of a decoded token at once.
ABLATION = {
    "LRU, waiting for all of a layer": System("lru", store=BARE),
    "+ prefetching": _step("step-prefetch"),
    "+ chunks": _step("step-chunks"),
    "+ early preemption": _step("step-preemption"),
    "+ reordering": _PROMOE,
}
# Prefetch windows to try, in layers, because these papers leave the window open.
# ExpertFlow and MoE-Infinity predict all layers, and do not state how far ahead they
# prefetch. DuoServe-MoE is not listed, because it states its window.
WINDOWS = {
    "moe-infinity": (1, 2, 4, EVERY_LAYER),
    "promoe": (1, 2, 4, 8),
    "expertflow": (1, 2, 4, EVERY_LAYER),
}


def ahead(paper: str, window: int) -> System:
    """Returns the paper's strategy with a prefetch window of `window` layers."""
    system = strategy(paper)
    assert system.prefetch is not None
    return system._replace(prefetch=replace(system.prefetch, window=window))


def systems_of(paper: str, window: int | None = None) -> dict[str, System]:
    """Returns the systems that are compared to decide a paper's claims.

    All systems get the switch `sweep` of the paper's strategy, so that the comparison
    is fair. This switch changes which experts the store prefetches and evicts during
    prompts.

    window: the prefetch window of the paper's strategy in layers, chosen on other
    requests; None: the strategy's own.
    """
    own = strategy(paper) if window is None else ahead(paper, window)
    systems = {
        **{name: strategy(name) for name in BASES},
        paper: own,
        **BASELINES[paper],
    }
    return {name: beside(system, own) for name, system in systems.items()}


def beside(system: System, other: System) -> System:
    """Returns `system` with the `sweep` option of `other`."""
    return system._replace(store=replace(system.store, sweep=other.store.sweep))


@dataclass(frozen=True)
class Workload:
    """A trace with its model's artifacts. The trace's first requests only warm the
    cache; only the later ones are counted."""

    study: Study
    # Numbers of the counted requests. The number of a group of requests that decode
    # together is its first request's number.
    counted: Sequence[int]

    @classmethod
    def of(cls, study: Study, warm: Trace, n_counted: int | None = None) -> Workload:
        """Returns a workload: the requests of `warm`, which are not counted, and then
        the requests of the study.

        n_counted: approximately how many of the study's requests to use: the first of
        each kind, in equal numbers if there are enough; None: all.
        """
        sequences = study.trace.sequences()
        labels = study.trace.header.labels
        kinds = sorted({labels.get(sequence, "") for sequence in sequences})
        of_each = len(sequences) if n_counted is None else -(-n_counted // len(kinds))
        chosen = sorted(
            s
            for kind in kinds
            for s in [s for s in sequences if labels.get(s, "") == kind][:of_each]
        )
        counted = arranged(study.trace, chosen)
        return cls(
            replace(study, trace=joined(counted, arranged(warm, warm.sequences()))),
            chosen,
        )

    @classmethod
    def together(
        cls, study: Study, n_together: int, n_groups: int, n_warm: int = 1
    ) -> Workload:
        """Returns a workload with groups of `n_together` requests that decode together.

        The first `n_warm` groups are not counted. The prompts of a group are processed
        one after another. Each later pass contains one token from each request, until
        the shortest answer ends. Requests are assigned to groups in order of arrival.
        When all requests have been used, they are reused in a random order. A reused
        request counts as a new request.
        """
        trace = study.trace
        random = np.random.default_rng(0)
        queue = list[int]()
        passes = list[Int64s]()
        names = list[Int32s]()
        firsts = list[int]()
        order = np.array(trace.sequences())
        decoding = trace.phase_of == Phase.DECODE
        for number in range(n_warm + n_groups):
            while len(queue) < n_together:
                queue += order.tolist()
                order = random.permutation(order)
            group = queue[:n_together]
            del queue[:n_together]
            own = np.arange(
                number * n_together, (number + 1) * n_together, dtype=np.int32
            )
            firsts.append(int(own[0]))
            of = [np.flatnonzero(trace.sequence_of == sequence) for sequence in group]
            for name, tokens in zip(own, of, strict=True):
                passes.append(tokens[~decoding[tokens]])
                names.append(np.full(len(passes[-1]), name))
            answers = [tokens[decoding[tokens]] for tokens in of]
            rounds = np.stack(
                [tokens[: min(map(len, answers))] for tokens in answers], axis=1
            )
            passes += list(rounds)
            names += [own] * len(rounds)
        return cls(replace(study, trace=grouped(trace, passes, names)), firsts[n_warm:])

    def systems(
        self, systems: Mapping[str, System], n_slots: int, link: Link
    ) -> dict[str, dict[str, Any]]:
        """Returns {name of a system: figures of its replay}, all with `n_slots` slots.
        Raises OptionError."""
        return {
            name: self._figures(self._replay(system, n_slots, link))
            for name, system in systems.items()
        }

    def _replay(self, system: System, n_slots: int, link: Link) -> Replay:
        trace = self.study.trace
        options = replace(
            link.options(trace.shape), prefetch=system.prefetch, store=system.store
        )
        predictor = self.study.predictor(system.predictor)
        # Limits the reach to the window; otherwise, the store would prefetch for every
        # predicted layer.
        if system.prefetch is not None:
            predictor.reach = min(predictor.reach, system.prefetch.window)
        replay = Replay(
            trace, self.study.policy(system.policy), predictor, n_slots, options
        )
        replay.next_layer = system.next_layer
        return replay

    def _figures(self, replay: Replay) -> dict[str, Any]:
        """Returns figures of a replay.

        Lists with an item for each counted request:
        - token_ms, tokens, prompt_ms: ms per decode pass, number of decode passes, ms of the prompt.
        - by_request: `ready`, `stall_ms` and `experts` (see below) of this request's decode passes.

        Figures over the decode passes of all counted requests:
        - percentiles_ms: percentiles of the time of a pass.
        - ready: the share of look-ups that found the expert complete.
        - late: the share of look-ups that found the expert on its way.
        - stall_ms, experts: stall in ms, and number of experts read or copied, each per pass.
        - ahead: the shares of prefetched experts that were used in time, were used late, and were not used; None if
          no expert was prefetched.
        """
        counted = replay.counted()
        ms = counted["sim_clock_ns"] / 1e6
        answers = [replay.passes(sequence, Phase.DECODE) for sequence in self.counted]
        decoding = np.any(answers, axis=0)
        of = {name: int(values[decoding].sum()) for name, values in counted.items()}
        started = of["prefetch_started"]
        in_time = of["prefetch_useful"]
        late = of["prefetch_late"]
        each = [self._shares(counted, passes) for passes in answers]
        return {
            "token_ms": [round(float(ms[passes].mean()), 3) for passes in answers],
            "tokens": [int(passes.sum()) for passes in answers],
            "prompt_ms": [
                round(float(ms[replay.passes(s, Phase.PREFILL)].sum()), 2)
                for s in self.counted
            ],
            "percentiles_ms": {
                str(p): round(float(np.percentile(ms[decoding], p)), 2)
                for p in (50, 90, 99)
            },
            **self._shares(counted, decoding),
            "by_request": {
                name: [shares[name] for shares in each] for name in BY_REQUEST
            },
            "ahead": [
                round(n / started, 4) for n in (in_time, late, started - in_time - late)
            ]
            if started
            else None,
        }

    def _shares(self, counted: Mapping[str, Int64s], passes: Bools) -> dict[str, float]:
        """Returns figures of the passes for which `passes` is True.

        experts: the mean number of experts that are read or copied in a pass.
        """
        of = {name: int(values[passes].sum()) for name, values in counted.items()}
        n_passes = int(passes.sum())
        moved = of["bytes_missed"] + of["bytes_prefetched"]
        return {
            "ready": round(of["hits_ready"] / of["lookups"], 4),
            "late": round(of["hits_late"] / of["lookups"], 4),
            "stall_ms": round(of["stall_ns"] / n_passes / 1e6, 3),
            "experts": round(moved / self.study.trace.shape.expert_bytes / n_passes, 2),
        }


BY_REQUEST = ("ready", "stall_ms", "experts")
Eams = list[Float32s]


def request_counts(trace: Trace, phase: Phase, n_windows: int = 1) -> Eams:
    """Returns the EAMs (expert activation matrices) of the requests, each (n_layer,
    n_expert). They count only tokens of one phase.

    n_windows: the number of EAMs per request. A single EAM counts all of the request's
    tokens of the phase. With several EAMs, each counts a window of half of these
    tokens, and the windows begin at evenly spaced tokens.
    """
    of = trace.sequence_of
    phases = trace.phase_of
    layers = list(trace.shape.layers)
    found = []
    for sequence in trace.sequences():
        tokens = np.flatnonzero((of == sequence) & (phases == phase))
        length = len(tokens) if n_windows == 1 else -(-len(tokens) // 2)
        for start in np.linspace(0, len(tokens) - length, n_windows).astype(int):
            counts = np.zeros(trace.shape.table, np.float32)
            counts[layers] = used_experts(trace, tokens[start : start + length]).sum(
                axis=0
            )
            found.append(counts)
    return found


def collection(trace: Trace, n_entries: int) -> Eamc:
    """Returns MoE-Infinity's collection with the last `n_entries` EAMs of a trace.

    An EAM counts the decoded tokens of one request. If the trace has fewer requests
    than `n_entries`, each request has several EAMs, which count windows of its tokens.
    """
    n_windows = max(1, -(-n_entries // max(1, len(trace.sequences()))))
    eamc = Eamc(*trace.shape.table)
    for counts in (
        request_counts(trace, Phase.DECODE, n_windows)[-n_entries:] if n_entries else ()
    ):
        eamc.add(counts)
    return eamc


def write_collections(
    folder: Path, traces: Sequence[Trace], n_entries: int | None = None
) -> None:
    """Writes MoE-Infinity's collection to the file in `folder` that `Artifacts` reads.

    The collection contains `n_entries` entries from each trace, or one entry per
    request if n_entries is None. If n_entries is 0, the function only removes the file.
    """
    path = folder / "eamc.safetensors"
    path.unlink(missing_ok=True)
    if n_entries == 0:
        return
    state = np.concatenate(
        [
            collection(trace, n_entries or len(trace.sequences())).state
            for trace in traces
        ]
    )
    eamc = Eamc.from_state(state, capacity=len(state))
    weights.save(
        path, "eamc", traces[0].header.fingerprint, traces[0].shape, eamc.weights()
    )


def routing_digest(trace: Trace) -> str:
    """Returns the sha256 of the data that is replayed: tokens, requests, phases, and
    the chosen experts.

    Times and inputs are left out, because they differ between two recordings of the
    same requests.
    """
    parts = trace.tokens, trace.sequence_of, trace.phase_of, trace.expert_ids
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    ).hexdigest()
