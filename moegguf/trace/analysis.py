"""Analysis of one recorded trace: replays by policy, scores of predictors, and the report that joins them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from moegguf.controller.accuracy import LinkModel
from moegguf.controller.artifacts import MEASURED, Artifacts
from moegguf.controller.measured import Measured, write_measured
from moegguf.controller.policies import make_policy, policy_names
from moegguf.controller.policies.base import AnyPolicy
from moegguf.controller.predictors import PREDICTORS, make_predictor
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.errors import OptionError
from moegguf.gguf.experts import read_layout
from moegguf.native.events import Phase
from moegguf.trace.format import read
from moegguf.trace.report import PolicyTable, Recorded, Recovery, Report, ScheduleTable, StallTable
from moegguf.trace.reuse import reuse
from moegguf.trace.score import ScoreTable, score
from moegguf.trace.simulate import SimOptions, Simulation, slots_of
from moegguf.trace.sweep import BELADY, Row, sweep
from moegguf.trace.token_scheduler import measure
from moegguf.trace.trace import Trace

ALL = "all"
Progress = Callable[[str, float], object]  # "stage: what is being measured", and the share of the stage that is done


def silent(what: str, share: float) -> None:
    """Nobody wants to know."""


def counted(progress: Progress, stage: str, n: int) -> Callable[[str], None]:
    """Tells `progress` of each of the n parts of a stage, when it begins."""
    begun = itertools.count()

    def step(what: str) -> None:
        progress(f"{stage}: {what}", next(begun) / n)

    return step


def spread(trace: Trace, n_tokens: int) -> list[int]:
    """Requests with about `n_tokens` decoded tokens: of each kind of text in turn the next one, until there are enough.

    The first request of every kind is among them.
    """
    lengths = np.diff(trace.pass_start) * (trace.pass_phase == Phase.DECODE)
    decoded = dict.fromkeys(trace.sequences(), 0)
    for sequence, length in zip(trace.pass_sequence.tolist(), lengths.tolist(), strict=True):
        decoded[sequence] += length
    kinds: dict[str, list[int]] = {}
    for sequence in decoded:
        kinds.setdefault(trace.header.labels.get(sequence, ""), []).append(sequence)
    chosen, found = list[int](), 0
    for turn, sequences in enumerate(itertools.zip_longest(*kinds.values())):
        for sequence in filter(lambda s: s is not None, sequences):
            if turn == 0 or found < n_tokens:
                chosen.append(sequence)
                found += decoded[sequence]
    return chosen


def sim_options(link: LinkModel, prefetch: bool) -> SimOptions:
    """A replay over this link."""
    return SimOptions(
        prefetch=PrefetchOptions() if prefetch else None,
        link_bytes_per_s=link.bytes_per_s,
        link_latency_s=link.latency_us / 1e6,
        layer_compute_us=link.layer_compute_us,
    )


@dataclass(frozen=True)
class TraceAnalysis:
    """A trace, and what is known about the model it was recorded from."""

    trace: Trace
    artifacts: Artifacts

    @classmethod
    def open(cls, path: Path, model: Path | None = None, folder: Path | None = None) -> TraceAnalysis:
        """Raises TraceError for a damaged trace, OptionError when it is of another model or has only prompts."""
        trace = read(path)
        if not trace.decode().n_pass:
            raise OptionError(f"{path} has no answers, only prompts; record it again with --max-tokens above 0.")
        layout = read_layout(model) if model else None
        if layout is not None and Artifacts(layout).fingerprint != trace.header.fingerprint:
            raise OptionError(
                f"{path} was recorded from another model ({trace.header.model or 'unnamed'}) than {model}."
            )
        return cls(trace, Artifacts(layout, trace.header.fingerprint, folder))

    def limited(self, n_tokens: int) -> TraceAnalysis:
        """The same with about `n_tokens` decoded tokens, of all kinds of text alike; 0: with all of them."""
        chosen = spread(self.trace, n_tokens) if n_tokens else self.trace.sequences()
        return replace(self, trace=self.trace.select(chosen))

    def used(self, of: TraceAnalysis) -> str:
        """How much of another study this one looks at, in words."""
        parts = (self.trace, of.trace)
        n, n_all = (len(trace.sequences()) for trace in parts)
        tokens, all_tokens = (trace.decode().n_tokens for trace in parts)
        return f"{n:,} of {n_all:,} requests with {tokens:,} of {all_tokens:,} decoded tokens"

    def policies(self, names: Sequence[str]) -> list[str]:
        """The names; "all" is every policy that can be made. Raises OptionError for one that cannot, and for none."""
        return self._names("policy", names, policy_names(), self.policy)

    def predictors(self, names: Sequence[str]) -> list[str]:
        """The names; "all" is every predictor that can be made. Raises OptionError for one that cannot, and for none.

        What "all" has to leave out is a warning.
        """
        found = self._names("predictor", names, PREDICTORS, self.predictor)
        return [name for name in found if name != "none"] if ALL in names else found

    def _names(self, kind: str, names: Sequence[str], known: Iterable[str], make: Callable[[str], object]) -> list[str]:
        if not names:
            raise OptionError(f"no {kind} is named; known are {', '.join(known)}, or all.")
        for name in names:
            if name != ALL:
                make(name)
        if ALL not in names:
            return list(dict.fromkeys(names))
        found = [name for name in known if self.can(make, name)]
        left_out = [name for name in known if name not in found]
        if left_out:
            warnings.warn(f"left out: {', '.join(left_out)}; --{kind} {left_out[0]} says why.", stacklevel=3)
        return found

    @staticmethod
    def can(make: Callable[[str], object], name: str) -> bool:
        """Whether `policy` or `predictor` makes one of this name."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(name)
        except OptionError:
            return False
        return True

    def policy(self, name: str) -> AnyPolicy:
        """A fresh one. Raises OptionError."""
        return make_policy(name, self.trace.shape, self.artifacts)

    def predictor(self, name: str) -> Predictor:
        """A fresh one. Raises OptionError, also when the trace has not what it needs."""
        predictor = make_predictor(name, self.trace.shape, self.artifacts)
        if predictor.needs_inputs and self.trace.inputs is None:
            raise OptionError(f"{name!r} reads what enters the routers: record the trace with --inputs.")
        return predictor

    def simulate(
        self,
        policies: Sequence[str],
        predictors: Sequence[str],
        shares: Sequence[float],
        link: LinkModel | None = None,
        prefetch: bool = False,
        progress: Progress = silent,
    ) -> list[Row]:
        """Replays with every policy, predictor and share, and Belady's bound. "all" names all there are."""
        if prefetch and link is None:
            raise OptionError(
                "--prefetch needs a modelled link, or everything asked for would be there at once: --link."
            )
        if prefetch and set(predictors) == {"none"}:
            raise OptionError("--prefetch needs somebody to say what comes next: --predictor.")
        policies, predictors = self.policies(policies), self.predictors(predictors)
        return sweep(
            self.trace,
            {name: partial(self.policy, name) for name in policies},
            {name: partial(self.predictor, name) for name in predictors},
            shares,
            sim_options(link, prefetch) if link else None,
            counted(progress, "hit rates", len(policies) * len(predictors) * len(shares)),
        )

    def score(
        self, predictors: Sequence[str], link: LinkModel | None = None, progress: Progress = silent
    ) -> ScoreTable:
        """Every predictor by every paper's measure, beside its control on the trace without order."""
        names = self.predictors(predictors)
        tables, step = [], counted(progress, "scores", len(names))
        for name in names:
            step(name)
            tables.append(score(self.trace, [self.predictor(name)], link=link))
        return replace(
            tables[0],
            scores=tuple(one for table in tables for one in table.scores),
            controls=tuple(one for table in tables for one in table.controls),
        )

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
            self.artifacts.fingerprint,
            {policy: at for policy, (_, at) in best.items()},
            {policy: predictor for policy, (predictor, _) in best.items()},
            about={"requests": len(self.trace.sequences()), "tokens": self.trace.n_tokens},
        )
        path = (self.artifacts.folder or self.artifacts.folder_to_write()) / MEASURED
        write_measured(path, measured)
        return path


