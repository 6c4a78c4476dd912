"""The controller: updates the history at each routing event. Depending on the policy
and the predictor, it also predicts, scores experts and requests prefetches.

No controller is needed if the policy is native and there is no predictor, because the
store then decides alone. If the policy is native and the store computes the predictor,
the controller switches the store's predictor and prefetching on and off. It then needs
routing events only for the predictor `eamc`, which adds finished requests to its
collection.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np

from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.policies import AnyPolicy, Policy, Sparsity
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.prefetch import Prefetcher, PrefetchOptions, most_prefetches
from moegguf.controller.shape import MoeShape
from moegguf.controller.watchdog import Watchdog
from moegguf.errors import CallbackError, MoeggufError
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.predictor import NativeForecast
from moegguf.native.store import NativePolicy, Store


@dataclass(frozen=True)
class ActingOptions:
    """Options of a controller: prefetching, limits, and clocks."""

    prefetch: PrefetchOptions | None = None  # None: nothing is prefetched
    # Seconds that a policy or predictor may take for one event; a slower one is
    # switched off.
    slowest_s: float = 1.0
    # True: an error in a policy or predictor raises CallbackError, and there is no time
    # limit.
    strict: bool = False
    # True: each routing event waits for the store's earlier predictions; runs are then
    # reproducible, but slow
    lockstep: bool = False
    # The watchdog's clock in ns; None: the caller counts tokens with `count_token`
    clock_ns: Callable[[], int] | None = None
    # A function that returns the link's total busy time so far in ns; None: the
    # watchdog ignores the link
    link_ns: Callable[[], int] | None = None


def build_controller(
    shape: MoeShape,
    policy: AnyPolicy,
    predictor: Predictor,
    store: Store,
    options: ActingOptions,
) -> Controller | None:
    """Returns the controller of one model, live or simulated. Returns None if the
    policy is native and there is no predictor, because the store then decides alone.

    If the policy is native, sets it in the store. The policy `sparsity` brings its own
    predictor if `predictor` is NoPrediction. Raises OptionError if the store rejects
    the policy or the predictor.
    """
    if isinstance(policy, Sparsity) and isinstance(predictor, NoPrediction):
        predictor = policy.predictor
    if isinstance(policy, NativePolicy):
        store.set_policy(policy.name)
        if isinstance(predictor, NoPrediction):
            return None
    return Controller(shape, policy, predictor, store, options)


class Controller:
    """Receives one model's announcements and routing events, from one thread at a time,
    and controls the model's store.

    A policy or predictor that raises an error, returns invalid values or takes too long
    is switched off, with one warning. The store then continues without it, and evicts
    by LRU if the policy was switched off. With the option `strict`, CallbackError is
    raised instead.
    """

    def __init__(
        self,
        shape: MoeShape,
        policy: AnyPolicy,
        predictor: Predictor,
        store: Store,
        options: ActingOptions,
    ) -> None:
        self.shape = shape
        self._native = predictor.native()
        # True: the store computes the predictor and requests the prefetches.
        self.native = self._native is not None
        # True: the policy is in Python and scores experts.
        self.scores = isinstance(policy, Policy)
        self.policy: AnyPolicy | None = policy
        self.predictor: Predictor | None = predictor
        self.history = History(shape)
        self.options = options
        watched = options.prefetch is not None and options.prefetch.watchdog
        self.watchdog = Watchdog(options.link_ns) if watched else None
        self.seconds = 0.0  # seconds spent in announce() and observe()
        self.n_events = 0  # routing events observed
        self.stopped = False
        self._scored = self._forecast_set = False
        self._store = store
        self._prefetcher = (
            Prefetcher(shape, options.prefetch) if options.prefetch else None
        )
        self._native_forecast = _native_forecast(shape, predictor, options)
        self._predicting = False
        self._acting = True
        self._changing = Lock()  # held while the predictor in the store is changed
        self._direct_store()
        if options.prefetch is not None:
            self._forecast = Forecast(
                shape, options.prefetch.window, options.prefetch.again
            )
        else:
            # There is no prefetching, but a policy may read the forecast. A predictor
            # that needs inputs is costly, so it predicts only as many layers ahead as
            # the default window of PrefetchOptions.
            self._forecast = Forecast(
                shape,
                PrefetchOptions.window if predictor.needs_inputs else predictor.reach,
            )

    @property
    def may_prefetch(self) -> bool:
        """Returns False if prefetching was not chosen, or if the predictor has been
        switched off after a failure."""
        return self._prefetcher is not None

    @property
    def prefetching(self) -> bool:
        """Returns whether this controller prefetches now: prefetching is allowed, and
        the watchdog has not switched it off."""
        return self.may_prefetch and (self.watchdog is None or self.watchdog.on)

    @property
    def needs_events(self) -> bool:
        """Returns whether the controller needs announcements and routing events. If
        not, the store evicts, predicts and prefetches without them."""
        return (
            isinstance(self.policy, Policy)
            or not self.native
            or isinstance(self.predictor, EamcPredictor)
        )

    def announce(self, announcement: Announcement) -> None:
        """Receives the tokens that are evaluated next. A predictor in Python is called
        before the first layer, so that it can predict from token ids alone."""
        if self.stopped:
            return
        start = time.perf_counter()
        if self._prefetcher is not None:
            self._prefetcher.begin_pass()
        if self.watchdog is not None and self.options.clock_ns is not None:
            parts = announcement.parts()
            phase = (
                Phase.DECODE
                if all(part.phase == Phase.DECODE for part in parts)
                else Phase.PREFILL
            )
            self.count_token(phase, self.options.clock_ns(), len(parts))
        if self._refused:
            self._forecast.clear()
        elif self.predictor is not None:
            self._guarded(
                self._drop_predictor, self._begin_pass, self.predictor, announcement
            )
        self._act(announcement.phase)
        self.seconds += time.perf_counter() - start

    def observe(self, event: RoutingEvent) -> None:
        """Receives the routing event of one layer: updates the history, predicts,
        scores experts and requests prefetches."""
        if self.stopped or event.il not in self.shape.row_of:
            return
        start = time.perf_counter()
        self.n_events += 1
        self.history.update(event)
        if self.native and self.history.finished:
            self._learn()
        if self.predictor is not None and not self._refused:
            self._guarded(self._drop_predictor, self._look_ahead, self.predictor, event)
        if isinstance(self.policy, Policy):
            self._guarded(self._drop_policy, self._score, self.policy, event.phase)
        self._act(event.phase)
        self.seconds += time.perf_counter() - start

    def count_token(self, phase: Phase, now_ns: int, n_sequences: int = 1) -> None:
        """Reports the next pass to the watchdog, and applies the watchdog's decision to
        the store's own predictor. Does nothing without a watchdog. `phase` is DECODE
        only if the pass has no prompt tokens. `n_sequences` is the number of sequences
        in the pass; drafted tokens may be counted as additional sequences."""
        if self.watchdog is None:
            return
        if phase == Phase.DECODE:
            self.watchdog.token(now_ns, n_sequences)
        else:
            self.watchdog.pause()
        try:
            self._direct_store()
        except MoeggufError as error:
            # There may be too little memory for another thread, for example.
            self._drop_predictor(_reason(error))

    def _direct_store(self) -> None:
        """Switches the store's own predictor and its prefetching on or off, as the
        watchdog has decided. Both are off after the predictor has failed. While the
        watchdog waits for its next trial with prefetching off, the predictor is off,
        too. Does nothing if the store does not compute the predictor."""
        if self._native is None:
            return
        with self._changing:
            predicting = self.predictor is not None and not self._refused
            if self._predicting != predicting:
                self._predicting = predicting
                self._store.set_predictor(
                    self._native if predicting else None, self._native_forecast
                )
            if self._acting != self.prefetching:
                self._acting = self.prefetching
                self._store.act_on_forecasts(self._acting)

    def _learn(self) -> None:
        """Adds finished requests to the EAM collection, if the predictor has one. The
        store's predictor is off while the collection changes."""
        learner = self.predictor
        if not isinstance(learner, EamcPredictor):
            return
        with self._changing:
            self._store.set_predictor(None, self._native_forecast)
            learner.learn(self.history)
            self._native = learner.native()
            if self._predicting:
                self._store.set_predictor(self._native, self._native_forecast)

    @property
    def _refused(self) -> bool:
        """Returns True if prefetching is off until the watchdog's next trial begins.
        Nothing is predicted until then."""
        return (
            self.watchdog is not None and self.watchdog.resting and not self.watchdog.on
        )

    def _guarded(
        self,
        switch_off: Callable[[str], None],
        call: Callable[..., None],
        *arguments: object,
    ) -> None:
        """Calls `call(*arguments)`. If the call raises, or has taken longer than
        `slowest_s`, calls `switch_off` with the reason. The option `strict` lifts the
        time limit."""
        start = time.perf_counter()
        try:
            call(*arguments)
            took = time.perf_counter() - start
            if took > self.options.slowest_s and not self.options.strict:
                raise TimeoutError(
                    f"took {took:.1f} s for one routing event, but may take at most {self.options.slowest_s:g} s"
                )
        except Exception as error:
            switch_off(_reason(error))

    def _begin_pass(self, predictor: Predictor, announcement: Announcement) -> None:
        predictor.announce(announcement)
        if not self.native:
            self._forecast.begin_pass(predictor)

    def _look_ahead(self, predictor: Predictor, event: RoutingEvent) -> None:
        predictor.observe(event)
        if not self.native:
            self._forecast.advance(predictor, event.il)
        elif self.scores:
            self._forecast.take(*self._store.forecast())

    def _score(self, policy: Policy, phase: Phase) -> None:
        scores = policy.scores(self.history, self._forecast)
        if scores is not None and np.shape(scores) != self.shape.table:
            raise ValueError(
                f"scores must have the shape {self.shape.table} (layers, experts), but have {np.shape(scores)};"
                " correct the policy"
            )
        # The policy's scores are not used in a pass of only prompt tokens. Such a pass
        # uses many experts of each layer, one layer after another. The store's own
        # prefetching of the next layer serves such a pass better than predictions
        # (DuoServe-MoE, section 5: prefill and decode are scheduled separately).
        if phase == Phase.PREFILL:
            self._clear_scores()
        elif scores is not None:
            self._store.set_scores(scores)
            self._scored = True

    def _act(self, phase: Phase) -> None:
        """Sends the forecast to the store if a native policy uses forecasts, and
        prefetch requests to the store if the controller prefetches. Does nothing if
        `phase` is not DECODE, or if the store computes the predictor. While the
        watchdog has switched prefetching off, clears the forecast in the store
        instead."""
        if phase != Phase.DECODE or self.native:
            return
        if self.may_prefetch and not self.prefetching:
            self._clear_forecast()
            return
        if isinstance(self.policy, NativePolicy) and self.policy.takes_forecast:
            self._store.set_forecast(
                self._forecast.probabilities(), self._forecast.known()
            )
            self._forecast_set = True
        if self.prefetching:
            assert self._prefetcher is not None
            if wanted := self._prefetcher.requests(
                self._forecast, self._store.residency
            ):
                self._store.prefetch(*zip(*wanted, strict=True))

    def _clear_scores(self) -> None:
        if self._scored:
            self._store.set_scores(None)
            self._scored = False

    def _clear_forecast(self) -> None:
        if self._forecast_set:
            self._store.set_forecast(None)
            self._forecast_set = False

    def _drop_predictor(self, why: str) -> None:
        name = name_of(self.predictor)
        self.predictor = None
        self._prefetcher = None
        self._forecast.clear()
        self._direct_store()
        self._tell(f"the predictor {name} {why}", "continuing without it")

    def _drop_policy(self, why: str) -> None:
        name = name_of(self.policy)
        self.policy = None
        if not self.stopped:
            self._clear_scores()
        self._tell(f"the policy {name} {why}", "continuing with LRU")

    def _tell(self, what: str, going_on: str) -> None:
        if self.options.strict:
            raise CallbackError(
                f"a simulation stops at the first error in a policy or predictor: {what}; correct this error and"
                " simulate again."
            )
        if not self.stopped:
            warnings.warn(f"{what}; {going_on}.", stacklevel=4)

    def stop(self) -> None:
        """Makes the controller ignore all later events, including events that are
        already in the store's queue."""
        self.stopped = True


