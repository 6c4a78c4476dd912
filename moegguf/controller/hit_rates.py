"""Hit rates of a model: measured on its own routing, or published by others for a few
models. A measurement also determines which policy and predictor the policy "auto"
stands for.

A measurement is a small JSON file. `moegguf trace simulate --save` writes it, and the
demo model's file is shipped with moegguf. A policy that did not beat LRU in the
measurement is not chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from moegguf.atomic_write import write_atomically
from moegguf.controller.own_classes import names_file
from moegguf.errors import OptionError
from moegguf.gguf.experts import ExpertLayout

VERSION = 1
# A policy replaces LRU only if its hit rate is at least this much higher; less may be
# noise.
LEAST_GAIN = 0.005
# Two shares of experts in memory are treated as equal if they differ by at most this.
NEAR_SHARE = 0.05

T = TypeVar("T")


@dataclass(frozen=True)
class ControllerChoice:
    """The names of a policy and a predictor, and whether to prefetch."""

    policy: str = "lru"
    predictor: str = "none"
    prefetch: bool = False


# The choices for a model without a measurement. UNMEASURED had the best results in
# replays of the demo model's routing, of the routing of random weights, and of
# synthetic routing that imitates published expert reuse. In a live run the watchdog
# switches prefetching off when it does not save enough time. The second choice
# is for loads whose options name a predictor or switch prefetching off.
UNMEASURED = ControllerChoice("next-use", prefetch=True)
UNMEASURED_WITHOUT_PREDICTIONS = ControllerChoice("next-use")


@dataclass(frozen=True)
class Measured:
    """Hit rates of decode passes on a model's recorded routing.

    The policy is chosen according to `hit_rates`. `ranges` and `bound` were measured on
    other requests, so they are independent of the choice. A policy's range extends from
    the 1st to the 99th percentile of the hit rates of these other requests.
    `about["ranges"]` is the number of these requests.
    """

    fingerprint: str  # fingerprint of the model's routers
    # {policy: {share of experts in slots: hit rate}}.
    hit_rates: Mapping[str, Mapping[float, float]]
    # {policy: predictor that the policy was measured with}.
    predictors: Mapping[str, str] = field(default_factory=dict)
    # Facts about the measurement, such as the numbers of requests and tokens
    about: Mapping[str, str | int] = field(default_factory=dict)
    # {policy: {share: range}}.
    ranges: Mapping[str, Mapping[float, tuple[float, float]]] = field(
        default_factory=dict
    )
    # {share in slots: hit rate of Belady's optimal policy}.
    bound: Mapping[float, float] = field(default_factory=dict)

    def choose(self, share: float) -> ControllerChoice:
        """Returns the policy with the highest hit rate at the measured share nearest to
        `share` (of experts with slots), and the predictor that the policy was measured
        with. The choice has no prefetching, because hit rates do not show whether
        prefetching saves time.

        Policies that are below LRU at any measured share, or were measured at other
        shares than LRU, are left out. Returns LRU if it was not measured, or if the
        best hit rate does not exceed LRU's by at least LEAST_GAIN.
        """
        lru = self.hit_rates.get("lru", {})
        if not lru:
            return ControllerChoice()
        nearest = min(lru, key=lambda measured: abs(measured - share))
        never_worse = {
            name: rates
            for name, rates in self.hit_rates.items()
            if rates.keys() == lru.keys() and all(rates[at] >= lru[at] for at in lru)
        }
        at = {name: rates[nearest] for name, rates in never_worse.items()}
        best = max(at, key=lambda name: (at[name], name == "lru"))
        policy = best if at[best] >= lru[nearest] + LEAST_GAIN else "lru"
        return ControllerChoice(policy, self.predictors.get(policy, "none"))

    def range_at(self, share: float) -> tuple[float, float] | None:
        """Returns the range (low, high) of hit rates of the policy that `choose`
        returns for this share, interpolated between the measured shares. Neither end
        exceeds Belady's bound. Returns None if the policy's range was not measured."""
        ranges = self.ranges.get(self.choose(share).policy)
        if not ranges:
            return None
        bound = interpolate(self.bound, share)
        low = interpolate({at: ends[0] for at, ends in ranges.items()}, share)
        high = interpolate({at: ends[1] for at, ends in ranges.items()}, share)
        return min(low, bound), min(high, bound)


def interpolate(rates: Mapping[float, float], share: float) -> float:
    """Returns the hit rate at `share`, by linear interpolation of `rates`, {share: hit
    rate}. Limits `share` to [0, 1] first. The hit rate is 0 at share 0, and 1 at share
    1 unless `rates` has a different value there."""
    share = min(max(share, 0.0), 1.0)
    for (x0, y0), (x1, y1) in pairwise(
        ((0.0, 0.0), *sorted(rates.items()), (1.0, 1.0))
    ):
        if share <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return 1.0


def write_measured(path: Path, measured: Measured) -> None:
    """Writes a measurement as a JSON file, atomically."""
    facts = _rounded(asdict(measured) | {"version": VERSION})
    write_atomically(path, (json.dumps(facts, indent=1) + "\n").encode())


def _rounded(value: Any) -> Any:
    """Returns the value with floats rounded to five decimal places. Keys that are
    floats (shares) become short strings, and tuples become lists."""
    if isinstance(value, dict):
        return {
            f"{key:g}" if isinstance(key, float) else key: _rounded(part)
            for key, part in value.items()
        }
    if isinstance(value, tuple):
        return [_rounded(part) for part in value]
    return round(value, 5) if isinstance(value, float) else value


def read_measured(path: Path) -> Measured:
    """Reads a measurement from its JSON file. Raises OptionError, with the path, if the
    file cannot be read or is not a valid measurement."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["version"] != VERSION:
            raise ValueError(
                f"its version must be {VERSION}, but is {facts['version']}"
            )
        rates = {
            _name(name): _by_share(table, _share)
            for name, table in facts["hit_rates"].items()
        }
        ranges = {
            _name(name): _by_share(table, _ends)
            for name, table in facts.get("ranges", {}).items()
        }
        bound = _by_share(facts.get("bound", {}), _share)
        predictors = {
            _name(name): _name(predictor)
            for name, predictor in facts["predictors"].items()
        }
        return Measured(
            str(facts["fingerprint"]), rates, predictors, facts["about"], ranges, bound
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise OptionError(
            f"{path} is not a measurement of policies ({error}); delete it, or measure again with `moegguf trace"
            " simulate --save`."
        ) from error


def _name(value: Any) -> str:
    """Returns `value` as the name of a policy or predictor. Raises ValueError for
    "FILE.py:CLASS", because using such a name would run the file's code."""
    name = str(value)
    if names_file(name):
        raise ValueError(
            f"{name!r:.60} is not the name of a built-in policy or predictor"
        )
    return name


def _by_share(table: Mapping[str, Any], read: Callable[[Any], T]) -> dict[float, T]:
    found = {_share(at): read(value) for at, value in table.items()}
    if 0 in found:
        raise ValueError("a share of the experts must be above 0")
    return found


def _ends(value: Any) -> tuple[float, float]:
    low, high = value
    return _share(low), _share(high)


def _share(value: Any) -> float:
    if not 0 <= float(value) <= 1:
        raise ValueError(
            f"shares and hit rates must be from 0 to 1, but one is {value!r:.40}"
        )
    return float(value)


@dataclass(frozen=True)
class HitRange:
    """The range in which an answer's hit rate is expected."""

    low: float
    high: float
    basis: str  # names the source of the range


@dataclass(frozen=True)
class HitCurve:
    """Hit rates of a model: {share of its experts with slots: hit rate}."""

    rates: Mapping[float, float]
    source: str  # name of the model, and who published or measured the hit rates
    n_expert: int = 0
    n_expert_used: int = 0

    def at(self, share: float) -> float:
        """Returns the interpolated hit rate if this share of all experts has slots."""
        return min(1.0, interpolate(self.rates, share))

    def corrected(self, reached: Mapping[float, float]) -> HitCurve:
        """Returns the curve corrected by `reached`, the hit rates of answers on this
        machine, {share: hit rate}. Adds the points in `reached`, and removes the
        curve's points whose shares are within NEAR_SHARE of them."""
        if not reached:
            return self
        others = {
            at: rate
            for at, rate in self.rates.items()
            if all(abs(at - share) > NEAR_SHARE for share in reached)
        }
        return replace(
            self,
            rates={**others, **reached},
            source=f"{self.source}, corrected by answers on this machine",
        )


# A comment has the number of the report in the repository.
PUBLISHED = (
    HitCurve(
        {0.03: 0.0, 0.06: 0.37, 0.18: 0.706, 0.24: 0.803, 0.26: 0.84, 0.38: 0.89, 0.40: 0.95, 0.64: 0.96},
        "Qwen3-30B-A3B (reported by kekzl/imp)", 128, 8,  # 1359
    ),
    HitCurve(
        {0.06: 0.435, 0.12: 0.62, 0.18: 0.72, 0.24: 0.789, 0.33: 0.85},
        "Qwen3.8-Flash-Next (reported by kekzl/imp)", 512, 10,  # 2061
    ),
    HitCurve(
        {0.042: 0.45, 0.083: 0.61, 0.167: 0.79, 0.25: 0.88, 0.29: 0.90},
        "Qwen3.8-Flash-Next (reported by BigCherry)", 512, 10,
    ),
    HitCurve({0.22: 0.741, 0.49: 0.79}, "Qwen3.6-35B-A3B (reported by FreeToken and lucebox)", 256, 8),  # 231
    HitCurve({0.22: 0.67, 0.44: 0.88, 0.66: 0.95, 0.88: 0.94}, "GLM-5.3-Flash (reported by neurall/llama.cpp)", 288, 8),
    HitCurve({0.25: 0.51}, "OLMoE (reported by JustVugg/colibri)", 64, 8),  # 1092
)  # fmt: skip


def published_for(
    n_expert: int, n_expert_used: int
) -> tuple[tuple[HitCurve, ...], bool]:
    """Returns the published curves of models with these numbers of experts, and True.
    If there are none, returns all published curves, and False."""
    same = tuple(
        curve
        for curve in PUBLISHED
        if (curve.n_expert, curve.n_expert_used) == (n_expert, n_expert_used)
    )
    return same or PUBLISHED, bool(same)


def published_curve(n_expert: int, n_expert_used: int) -> HitCurve:
    """Returns one published curve: the one with the median hit rate at a share of 0.25
    (of two middle ones, the lower). The candidates are the curves that `published_for`
    returns."""
    curves, same = published_for(n_expert, n_expert_used)
    ordered = sorted(curves, key=lambda curve: curve.at(0.25))
    chosen = ordered[(len(ordered) - 1) // 2]
    kind = (
        "published for"
        if same
        else "not known for this model; the middle of those published:"
    )
    return replace(chosen, source=f"{kind} {chosen.source}")


def reached_range(
    layout: ExpertLayout, n_slots: int, curve: HitCurve, reached: Mapping[float, float]
) -> HitRange | None:
    """Returns the hit rate of `curve`, which `HitCurve.corrected` has corrected by
    `reached`, as a range. Returns None if every expert has a slot, or if no answer has
    reached a hit rate with about this number of slots."""
    share = n_slots / max(1, layout.n_expert_total)
    if share >= 1 or all(abs(at - share) > NEAR_SHARE for at in reached):
        return None
    return HitRange(
        curve.at(share),
        curve.at(share),
        "reached by answers of this model on this machine",
    )


def published_range(layout: ExpertLayout, n_slots: int) -> HitRange:
    """Returns the range from the lowest to the highest hit rate that published curves
    give for this number of slots. Uses the curves of models of this shape, or all
    curves if none has this shape. If there are fewer slots than the experts that one
    token uses over all layers, the range begins at 0, because LRU then has almost no
    hits."""
    share = n_slots / max(1, layout.n_expert_total)
    curves, same = published_for(layout.n_expert, layout.n_expert_used)
    rates = sorted((curve.at(share), curve.source) for curve in curves)
    low, lowest = rates[0]
    high, highest = rates[-1]
    sources = lowest if lowest == highest else f"{lowest}, to {highest}"
    of = "of its shape" if same else "of other shapes"
    basis = f"not measured on this model; published for models {of}: {sources}"
    return HitRange(low if n_slots >= layout.token_cycle_slots else 0.0, high, basis)


def typical_hit_rate(layout: ExpertLayout, n_slots: int) -> float:
    """Returns the middle of the published range. This figure is for comparing plans,
    not for predicting a speed."""
    found = published_range(layout, n_slots)
    return (found.low + found.high) / 2
