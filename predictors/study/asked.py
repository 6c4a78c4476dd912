"""Runs the store's own predictors one layer at a time, so that a study measures the
same code as a live run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moegguf.controller.controller import ActingOptions, build_controller
from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.native.events import Announcement, Float32s, RoutingEvent
from moegguf.native.store import Store, StoreOptions
from moegguf.trace.simulate import announce_to, layout_of


class Asked(Predictor):
    """A predictor that runs inside a simulated store. `predict` returns the store's
    latest prediction for a layer.

    The store has one slot fewer than there are experts, because a store with a slot for
    every expert does not predict. The store follows each sequence separately.
    """

    def __init__(self, make: Callable[[], Predictor]) -> None:
        self._make, inner = make, make()
        super().__init__(inner.shape, inner.reach)
        # ClassVars of Predictor, which each object of this class copies from its inner
        # predictor
        self.name, self.needs_inputs = inner.name, inner.needs_inputs  # type: ignore[misc]
        n_layer = self.shape.n_moe_layer
        options = StoreOptions(repack=False, simulate=True)
        self._store = Store(
            layout_of(self.shape), n_layer * self.shape.n_expert - 1, options
        )
        acting = ActingOptions(
            PrefetchOptions(n_layer, budget_bytes=0, watchdog=False),
            strict=True,
            lockstep=True,
        )
        self._controller = build_controller(self.shape, LRU, inner, self._store, acting)

    def announce(self, announcement: Announcement) -> None:
        """Announces the tokens of the next pass to the store."""
        announce_to(self._store.context, announcement)
        if self._controller is not None:
            self._controller.announce(announcement)

    def observe(self, event: RoutingEvent) -> None:
        """Sends the routing of a layer to the store."""
        self._store.context.acquire(event.il, event.expert_ids, event.inputs)
        if self._controller is not None:
            self._controller.observe(event)

    def predict(self, il: int, distance: int) -> Float32s | None:
        """Returns the probabilities of a layer's experts (n_expert,), from the store's
        latest prediction.

        Returns None if the store has no prediction for the layer, or if `distance` is
        beyond the predictor's reach.
        """
        probabilities, known = self._store.forecast()
        return probabilities[il] if known[il] and distance <= self.reach else None

    def __deepcopy__(self, memo: Any) -> Predictor:
        return Asked(self._make)

    def __del__(self) -> None:
        self._store.close()


def asked(make: Callable[[], Predictor]) -> Predictor:
    """Returns the predictor that `make` creates. Wraps a native predictor in `Asked`,
    so that a store runs it."""
    return Asked(make) if make().native() is not None else make()
