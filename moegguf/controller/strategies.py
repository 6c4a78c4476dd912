"""Strategies by name, those of four papers and others: which cache, predictor, prefetch, order, prefill.

A strategy only names parts; each part can still be chosen by itself. Papers: MoE-Infinity (arXiv 2401.14361v3), ProMoE,
ExpertFlow, DuoServe-MoE. Sections are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moegguf.controller.prefetch import NO_LIMIT, PrefetchOptions
from moegguf.errors import OptionError
from moegguf.native.store import StoreOptions

OWN = "moegguf"
EVERY_LAYER = 1 << 16  # a window over all of them
SWITCHES = ("chunked", "preempt", "overlap", "sweep", "stream")

Prefetch = PrefetchOptions | bool | None


@dataclass(frozen=True)
class Strategy:
    """What a strategy sets. `policy` "auto", and None: what was measured to be best for the model.

    store: what it sets of a store, one of SWITCHES. sources: {field or switch: where the paper says so, or what it
    leaves open and what was taken}. A paper's prefetching is always on: none knows a watchdog or a limit of bytes.
    """

    name: str
    about: str
    policy: str = "auto"
    predictor: str | None = None
    prefetch: Prefetch = None
    store: StoreOptions = field(default_factory=StoreOptions)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def switches(self) -> dict[str, Any]:
        """{switch of a store: its value}."""
        return {name: getattr(self.store, name) for name in SWITCHES}

    def parts(self, policy: Any, predictor: Any, prefetch: Prefetch) -> tuple[Any, Any, Prefetch]:
        """Policy, predictor (names or objects) and prefetching as chosen; "auto" and None are the strategy's.

        True for prefetching is the strategy's way of doing it.
        """
        own_way = prefetch is None or (prefetch is True and bool(self.prefetch))
        return (
            self.policy if isinstance(policy, str) and policy == "auto" else policy,
            self.predictor if predictor is None else predictor,
            self.prefetch if own_way else prefetch,
        )


def _prefetch(window: int, again: bool, by_proximity: bool = False) -> PrefetchOptions:
    return PrefetchOptions(
        window, again, NO_LIMIT, least_probability=0.0, by_proximity=by_proximity, watchdog=False, waste_weight=0.0
    )


_IN_PROMPTS = "of a prompt, which uses nearly every expert, the store's sweep fetches the next layer ahead"

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "none", "LRU alone, each layer waiting for its experts", "lru", "none", False,
            store=StoreOptions(overlap=False, sweep=False),
            sources={"policy": "no decisions: the store's default, with its floor per layer, and nothing ahead"},
        ),
        Strategy(
            "lru", "LRU, computing by expert, the next layer ahead in prompts", "lru", "none", False,
            sources={"policy": "everything that the store does without predictions"},
        ),
        Strategy(
            "moe-infinity", "MoE-Infinity", "sparsity", "eamc", _prefetch(EVERY_LAYER, again=True, by_proximity=True),
            store=StoreOptions(chunked=False, overlap=False),
            sources={
                "policy": "4.7, algorithm 1; only ended requests are matched (4.5). A computed layer's share is that of"
                " the last pass's match",
                "predictor": "4.5: EAMC, several matches summed and normalised by row",
                "prefetch": "4.3: predicted anew after every layer's routing; 4.5: by probability times 1-(i-l)/L. How"
                " many is open: of a layer as many as a token uses. Each prediction puts the queue in order again",
                "chunked": "not in the paper: whole experts",
                "overlap": "not in the paper: experts are computed when all are there",
                "sweep": f"4.3: the prompt is an iteration that is predicted too; here, {_IN_PROMPTS}",
            },
        ),
        Strategy(
            "promoe", "ProMoE", "lru", "mlp", _prefetch(4, again=False),
            sources={
                "policy": "Ablation Study: the base is LRU",
                "predictor": "Learning-based Predictor: a two-layer MLP per layer",
                "prefetch": "Sliding-window Prefetching: layer i+k once, from layer i (footnote 1: from the first where"
                " there is none); as many as a token uses. k is open (figure 8: 1, 2, 4, 8): 4",
                "chunked": "Chunked Prefetch: one chunk per matrix",
                "preempt": "Early Preemption: misses first, which is always so, and stale wishes of the layer dropped",
                "overlap": "Reordered Inference: experts that are there first",
                "sweep": f"Overall Performance: prompts prefetch too; here, {_IN_PROMPTS}",
            },
        ),
        Strategy(
            "expertflow", "ExpertFlow", "locality", "routing-path", _prefetch(EVERY_LAYER, again=False),
            store=StoreOptions(chunked=False),
            sources={
                "policy": "3.2.1 PLEC and 3.2.2 real-time correction: what was prefetched in vain goes first, from the"
                " routing event on that shows it",
                "predictor": "3.1: all layers at once from the tokens, before the pass",
                "prefetch": "3.2.1: what is predicted, the nearest layers first, as completed ones make room",
                "chunked": "not in the paper: whole experts",
                "overlap": "3.2: missed experts are fetched while others compute",
                "sweep": f"3.1.1: prompts are predicted too; here, {_IN_PROMPTS}",
            },
        ),
        Strategy(
            "duoserve", "DuoServe-MoE", "lru", "expert-mlp", _prefetch(1, again=True),
            store=StoreOptions(chunked=False, sweep=False, stream=True),
            sources={
                "policy": "5.1: k slots in all, refilled for each layer: so many with the least `expert_cache`. A layer"
                " has its slots until the next is routed, so 2k prefetch as the paper's k do; with more, LRU",
                "predictor": "4.2: ExpertMLP, the next layer from those before",
                "prefetch": "5.3: the next layer's k most probable, while this one computes",
                "chunked": "not in the paper: whole experts",
                "overlap": "5.2: one expert computes while the next is fetched. Decoding waits for all (5.3); here it"
                " does not",
                "sweep": "5.2: of the next layer the first expert is fetched before its router has chosen",
                "stream": "5.2: a prompt's experts one after another through slots, each fetched once",
            },
        ),
        Strategy(
            OWN, "what was measured to be best for the model, else next-use; prefetching where it pays",
            sources={"policy": "the model's measured.json (`moegguf trace simulate --save`)"},
        ),
    )
}  # fmt: skip


def find_strategy(name: str) -> Strategy:
    """The strategy of this name; "" is moegguf's own. Raises OptionError."""
    found = STRATEGIES.get(name or OWN)
    if found is None:
        raise OptionError(f"there is no strategy {name[:60]!r}; known are {', '.join(STRATEGIES)}.")
    return found
