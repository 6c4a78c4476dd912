"""Measured hit rates of a model, and the choice of policy and predictor that follows from them.

A measurement is a small JSON file, written by `moegguf trace simulate --save` and shipped for the demo model. A policy
that did not beat LRU in the measurement is not chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True)
class Measured:
    """Hit rates of decode passes on recorded routing: {policy: {share of experts: hit rate}}.

    predictors: the predictor each policy was measured with. prefetch: the predictor whose prefetching lowered the stall
    of a live run, or "none". about: size and kind of the trace measured.
    """

    fingerprint: str
    hit_rates: Mapping[str, Mapping[float, float]]
    predictors: Mapping[str, str] = field(default_factory=dict)
    prefetch: str = "none"
    about: Mapping[str, str | int] = field(default_factory=dict)

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


def write_measured(path: Path, measured: Measured) -> None:
    """Writes the file atomically."""
    facts = asdict(measured)
    facts["version"] = VERSION
    facts["hit_rates"] = {
        name: {f"{share:g}": round(rate, 5) for share, rate in rates.items()}
        for name, rates in measured.hit_rates.items()
    }
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
        if not all(0 <= rate <= 1 and 0 < share <= 1 for table in rates.values() for share, rate in table.items()):
            raise ValueError("shares and hit rates lie between 0 and 1")
        predictors = {str(name): str(predictor) for name, predictor in facts["predictors"].items()}
        return Measured(str(facts["fingerprint"]), rates, predictors, str(facts["prefetch"]), facts["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{path} is not a measurement of policies ({error}); delete it or measure again.") from error
