"""Predictors from the router's input of a layer: skip, and ProMoE's learned networks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np

from moegguf.controller.predictors.base import Predictor
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.gguf.routers import Routers
from moegguf.native.events import Announcement, Float32s, RoutingEvent
from moegguf.native.matvec import QuantizedMatrix
from moegguf.native.predictor import Array, NativePredictor, integers

Pair = tuple[int, int]  # (source il, target il)


class InputPredictor(Predictor):
    """Base of predictors from the router's input: keeps a copy of the last one, if it is one token's and finite.

    Passes of several tokens are left out: a prompt uses most experts anyway, and costs a vector per token.
    """

    needs_inputs: ClassVar[bool] = True

    def __init__(self, shape: MoeShape, reach: int) -> None:
        super().__init__(shape, reach)
        self._input = np.zeros(shape.n_embd, np.float32)
        self._source: int | None = None  # the layer of that input

    def announce(self, announcement: Announcement) -> None:
        """Discards the input of the pass before."""
        self._source = None

    def observe(self, event: RoutingEvent) -> None:
        """Copies the event's input."""
        self._source = None
        inputs = event.inputs
        if inputs is None or inputs.shape != (1, self.shape.n_embd) or event.il not in self.shape.row_of:
            return
        np.copyto(self._input, inputs[0])
        if np.isfinite(np.dot(self._input, self._input)):
            self._source = event.il

    def _input_for(self, il: int, distance: int) -> Float32s | None:
        """The input kept, if its layer is `distance` MoE layers before `il`."""
        if self._source is None or self.shape.layer_after(self._source, distance) != il:
            return None
        return self._input


class Skip(InputPredictor):
    """Predicts at any distance; accuracy falls with it, as inputs of distant layers differ more."""

    name: ClassVar[str] = "skip"

    def __init__(self, shape: MoeShape, routers: Routers) -> None:
        super().__init__(shape, reach=len(shape.layers) - 1)
        self.routers = routers

    def predict(self, il: int, distance: int) -> Float32s | None:
        """The probabilities of the router of layer `il`."""
        return self._through_router(il, distance) if distance > 0 else None

    def fork(self) -> Skip:
        """Shares the routers."""
        return type(self)(self.shape, self.routers)

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

    def _through_router(self, il: int, distance: int) -> Float32s | None:
        vector = self._input_for(il, distance)
        if vector is None or il not in self.routers.routers:
            return None
        return self.routers.probabilities(il, vector)


def window_pairs(shape: MoeShape, windows: Iterable[int]) -> list[Pair]:
    """The pairs that these windows need, in order; the first MoE layer is no target: none precedes it."""
    rows = range(1, len(shape.layers))
    return sorted({(shape.layers[max(row - k, 0)], shape.layers[row]) for k in windows for row in rows})


class _Network(NamedTuple):
    hidden: QuantizedMatrix
    out: QuantizedMatrix


class MlpPredictor(InputPredictor):
    """Predicts the pairs it was trained for: at distance k, and from the first MoE layer up to any window.

    One call computes one MLP; 0.2 ms for 2 million weights.
    """

    name: ClassVar[str] = "mlp"

    def __init__(self, shape: MoeShape, networks: dict[Pair, _Network]) -> None:
        row_of = shape.row_of
        super().__init__(shape, reach=max((row_of[b] - row_of[a] for a, b in networks), default=0))
        self._networks = networks
        self._hidden = np.zeros(max((n.hidden.shape[0] for n in networks.values()), default=0), np.float32)

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
                    weights.array(f"{part}.weight", *sizes[name]),
                    weights.array(f"{part}.bias", sizes[name][0]),
                    relu=name == "hidden",
                )
                for name, part in parts.items()
            })  # fmt: skip

        return cls(shape, {pair: network(pair) for pair in window_pairs(shape, windows)})

    def predict(self, il: int, distance: int) -> Float32s | None:
        """None for a pair without a network."""
        vector = self._input_for(il, distance)
        network = None if self._source is None else self._networks.get((self._source, il))
        if vector is None or network is None:
            return None
        hidden = network.hidden.apply(vector, self._hidden)
        logits = network.out.apply(hidden, np.empty(self.shape.n_expert, np.float32))
        return probabilities(logits, self.shape.n_expert_used)

    def fork(self) -> MlpPredictor:
        """Shares the networks."""
        return MlpPredictor(self.shape, self._networks)

    def native(self) -> NativePredictor | None:
        """The networks as they are, in signed bytes; None in a model of one MoE layer."""
        if not self._networks:
            return None
        arrays: dict[str, Array] = {
            "n_embd": integers(self.shape.n_embd),
            "n_hidden": integers(len(self._hidden)),
            "pairs": integers(*(il for pair in self._networks for il in pair)),
        }
        for (source, target), network in self._networks.items():
            for name, matrix in network._asdict().items():
                arrays |= matrix.arrays(f"{source}.{target}.{name}")
        return NativePredictor(self.name, arrays)


def probabilities(logits: Float32s, n_expert_used: int) -> Float32s:
    """softmax(logits) (n_expert,) times n_expert_used, at most 1: the expected choices of each expert."""
    exponentials = np.exp(logits - logits.max())
    exponentials *= n_expert_used / float(exponentials.sum())
    return np.minimum(exponentials, 1.0, out=exponentials)
