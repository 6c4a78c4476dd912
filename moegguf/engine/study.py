"""What can be learnt from one recorded trace: replays, scores, and the report that joins them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moegguf.controller.choice import Measured, write_measured
from moegguf.controller.policies import POLICIES, make_policy
from moegguf.controller.policies.base import Policy
from moegguf.controller.predictors import PREDICTORS, make_predictor
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.report_data import PolicyTable, Recorded, Recovery, Report, ScheduleTable, StallTable
from moegguf.controller.reuse import reuse
from moegguf.controller.scheduler import measure
from moegguf.controller.score import ScoreTable, score
from moegguf.controller.simulate import SimOptions, Simulation, slots_of
from moegguf.controller.sweep import BELADY, Row, sweep
from moegguf.controller.tally import Link
from moegguf.controller.trace import Trace
from moegguf.controller.trace_file import read
from moegguf.engine.knowledge import MEASURED, Knowledge
from moegguf.engine.machine import read_machine
from moegguf.errors import OptionError
from moegguf.experts import read_layout

ALL = "all"
LINKS_GB_PER_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
STALL_SHARE = 0.25  # of all experts in the pool, where stalls are compared
BATCHES = (2, 4, 8)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """A modelled link and computer: bytes per second, latency of one transfer, compute time of one layer."""

    bytes_per_s: float
    latency_us: float = 0.0
    layer_compute_us: float = 0.0

    def options(self, prefetch: bool) -> SimOptions:
        return SimOptions(
            prefetch=PrefetchOptions() if prefetch else None,
            link_bytes_per_s=self.bytes_per_s,
            link_latency_s=self.latency_us / 1e6,
            layer_compute_us=self.layer_compute_us,
        )


@dataclass(frozen=True)
class Study:
    """A trace, and what is known about the model it was recorded from."""

    trace: Trace
    knowledge: Knowledge

    @classmethod
    def open(cls, path: Path, model: Path | None = None, folder: Path | None = None) -> Study:
        """Raises TraceError for a damaged trace, OptionError when it was recorded from another model."""
        trace = read(path)
        layout = read_layout(model) if model else None
        if layout is not None and Knowledge(layout).fingerprint != trace.header.fingerprint:
            raise OptionError(
                f"{path} was recorded from another model ({trace.header.model or 'unnamed'}) than {model}."
            )
        return cls(trace, Knowledge(layout, trace.header.fingerprint, folder))

    def policies(self, names: Sequence[str]) -> list[str]:
        """The names; "all" is every policy that can be made. Raises OptionError for one that cannot."""
        return self._names(names, POLICIES, self._policy)

    def predictors(self, names: Sequence[str]) -> list[str]:
        """The names; "all" is every predictor that can be made. Raises OptionError for one that cannot."""
        found = self._names(names, PREDICTORS, self._predictor)
        return [name for name in found if name != "none"] if ALL in names else found

    def _names(self, names: Sequence[str], known: Iterable[str], make: Callable[[str], object]) -> list[str]:
        if ALL not in names:
            for name in names:
                make(name)
            return list(names)
        return [name for name in known if self._can(make, name)]

    @staticmethod
    def _can(make: Callable[[str], object], name: str) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(name)
        except OptionError:
            return False
        return True

    def _policy(self, name: str) -> Policy:
        return make_policy(name, self.trace.shape, self.knowledge)

    def _predictor(self, name: str) -> Predictor:
        return make_predictor(name, self.trace.shape, self.knowledge)

    def simulate(
        self,
        policies: Sequence[str],
        predictors: Sequence[str],
        shares: Sequence[float],
        timing: Timing | None = None,
        prefetch: bool = False,
        say: Say | None = None,
    ) -> list[Row]:
        """Replays with every policy, predictor and share, and Belady's bound. `say` hears what is replayed next."""
        if prefetch and timing is None:
            raise OptionError(
                "--prefetch needs a modelled link, or everything asked for would be there at once: --link."
            )
        return sweep(
            self.trace,
            {name: partial(self._policy, name) for name in policies},
            {name: partial(self._predictor, name) for name in self.predictors(predictors)},
            shares,
            timing.options(prefetch) if timing else None,
            say,
        )

    def score(self, predictors: Sequence[str], timing: Timing | None = None) -> ScoreTable:
        """Every predictor by every paper's measure, beside its control on the trace without order."""
        link = Link(timing.bytes_per_s, timing.latency_us, timing.layer_compute_us) if timing else None
        return score(self.trace, [self._predictor(name) for name in predictors], link=link)

    def save(self, rows: Sequence[Row]) -> Path:
        """Keeps decode hit rates where `policy="auto"` finds them; returns the file.

        Of several predictors with one policy, the one with the higher mean hit rate counts.
        """
        rates: dict[tuple[str, str], dict[float, float]] = {}
        for row in rows:
            if row.policy != BELADY:
                rates.setdefault((row.policy, row.predictor), {})[row.share] = row.decode_hit_rate
        best: dict[str, tuple[str, dict[float, float]]] = {}
        for (policy, predictor), at in rates.items():
            if policy not in best or np.mean(list(at.values())) > np.mean(list(best[policy][1].values())):
                best[policy] = predictor, at
        measured = Measured(
            self.knowledge.fingerprint,
            {policy: at for policy, (_, at) in best.items()},
            {policy: predictor for policy, (predictor, _) in best.items()},
            about={"requests": len(self.trace.sequences()), "tokens": self.trace.n_tokens},
        )
        path = (self.knowledge.folder or self.knowledge.folder_to_write()) / MEASURED
        write_measured(path, measured)
        return path

    def report(self, shares: Sequence[float], layer_compute_us: float, say: Say) -> Report:
        """Everything there is to draw. `say` hears what is being measured."""
        rows = self.simulate(self.policies([ALL]), ["none"], shares, say=say)
        table: dict[str, dict[float, float]] = {}
        for row in rows:
            table.setdefault(row.policy, {})[row.share] = row.decode_hit_rate
        policies = PolicyTable(table)
        best = policies.best_online(min(shares, key=lambda share: abs(share - STALL_SHARE))) or "lru"
        say("scores of the predictors")
        return Report(
            recorded=Recorded.of(self.trace, hardware=read_machine().cpu_model),
            reuse=reuse(self.trace),
            policies=policies,
            scores=self.score(self.predictors([ALL])),
            stalls=self._stalls(best, layer_compute_us, say),
            recovery=self._recovery(["lru", "lfu", "sparsity", best], say),
            schedule=self._schedule(),
            labels=self.trace.header.labels,
        )

    def _stalls(self, best: str, layer_compute_us: float, say: Say) -> StallTable:
        """Stall per decoded token over link speeds: LRU, the best policy, and both with prefetching."""
        ahead = next((name for name in ("mlp", "skip", "eamc") if self._can(self._predictor, name)), "none")
        settings = {
            "lru": ("lru", "none"),
            best: (best, "none"),
            f"lru, {ahead} prefetch": ("lru", ahead),
            f"{best}, {ahead} prefetch": (best, ahead),
        }
        stalls: dict[str, dict[float, float]] = {}
        n_slots = slots_of(self.trace.shape, STALL_SHARE)
        for label, (policy, predictor) in settings.items():
            for speed in LINKS_GB_PER_S:
                say(f"{label} at {speed:g} GB/s")
                timing = Timing(speed * 1e9, 50.0, layer_compute_us)
                options = timing.options(prefetch=predictor != "none")
                result = Simulation(
                    self.trace, self._policy(policy), self._predictor(predictor), n_slots, options
                ).run()
                stalls.setdefault(label, {})[speed] = result.decode.stall_ns / max(1, result.decode.tokens) / 1e6
        return StallTable(stalls, compute_ms=layer_compute_us * len(self.trace.shape.layers) / 1e3)

    def _recovery(self, policies: Sequence[str], say: Say) -> Recovery | None:
        """Hit rate request by request across the first change between the two kinds with the most requests."""
        labels = self.trace.header.labels
        kinds: dict[str, list[int]] = {}
        for sequence in self.trace.sequences():
            kinds.setdefault(labels.get(sequence, ""), []).append(sequence)
        if len(kinds) < 2:
            return None
        first, second = sorted(kinds, key=lambda kind: -len(kinds[kind]))[:2]
        order = [*kinds[first], *kinds[second]]
        changed = self.trace.select(order)
        n_slots, rates = slots_of(self.trace.shape, STALL_SHARE), dict[str, list[float]]()
        for name in dict.fromkeys(policies):
            say(f"{name} across a change from {first} to {second}")
            result = Simulation(changed, self._policy(name), self._predictor("none"), n_slots).run()
            rates[name] = [span.hit_rate for span in result.sequences.values()]
        return Recovery(rates, len(kinds[first]), (first, second), STALL_SHARE)

    def _schedule(self) -> ScheduleTable | None:
        """Distinct experts per batch in order of arrival, at random, and by the token scheduler."""
        table: dict[int, dict[str, float]] = {}
        for batch in BATCHES:
            try:
                effect = measure(self.trace, batch)
            except OptionError:
                continue
            table[batch] = {"arrival": effect.in_order, "random": effect.shuffled, "scheduled": effect.scheduled}
        return ScheduleTable(table) if table else None
