"""Measures all parts of a report from one trace: replays, scores, stalls over link speeds, recovery, batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from moegguf.controller.predictors.base import NoPrediction
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.strategies import STRATEGIES
from moegguf.trace.analysis import ALL, Progress, Row, no_progress, step_reporter
from moegguf.trace.belady import BELADY
from moegguf.trace.simulate import Simulation, slots_of
from moegguf.trace.trace import Setting
from predictors.study.accuracy import LinkModel
from predictors.study.arrange import arranged
from predictors.study.common import Study, sim_options
from predictors.study.report.tables import PolicyTable, Recovery, Report, ScheduleTable, StallTable, TraceSummary
from predictors.study.reuse import reuse
from predictors.study.scheduling import compare
from predictors.study.score import score_named
from predictors.study.token_scheduler import PATHS

LINKS_GB_PER_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
STALL_SHARE = 0.25  # share of all experts in the pool when stalls are compared
STALL_TOKENS = 0.25  # share of the tokens replayed for stalls: one replay per link speed
BATCHES = (2, 4, 8)


def build_report(
    study: Study,
    shares: Sequence[float],
    layer_compute_us: float,
    n_tokens: int,
    hardware: str = "",
    progress: Progress = no_progress,
) -> Report:
    """All parts of the report. Replays and scores use about `n_tokens` decoded tokens (0: all), stalls fewer."""
    part = study.limited(n_tokens)
    timed = study.limited(max(1, round(n_tokens * STALL_TOKENS))) if n_tokens else study
    rows = part.simulate([ALL], ["none"], shares, progress=progress)
    best = _policy_table(rows).best_online(min(shares, key=lambda share: abs(share - STALL_SHARE))) or "lru"
    summary = TraceSummary.of(study.trace, hardware=hardware)
    sizes = part.sample_size(study), timed.sample_size(study)
    samples: dict[str, Setting] = dict(zip(("replayed and scored", "stalls from"), sizes, strict=True))
    return Report(
        trace=replace(summary, settings=summary.settings | samples),
        reuse=reuse(study.trace),
        policies=_policy_table([*rows, *_predictive_caching(part, shares)]),
        scores=score_named(part, [ALL], progress=progress),
        stalls=_stalls(timed, best, layer_compute_us, progress),
        recovery=_recovery(study, ["lru", "lfu", "sparsity", best], progress),
        schedule=_schedule(part, progress),
        labels=study.trace.header.labels,
    )


def _stalls(study: Study, best: str, layer_compute_us: float, progress: Progress) -> StallTable:
    """Stall per decoded token over link speeds: LRU, the best policy, and both with prefetching."""
    candidates = ("mlp", "skip", "eamc")
    prefetcher = next((name for name in candidates if not study.why_not(study.predictor, name)), "none")
    settings = {
        "lru": ("lru", "none"),
        best: (best, "none"),
        f"lru, {prefetcher} prefetch": ("lru", prefetcher),
        f"{best}, {prefetcher} prefetch": (best, prefetcher),
    }
    stalls: dict[str, dict[float, float]] = {}
    step = step_reporter(progress, "stalls", len(settings) * len(LINKS_GB_PER_S))
    n_slots = slots_of(study.trace.shape, STALL_SHARE)
    for label, (policy, predictor) in settings.items():
        for speed in LINKS_GB_PER_S:
            step(f"{label} at {speed:g} GB/s")
            link = LinkModel(speed * 1e9, 50.0, layer_compute_us)
            options = replace(sim_options(link), prefetch=PrefetchOptions() if predictor != "none" else None)
            made = study.policy(policy), study.predictor(predictor)
            result = Simulation(study.trace, *made, n_slots, options).run()
            stalls.setdefault(label, {})[speed] = result.decode.stall_ns / max(1, result.decode.tokens) / 1e6
    return StallTable(stalls, compute_ms=layer_compute_us * len(study.trace.shape.layers) / 1e3)


def _recovery(study: Study, policies: Sequence[str], progress: Progress) -> Recovery | None:
    """Hit rate per request: all requests of the most frequent kind of text, then all of the second."""
    labels = study.trace.header.labels
    kinds: dict[str, list[int]] = {}
    for sequence in study.trace.sequences():
        kinds.setdefault(labels.get(sequence, ""), []).append(sequence)
    if len(kinds) < 2:
        return None
    first, second = sorted(kinds, key=lambda kind: -len(kinds[kind]))[:2]
    changed = arranged(study.trace, [*kinds[first], *kinds[second]])
    n_slots, rates = slots_of(study.trace.shape, STALL_SHARE), dict[str, list[float]]()
    names = list(dict.fromkeys(policies))
    step = step_reporter(progress, f"from {first or 'unnamed'} to {second or 'unnamed'} text", len(names))
    for name in names:
        step(name)
        result = Simulation(changed, study.policy(name), study.predictor("none"), n_slots).run()
        rates[name] = [span.hit_rate for span in result.sequences.values()]
    return Recovery(rates, len(kinds[first]), (first, second), STALL_SHARE)


def _schedule(study: Study, progress: Progress) -> ScheduleTable | None:
    """Distinct experts per batch, by each order of requests that the token scheduler is compared with."""
    n_decoding = len(study.trace.decode().sequences())
    paths = next(name for name in reversed(PATHS) if not study.why_not(study.paths, name))
    table, step = dict[int, dict[str, float]](), step_reporter(progress, "batches", len(BATCHES))
    for batch in BATCHES:
        step(f"of {batch} requests")
        if 2 * batch <= n_decoding:
            effects = compare(study.trace, batch, partial(study.paths, paths), {})
            table[batch] = {effect.order: effect.experts for effect in effects}
    return ScheduleTable(table) if table else None


def _predictive_caching(study: Study, shares: Sequence[float]) -> list[Row]:
    """ExpertFlow's cache with its own predictor, where that is trained: without one it is decayed LFU."""
    predictor = STRATEGIES["expertflow"].predictor or ""
    if study.why_not(study.predictor, predictor):
        return []
    rows = study.simulate([STRATEGIES["expertflow"].policy], [predictor], shares)
    return [row for row in rows if row.policy != BELADY]


def _policy_table(rows: Sequence[Row]) -> PolicyTable:
    table: dict[str, dict[float, float]] = {}
    for row in rows:
        name = row.policy if row.predictor == NoPrediction.name else f"{row.policy}, {row.predictor}"
        table.setdefault(name, {})[row.share] = row.decode_hit_rate
    return PolicyTable(table)
