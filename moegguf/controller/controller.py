"""The controller's one paragraph: on a gate, remember it, ask the predictor, score what to keep, fetch ahead, judge."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.judge import LiveJudge
from moegguf.controller.policies.base import CarriedByStore, Policy
from moegguf.controller.policies.lru import Lru
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.prefetch import Prefetcher, PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.controller.watchdog import Watchdog
from moegguf.native.events import Announcement, Float32s, NativePolicy, Phase, RoutingEvent

Int32s = npt.NDArray[np.int32]


class Actions(Protocol):
    """What a controller can do and ask: the store, live or simulated."""

    def set_scores(self, scores: Float32s | None) -> None:
        """The lowest is evicted first."""

    def prefetch(self, il: Int32s, experts: Int32s) -> None:
        """Asks for experts early."""

    def residency(self) -> npt.NDArray[np.uint8]:
        """(n_layer, n_expert): 0 absent, 1 on its way, 2 there."""

    def counters(self) -> Mapping[str, int]:
        """The store's counters."""


@dataclass(frozen=True)
class ControllerOptions:
    """prefetch: None acts on no prediction. judge: predictions are compared with what happens. slowest_s: a policy or
    predictor that once takes longer is switched off. clock_ns: what the watchdog goes by; None when somebody else
    tells it of tokens.
    """

    prefetch: PrefetchOptions | None = None
    judge: bool = False
    slowest_s: float = 1.0
    clock_ns: Callable[[], int] | None = None


def carried_by_store(policy: Policy, predictor: Predictor, options: ControllerOptions) -> NativePolicy | None:
    """What makes the store carry out the policy by itself; None where it takes a controller."""
    listens = options.prefetch is not None or options.judge or not isinstance(predictor, NoPrediction)
    return policy.native_policy if not listens and isinstance(policy, CarriedByStore) else None


