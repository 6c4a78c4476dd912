"""The data of a routing report, and figures derived from them. page.py presents them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from moegguf.controller.policies import LRU
from moegguf.native.events import Phase
from moegguf.trace.belady import BELADY, gap_closed
from moegguf.trace.trace import Setting, Trace
from predictors.study.reuse import Reuse
from predictors.study.scoring import ScoreTable

SMOOTHED_REQUESTS = 5
RECOVERED = 0.95  # share of the final level of the hit rate


@dataclass(frozen=True)
class TraceSummary:
    """Source of the numbers. kinds: {kind of text: requests}. prompt_tokens, answer_tokens: prefill, decode."""

    model: str
    fingerprint: str
    n_moe_layer: int
    n_expert: int
    n_expert_used: int
    expert_bytes: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    kinds: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    hardware: str = ""

    @classmethod
    def of(cls, trace: Trace, hardware: str = "") -> TraceSummary:
        """The summary of a trace."""
        shape, answer_tokens = trace.shape, int(np.count_nonzero(trace.phase_of == Phase.DECODE))
        return cls(
            model=trace.header.model,
            fingerprint=trace.header.fingerprint,
            n_moe_layer=len(shape.layers),
            n_expert=shape.n_expert,
            n_expert_used=shape.n_expert_used,
            expert_bytes=shape.expert_bytes,
            requests=len(trace.sequences()),
            prompt_tokens=trace.n_tokens - answer_tokens,
            answer_tokens=answer_tokens,
            kinds=dict(Counter(trace.header.labels.get(sequence, "") for sequence in trace.sequences())),
            settings=dict(trace.header.settings),
            hardware=hardware,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of experts that one token uses over all layers."""
        return self.n_moe_layer * self.n_expert_used * self.expert_bytes


@dataclass(frozen=True)
class PolicyTable:
    """{policy: {budget as a share of all experts: hit rate}}; `offline`: policies that use the rest of the trace."""

    hit_rates: dict[str, dict[float, float]]
    offline: tuple[str, ...] = (BELADY,)

    def budgets(self) -> list[float]:
        """Budgets of any policy, ascending."""
        return sorted({budget for rates in self.hit_rates.values() for budget in rates})

    def best_online(self, budget: float) -> str | None:
        """The online policy with the highest hit rate at this budget; the first of equals."""
        rates = {name: r[budget] for name, r in self.hit_rates.items() if name not in self.offline and budget in r}
        return max(rates, key=lambda name: rates[name]) if rates else None

    def gap_closed(self, policy: str, budget: float) -> float | None:
        """`belady.gap_closed` by a policy."""
        return gap_closed(*(self.hit_rates.get(name, {}).get(budget) for name in (policy, LRU.name, BELADY)))

    def worse_than_baseline(self, policy: str) -> list[float]:
        """Budgets at which a policy has a lower hit rate than LRU."""
        rates, baseline = self.hit_rates.get(policy, {}), self.hit_rates.get(LRU.name, {})
        return [budget for budget in sorted(rates) if budget in baseline and rates[budget] < baseline[budget] - 1e-9]


@dataclass(frozen=True)
class StallTable:
    """{setting: {link in GB/s: stall in ms per token}}; compute_ms: of a token, without any stall."""

    stall_ms: dict[str, dict[float, float]]
    compute_ms: float | None = None
    baseline: str = LRU.name

    def speeds(self) -> list[float]:
        """Link speeds of any setting, ascending."""
        return sorted({speed for stalls in self.stall_ms.values() for speed in stalls})

    def best(self, speed: float) -> str | None:
        """The setting with the least stall; the first of equals."""
        stalls = {name: row[speed] for name, row in self.stall_ms.items() if speed in row}
        return min(stalls, key=lambda name: stalls[name]) if stalls else None


@dataclass(frozen=True)
class Recovery:
    """{policy: hit rate per request}; the kind of text changes at request `change` (counted from 0)."""

    hit_rates: dict[str, list[float]]
    change: int
    kinds: tuple[str, str] = ("", "")
    budget: float | None = None

    def smoothed(self, policy: str) -> list[float]:
        """Means over the last SMOOTHED_REQUESTS requests, of the same kind of text only."""
        rates = self.hit_rates[policy]
        starts = [max(self.change if i >= self.change else 0, i + 1 - SMOOTHED_REQUESTS) for i in range(len(rates))]
        return [float(np.mean(rates[start : i + 1])) for i, start in enumerate(starts)]

    def recovered_after(self, policy: str) -> int | None:
        """Requests after the change until the smoothed hit rate first reaches RECOVERED of its level at the end.

        The level is the mean over the last half of the requests after the change. None: never within the series.
        """
        after = self.smoothed(policy)[self.change :]
        if not after:
            return None
        level = float(np.mean(self.hit_rates[policy][self.change + len(after) // 2 :]))
        return next((i for i, rate in enumerate(after) if rate >= RECOVERED * level), None)


@dataclass(frozen=True)
class ScheduleTable:
    """{requests per batch: {order: distinct experts of a pass}}, for orders such as "fifo"."""

    experts: dict[int, dict[str, float]]
    baseline: str = "fifo"

    def saved(self, batch: int, order: str) -> float | None:
        """Share of the experts of a batch that this order of requests saves."""
        row = self.experts.get(batch, {})
        return 1 - row[order] / row[self.baseline] if order in row and row.get(self.baseline) else None


@dataclass(frozen=True)
class Report:
    """All measurements; None for a part not measured. labels: kind of text of each request."""

    trace: TraceSummary
    labels: dict[int, str] = field(default_factory=dict)
    reuse: Reuse | None = None
    policies: PolicyTable | None = None
    scores: ScoreTable | None = None
    stalls: StallTable | None = None
    recovery: Recovery | None = None
    schedule: ScheduleTable | None = None
    title: str = "Routing report"
