"""A table of replays: policies x predictors x budgets, with Belady's bound, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moegguf.controller.policies.base import LRU, AnyPolicy
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.trace.belady import Lookups, belady
from moegguf.trace.simulate import SimOptions, SimResult, Simulation, fitted, slots_of
from moegguf.trace.trace import Trace

Policies = Mapping[str, Callable[[], AnyPolicy]]
Predictors = Mapping[str, Callable[[], Predictor]]
BELADY = "belady"


@dataclass(frozen=True)
class Row:
    """One replay. `simulated` is None for Belady's bound, which has no store and no time."""

    policy: str
    predictor: str
    share: float
    n_slots: int
    hit_rate: float
    decode_hit_rate: float
    simulated: SimResult | None = None


def sweep(
    trace: Trace,
    policies: Policies,
    predictors: Predictors,
    shares: Sequence[float],
    options: SimOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Every policy with every predictor at every share of the experts, Belady last; in the order given.

    `progress` is called with a description of each replay before it starts.
    """
    rows = []
    for share in shares:
        n_slots = slots_of(trace.shape, share)
        for name, make_policy in policies.items():
            for predictor_name, make_predictor in predictors.items():
                if progress is not None:
                    progress(f"{name} with {predictor_name} in {n_slots} slots")
                policy, predictor = make_policy(), make_predictor()
                rows.append(
                    _row(name, predictor_name, share, Simulation(trace, policy, predictor, n_slots, options).run())
                )
        rows.append(_bound(trace, share, n_slots))
    return rows


def _row(policy: str, predictor: str, share: float, result: SimResult) -> Row:
    return Row(policy, predictor, share, result.n_slots, result.hit_rate, result.decode_hit_rate, result)


def _bound(trace: Trace, share: float, n_slots: int) -> Row:
    bound = belady(Lookups.of(fitted(trace, n_slots)), n_slots)
    return Row(BELADY, "none", share, n_slots, bound.hit_rate, bound.decode_hit_rate)


def closed_gap(rows: Sequence[Row], row: Row) -> float | None:
    """Share of the gap between LRU and Belady in decode hit rate that a row closes; None without a gap."""
    at = {(other.policy, other.predictor): other for other in rows if other.share == row.share}
    low = at.get((LRU.name, NoPrediction.name))
    high = at.get((BELADY, "none"))
    if low is None or high is None or high.decode_hit_rate <= low.decode_hit_rate:
        return None
    return (row.decode_hit_rate - low.decode_hit_rate) / (high.decode_hit_rate - low.decode_hit_rate)
