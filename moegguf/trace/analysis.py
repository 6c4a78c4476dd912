"""Replays one recorded trace with different policies, predictors and numbers of slots,
in one tier or two, and saves hit rates."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

import numpy as np

from moegguf.controller.artifacts import MEASURED, Artifacts
from moegguf.controller.hit_rates import (
    UNMEASURED,
    UNMEASURED_WITHOUT_PREDICTIONS,
    ControllerChoice,
    Measured,
    write_measured,
)
from moegguf.controller.own_classes import names_file
from moegguf.controller.policies import (
    AUTO,
    LRU,
    AnyPolicy,
    device_policy,
    make_policy,
    policy_names,
    ram_policy,
)
from moegguf.controller.predictors import PREDICTORS, make_predictor, prefetch_predictor
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.strategies import STRATEGIES, find_strategy
from moegguf.errors import OptionError, StorageError
from moegguf.gguf.experts import read_layout
from moegguf.native.events import Phase
from moegguf.native.store import DeviceSlots
from moegguf.trace.belady import BELADY, Lookups, belady, gap_closed
from moegguf.trace.format import read
from moegguf.trace.simulate import SimOptions, SimResult, Simulation, fitted, slots_of
from moegguf.trace.trace import Trace

ALL = "all"
# Compute time of a layer per pass, in microseconds, in a replay that prefetches without
# a link.
IN_TIME_US = 1.0
# Receives "STAGE: STEP" and the finished share of the stage (0 to 1).
Progress = Callable[[str, float], object]


def no_progress(step: str, share: float) -> None:
    """Does nothing: a `Progress` for callers that do not need progress reports."""


def step_reporter(
    progress: Progress, stage: str, n_steps: int
) -> Callable[[str], None]:
    """Returns a function to call at the start of each of a stage's `n_steps` steps. The
    function passes the step and the finished share of the stage to `progress`."""
    started = itertools.count()

    def report(step: str) -> None:
        progress(f"{stage}: {step}", next(started) / n_steps)

    return report


def sample_sequences(trace: Trace, n_tokens: int) -> list[int]:
    """Chooses requests that together have at least `n_tokens` decoded tokens, or all
    requests if there are fewer tokens. Returns the requests' numbers. Requests are
    chosen one by one, and the kinds of text take turns.

    The first request of every kind is always chosen.
    """
    decoded_tokens = Counter(trace.sequence_of[trace.phase_of == Phase.DECODE].tolist())
    chosen = list[int]()
    n_chosen_tokens = 0
    for index, sequences in enumerate(itertools.zip_longest(*trace.by_kind())):
        for sequence in filter(lambda s: s is not None, sequences):
            if index == 0 or n_chosen_tokens < n_tokens:
                chosen.append(sequence)
                n_chosen_tokens += decoded_tokens[sequence]
    return chosen


@dataclass(frozen=True)
class Row:
    """The result of one replay, or Belady's bound. In a row of Belady's bound
    `simulated` is None, because the bound is computed without a store and without
    times.

    `share`: share of all experts that have slots, on devices if there are two tiers.
    `ram_share`: share of all experts that have slots in RAM below a device; None if
    there is only one tier. `devices`: {name of a device: share of all experts that have
    slots there}; empty unless there are several devices.
    """

    policy: str
    predictor: str
    share: float
    n_slots: int
    hit_rate: float
    decode_hit_rate: float
    simulated: SimResult | None = None
    strategy: str = ""
    ram_share: float | None = None
    devices: Mapping[str, float] = field(default_factory=dict)


def gap_closed_by(rows: Sequence[Row], row: Row) -> float | None:
    """Returns the share of the gap between LRU and Belady's bound that the decode hit
    rate of `row` closes (`gap_closed`). LRU (without a predictor) and the bound are
    taken from the rows with the same `share`. Returns None if one of them is missing,
    or if there is no gap."""
    at = {
        (other.policy, other.predictor): other.decode_hit_rate
        for other in rows
        if other.share == row.share
    }
    return gap_closed(
        row.decode_hit_rate,
        at.get((LRU.name, NoPrediction.name)),
        at.get((BELADY, NoPrediction.name)),
    )


def hit_ranges(rows: Sequence[Row]) -> dict[str, dict[float, tuple[float, float]]]:
    """Returns {policy: {share: (low, high)}}. `low` and `high` are the 1 % and 99 %
    quantiles of the hit rates that single requests have in these rows."""
    rates: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        if row.simulated is not None:
            found = [span.hit_rate for span in row.simulated.sequences.values()]
            rates.setdefault((row.policy, row.share), []).extend(found)
    ranges: dict[str, dict[float, tuple[float, float]]] = {}
    for (policy, share), found in rates.items():
        low, high = np.quantile(found, (0.01, 0.99)).tolist()
        ranges.setdefault(policy, {})[share] = low, high
    return ranges


def _prefetching(
    options: SimOptions, timed: bool, predictors: Sequence[str]
) -> SimOptions:
    """Returns the options for replays with these predictors. If `timed` is False, the
    options let prefetches arrive in time. Raises OptionError if the options enable
    prefetching but "none" is the only predictor."""
    if options.prefetch and set(predictors) == {"none"}:
        raise OptionError("--prefetch needs a predictor; give --predictor NAME.")
    return options if timed else _in_time(options)


def _in_time(options: SimOptions) -> SimOptions:
    """Returns options for a replay without a link, in which every prefetched expert
    arrives in time: layers take some time and transfers take none. The watchdog is off,
    because it would stop prefetching that saves no time. Options without prefetching
    are returned unchanged."""
    if options.prefetch is None:
        return options
    return replace(
        options,
        prefetch=replace(options.prefetch, watchdog=False),
        layer_pass_us=IN_TIME_US,
    )


@dataclass(frozen=True)
class TraceAnalysis:
    """A trace, and the saved artifacts of the recorded model."""

    trace: Trace
    artifacts: Artifacts
    known_predictors: ClassVar[tuple[str, ...]] = PREDICTORS

    @classmethod
    def open(
        cls, path: Path, model: Path | None = None, folder: Path | None = None
    ) -> Self:
        """Reads a trace and finds its model's artifacts, in `folder` first if it is
        given. Raises TraceError for a damaged trace. Raises OptionError if the trace
        was not recorded from `model`, or has no decoded token."""
        trace = read(path)
        if not trace.decode().n_pass:
            raise OptionError(
                f"{path} must have answers, but has only prompts; record it with --max-tokens above 0, or import it"
                " with fewer --prompt-tokens."
            )
        layout = read_layout(model) if model else None
        if layout is not None:
            trace.header.check_model(Artifacts(layout).fingerprint)
        return cls(trace, Artifacts(layout, trace.header.fingerprint, folder))

    def limited(self, n_tokens: int) -> Self:
        """Returns an analysis of only some requests, among them requests of every kind
        of text.

        Together they have at least `n_tokens` decoded tokens. If the trace has fewer,
        all requests are chosen (`sample_sequences`). 0: all requests.
        """
        chosen = (
            sample_sequences(self.trace, n_tokens)
            if n_tokens
            else self.trace.sequences()
        )
        return replace(self, trace=self.trace.select(chosen))

    def halves(self) -> tuple[Self, Self]:
        """Splits the requests into two halves. Each half contains half of the requests
        of each kind of text, give or take one. Raises OptionError if there is only one
        request."""
        one_by_one = list(itertools.chain(*self.trace.by_kind()))
        if len(one_by_one) < 2:
            raise OptionError(
                "--save chooses a policy on some requests and judges it on others, so it needs at least two requests,"
                f" but is given {len(one_by_one)}; raise --tokens, or record more requests."
            )
        first, second = (
            replace(self, trace=self.trace.select(sorted(one_by_one[start::2])))
            for start in (0, 1)
        )
        return first, second

    def each(self) -> Iterator[Self]:
        """Yields an analysis with a single request, for each request."""
        return (
            replace(self, trace=self.trace.select([sequence]))
            for sequence in self.trace.sequences()
        )

    def sample_size(self, whole: TraceAnalysis) -> str:
        """Returns a text such as "3 of 10 requests with 1,000 of 4,000 decoded tokens":
        the size of this sample and of `whole`."""
        parts = (self.trace, whole.trace)
        n, n_all = (len(trace.sequences()) for trace in parts)
        tokens, all_tokens = (trace.decode().n_tokens for trace in parts)
        return f"{n:,} of {n_all:,} requests with {tokens:,} of {all_tokens:,} decoded tokens"

    def policies(self, names: Sequence[str]) -> list[str]:
        """Returns the names without duplicates. If "all" is among them, returns the
        names of all available policies instead, and warns about the policies that are
        not available. Raises OptionError if `names` is empty, or if one of them, other
        than "all", is not available."""
        return self._names("policy", names, policy_names(), self.policy)

    def predictors(self, names: Sequence[str]) -> list[str]:
        """Returns the names without duplicates. If "all" is among them, returns the
        names of all available predictors except "none" instead, and warns about those
        that are not available.

        Raises OptionError for a name in `names` that is not available, and if `names`
        is empty.
        """
        found = self._names("predictor", names, self.known_predictors, self.predictor)
        return [name for name in found if name != "none"] if ALL in names else found

    def _names(
        self,
        kind: str,
        names: Sequence[str],
        known: Iterable[str],
        make: Callable[[str], object],
    ) -> list[str]:
        if not names:
            raise OptionError(
                f"no {kind} is named; known names: {', '.join(known)}, or all."
            )
        for name in names:
            if name != ALL:
                make(name)
        if ALL not in names:
            return list(dict.fromkeys(names))
        reasons = {
            name: reason for name in known if (reason := self.why_not(make, name))
        }
        groups: dict[str, list[str]] = {}
        # Groups names whose reasons differ only in the name.
        for name, reason in reasons.items():
            groups.setdefault(
                reason.replace(f"the {kind} ", "").replace(repr(name), "it"), []
            ).append(name)
        if groups:
            told = "; ".join(
                f"{', '.join(group)} ({reason})" for reason, group in groups.items()
            )
            warnings.warn(f"left out: {told}", stacklevel=3)
        return [name for name in known if name not in reasons]

    @staticmethod
    def why_not(make: Callable[[str], object], name: str) -> str:
        """Returns the message of the OptionError that `make(name)` raises, without the
        last full stop. Returns "" if `make` does not raise one."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(name)
        except OptionError as error:
            return str(error).rstrip(".")
        return ""

    def policy(self, name: str) -> AnyPolicy:
        """Returns a new policy for this name or "FILE.py:CLASS". Raises OptionError if
        it is not available."""
        return make_policy(name, self.trace.shape, self.artifacts)

    def predictor(self, name: str) -> Predictor:
        """Returns a new predictor for this name or "FILE.py:CLASS". Raises OptionError
        if it is not available, or if it needs the routers' inputs and the trace does
        not have them."""
        predictor = self.new_predictor(name)
        if predictor.needs_inputs and self.trace.inputs is None:
            raise OptionError(
                f"the predictor {name!r} needs the inputs of the routers, but the trace does not have them; record it"
                " with `moegguf trace record --inputs`."
            )
        return predictor

    def new_predictor(self, name: str) -> Predictor:
        """Returns a new predictor like `predictor`, but does not check that the trace
        has the routers' inputs. Raises OptionError."""
        return make_predictor(name, self.trace.shape, self.artifacts)

    def simulate(
        self,
        policies: Sequence[str],
        predictors: Sequence[str],
        shares: Sequence[float],
        options: SimOptions = SimOptions(),
        progress: Progress = no_progress,
    ) -> list[Row]:
        """Replays the trace with every combination of policy, predictor and share, and
        adds Belady's bound for each share. "all" stands for every available name,
        except the predictor "none".

        Raises OptionError for an unknown name, and for prefetching without a predictor.
        If the options have no link, every prefetched expert arrives in time.
        """
        options = _prefetching(options, options.timed, predictors)
        policies = self.policies(policies)
        predictors = self.predictors(predictors)
        rows = list[Row]()
        step = step_reporter(
            progress, "hit rates", len(policies) * len(predictors) * len(shares)
        )
        for share in shares:
            n_slots = slots_of(self.trace.shape, share)
            for policy, ahead in itertools.product(policies, predictors):
                step(f"{policy} with {ahead} in {n_slots} slots")
                rows.append(self._replayed(policy, ahead, n_slots, options, share))
            rows.append(self._bound(share))
        return rows

    def _replayed(
        self, policy: str, predictor: str, n_slots: int | Sequence[DeviceSlots], options: SimOptions, share: float,
        **others: Any,
    ) -> Row:  # fmt: skip
        """Replays the trace once, with a new policy and a new predictor of these names.
        `others` holds the other fields of the row."""
        result = Simulation(
            self.trace, self.policy(policy), self.predictor(predictor), n_slots, options
        ).run()
        rates = result.n_slots, result.hit_rate, result.decode_hit_rate
        # Replaces the class name, which may be the same in two files.
        if names_file(policy):
            result = replace(result, policy=policy)
        if names_file(predictor):
            result = replace(result, predictor=predictor)
        return Row(result.policy, result.predictor, share, *rates, result, **others)

    def _bound(self, share: float) -> Row:
        n_slots = slots_of(self.trace.shape, share)
        bound = belady(Lookups.of(fitted(self.trace, n_slots)), n_slots)
        return Row(
            BELADY,
            NoPrediction.name,
            share,
            n_slots,
            bound.hit_rate,
            bound.decode_hit_rate,
        )

    def simulate_tiers(
        self,
        policies: Sequence[str],
        predictors: Sequence[str],
        budgets: Mapping[float, tuple[DeviceSlots, ...]],
        ram_shares: Sequence[float],
        options: SimOptions = SimOptions(),
        progress: Progress = no_progress,
    ) -> list[Row]:
        """Replays the trace with slots on devices and slots in RAM below them, for
        every combination of policy, predictor, share in VRAM and share in RAM.

        policies: names of policies for VRAM, with LRU in RAM, or "vram=NAME,ram=NAME".
        One of the two parts may be missing; the policy is then the measured one in
        VRAM, and LRU in RAM.

        budgets: {share of the experts in VRAM: the devices with their numbers of slots
        and staging tensors, as planned}. Prompts use the staging tensors. If no device
        has any, prompts are cut into passes small enough to be computed exactly from
        slots.

        Raises OptionError as `simulate` does.
        """
        timed = options.timed or any(
            device.link for devices in budgets.values() for device in devices
        )
        options = _prefetching(options, timed, predictors)
        plain = (
            self.policies([name for name in policies if "=" not in name])
            if ALL in policies
            else policies
        )
        by_tier = {
            name: (device_policy(name, "vram"), ram_policy(name)) for name in plain
        }
        for name in {vram for vram, _ in by_tier.values()} - {AUTO}:
            self.policy(name)
        named = self.predictors(predictors)
        shape = self.trace.shape
        rows = list[Row]()
        pairs = list(itertools.product(budgets.items(), ram_shares))
        step = step_reporter(
            progress, "hit rates", len(pairs) * len(by_tier) * len(named)
        )
        for ((share, devices), ram_share), (
            label,
            (vram, ram),
        ), ahead in itertools.product(pairs, by_tier.items(), named):
            step(
                f"{label} with {ahead} in {share:.4g} of the experts over {ram_share:.4g}"
            )
            over = replace(
                options, n_ram_slots=slots_of(shape, ram_share), ram_policy=ram
            )
            policy = (
                self._measured_choice(share, timed=False).policy
                if vram == AUTO
                else vram
            )
            of_devices = {
                str(d.name): d.n_slots / shape.n_expert / shape.n_moe_layer
                for d in devices
            }
            several = {
                "ram_share": ram_share,
                "devices": of_devices if len(devices) > 1 else {},
            }
            row = self._replayed(policy, ahead, devices, over, share, **several)
            rows.append(replace(row, policy=label))
        return rows

    def simulate_strategies(
        self,
        names: Sequence[str],
        shares: Sequence[float],
        options: SimOptions = SimOptions(),
        policy: str = "auto",
        predictor: str | None = None,
        prefetch: bool | None = None,
        progress: Progress = no_progress,
    ) -> list[Row]:
        """Replays the trace with whole strategies, and adds Belady's bound for each
        share. "all" stands for every available strategy. `policy`, `predictor` and
        `prefetch` replace the corresponding part of each strategy, unless they are
        "auto" or None.

        options: the link and the time of a layer. Raises OptionError for unknown names,
        and for policies and predictors that are not available for this model. Also
        raises OptionError if a strategy prefetches but there is no link, unless
        `prefetch` is True. Warns about the strategies that "all" leaves out.
        """

        def check_parts(name: str) -> None:
            of, ahead, _ = find_strategy(name).parts(policy, predictor, prefetch)
            if of != "auto":
                self.policy(of)
            if ahead:
                self.predictor(ahead)

        strategies = [
            find_strategy(name)
            for name in self._names("strategy", names, STRATEGIES, check_parts)
        ]
        parts = {
            strategy.name: strategy.parts(policy, predictor, prefetch)
            for strategy in strategies
        }
        ahead_of = [name for name, part in parts.items() if part[2]]
        if ahead_of and not options.timed and not prefetch:
            raise OptionError(
                "prefetching needs a modelled link, because transfers take no time without a link, but these strategies"
                f" prefetch: {', '.join(ahead_of)}; give --link or --no-prefetch, or --prefetch to let each expert"
                " arrive in time."
            )
        rows = list[Row]()
        step = step_reporter(progress, "hit rates", len(strategies) * len(shares))
        for share in shares:
            n_slots = slots_of(self.trace.shape, share)
            for strategy in strategies:
                step(f"{strategy.name} in {n_slots} slots")
                of, ahead, fetched = parts[strategy.name]
                found = (
                    self._measured_choice(share, options.timed)
                    if of == "auto"
                    else ControllerChoice(of)
                )
                if fetched is None:
                    fetched = found.prefetch and options.timed
                fetched = PrefetchOptions() if fetched is True else fetched or None
                how = replace(options, prefetch=fetched, store=strategy.store)
                how = how if how.timed else _in_time(how)
                ahead = ahead or found.predictor
                rows.append(
                    self._replayed(
                        found.policy, ahead, n_slots, how, share, strategy=strategy.name
                    )
                )
            rows.append(self._bound(share))
        return rows

    def _measured_choice(self, share: float, timed: bool) -> ControllerChoice:
        """Returns the policy and the predictor that a live run would choose for this
        share of experts with slots. Without saved hit rates, the choice has predictions
        only if `timed` is True and `prefetch_predictor` can predict from this trace."""
        if measured := self.artifacts.measured():
            return measured.choose(share)
        name = prefetch_predictor(self.artifacts)
        if not timed or self.why_not(self.predictor, name):
            return UNMEASURED_WITHOUT_PREDICTIONS
        return replace(UNMEASURED, predictor=name)

    def save(
        self, rows: Sequence[Row], reported: Sequence[Row], alone: Sequence[Row] = ()
    ) -> Path:
        """Saves decode hit rates in the file that `policy="auto"` reads. Returns the
        path. Raises OptionError if the trace was not recorded from this model, and
        StorageError if the file cannot be written.

        rows: replays of the requests from which `auto` chooses its policy. If a policy
        was replayed with several predictors, the predictor with the highest mean hit
        rate is saved.

        reported: replays of other requests, whose hit rates `show` and `estimate`
        print.

        alone: replays of each of these other requests by itself, starting with empty
        slots.
        """
        rates: dict[tuple[str, str], dict[float, float]] = {}
        for row in rows:
            if row.policy != BELADY:
                rates.setdefault((row.policy, row.predictor), {})[row.share] = (
                    row.decode_hit_rate
                )
        best: dict[str, tuple[str, dict[float, float]]] = {}
        for policy in dict.fromkeys(policy for policy, _ in rates):
            found = [(ahead, at) for (of, ahead), at in rates.items() if of == policy]
            best[policy] = max(found, key=lambda one: fmean(one[1].values()))
        measured = Measured(
            self.artifacts.fingerprint,
            {policy: at for policy, (_, at) in best.items()},
            {policy: predictor for policy, (predictor, _) in best.items()},
            about={
                "requests": len(self.trace.sequences()),
                "tokens": self.trace.n_tokens,
                "ranges": max(
                    (len(row.simulated.sequences) for row in reported if row.simulated),
                    default=0,
                ),
            },
            ranges=hit_ranges(
                [
                    row
                    for row in (*reported, *alone)
                    if row.policy in best and best[row.policy][0] == row.predictor
                ]
            ),
            bound={
                row.share: row.decode_hit_rate
                for row in reported
                if row.policy == BELADY
            },
        )
        self.trace.header.check_model(self.artifacts.fingerprint)
        try:
            path = (
                self.artifacts.folder or self.artifacts.writable_folder()
            ) / MEASURED
            write_measured(path, measured)
        except OSError as error:
            raise StorageError(
                f"the hit rates cannot be saved ({error}); make room on the disk, or make the folder writable."
            ) from error
        return path
