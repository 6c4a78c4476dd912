"""The sentences of a report, each computed from the numbers in the section's tables."""

from __future__ import annotations

import math

import numpy as np

from moegguf.controller.policies import LRU
from moegguf.terminal.units import percent as format_percent
from moegguf.trace.belady import BELADY
from predictors.study.report.tables import PolicyTable, Recovery, ScheduleTable, StallTable
from predictors.study.reuse import Reuse
from predictors.study.scoring import ScoreTable

MIN_DIFFERENCE = 0.02  # smallest difference of shares that gets a sentence
MIN_FRESH_ACCURACY = 0.999  # of the fresh-gate control, whose recorded inputs are rounded to 16 bits


def percent(share: float | None) -> str:
    """ "47.1%"; a dash where nothing was measured."""
    return format_percent(share, unknown="–")


def of_heatmaps(reuse: Reuse) -> list[str]:
    """Findings on the two heatmaps."""
    counts = reuse.counts.sum(axis=0)
    if not counts.sum():
        return ["No tokens were decoded."]
    idle = float(np.mean(counts == 0))
    sentences = [
        f"Over all requests, {percent(reuse.merged.covering)} of a layer's experts make up 80% of its uses"
        f" (80.0% would be even); {percent(idle)} of the experts are never used."
    ]
    gain = reuse.same_size.covering - reuse.within.covering
    if gain > MIN_DIFFERENCE:
        return [*sentences, "Within one request the share is smaller: see the next section."]
    return [*sentences, "Single requests are no more uneven than random samples of the same length."]


def of_reuse(reuse: Reuse) -> list[str]:
    """Findings on reuse within a request compared with reuse across requests."""
    known = [w for w, share in reuse.windows_same.items() if not math.isnan(share + reuse.windows_other[w])]
    if not known:
        return ["Too few tokens or requests to compare reuse within a request and across requests."]
    window = 4 if 4 in known else known[-1]
    same, other = reuse.windows_same[window], reuse.windows_other[window]
    sentences = [
        f"{percent(same)} of a token's experts were used in the {window} tokens before it of the same request,"
        f" {percent(other)} in {window} tokens of another request.",
        f"80% of a request's uses fall on {percent(reuse.within.covering)} of the experts,"
        f" 80% of the uses of as many tokens from all requests on {percent(reuse.same_size.covering)}.",
    ]
    if same - other > MIN_DIFFERENCE:
        return [*sentences, "Use is local to a request: policies that use the request's history can gain."]
    return [*sentences, "Use is not local to a request: policies that use the request's history cannot gain."]


def of_policies(table: PolicyTable) -> list[str]:
    """Findings on hit rates: how much of the distance from LRU to Belady's bound the best policy closes."""
    sentences = []
    for budget in table.budgets():
        best = table.best_online(budget)
        closed = table.gap_closed(best, budget) if best else None
        if best is None or closed is None:
            continue
        rates = [table.hit_rates[name][budget] for name in (LRU.name, best, BELADY)]
        if best == LRU.name:
            sentences.append(f"At {budget:.0%} of the experts no policy is better than LRU ({percent(rates[0])}).")
        else:
            sentences.append(
                f"At {budget:.0%} of the experts {best} closes {closed:.0%} of the distance between LRU"
                f" ({percent(rates[0])}) and Belady ({percent(rates[2])}): {percent(rates[1])}."
            )
    losing = [name for name in table.hit_rates if name != LRU.name and table.worse_than_baseline(name)]
    if losing:
        sentences.append(f"Below LRU at one budget or more: {', '.join(losing)}.")
    return sentences or [f"No budget at which {LRU.name}, {BELADY} and another policy were all measured."]


def of_scores(table: ScoreTable) -> list[str]:
    """Findings on predictors: the most accurate at each distance, and its control."""
    sentences = []
    for distance in table.distances:
        known = {s.name: s.means[distance].accuracy for s in table.scores if s.means[distance].coverage > 0}
        right = {name: value for name, value in known.items() if value is not None}
        if not right:
            continue
        best = max(right, key=lambda name: right[name])
        layers = "layer" if distance == 1 else "layers"
        beside = _above_control(table, best, distance, right[best])
        sentences.append(f"{distance} {layers} ahead {best} is the most accurate: {percent(right[best])}{beside}.")
    for score in table.scores:
        if score.fresh is not None and score.fresh.accuracy is not None:
            sentences.append(_fresh(score.name, score.fresh.accuracy))
    return sentences or ["No predictor made a prediction."]


def _fresh(name: str, accuracy: float) -> str:
    """The fresh-gate control is exact except for near-ties that rounding of the recorded inputs decides."""
    if accuracy == 1:
        return f"Fresh-gate control of {name}: 100%, as expected."
    if accuracy >= MIN_FRESH_ACCURACY:
        return f"Fresh-gate control of {name}: {accuracy:.2%}; the rest are near-ties of inputs recorded in 16 bits."
    return f"Fresh-gate control of {name}: {accuracy:.2%}, NOT 100%: a fault."


def _above_control(table: ScoreTable, name: str, distance: int, accuracy: float) -> str:
    """The distance to the control, and the share of routing events with a prediction when below 99.5%."""
    score, control = next(s for s in table.scores if s.name == name), table.control_of(name)
    control_accuracy = control.means[distance].accuracy if control else None
    gain = math.nan if control_accuracy is None else accuracy - control_accuracy
    text = "" if math.isnan(gain) else f", {100 * gain:.0f} points above its control"
    if gain <= MIN_DIFFERENCE:
        text = ", no better than its control"
    coverage = score.means[distance].coverage
    return text if coverage > 0.995 else f"{text}, with predictions for {percent(coverage)} of events"


def of_stalls(table: StallTable) -> list[str]:
    """Findings on stall: the setting with the least at each link speed, compared with the baseline."""
    sentences = []
    for speed in table.speeds():
        best, base = table.best(speed), table.stall_ms.get(table.baseline, {}).get(speed)
        if best is None or base is None:
            continue
        least = table.stall_ms[best][speed]
        if best == table.baseline or base - least < 0.01 * base or base == 0:
            sentences.append(
                f"At {speed:g} GB/s no setting stalls clearly less than {table.baseline} ({base:.2f} ms per token)."
            )
        else:
            sentences.append(
                f"At {speed:g} GB/s {best} stalls for {least:.2f} ms per token, {table.baseline} for {base:.2f} ms."
            )
    return sentences or ["No setting was measured together with the baseline."]


def of_recovery(table: Recovery) -> list[str]:
    """Findings on the change of text: requests until each policy's hit rate recovers."""
    sentences = []
    for name in table.hit_rates:
        needed = table.recovered_after(name)
        sentences.append(f"{name} {'not within the series' if needed is None else f'after {needed}'}")
    if not sentences:
        return ["No policy was measured over a change of text."]
    return [f"Requests until the hit rate reaches 95% of its final level: {', '.join(sentences)}."]


def of_schedule(table: ScheduleTable) -> list[str]:
    """Findings on the scheduler: distinct experts per batch, compared with order of arrival."""
    sentences = []
    for batch, row in table.experts.items():
        for order in row:
            saved = table.saved(batch, order)
            if order != table.baseline and saved is not None:
                change = f"{saved:.1%} fewer" if saved >= 0 else f"{-saved:.1%} more"
                sentences.append(f"{batch} requests per batch, {order}: {change} experts than in order of arrival.")
    return sentences or ["No order of requests was measured together with the order of arrival."]
