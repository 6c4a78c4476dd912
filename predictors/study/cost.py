"""Measures how long predictions take in the store: the step `costs` of `regenerate`.

    python -m predictors.study.regenerate --only costs

Weights are random, because times depend only on their sizes. Times are read from the
store's counter `forecast_ns`, which does not include the computation of layers. The
machine should be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moegguf.controller.collection import Eamc
from moegguf.controller.controller import ActingOptions, build_controller
from moegguf.controller.predictors.base import Predictor
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.predictors.networks import (
    Sizes,
    expert_mlp,
    expert_mlp_sizes,
    mlp,
    mlp_sizes,
    skip,
)
from moegguf.controller.predictors.routing_path import routing_path
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.gguf.routers import Gating, Router, Routers
from moegguf.learning.routing_path import Options, array_sizes
from moegguf.native.events import Float32s, Phase
from moegguf.native.store import NativePolicy, Store, StoreOptions
from moegguf.trace.simulate import layout_of
from predictors.study.papers import strategy

N_WARM = 4
N_TOKENS = 24
HIDDEN = (512, 256, 128, 64, 64, 64)
N_HIDDEN = 128
SHAPES = {
    "laboratory, 30 x 64": MoeShape(30, 64, 8, tuple(range(30)), 576, 49152, 31104),
    "Qwen3-30B-A3B, 48 x 128": MoeShape(
        48, 128, 8, tuple(range(48)), 2048, 151936, 2654208
    ),
}
Random = np.random.Generator


@dataclass(frozen=True)
class Cost:
    """Computation times of a predictor, in microseconds."""

    layer: float  # median time after the routing of one layer
    layer_99: float  # 99th percentile of the time after the routing of one layer
    # Median time before the first layer of a pass, when its token has been announced.
    before: float

    def figures(self) -> dict[str, float]:
        """Returns {name of a field: its time in microseconds, rounded to 0.1}."""
        return {name: round(value, 1) for name, value in vars(self).items()}


def _floats(rng: Random, *shape: int) -> Float32s:
    return rng.standard_normal(shape, np.float32) / np.float32(10)


def _skip(shape: MoeShape, rng: Random) -> Predictor:
    matrices = {
        il: Router(shape.n_expert_used, _floats(rng, shape.n_expert, shape.n_embd))
        for il in shape.layers
    }
    return skip(shape, Routers(Gating.SOFTMAX, matrices))


def _weights(rng: Random, sizes: Sizes, **facts: Any) -> Weights:
    arrays = {name: _floats(rng, *size) for name, size in sizes.items()}
    return Weights(arrays, facts)


def _mlp(shape: MoeShape, rng: Random) -> Predictor:
    sizes = mlp_sizes(shape, [4], N_HIDDEN)
    return mlp(shape, _weights(rng, sizes, windows=[4], n_hidden=N_HIDDEN))


def _expert_mlp(shape: MoeShape, rng: Random) -> Predictor:
    sizes = expert_mlp_sizes(shape, HIDDEN)
    return expert_mlp(shape, _weights(rng, sizes, hidden=list(HIDDEN)))


def _routing_path(shape: MoeShape, rng: Random) -> Predictor:
    n_moe_layer, n_expert = shape.n_moe_layer, shape.n_expert
    sizes = array_sizes(Options(), shape.n_vocab + 1, n_moe_layer, n_expert)
    return routing_path(shape, _weights(rng, sizes))


def _eamc(n_entries: int) -> Callable[[MoeShape, Random], Predictor]:
    def make(shape: MoeShape, rng: Random) -> Predictor:
        eamc = Eamc(*shape.table)
        for _ in range(n_entries):
            shares = rng.dirichlet(np.full(shape.n_expert, 0.3), shape.n_layer)
            eamc.add(rng.multinomial(640, shares).clip(max=80).astype(np.float32))
        return EamcPredictor(shape, eamc)

    return make


# {title: (function that creates the predictor, name of the strategy that uses it)}
PREDICTORS: Mapping[str, tuple[Callable[[MoeShape, Random], Predictor], str]] = {
    "skip, 2 layers": (_skip, "moegguf"),
    "ProMoE's networks": (_mlp, "promoe"),
    "EAM matching, 120 entries": (_eamc(120), "moe-infinity"),
    "EAM matching, 1,000 entries": (_eamc(1000), "moe-infinity"),
    "routing-path network": (_routing_path, "expertflow"),
    "ExpertMLP": (_expert_mlp, "duoserve"),
}


def cost(shape: MoeShape, predictor: Predictor, name: str) -> Cost:
    """Measures the times of a predictor with the prefetching options of the strategy
    `name`.

    A quarter of the experts have slots, and routing is random. The first N_WARM tokens
    are not counted.
    """
    rng = np.random.default_rng(0)
    n_slots = shape.n_moe_layer * shape.n_expert // 4
    options = StoreOptions(repack=False, simulate=True, link_bytes_per_s=2e10)
    before = []
    of_layer = []
    with closing(Store(layout_of(shape), n_slots, options)) as store:
        acting = ActingOptions(prefetch=strategy(name).prefetch)
        build_controller(shape, NativePolicy("lru"), predictor, store, acting)

        def spent(act: Callable[[], object]) -> float:
            start = store.counters()["forecast_ns"]
            act()
            return (store.counters()["forecast_ns"] - start) / 1e3

        for token in range(N_WARM + N_TOKENS):
            before.append(
                spent(partial(store.context.announce, 0, Phase.DECODE, [token]))
            )
            ids = rng.random((shape.n_layer, shape.n_expert)).argsort(1)[
                :, : shape.n_expert_used
            ]
            inputs = rng.standard_normal((shape.n_layer, 1, shape.n_embd), np.float32)
            for il in shape.layers:
                entered = inputs[il] if predictor.needs_inputs else None
                of_layer.append(
                    spent(partial(store.context.acquire, il, ids[il : il + 1], entered))
                )
                store.advance(500_000)
    times = of_layer[N_WARM * shape.n_moe_layer :]
    median, slow = (float(np.percentile(times, p)) for p in (50, 99))
    return Cost(median, slow, float(np.median(before[N_WARM:])))


def costs() -> dict[str, Any]:
    """Measures every predictor with every shape. Returns {shape: {predictor:
    figures}}."""
    return {
        title: {
            name: cost(shape, make(shape, np.random.default_rng(1)), of).figures()
            for name, (make, of) in PREDICTORS.items()
        }
        for title, shape in SHAPES.items()
    }
