"""The survey of a trace: every policy and predictor there is, and what else a report shows.

Replays and scores take long and look at a part of the trace; what is only counted is counted over all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moegguf.controller.report_data import PolicyTable, Recorded, Recovery, Report, ScheduleTable, StallTable
from moegguf.controller.reuse import reuse
from moegguf.controller.scheduler import measure
from moegguf.controller.simulate import Simulation, slots_of
from moegguf.controller.sweep import Row
from moegguf.engine.machine import read_machine
from moegguf.engine.study import ALL, Progress, Study, Timing, counted, silent
from moegguf.errors import OptionError

LINKS_GB_PER_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
STALL_SHARE = 0.25  # of all experts in the pool, where stalls are compared
STALL_TOKENS = 0.25  # of those replayed: means over tokens need fewer, and it is done for every link
BATCHES = (2, 4, 8)


def survey(
    study: Study,
    shares: Sequence[float],
    layer_compute_us: float,
    n_tokens: int,
    progress: Progress = silent,
) -> Report:
    """Everything there is to draw. What takes long, replays and scores, looks at about
    `n_tokens` decoded tokens (0: all), stalls at fewer."""
    part = study.limited(n_tokens)
    timed = study.limited(max(1, round(n_tokens * STALL_TOKENS))) if n_tokens else study
    policies = _policy_table(part.simulate([ALL], ["none"], shares, progress=progress))
    best = policies.best_online(min(shares, key=lambda share: abs(share - STALL_SHARE))) or "lru"
    recorded = Recorded.of(study.trace, hardware=read_machine().cpu_model)
    settings = recorded.settings | {"replayed and scored": part.used(study), "stalls from": timed.used(study)}
    return Report(
        recorded=replace(recorded, settings=settings),
        reuse=reuse(study.trace),
        policies=policies,
        scores=part.score([ALL], progress=progress),
        stalls=_stalls(timed, best, layer_compute_us, progress),
        recovery=_recovery(study, ["lru", "lfu", "sparsity", best], progress),
        schedule=_schedule(part, progress),
        labels=study.trace.header.labels,
    )


def _stalls(study: Study, best: str, layer_compute_us: float, progress: Progress) -> StallTable:
    """Stall per decoded token over link speeds: LRU, the best policy, and both with prefetching."""
    ahead = next((name for name in ("mlp", "skip", "eamc") if study.can(study.predictor, name)), "none")
    settings = {
        "lru": ("lru", "none"),
        best: (best, "none"),
        f"lru, {ahead} prefetch": ("lru", ahead),
        f"{best}, {ahead} prefetch": (best, ahead),
    }
    stalls: dict[str, dict[float, float]] = {}
    step = counted(progress, "stalls", len(settings) * len(LINKS_GB_PER_S))
    n_slots = slots_of(study.trace.shape, STALL_SHARE)
    for label, (policy, predictor) in settings.items():
        for speed in LINKS_GB_PER_S:
            step(f"{label} at {speed:g} GB/s")
            timing = Timing(speed * 1e9, 50.0, layer_compute_us)
            options = timing.options(prefetch=predictor != "none")
            result = Simulation(study.trace, study.policy(policy), study.predictor(predictor), n_slots, options).run()
            stalls.setdefault(label, {})[speed] = result.decode.stall_ns / max(1, result.decode.tokens) / 1e6
    return StallTable(stalls, compute_ms=layer_compute_us * len(study.trace.shape.layers) / 1e3)


def _recovery(study: Study, policies: Sequence[str], progress: Progress) -> Recovery | None:
    """Hit rate request by request: all of the kind with the most requests, then all of the kind with the next most."""
    labels = study.trace.header.labels
    kinds: dict[str, list[int]] = {}
    for sequence in study.trace.sequences():
        kinds.setdefault(labels.get(sequence, ""), []).append(sequence)
    if len(kinds) < 2:
        return None
    first, second = sorted(kinds, key=lambda kind: -len(kinds[kind]))[:2]
    changed = study.trace.arranged([*kinds[first], *kinds[second]])
    n_slots, rates = slots_of(study.trace.shape, STALL_SHARE), dict[str, list[float]]()
    names = list(dict.fromkeys(policies))
    step = counted(progress, f"from {first or 'unnamed'} to {second or 'unnamed'} text", len(names))
    for name in names:
        step(name)
        result = Simulation(changed, study.policy(name), study.predictor("none"), n_slots).run()
        rates[name] = [span.hit_rate for span in result.sequences.values()]
    return Recovery(rates, len(kinds[first]), (first, second), STALL_SHARE)


def _schedule(study: Study, progress: Progress) -> ScheduleTable | None:
    """Distinct experts per batch in order of arrival, at random, and by the token scheduler."""
    table: dict[int, dict[str, float]] = {}
    step = counted(progress, "batches", len(BATCHES))
    for batch in BATCHES:
        step(f"of {batch} requests")
        try:
            effect = measure(study.trace, batch)
        except OptionError:
            continue
        table[batch] = {"arrival": effect.in_order, "random": effect.shuffled, "scheduled": effect.scheduled}
    return ScheduleTable(table) if table else None


def _policy_table(rows: Sequence[Row]) -> PolicyTable:
    table: dict[str, dict[float, float]] = {}
    for row in rows:
        table.setdefault(row.policy, {})[row.share] = row.decode_hit_rate
    return PolicyTable(table)
