"""The controller of one model, live: what was asked for, found and built, and the thread it hears gates on.

A pool that holds every expert has nothing to decide: nobody listens then, and steering costs nothing.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.controller import Controller, ControllerOptions, carried_by_store
from moegguf.controller.measured import ControllerChoice
from moegguf.controller.policies import POLICIES, make_policy
from moegguf.controller.policies.base import Policy
from moegguf.controller.policies.sparsity import SparsityAware
from moegguf.controller.predictors import PREDICTORS, make_predictor
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.engine.session import Session
from moegguf.errors import OptionError
from moegguf.native.events import Announcement, Phase, RoutingEvent
from moegguf.native.store import ListenOptions
from moegguf.trace.report import plain

AUTO = "auto"
AHEAD, AHEAD_UNTRAINED = "mlp", "skip"  # what prefetching goes by when nobody says: the most accurate ones measured


@dataclass(frozen=True)
class Steer:
    """What a user asks of the controller.

    policy: a name, an object with a method `scores`, or "auto": what was measured to be best for this model, else
    LRU. predictor: a name, a `Predictor`, or None: what the policy was measured with, and with `prefetch` the best
    there is. prefetch: whether predictions are acted on, or how; None: only where that was measured to pay. judge:
    compare predictions with what happens. lockstep: decisions act at a fixed place, so that a simulation repeats them
    exactly; slow.
    """

    policy: str | Policy = AUTO
    predictor: str | Predictor | None = None
    prefetch: bool | PrefetchOptions | None = None
    judge: bool = False
    lockstep: bool = False

    def __post_init__(self) -> None:
        """Raises OptionError for a name that nobody has, or an object that is none of these."""
        if isinstance(self.policy, str):
            _check_name("policy", self.policy, (AUTO, *POLICIES))
        elif not isinstance(self.policy, Policy):
            raise OptionError(
                f"policy={self.policy!r} is neither a name nor an object with a method scores(history, outlook)."
            )
        if isinstance(self.predictor, str):
            _check_name("predictor", self.predictor, PREDICTORS)
        elif not isinstance(self.predictor, Predictor | None):
            raise OptionError(f"predictor={self.predictor!r} is neither a name nor a Predictor.")

    @property
    def is_plain(self) -> bool:
        """LRU, and nothing to predict: the store needs nobody for that."""
        return self.policy == "lru" and self.predictor in (None, "none") and not self.judge and not self.prefetch


@dataclass
class LiveController:
    """One model's controller. `controller` is None where the store needs nobody: `carried` is then its policy."""

    session: Session
    artifacts: Artifacts
    asked: Steer
    controller: Controller | None = field(init=False, default=None)
    carried: str = field(init=False, default="lru")
    choice: ControllerChoice = field(init=False, default_factory=ControllerChoice)
    _listening: bool = field(init=False, default=False)
    _asleep: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.asked.is_plain:
            return
        shape = MoeShape.of(self.session.layout)
        self.choice = self._choose()
        try:
            predictor, policy = self._predictor(shape), self._policy(shape)
        except OptionError as error:
            if self.asked.policy != AUTO or self.asked.predictor is not None:
                raise
            warnings.warn(f"what was measured to be best is not there: {error} Going on with LRU.", stacklevel=2)
            self.choice = ControllerChoice()
            return
        if self.choice == ControllerChoice() and self.asked.policy == AUTO and not self.asked.judge:
            return
        options = ControllerOptions(prefetch=self._prefetch(), judge=self.asked.judge)
        native = carried_by_store(policy, predictor, options)
        if native is not None:
            self.session.store.set_policy(native.name, **native.parameters)
            self.carried = _name(policy, "lru")
            return
        self._wants = ListenOptions(inputs=predictor.needs_inputs, lockstep=self.asked.lockstep)
        self.controller = Controller(shape, policy, predictor, self.session.store, options)
        native = self.controller.native_policy()
        if self.controller.watchdog is not None and native is not None:
            self.session.store.set_policy(native.name, **native.parameters)  # while it sleeps; its scores come first
        self.update(self.session.plan.n_slots)

    def _choose(self) -> ControllerChoice:
        """The names to use; those of objects given by the user do not matter."""
        asked, measured = self.asked, self.artifacts.measured()
        share = self.session.plan.n_slots / max(1, self.session.layout.n_expert_total)
        found = measured.choose(share) if measured and asked.policy == AUTO else ControllerChoice()
        policy = found.policy if asked.policy == AUTO else str(asked.policy)
        prefetch = bool(asked.prefetch) if asked.prefetch is not None else found.prefetch
        if asked.predictor is not None:
            return ControllerChoice(policy, str(asked.predictor), prefetch)
        predictor = found.predictor
        if measured and asked.policy != AUTO:
            predictor = measured.predictors.get(policy, "none")
        if prefetch and predictor == "none":
            predictor = AHEAD if next(self.artifacts.find(f"{AHEAD}.safetensors"), None) else AHEAD_UNTRAINED
        return ControllerChoice(policy, predictor, prefetch)

    def _policy(self, shape: MoeShape) -> Policy:
        if not isinstance(self.asked.policy, str):
            return self.asked.policy
        return make_policy(self.choice.policy, shape, self.artifacts)

    def _predictor(self, shape: MoeShape) -> Predictor:
        if isinstance(self.asked.predictor, Predictor):
            return self.asked.predictor
        return make_predictor(self.choice.predictor, shape, self.artifacts)

    def _prefetch(self) -> PrefetchOptions | None:
        if isinstance(self.asked.prefetch, PrefetchOptions):
            return self.asked.prefetch
        return PrefetchOptions() if self.choice.prefetch else None

    @property
    def wants(self) -> ListenOptions:
        return self._wants

    def announce(self, announcement: Announcement) -> None:
        assert self.controller is not None
        self.controller.announce(announcement)

    def observe(self, gate: RoutingEvent) -> None:
        assert self.controller is not None
        self.controller.observe(gate)

    def before_tokens(self, phase: Phase) -> None:
        """Tokens are evaluated next. While the watchdog keeps prefetching off, nobody listens: the store does alone.

        Not for the event thread, which it may wait for.
        """
        controller = self.controller
        if controller is None or controller.watchdog is None:
            return
        if phase == Phase.DECODE:
            controller.watchdog.token(time.perf_counter_ns())
        else:
            controller.watchdog.pause()
        if self._asleep and not controller.superfluous:
            self._asleep, self._listening = False, True
            self.session.listeners.add(self)
        elif self._listening and controller.superfluous:
            self._asleep, self._listening = True, False
            self.session.listeners.remove(self)
            self.session.store.set_scores(None)

    def update(self, n_slots: int) -> None:
        """Listens while there is something to decide or to judge: call it when the pool gets `n_slots` slots.

        A pool that was resident knows of its new size at its next gate only.
        """
        info = self.session.store.info()
        tight = not info["resident"] or n_slots < info["n_experts"]
        needed = self.controller is not None and (self.asked.judge or tight) and not self._asleep
        if needed and not self._listening:
            self.session.listeners.add(self)
        elif not needed and self._listening:
            self.session.listeners.remove(self)
        self._listening = needed

    def figures(self) -> dict[str, Any]:
        """Who decides: policy, predictor, prefetch ("off", "on", "resting": it did not pay); what it cost and, with
        `judge`, how often it was right.
        """
        controller = self.controller
        if controller is None:
            return {"policy": self.carried, "predictor": "none", "prefetch": "off"}
        figures: dict[str, Any] = {
            "policy": _name(controller.policy, "lru"),
            "predictor": _name(controller.predictor, "none"),
            "prefetch": "off" if not controller.acts else "on" if controller.prefetching else "resting",
            "gates": controller.gates,
            "us_per_gate": round(controller.seconds / max(1, controller.gates) * 1e6, 1),
        }
        if controller.watchdog is not None and controller.watchdog.last_gain is not None:
            figures["time_saved_by_prefetch"] = round(controller.watchdog.last_gain, 4)
        if controller.judge is not None:
            figures["judged"] = plain(controller.judge.table())
        return figures

    def close(self) -> None:
        """Stops deciding and keeps what was learnt. Before the store goes. Twice is harmless."""
        if self.controller is None:
            return
        self.controller.stop()
        self.session.listeners.remove(self)  # until here events may come
        controller, self.controller = self.controller, None
        self._listening = False
        if controller.gates == 0:
            return
        for learner in (controller.predictor, controller.policy):
            if isinstance(learner, EamcPredictor | SparsityAware):
                learner.eamcs.add(controller.history.prefill, controller.history.decode)  # the last request
                self.artifacts.keep(learner.eamcs)
                return  # both learn the same requests: one of them is enough


def _check_name(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise OptionError(f"there is no {kind} {name!r}; known are {', '.join(known)}.")


def _name(of: object, nothing: str) -> str:
    return nothing if of is None else str(getattr(of, "name", type(of).__name__))
