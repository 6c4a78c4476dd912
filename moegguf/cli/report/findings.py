"""What the numbers of a report say, sentence by sentence: each claim is computed here from the figures beside it."""

from __future__ import annotations

import math

import numpy as np

from moegguf.trace.report import BASELINE, BOUND, PolicyTable, Recovery, ScheduleTable, StallTable
from moegguf.trace.reuse import Reuse
from moegguf.trace.score import ScoreTable

CLEAR = 0.02  # a difference of shares that is worth a sentence

NEAR_TIES = 0.999  # of the fresh-gate control on recorded inputs


def percent(share: float | None) -> str:
    """ "47.1%"; a dash where nothing was measured."""
    return "–" if share is None or math.isnan(share) else f"{share:.1%}"


def of_heat(reuse: Reuse) -> list[str]:
    """On the two heatmaps."""
    counts = reuse.counts.sum(axis=0)
    if not counts.sum():
        return ["Nothing was decoded."]
    idle = float(np.mean(counts == 0))
    words = [
        f"Over all requests, {percent(reuse.merged.covering)} of a layer's experts make up 80% of its uses"
        f" (80.0% would be even); {percent(idle)} of the experts are never used."
    ]
    gain = reuse.same_size.covering - reuse.within.covering
    if gain > CLEAR:
        return [*words, "Within one request fewer do: see the next section."]
    return [*words, "Single requests are no more uneven than chance makes samples of their length."]


def of_reuse(reuse: Reuse) -> list[str]:
    """On reuse within a request against across requests."""
    known = [w for w, share in reuse.windows_same.items() if not math.isnan(share + reuse.windows_other[w])]
    if not known:
        return ["Too few tokens or requests to compare reuse within a request and across requests."]
    window = 4 if 4 in known else known[-1]
    same, other = reuse.windows_same[window], reuse.windows_other[window]
    words = [
        f"{percent(same)} of a token's experts were used in the {window} tokens before it of the same request,"
        f" {percent(other)} in {window} tokens of another request.",
        f"80% of a request's uses fall on {percent(reuse.within.covering)} of the experts,"
        f" of as many tokens taken from all requests on {percent(reuse.same_size.covering)}.",
    ]
    if same - other > CLEAR:
        return [*words, "Use is local to a request: policies that look at the request have something to gain."]
    return [*words, "Use is not local to a request: policies that look at the request have nothing to gain."]


def of_policies(table: PolicyTable) -> list[str]:
    """On hit rates: how far the best policy gets from LRU to Belady's bound, and what loses to LRU."""
    words = []
    for budget in table.budgets():
        best = table.best_online(budget)
        closed = table.gap_closed(best, budget) if best else None
        if best is None or closed is None:
            continue
        rates = [table.hit_rates[name][budget] for name in (BASELINE, best, BOUND)]
        if best == BASELINE:
            words.append(f"At {budget:.0%} of the experts nothing beats LRU ({percent(rates[0])}).")
        else:
            words.append(
                f"At {budget:.0%} of the experts {best} closes {closed:.0%} of the distance between LRU"
                f" ({percent(rates[0])}) and Belady ({percent(rates[2])}): {percent(rates[1])}."
            )
    losing = [name for name in table.hit_rates if name != BASELINE and table.worse_than_baseline(name)]
    if losing:
        words.append(f"Below LRU at one budget or more: {', '.join(losing)}.")
    return words or [f"No budget at which {BASELINE}, {BOUND} and another policy were all measured."]


def of_scores(table: ScoreTable) -> list[str]:
    """On predictors: the best at each distance, and how far above its control it is."""
    words = []
    for distance in table.distances:
        known = {s.name: s.means[distance].accuracy for s in table.scores if s.means[distance].coverage > 0}
        right = {name: value for name, value in known.items() if value is not None}
        if not right:
            continue
        best = max(right, key=lambda name: right[name])
        layers = "layer" if distance == 1 else "layers"
        beside = _beside_control(table, best, distance, right[best])
        words.append(f"{distance} {layers} ahead {best} is the most accurate: {percent(right[best])}{beside}.")
    for score in table.scores:
        if score.fresh is not None and score.fresh.accuracy is not None:
            words.append(_fresh(score.name, score.fresh.accuracy))
    return words or ["No predictor answered."]


def _fresh(name: str, accuracy: float) -> str:
    """On the control that must be exact, but for what recording the router's input in 16 bits rounds away."""
    if accuracy == 1:
        return f"Fresh-gate control of {name}: 100%, as it must."
    if accuracy >= NEAR_TIES:
        return f"Fresh-gate control of {name}: {accuracy:.2%}; the rest are near-ties of inputs recorded in 16 bits."
    return f"Fresh-gate control of {name}: {accuracy:.2%}, NOT 100%: a fault."


def _beside_control(table: ScoreTable, name: str, distance: int, accuracy: float) -> str:
    """How far a predictor is above its control, and how often it answers when that is not always."""
    score, control = next(s for s in table.scores if s.name == name), table.control_of(name)
    logprob = control.means[distance].accuracy if control else None
    gain = math.nan if logprob is None else accuracy - logprob
    words = "" if math.isnan(gain) else f", {100 * gain:.0f} points above its control"
    if gain <= CLEAR:
        words = ", no better than its control"
    coverage = score.means[distance].coverage
    return words if coverage > 0.995 else f"{words}, answering {percent(coverage)} of the time"


def of_stalls(table: StallTable) -> list[str]:
    """On stall: which setting waits least at each speed, against the baseline."""
    words = []
    for speed in table.speeds():
        best, base = table.best(speed), table.stall_ms.get(table.baseline, {}).get(speed)
        if best is None or base is None:
            continue
        least = table.stall_ms[best][speed]
        if best == table.baseline or base - least < 0.01 * base or base == 0:
            words.append(f"At {speed:g} GB/s nothing waits clearly less than {table.baseline} ({base:.2f} ms).")
        else:
            words.append(f"At {speed:g} GB/s {best} waits {least:.2f} ms per token, {table.baseline} {base:.2f} ms.")
    return words or ["No setting was measured beside the baseline."]


def of_recovery(table: Recovery) -> list[str]:
    """On the change of text: how many requests each policy needs to be back at the level it settles at."""
    words = []
    for name in table.hit_rates:
        needed = table.recovered_after(name)
        words.append(f"{name} {'not within the series' if needed is None else f'after {needed}'}")
    if not words:
        return ["No policy was followed over a change of text."]
    return [f"Requests until the hit rate is at 95% of the level it settles at: {', '.join(words)}."]


def of_schedule(table: ScheduleTable) -> list[str]:
    """On the scheduler: how many experts a batch needs less."""
    words = []
    for batch, row in table.experts.items():
        for order in row:
            saved = table.saved(batch, order)
            if order != table.baseline and saved is not None:
                change = f"{saved:.1%} fewer" if saved >= 0 else f"{-saved:.1%} more"
                words.append(f"{batch} requests per batch, {order}: {change} experts than in order of arrival.")
    return words or ["No order of requests was measured beside the order of arrival."]
