"""Predictors from the router's input of a layer: skip, and ProMoE's learned networks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, NamedTuple

from moegguf.controller.predictors.base import StorePredictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.gguf.routers import Routers
from moegguf.native.predictor import Array, NativePredictor, QuantizedMatrix, integers

Pair = tuple[int, int]  # (source il, target il)


class Skip(StorePredictor):
    """Predicts at any distance; accuracy falls with it, as inputs of distant layers differ more."""

    name: ClassVar[str] = "skip"
    needs_inputs: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, reach=len(shape.layers) - 1)
        self.routers = routers

    def native(self) -> NativePredictor | None:
        """The routers in signed bytes, with a scale per expert."""
        arrays: dict[str, Array] = {
            "n_embd": integers(self.shape.n_embd), "gating": integers(self.routers.gating),
            "n_group": integers(self.routers.n_group), "n_group_used": integers(self.routers.n_group_used),
        }  # fmt: skip
        for il, router in self.routers.routers.items():
            matrix = QuantizedMatrix(router.matrix)
            arrays |= {f"{il}.weights": matrix.bytes, f"{il}.scale": matrix.scale}
            biases = {"logit_bias": router.logit_bias, "choice_bias": router.choice_bias}
            arrays |= {f"{il}.{name}": bias for name, bias in biases.items() if bias is not None}
        return NativePredictor(self.name, arrays)

    def release(self) -> None:
        """Forgets the routers in float32."""
        self.routers = replace(self.routers, routers={})


def window_pairs(shape: MoeShape, windows: Iterable[int]) -> list[Pair]:
    """The pairs that these windows need, in order; the first MoE layer is no target: none precedes it."""
    rows = range(1, len(shape.layers))
    return sorted({(shape.layers[max(row - k, 0)], shape.layers[row]) for k in windows for row in rows})


class _Network(NamedTuple):
    hidden: QuantizedMatrix
    out: QuantizedMatrix


class MlpPredictor(StorePredictor):
    """Predicts the pairs it was trained for: at distance k, and from the first MoE layer up to any window.

    One call computes one MLP; 0.2 ms for 2 million weights.
    """

    name: ClassVar[str] = "mlp"
    needs_inputs: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, networks: dict[Pair, _Network]) -> None:
        row_of = shape.row_of
        super().__init__(shape, reach=max((row_of[b] - row_of[a] for a, b in networks), default=0))
        self._networks = networks

    @classmethod
    def from_weights(cls, shape: MoeShape, weights: Weights) -> MlpPredictor:
        """From arrays `<source>.<target>.{hidden,out}.{weight,bias}` and the facts `windows` and `n_hidden`.

        ValueError when they do not fit.
        """
        windows, n_hidden = weights.facts["windows"], weights.facts["n_hidden"]
        if not isinstance(n_hidden, int) or not windows or not all(isinstance(k, int) and k > 0 for k in windows):
            raise ValueError(f"windows {windows!r:.80} and n_hidden {n_hidden!r:.80} must be whole numbers above zero")
        sizes = {"hidden": (n_hidden, shape.n_embd), "out": (shape.n_expert, n_hidden)}

        def network(pair: Pair) -> _Network:
            parts = {name: f"{pair[0]}.{pair[1]}.{name}" for name in sizes}
            return _Network(**{
                name: QuantizedMatrix(
                    weights.array(f"{part}.weight", *sizes[name]), weights.array(f"{part}.bias", sizes[name][0])
                )
                for name, part in parts.items()
            })  # fmt: skip

        return cls(shape, {pair: network(pair) for pair in window_pairs(shape, windows)})

    def native(self) -> NativePredictor | None:
        """The networks as they are, in signed bytes; None in a model of one MoE layer."""
        if not self._networks:
            return None
        arrays: dict[str, Array] = {
            "n_embd": integers(self.shape.n_embd),
            "n_hidden": integers(max(network.hidden.shape[0] for network in self._networks.values())),
            "pairs": integers(*(il for pair in self._networks for il in pair)),
        }
        for (source, target), network in self._networks.items():
            for name, matrix in network._asdict().items():
                arrays |= matrix.arrays(f"{source}.{target}.{name}")
        return NativePredictor(self.name, arrays)
