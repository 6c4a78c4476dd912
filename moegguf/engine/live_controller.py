"""The controller of one running model: chooses the policy and the predictor according
to the options, and decides when to listen to the store.

If every expert has a slot, there is nothing to decide. The controller then does not
listen, and takes no time. The controller influences slots only through policies,
scores, forecasts and requests to prefetch.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.controller import (
    ActingOptions,
    Controller,
    build_controller,
    name_of,
)
from moegguf.controller.hit_rates import (
    UNMEASURED,
    UNMEASURED_WITHOUT_PREDICTIONS,
    ControllerChoice,
    Measured,
)
from moegguf.controller.policies import (
    AUTO,
    LRU,
    AnyPolicy,
    Policy,
    check_policy,
    device_policy,
    make_policy,
    parse_policies,
    ram_policy,
)
from moegguf.controller.predictors import (
    check_predictor,
    make_predictor,
    prefetch_predictor,
)
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.engine.session import Session
from moegguf.errors import ModelFormatError, MoeggufError, OptionError
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import ListenOptions, Tier

CHECKPOINT_REQUESTS = 8
# Larger passes are not predicted from router inputs; they use most experts anyway.
MOST_INPUT_TOKENS = 16


@dataclass(frozen=True)
class ControllerOptions:
    """The user's choices, as `Llama` documents them.

    The policy "auto" is the policy that was measured to be best for this model. Without
    a measurement it is next-use; for a single sequence, predicted experts are then also
    prefetched while that saves time. `predictor` None chooses the predictor that the
    measurement names. If there is none and prefetching is on, None chooses the best
    predictor that is available. `prefetch` None prefetches only with the policy "auto",
    for a single sequence without a given predictor, if nothing was measured.
    """

    policy: str | Policy = AUTO
    predictor: str | Predictor | None = None
    prefetch: bool | PrefetchOptions | None = None
    lockstep: bool = False

    def __post_init__(self) -> None:
        """Raises OptionError for an unknown name, a class that cannot be used, or an
        object of the wrong kind."""
        if isinstance(self.policy, str):
            parse_policies(self.policy) if "=" in self.policy else check_policy(
                self.policy
            )
        elif not isinstance(self.policy, Policy):
            raise OptionError(
                f"policy must be a name or an object with a method scores(history, forecast), but is"
                f" {self.policy!r:.80}; give one of these."
            )
        if isinstance(self.predictor, str):
            check_predictor(self.predictor)
        elif not isinstance(self.predictor, Predictor | None):
            raise OptionError(
                f"predictor must be a name, a Predictor or None, but is {self.predictor!r:.80}; give one of these."
            )

    @property
    def is_plain(self) -> bool:
        """True for LRU without predictions or prefetching. The store then needs no
        controller."""
        return (
            self.policy == LRU.name
            and self.predictor in (None, "none")
            and not self.prefetch
        )


@dataclass(eq=False)
class LiveController:
    """The controller of one model. `controller` is None if the store decides alone,
    with the policy `native_policy`, and after close().

    `policy_below` is the policy of slots in RAM below a device's slots.
    """

    session: Session
    artifacts: Artifacts
    options: ControllerOptions

    def __post_init__(self) -> None:
        """Chooses the policy and the predictor, and starts listening if necessary."""
        self.controller: Controller | None = None
        self.native_policy = self.policy_below = LRU.name
        self.choice = ControllerChoice()
        self._measured: Measured | None = None
        self._listening = False
        self._has_absent_experts = True  # True: some experts may have no slot
        self._n_ended = 0  # number of finished requests
        self._choose_tiers()
        if self.options.is_plain:
            return
        try:
            self._build()
        except MoeggufError as error:
            if self.choice == self._choose(plain=True):
                raise
            self._build(plain=True)
            # No warning if nothing was measured and moegguf cannot read the routers.
            if self._measured or not isinstance(error, ModelFormatError):
                warnings.warn(
                    f"the policy or predictor that was chosen for this model is not available: {error} Continuing with"
                    f" {_titled(self.choice)}.",
                    stacklevel=2,
                )
        if self.controller is not None:
            self.update()

    def _build(self, plain: bool = False) -> None:
        """Creates the controller that the options choose. plain: as in `_choose`. Every
        failure is raised as a MoeggufError."""
        policy: str | AnyPolicy = self.options.policy
        predictor = self.options.predictor
        prefetch = self.options.prefetch
        lockstep = self.options.lockstep
        store = self.session.store
        plan = self.session.plan
        link_ns = None
        if prefetch is None and plan.on_device:
            # Unless the user asked for it, prefetching is tried only while the link is
            # busy. A trial copies router inputs from the device, which costs more than
            # a fast link saves.
            link_ns = lambda: int(store.tier()["copy_ns"])  # noqa: E731
        try:
            self.choice = self._choose(plain)
            shape = MoeShape.of(self.session.layout)
            if not isinstance(predictor, Predictor):
                predictor = make_predictor(self.choice.predictor, shape, self.artifacts)
            if isinstance(policy, str):
                policy = make_policy(self.choice.policy, shape, self.artifacts)
            if not isinstance(prefetch, PrefetchOptions):
                prefetch = PrefetchOptions() if self.choice.prefetch else None
            acting = ActingOptions(
                prefetch=prefetch, lockstep=lockstep, link_ns=link_ns
            )
            self.controller = controller = build_controller(
                shape, policy, predictor, store, acting
            )
        except MoeggufError:
            raise
        except Exception as error:
            raise OptionError(
                f"{_titled(self.choice)} cannot be used ({type(error).__name__}: {error}); choose another policy or"
                " predictor, or none."
            ) from error
        if controller is None:
            self.native_policy = name_of(policy)
            return
        self.listen_options = ListenOptions(
            inputs=predictor.needs_inputs and not controller.native, lockstep=lockstep,
            lazy=controller.native and not lockstep and not controller.scores, max_input_tokens=MOST_INPUT_TOKENS,
        )  # fmt: skip

    def _choose_tiers(self) -> None:
        """Sets the policy of slots in RAM below a device, if there are such slots.
        Afterwards `options` holds the policy of the tier that layers read experts from.
        Does nothing if the policy is an object."""
        text = self.options.policy
        if not isinstance(text, str):
            return
        session = self.session
        if Tier.RAM in session.store.tiers:
            self.policy_below = ram_policy(text)
            session.store.set_policy(self.policy_below, Tier.RAM)
        tiers = [name.lower() for name in session.tiers()]
        if "=" in text and not set(tiers) & set(parse_policies(text)):
            warnings.warn(
                f"policy={text!r} has no effect, because experts are only in {tiers[0].upper()}; name a policy for"
                " this tier",
                stacklevel=2,
            )
        self.options = replace(self.options, policy=device_policy(text, tiers[0]))

    def _choose(self, plain: bool = False) -> ControllerChoice:
        """Returns the names of the policy and the predictor to use, and whether to
        prefetch. A name is ignored if the user has passed an object instead.

        plain: the choice does not use the measured hit rates. The policy "auto" is then
        LRU if a measurement of the model was found, and next-use otherwise. Nothing is
        predicted unless the options name a predictor or switch prefetching on.
        """
        options = self.options
        auto = self.options.policy == AUTO
        measured = self._measured = (
            self._measured if plain else self.artifacts.measured()
        )
        if measured and auto and not plain:
            found = measured.choose(
                self.session.plan.n_slots / max(1, self.session.layout.n_expert_total)
            )
        elif measured:
            found = ControllerChoice(
                predictor="none"
                if plain
                else measured.predictors.get(str(options.policy), "none")
            )
        elif plain or options.predictor is not None or options.prefetch is False:
            found = UNMEASURED_WITHOUT_PREDICTIONS
        else:
            found = UNMEASURED
        policy = found.policy if auto else str(options.policy)
        prefetch = (
            bool(options.prefetch)
            if options.prefetch is not None
            else found.prefetch and auto
        )
        if options.predictor is not None:
            return ControllerChoice(policy, str(options.predictor), prefetch)
        needs_predictor = prefetch and found.predictor == "none"
        predictor = (
            prefetch_predictor(self.artifacts) if needs_predictor else found.predictor
        )
        return ControllerChoice(policy, predictor, prefetch)

    def announce(self, announcement: Announcement) -> None:
        """Passes to the controller the tokens that are evaluated next. Runs on the
        event thread."""
        assert self.controller is not None
        self.controller.announce(announcement)

    def observe(self, event: RoutingEvent) -> None:
        """Passes a layer's routing event to the controller. With the predictor `eamc`,
        also saves its collection after every CHECKPOINT_REQUESTS requests. Runs on the
        event thread."""
        controller = self.controller
        assert controller is not None
        controller.observe(event)
        ended = controller.history.finished
        if ended and self._keeps and isinstance(controller.predictor, EamcPredictor):
            # Saves after every CHECKPOINT_REQUESTS requests (MoE-Infinity, appendix
            # B.2), so that a killed process loses little.
            before = self._n_ended
            self._n_ended = self._n_ended + len(ended)
            if self._n_ended // CHECKPOINT_REQUESTS > before // CHECKPOINT_REQUESTS:
                self.artifacts.save_collection(
                    controller.shape, controller.predictor.eamc.weights()
                )

    @property
    def _keeps(self) -> bool:
        """True if what was learned may be saved. Facts about some layers must not
        replace facts about all layers."""
        layout = self.artifacts.layout
        return layout is None or self.session.layout.layers == layout.layers

    def before_tokens(self, phase: Phase, n_sequences: int = 1) -> None:
        """Reports the next pass to the controller, unless every expert has a slot. The
        phase DECODE means that the pass has `n_sequences` answer tokens, and no prompt
        tokens."""
        if self.controller is not None and self._has_absent_experts:
            self.controller.count_token(phase, time.perf_counter_ns(), n_sequences)

    def update(self) -> None:
        """Starts or stops listening, depending on whether there is anything to decide.
        Call this after pools have changed size."""
        self._has_absent_experts = not self.session.store.info()["resident"]
        listeners = self.session.listeners
        needed = (
            self.controller is not None
            and self._has_absent_experts
            and self.controller.needs_events
        )
        if needed != self._listening:
            (listeners.add if needed else listeners.remove)(self)
        self._listening = needed

    def figures(self) -> dict[str, Any]:
        """Returns the names of the policy and the predictor, and the state of
        prefetching. With a controller, also returns the time that decisions take.

        Prefetching is "off" (also if every expert has a slot), "on", "measuring"
        (alternating on and off) or "paused". It is paused if it saved too little, or if
        a device's link has not been busy enough.
        """
        controller = self.controller
        name = self.native_policy
        if controller is not None:
            name = name_of(LRU if controller.policy is None else controller.policy)
        if self.policy_below != LRU.name:
            name = f"vram={name},ram={self.policy_below}"
        if controller is None:
            return {"policy": name, "predictor": "none", "prefetch": "off"}
        watchdog = controller.watchdog
        prefetch = "on" if controller.prefetching else "paused"
        if not self._has_absent_experts or not controller.may_prefetch:
            prefetch = "off"
        elif watchdog is not None and not watchdog.resting:
            prefetch = "measuring"
        counters = self.session.store.counters() if controller.native else {}
        n_events = counters.get("routing_events", controller.n_events)
        spent_s = (
            counters.get("forecast_ns", 0) / 1e9
            if controller.native
            else controller.seconds
        )
        figures: dict[str, Any] = {
            "policy": name,
            "predictor": "none"
            if controller.predictor is None
            else name_of(controller.predictor),
            "prefetch": prefetch,
            "routing_events": n_events,
            "us_per_event": round(spent_s / max(1, n_events) * 1e6, 1),
        }
        if counters.get("forecast_picks"):
            figures["predicted_right"] = round(
                counters["forecast_right"] / counters["forecast_picks"], 4
            )
        if watchdog is not None and watchdog.last_gain is not None:
            figures["time_saved_by_prefetch"] = round(watchdog.last_gain, 4)
        return figures

    def close(self) -> None:
        """Stops making decisions. With the predictor `eamc`, saves its collection. Call
        this before the store is closed. A second call does nothing."""
        if self.controller is None:
            return
        # stops listening first, because events that still arrive are not needed
        if self.controller.native and not self.controller.scores:
            self.session.listeners.remove(self)
        self.controller.stop()
        self.session.listeners.remove(self)  # events may still arrive until this line
        controller = self.controller
        self.controller = None
        self._listening = False
        if (
            controller.n_events > 0
            and self._keeps
            and isinstance(controller.predictor, EamcPredictor)
        ):
            learned = controller.predictor.learned(controller.history)
            self.artifacts.save_collection(controller.shape, learned.weights())


def _titled(choice: ControllerChoice) -> str:
    """Formats the names of a choice for a message."""
    policy = LRU.name.upper() if choice.policy == LRU.name else choice.policy
    if choice.predictor == "none":
        return policy
    return f"{policy} with predictions by {choice.predictor}"
