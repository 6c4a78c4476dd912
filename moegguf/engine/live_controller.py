"""The controller of one running model: what was requested, what that resolves to, and when it listens to the store.

A pool that holds every expert has nothing to decide: the controller does not listen then, and costs nothing.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.collection import EamcPair
from moegguf.controller.controller import ActingOptions, Controller, build_controller, name_of
from moegguf.controller.hit_rates import UNMEASURED, UNMEASURED_WITHOUT_PREDICTIONS, ControllerChoice, Measured
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
from moegguf.controller.predictors import PREDICTORS, make_predictor, prefetch_predictor
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.engine.session import Session
from moegguf.errors import ModelFormatError, MoeggufError, OptionError
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import ListenOptions, Tier

CHECKPOINT_REQUESTS = 8
MOST_INPUT_TOKENS = 16  # of a pass whose sequences are predicted from router inputs; larger ones use most experts


@dataclass(frozen=True)
class ControllerOptions:
    """What a user chooses.

    policy: a name, an object with a method `scores`, or "auto": what was measured to be best for this model, else
    next-use, with prefetching by `skip` for one sequence and while that pays; or names for tiers,
    "vram=NAME,ram=NAME". Without these it is that of the tier that layers compute on, and slots in RAM below
    a device evict by LRU. predictor: a name, a `Predictor`, or None: what the policy was measured with, and with
    `prefetch` the best there is. prefetch: whether predictions are acted on, or how; None: where that was
    measured to pay, or nothing was measured. lockstep: decisions act at a fixed place, so that a simulation repeats
    them exactly; slow.
    """

    policy: str | Policy = AUTO
    predictor: str | Predictor | None = None
    prefetch: bool | PrefetchOptions | None = None
    lockstep: bool = False

    def __post_init__(self) -> None:
        """Raises OptionError for an unknown name, or an object of another kind."""
        if isinstance(self.policy, str):
            parse_policies(self.policy) if "=" in self.policy else check_policy(self.policy)
        elif not isinstance(self.policy, Policy):
            raise OptionError(
                f"policy={self.policy!r} is neither a name nor an object with a method scores(history, forecast)."
            )
        if isinstance(self.predictor, str):
            if self.predictor not in PREDICTORS:
                raise OptionError(f"there is no predictor {self.predictor!r}; known are {', '.join(PREDICTORS)}.")
        elif not isinstance(self.predictor, Predictor | None):
            raise OptionError(f"predictor={self.predictor!r} is neither a name nor a Predictor.")

    @property
    def is_plain(self) -> bool:
        """LRU without predictions: what the store does without any controller."""
        return self.policy == LRU.name and self.predictor in (None, "none") and not self.prefetch


@dataclass
class LiveController:
    """One model's controller. `controller` is None where the store decides by itself, by `native_policy`."""

    session: Session
    artifacts: Artifacts
    options: ControllerOptions
    n_sequences: int = 1  # of the context
    controller: Controller | None = field(init=False, default=None)
    native_policy: str = field(init=False, default=LRU.name)
    policy_below: str = field(init=False, default=LRU.name)  # of slots in RAM, where a device computes
    choice: ControllerChoice = field(init=False, default_factory=ControllerChoice)
    _measured: Measured | None = field(init=False, default=None)
    _listening: bool = field(init=False, default=False)
    _paused: bool = field(init=False, default=False)
    _tight: bool = field(init=False, default=True)  # experts can be absent
    _n_ended: int = field(init=False, default=0)  # requests
    _writer: Thread | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._choose_tiers()
        if self.options.is_plain:
            return
        try:
            self._build(self._choose)
        except MoeggufError as error:
            if self.choice == self._choose_named():
                raise
            self._build(self._choose_named)
            if self._measured or not isinstance(error, ModelFormatError):  # routers that only llama.cpp can read
                warnings.warn(
                    f"what was chosen for this model is not available: {error} Going on with {_titled(self.choice)}.",
                    stacklevel=2,
                )
        if self.controller is not None:
            self.update(self.session.plan.n_slots)

    def _build(self, choose: Callable[[], ControllerChoice]) -> None:
        """Makes what is chosen. Raises a MoeggufError, whatever fails."""
        try:
            self.choice = choose()
            shape = MoeShape.of(self.session.layout)
            predictor, policy = self._predictor(shape), self._policy(shape)
            acting = ActingOptions(prefetch=self._prefetch(), lockstep=self.options.lockstep, link_ns=self._link_ns())
            self.controller = build_controller(shape, policy, predictor, self.session.store, acting)
        except MoeggufError:
            raise
        except Exception as error:
            raise OptionError(
                f"{_titled(self.choice)} cannot be used ({type(error).__name__}: {error}); choose another policy or"
                " predictor, or none."
            ) from error
        if self.controller is None:
            self.native_policy = name_of(policy)
            return
        self._paused = self.controller.native and self.controller.redundant
        native, lockstep = self.controller.native, self.options.lockstep
        self.listen_options = ListenOptions(
            inputs=predictor.needs_inputs and not native, lockstep=lockstep,
            lazy=native and not lockstep and not self.controller.scores,
            max_input_tokens=MOST_INPUT_TOKENS,
        )  # fmt: skip

    def _choose_tiers(self) -> None:
        """Sets the policy of slots in RAM below a device; `options` are then those of the tier that computes."""
        text = self.options.policy
        if not isinstance(text, str):
            return
        session = self.session
        if Tier.RAM in session.store.tiers:
            self.policy_below = ram_policy(text)
            session.store.set_policy(self.policy_below, Tier.RAM)
        tiers = [name.lower() for name in session.tiers()]
        if "=" in text and not set(tiers) & set(parse_policies(text)):
            warnings.warn(f"policy={text!r} has no effect: experts lie in {tiers[0].upper()} only", stacklevel=2)
        self.options = replace(self.options, policy=device_policy(text, tiers[0]))

    def _choose(self) -> ControllerChoice:
        """The names to use; those of objects given by the user do not matter."""
        measured = self._measured = self.artifacts.measured()
        share = self.session.plan.n_slots / max(1, self.session.layout.n_expert_total)
        found = measured.choose(share) if measured else self._unmeasured()
        if measured and self.options.policy != AUTO:
            found = ControllerChoice(predictor=measured.predictors.get(str(self.options.policy), "none"))
        return self._with_named(found)

    def _choose_named(self) -> ControllerChoice:
        """What is left where something that the user has not named cannot be had: LRU in place of a measured policy,
        and no predictions."""
        return self._with_named(ControllerChoice() if self._measured else UNMEASURED_WITHOUT_PREDICTIONS)

    def _with_named(self, found: ControllerChoice) -> ControllerChoice:
        """What was found, but for what the user has named."""
        options = self.options
        auto = options.policy == AUTO
        policy = found.policy if auto else str(options.policy)
        prefetch = bool(options.prefetch) if options.prefetch is not None else found.prefetch and auto
        if options.predictor is not None:
            return ControllerChoice(policy, str(options.predictor), prefetch)
        predictor = found.predictor
        if prefetch and predictor == "none":
            predictor = prefetch_predictor(self.artifacts)
        return ControllerChoice(policy, predictor, prefetch)

    def _unmeasured(self) -> ControllerChoice:
        """Predictions only where they pay: batches of several sequences leave the link no time
        (`docs/evidence/batches.md`)."""
        chosen_otherwise = self.options.predictor is not None or self.options.prefetch is False
        predicts = self.n_sequences == 1 and not chosen_otherwise
        return UNMEASURED if predicts else UNMEASURED_WITHOUT_PREDICTIONS

    def _policy(self, shape: MoeShape) -> AnyPolicy:
        if not isinstance(self.options.policy, str):
            return self.options.policy
        return make_policy(self.choice.policy, shape, self.artifacts)

    def _predictor(self, shape: MoeShape) -> Predictor:
        if isinstance(self.options.predictor, Predictor):
            return self.options.predictor
        return make_predictor(self.choice.predictor, shape, self.artifacts)

    def _prefetch(self) -> PrefetchOptions | None:
        if isinstance(self.options.prefetch, PrefetchOptions):
            return self.options.prefetch
        return PrefetchOptions() if self.choice.prefetch else None

    def _link_ns(self) -> Callable[[], int] | None:
        """Of a device's link, by which trials of prefetching that nobody asked for begin: they copy router inputs from
        the device, which a fast link does not pay back."""
        plan = self.session.plan
        if self.options.prefetch is not None or not (plan.device or plan.layers_on):
            return None
        return lambda: int(self.session.store.tier()["copy_ns"])

    def announce(self, announcement: Announcement) -> None:
        """Tokens are evaluated next. On the event thread."""
        assert self.controller is not None
        self.controller.announce(announcement)

    def observe(self, event: RoutingEvent) -> None:
        """A layer was routed. On the event thread."""
        controller = self.controller
        assert controller is not None
        controller.observe(event)
        if controller.history.finished and self._keeps and isinstance(controller.predictor, EamcPredictor):
            self._request_ended(controller.shape, controller.predictor.eamcs)

    def _request_ended(self, shape: MoeShape, eamcs: EamcPair) -> None:
        """Saves the collections after every CHECKPOINT_REQUESTS requests (MoE-Infinity, appendix B.2), on a thread of
        its own: a killed process loses little. The event thread copies the counts only. While they are being written,
        the next time is left out."""
        self._n_ended += 1
        if self._n_ended % CHECKPOINT_REQUESTS or (self._writer is not None and self._writer.is_alive()):
            return
        states = eamcs.states()
        self._writer = Thread(
            target=lambda: self.artifacts.save_collection(shape, EamcPair.packed(states)),
            name="moegguf-checkpoint",
            daemon=True,
        )
        self._writer.start()

    @property
    def _keeps(self) -> bool:
        """Whether what is learned is kept: what is known of all layers is not replaced by that of some, whose experts
        alone have slots."""
        layout = self.artifacts.layout
        return layout is None or self.session.layout.layers == layout.layers

    def before_tokens(self, phase: Phase, n_sequences: int = 1) -> None:
        """Tokens are evaluated next; DECODE: one of each sequence, and no prompt's beside. Between trials that said no,
        the store works without the controller.

        Not for the event thread, which this may wait for.
        """
        controller = self.controller
        if controller is None or controller.watchdog is None or not self._tight:
            return
        controller.count_token(phase, time.perf_counter_ns(), n_sequences)
        if self._paused and not controller.redundant:
            self._paused, self._listening = False, True
            self.session.listeners.add(self)
        elif self._listening and controller.redundant:
            self._paused, self._listening = True, False
            self.session.listeners.remove(self)
            controller.pause()

    def update(self, n_slots: int) -> None:
        """Listens while there is something to decide: call it when the pool gets `n_slots` slots.

        A pool that was resident applies its new size at the next routing event only.
        """
        info = self.session.store.info()
        self._tight = not info["resident"] or n_slots < info["n_experts"]
        needed = self.controller is not None and self._tight and not self._paused
        if needed and not self._listening:
            self.session.listeners.add(self)
        elif not needed and self._listening:
            self.session.listeners.remove(self)
        self._listening = needed

    def _named(self, policy: str) -> str:
        """The name that the options use, with that of RAM below where that is not LRU."""
        return policy if self.policy_below == LRU.name else f"vram={policy},ram={self.policy_below}"

    def figures(self) -> dict[str, Any]:
        """Policy, predictor, prefetch ("off", also where every expert is in memory, "on", "measuring": on and off in
        turns, "paused": it did not pay, or a device's link was not busy), and the controller's cost.
        """
        controller = self.controller
        if controller is None:
            return {"policy": self._named(self.native_policy), "predictor": "none", "prefetch": "off"}
        counters = self.session.store.counters() if controller.native else {}
        n_events = counters.get("routing_events", controller.n_events)
        spent_s = counters.get("forecast_ns", 0) / 1e9 if controller.native else controller.seconds
        figures: dict[str, Any] = {
            "policy": self._named(LRU.name if controller.policy is None else name_of(controller.policy)),
            "predictor": "none" if controller.predictor is None else name_of(controller.predictor),
            "prefetch": _prefetch_state(controller) if self._tight else "off",
            "routing_events": n_events,
            "us_per_event": round(spent_s / max(1, n_events) * 1e6, 1),
        }
        if counters.get("forecast_picks"):
            figures["predicted_right"] = round(counters["forecast_right"] / counters["forecast_picks"], 4)
        if controller.watchdog is not None and controller.watchdog.last_gain is not None:
            figures["time_saved_by_prefetch"] = round(controller.watchdog.last_gain, 4)
        return figures

    def close(self) -> None:
        """Stops deciding and saves what was learned; call it before the store is closed. Twice is harmless."""
        if self.controller is None:
            return
        if self.controller.native and not self.controller.scores:  # nothing of what comes late is lost, or takes long
            self.session.listeners.remove(self)
        self.controller.stop()
        self.session.listeners.remove(self)  # until here events may come
        controller, self.controller = self.controller, None
        self._listening = False
        if self._writer is not None:
            self._writer.join()
        if controller.n_events > 0 and self._keeps and isinstance(controller.predictor, EamcPredictor):
            learned = controller.predictor.learned(controller.history)
            self.artifacts.save_collection(controller.shape, learned.weights())


def _titled(choice: ControllerChoice) -> str:
    """A choice in words."""
    policy = LRU.name.upper() if choice.policy == LRU.name else choice.policy
    return policy if choice.predictor == "none" else f"{policy} with predictions by {choice.predictor}"


def _prefetch_state(controller: Controller) -> str:
    if not controller.may_prefetch:
        return "off"
    if controller.watchdog is not None and not controller.watchdog.resting:
        return "measuring"
    return "on" if controller.prefetching else "paused"
