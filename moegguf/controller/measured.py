"""Measured hit rates of a model, and the choice of policy and predictor that follows from them.

A measurement is a small JSON file, written by `moegguf trace simulate --save` and shipped for the demo model. A policy
that did not beat LRU in the measurement is not chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from moegguf.atomic_write import write_atomically
from moegguf.errors import OptionError

VERSION = 1
LEAST_GAIN = 0.005  # of the hit rate: less is noise between traces


@dataclass(frozen=True)
class ControllerChoice:
    """Names of a policy and a predictor, and whether predictions may be acted on."""

    policy: str = "lru"
    predictor: str = "none"
    prefetch: bool = False


# Where nothing was measured: the best on all routing that was tried, the demo model's, random weights' and published
# reuse. Live, prefetching stays on where it saves time.
UNMEASURED = ControllerChoice("next-use", prefetch=True)
UNMEASURED_WITHOUT_PREDICTIONS = ControllerChoice("next-use")


@dataclass(frozen=True)
class Measured:
    """Hit rates of decode passes on recorded routing: {policy: {share of experts: hit rate}}.

    ranges: {policy: {share: (low, high)}}, between which 49 in 50 requests lie. bound: {share: Belady's bound}.
    predictors: the predictor each policy was measured with. prefetch: the predictor whose prefetching lowered the stall
    of a live run, or "none". about: size and kind of the requests measured, and how many others ("ranges") the ranges
    and the bound are of: what is stated of a policy was not measured where it was chosen.
    """

    fingerprint: str
    hit_rates: Mapping[str, Mapping[float, float]]
    predictors: Mapping[str, str] = field(default_factory=dict)
    prefetch: str = "none"
    about: Mapping[str, str | int] = field(default_factory=dict)
    ranges: Mapping[str, Mapping[float, tuple[float, float]]] = field(default_factory=dict)
    bound: Mapping[float, float] = field(default_factory=dict)

    def choose(self, share: float) -> ControllerChoice:
        """The best policy at the measured share nearest to `share`, of those below LRU at no share; LRU unless that one
        has a hit rate higher by LEAST_GAIN.
        """
        lru = self.hit_rates.get("lru", {})
        if not lru:
            return ControllerChoice(predictor=self.prefetch, prefetch=self.prefetch != "none")
        nearest = min(lru, key=lambda measured: abs(measured - share))
        never_worse = {
            name: rates
            for name, rates in self.hit_rates.items()
            if rates.keys() == lru.keys() and all(rates[at] >= lru[at] for at in lru)
        }
        at = {name: rates[nearest] for name, rates in never_worse.items()}
        best = max(at, key=lambda name: (at[name], name == "lru"))
        policy = best if at[best] >= lru[nearest] + LEAST_GAIN else "lru"
        if self.prefetch != "none":
            return ControllerChoice(policy, self.prefetch, prefetch=True)
        return ControllerChoice(policy, self.predictors.get(policy, "none"))

    def range_at(self, share: float) -> tuple[float, float] | None:
        """The range of the policy that is chosen at this share, at most Belady's bound; None where it has none."""
        ranges = self.ranges.get(self.choose(share).policy)
        if not ranges:
            return None
        bound = interpolate(self.bound, share)
        low, high = (interpolate({at: ends[i] for at, ends in ranges.items()}, share) for i in range(2))
        return min(low, bound), min(high, bound)


def interpolate(rates: Mapping[float, float], share: float) -> float:
    """The hit rate at a share, from {share: hit rate}: linear between these, 0 at 0 and 1 at 1."""
    share = min(max(share, 0.0), 1.0)
    for (x0, y0), (x1, y1) in pairwise(((0.0, 0.0), *sorted(rates.items()), (1.0, 1.0))):
        if share <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return 1.0


def write_measured(path: Path, measured: Measured) -> None:
    """Writes the file atomically."""
    facts = asdict(measured)
    facts["version"] = VERSION
    facts["hit_rates"] = {
        name: {f"{share:g}": round(rate, 5) for share, rate in rates.items()}
        for name, rates in measured.hit_rates.items()
    }
    facts["ranges"] = {
        name: {f"{share:g}": [round(end, 5) for end in ends] for share, ends in table.items()}
        for name, table in measured.ranges.items()
    }
    facts["bound"] = {f"{share:g}": round(rate, 5) for share, rate in measured.bound.items()}
    write_atomically(path, (json.dumps(facts, indent=1) + "\n").encode())


def read_measured(path: Path) -> Measured:
    """Reads the file. Raises OptionError, with its path, when it is not a valid measurement."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["version"] != VERSION:
            raise ValueError(f"its version is {facts['version']}, not {VERSION}")
        rates = {
            str(name): {float(share): float(rate) for share, rate in table.items()}
            for name, table in facts["hit_rates"].items()
        }
        ranges = {
            str(name): {float(share): (float(low), float(high)) for share, (low, high) in table.items()}
            for name, table in facts.get("ranges", {}).items()
        }
        bound = {float(share): float(rate) for share, rate in facts.get("bound", {}).items()}
        pairs = [pair for table in (*rates.values(), bound) for pair in table.items()]
        pairs += [(share, end) for table in ranges.values() for share, ends in table.items() for end in ends]
        if not all(0 < share <= 1 and 0 <= rate <= 1 for share, rate in pairs):
            raise ValueError("shares and hit rates lie between 0 and 1")
        predictors = {str(name): str(predictor) for name, predictor in facts["predictors"].items()}
        return Measured(
            str(facts["fingerprint"]), rates, predictors, str(facts["prefetch"]), facts["about"], ranges, bound
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{path} is not a measurement of policies ({error}); delete it or measure again.") from error