class Controller:
    """Hears one model's announcements and gates, one thread at a time, and acts on its store.

    A policy or predictor that fails, answers nonsense or takes too long is switched off with one warning; the store
    then goes on with what it has, in the end with LRU.
    """

    def __init__(
        self, shape: MoeShape, policy: Policy, predictor: Predictor, actions: Actions, options: ControllerOptions
    ) -> None:
        self.shape = shape
        self.policy: Policy | None = policy
        self.predictor: Predictor | None = predictor
        self.history = History(shape)
        self.options = options
        self.judge = LiveJudge(predictor, drive=False) if options.judge else None
        self.watchdog = Watchdog() if options.prefetch and options.prefetch.watchdog else None
        self.seconds = 0.0  # spent in here
        self.gates = 0
        self.stopped = False
        self._scored = False
        self._actions = actions
        self._prefetcher = Prefetcher(shape, options.prefetch) if options.prefetch else None
        self._ahead = Forecast(shape, options.prefetch.window if options.prefetch else _window(predictor))

    @property
    def prefetching(self) -> bool:
        """Whether predictions are acted on now."""
        return self._prefetcher is not None and (self.watchdog is None or self.watchdog.on)

    @property
    def superfluous(self) -> bool:
        """Whether the store would do the same without this controller, until the watchdog allows prefetching."""
        off = self.watchdog is not None and not self.watchdog.on
        return off and self.judge is None and isinstance(self.policy, CarriedByStore | Lru | None)

    def native_policy(self) -> NativePolicy | None:
        """What the store goes by in the meantime; None: least recent use."""
        return self.policy.native_policy if isinstance(self.policy, CarriedByStore) else None

    @property
    def acts(self) -> bool:
        """Whether predictions may be acted on at all."""
        return self._prefetcher is not None

    def announce(self, announcement: Announcement) -> None:
        """Tokens are about to be evaluated: predictors from tokens look ahead of the first layer."""
        if self.stopped:
            return
        start = time.perf_counter()
        self._token_ended(announcement)
        if self.predictor is not None:
            self._predict(self.predictor, announcement)
        if self.prefetching and announcement.phase == Phase.DECODE:
            self._fetch()
        self.seconds += time.perf_counter() - start

    def observe(self, gate: RoutingEvent) -> None:
        """A layer was routed."""
        if self.stopped or gate.il not in self.shape.row_of:
            return
        start = time.perf_counter()
        self.gates += 1
        self.history.update(gate)
        if self.predictor is not None:
            self._look_ahead(self.predictor, gate)
        if self.policy is not None:
            self._score(self.policy, gate.phase)
        if self.prefetching and gate.phase == Phase.DECODE:
            self._fetch()
        self.seconds += time.perf_counter() - start

    def _token_ended(self, announcement: Announcement) -> None:
        if self._prefetcher is not None:
            self._prefetcher.begin_pass()
        if self.watchdog is None or self.options.clock_ns is None:
            return
        if announcement.phase == Phase.DECODE:
            self.watchdog.token(self.options.clock_ns())
        else:
            self.watchdog.pause()

    def _predict(self, predictor: Predictor, announcement: Announcement) -> None:
        start = time.perf_counter()
        try:
            predictor.announce(announcement)
            if self.judge is not None:
                self.judge.announce(announcement)
            self._ahead.begin_pass(predictor)
            self._check_time(start)
        except Exception as error:
            self._drop_predictor(_reason(error))

    def _look_ahead(self, predictor: Predictor, gate: RoutingEvent) -> None:
        start = time.perf_counter()
        try:
            predictor.observe(gate)
            if self.judge is not None:
                self.judge.observe(gate)
            self._ahead.advance(predictor, gate.il)
            self._check_time(start)
        except Exception as error:
            self._drop_predictor(_reason(error))

    def _score(self, policy: Policy, phase: Phase) -> None:
        start = time.perf_counter()
        try:
            scores = policy.scores(self.history, self._ahead)
            if scores is not None and np.shape(scores) != self.shape.table:
                raise ValueError(f"scores have the shape {np.shape(scores)}, not {self.shape.table}")
            # A prompt's pass needs every layer once, in order: the store's own pipeline knows that better than any
            # probability (DuoServe-MoE, section 5: prefill and decode scheduled apart). The policy only hears of it.
            if phase == Phase.PREFILL:
                self._forget_scores()
            elif scores is not None:
                self._actions.set_scores(scores)
                self._scored = True
            self._check_time(start)
        except Exception as error:
            self._drop_policy(_reason(error))

    def _forget_scores(self) -> None:
        if self._scored:
            self._actions.set_scores(None)
            self._scored = False

    def _check_time(self, start: float) -> None:
        took = time.perf_counter() - start
        if took > self.options.slowest_s:
            raise TimeoutError(f"took {took:.1f} s at one gate")

    def _fetch(self) -> None:
        assert self._prefetcher is not None
        layers, experts = self._prefetcher.wishes(self._ahead, self._actions.residency)
        if layers.size:
            self._actions.prefetch(layers, experts)

    def _drop_predictor(self, why: str) -> None:
        name, self.predictor, self._prefetcher = _name(self.predictor), None, None
        self._ahead.clear()
        if not self.stopped:
            warnings.warn(f"the predictor {name} {why}; going on without it.", stacklevel=2)

    def _drop_policy(self, why: str) -> None:
        name, self.policy = _name(self.policy), None
        if not self.stopped:
            self._forget_scores()
            warnings.warn(f"the policy {name} {why}; going on with LRU.", stacklevel=2)

    def stop(self) -> None:
        """From now on nothing is heard: events still queued pass at once."""
        self.stopped = True


def _window(predictor: Predictor) -> int:
    """How far ahead policies look: as far as the predictor reaches, but a matrix product per layer has its price."""
    return PrefetchOptions.window if predictor.needs_inputs else predictor.reach


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, TimeoutError) else f"raised {type(error).__name__}: {error}"


def _name(of: object) -> str:
    return str(getattr(of, "name", type(of).__name__))