def name_of(policy_or_predictor: object) -> str:
    """Returns the `title` of a policy or predictor, or else its `name`. If the object
    has neither, returns the name of its class."""
    own = type(policy_or_predictor).__name__
    return str(
        getattr(policy_or_predictor, "title", "")
        or getattr(policy_or_predictor, "name", "")
        or own
    )


def _reason(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, TimeoutError)
        else f"raised {type(error).__name__}: {error}"
    )


def _native_forecast(
    shape: MoeShape, predictor: Predictor, options: ActingOptions
) -> NativeForecast:
    prefetch = options.prefetch or PrefetchOptions(budget_bytes=0)
    return NativeForecast(
        window=max(
            1,
            min(prefetch.window, shape.n_moe_layer)
            if predictor.needs_inputs
            else predictor.reach,
        ),
        # `once`: each layer is predicted only once per pass. This suffices for
        # predictors that reach all layers, because their predictions do not change
        # within a pass. The EAM collection is an exception: it is matched again after
        # each layer.
        once=not prefetch.again
        or (
            predictor.reach >= shape.n_moe_layer
            and not isinstance(predictor, EamcPredictor)
        ),
        most_prefetches=min(
            most_prefetches(shape, prefetch), shape.n_moe_layer * shape.n_expert
        ),
        waste_weight=prefetch.waste_weight,
        lockstep=options.lockstep,
        by_proximity=prefetch.by_proximity,
    )
