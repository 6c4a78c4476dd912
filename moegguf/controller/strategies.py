"""Defines strategies by name, from four papers and other sources. A strategy names an
eviction policy, a predictor, prefetching options, and switches of the store.

Each of these parts can also be chosen separately. docs/evidence/strategies.md cites the
passage in the papers for each part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moegguf.controller.prefetch import NO_LIMIT, PrefetchOptions
from moegguf.errors import OptionError
from moegguf.native.store import StoreOptions

OWN = "moegguf"
EVERY_LAYER = 1 << 16  # a prefetch window that covers all layers
SWITCHES = ("chunked", "preempt", "overlap", "sweep", "stream")

Prefetch = PrefetchOptions | bool | None


@dataclass(frozen=True)
class Strategy:
    """The settings of a strategy. The policy "auto" and settings that are None are
    replaced by the choices that were measured to be best for the model, or by defaults
    if nothing was measured."""

    name: str
    about: str
    policy: str = "auto"
    predictor: str | None = None
    prefetch: Prefetch = None
    # Only the options in SWITCHES belong to the strategy.
    store: StoreOptions = field(default_factory=StoreOptions)

    @property
    def switches(self) -> dict[str, Any]:
        """{name of a store's switch: its value in this strategy}."""
        return {name: getattr(self.store, name) for name in SWITCHES}

    def parts(
        self, policy: Any, predictor: Any, prefetch: Prefetch
    ) -> tuple[Any, Any, Prefetch]:
        """Returns the policy, the predictor (each a name or an object) and prefetching.
        The strategy's settings replace the policy "auto", and None for the other two
        arguments.

        If `prefetch` is True and the strategy prefetches, the strategy's prefetching
        options are used.
        """
        own_way = prefetch is None or (prefetch is True and bool(self.prefetch))
        return (
            self.policy if isinstance(policy, str) and policy == "auto" else policy,
            self.predictor if predictor is None else predictor,
            self.prefetch if own_way else prefetch,
        )


def _prefetch(window: int, again: bool, by_proximity: bool = False) -> PrefetchOptions:
    return PrefetchOptions(
        window,
        again,
        NO_LIMIT,
        least_probability=0.0,
        by_proximity=by_proximity,
        watchdog=False,
        waste_weight=0.0,
    )


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "none", "LRU alone, each layer waiting for its experts", "lru", "none", False,
            StoreOptions(overlap=False, sweep=False),
        ),
        Strategy("lru", "LRU, computing by expert, the next layer ahead in prompts", "lru", "none", False),
        Strategy(
            "moe-infinity", "MoE-Infinity", "sparsity", "eamc", _prefetch(EVERY_LAYER, again=True, by_proximity=True),
            StoreOptions(chunked=False, overlap=False),
        ),
        Strategy("promoe", "ProMoE", "lru", "mlp", _prefetch(4, again=False)),
        Strategy(
            "expertflow", "ExpertFlow", "locality", "routing-path", _prefetch(EVERY_LAYER, again=False),
            StoreOptions(chunked=False),
        ),
        Strategy(
            "duoserve", "DuoServe-MoE", "lru", "expert-mlp", _prefetch(1, again=True),
            StoreOptions(chunked=False, sweep=False, stream=True),
        ),
        Strategy(OWN, "what was measured to be best for the model, else next-use; prefetching where it pays"),
    )
}  # fmt: skip


def find_strategy(name: str) -> Strategy:
    """Returns the strategy with this name; "" means moegguf's own strategy. Raises
    OptionError for an unknown name."""
    found = STRATEGIES.get(name or OWN)
    if found is None:
        raise OptionError(
            f"there is no strategy {name[:60]!r}; known strategies: {', '.join(STRATEGIES)}."
        )
    return found