LINKS_GB_PER_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
STALL_SHARE = 0.25  # of all experts in the pool, where stalls are compared
STALL_TOKENS = 0.25  # of those replayed: means over tokens need fewer, and it is done for every link
BATCHES = (2, 4, 8)


def build_report(
    study: TraceAnalysis,
    shares: Sequence[float],
    layer_compute_us: float,
    n_tokens: int,
    hardware: str = "",
    progress: Progress = silent,
) -> Report:
    """Everything there is to draw. What takes long, replays and scores, looks at about
    `n_tokens` decoded tokens (0: all), stalls at fewer."""
    part = study.limited(n_tokens)
    timed = study.limited(max(1, round(n_tokens * STALL_TOKENS))) if n_tokens else study
    policies = _policy_table(part.simulate([ALL], ["none"], shares, progress=progress))
    best = policies.best_online(min(shares, key=lambda share: abs(share - STALL_SHARE))) or "lru"
    recorded = Recorded.of(study.trace, hardware=hardware)
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


def _stalls(study: TraceAnalysis, best: str, layer_compute_us: float, progress: Progress) -> StallTable:
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
            link = LinkModel(speed * 1e9, 50.0, layer_compute_us)
            options = sim_options(link, prefetch=predictor != "none")
            result = Simulation(study.trace, study.policy(policy), study.predictor(predictor), n_slots, options).run()
            stalls.setdefault(label, {})[speed] = result.decode.stall_ns / max(1, result.decode.tokens) / 1e6
    return StallTable(stalls, compute_ms=layer_compute_us * len(study.trace.shape.layers) / 1e3)


def _recovery(study: TraceAnalysis, policies: Sequence[str], progress: Progress) -> Recovery | None:
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


def _schedule(study: TraceAnalysis, progress: Progress) -> ScheduleTable | None:
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
