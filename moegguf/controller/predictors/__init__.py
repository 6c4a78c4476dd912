"""Predictors, one per idea of a paper, by name; `base` says what one is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from moegguf.controller.collection import EamcPair
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.predictors.expert_mlp import ExpertMlp
from moegguf.controller.predictors.mlp import MlpPredictor
from moegguf.controller.predictors.popularity import Affinity, Popularity
from moegguf.controller.predictors.previous_token import PreviousToken
from moegguf.controller.predictors.routing_path import RoutingPath
from moegguf.controller.predictors.skip import FreshGate, Skip
from moegguf.controller.predictors.token_table import TokenTable
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights, load
from moegguf.errors import OptionError
from moegguf.gguf.routers import Routers


class Sources(Protocol):
    """What predictors and policies of one model may be made from."""

    @property
    def fingerprint(self) -> str:
        """Of the model."""

    def find(self, name: str) -> Iterator[Path]:
        """Files of this name about the model, the best first."""

    def routers(self) -> Routers:
        """The model's own routers."""

    def collection(self, shape: MoeShape) -> EamcPair | None:
        """Its EAM collection, for one owner; None when there is none yet."""


Make = Callable[[MoeShape, Sources], Predictor]


def _learned(name: str, build: Callable[[MoeShape, Weights], Predictor]) -> Make:
    """From the nearest usable file `NAME.safetensors`. Raises OptionError when there is no file at all."""

    def make(shape: MoeShape, sources: Sources) -> Predictor:
        there_is_one = False
        for path in sources.find(f"{name}.safetensors"):
            there_is_one = True
            found = load(path, name, sources.fingerprint, shape, lambda weights: build(shape, weights))
            if found is not None:
                return found
        if there_is_one:
            return NoPrediction(shape)
        raise OptionError(
            f"the predictor {name!r} has to be trained for this model first (tools/train_predictor.py, on a trace);"
            f" these need no training: {', '.join(UNTRAINED)}."
        )

    return make


PREDICTORS: dict[str, Make] = {
    "none": lambda shape, sources: NoPrediction(shape),
    "previous-token": lambda shape, sources: PreviousToken(shape),
    "eamc": lambda shape, sources: EamcPredictor(shape, sources.collection(shape)),
    "skip": lambda shape, sources: Skip(shape, sources.routers()),
    "fresh-gate": lambda shape, sources: FreshGate(shape, sources.routers()),
    "token-id": _learned("token-id", TokenTable.from_weights),
    "popularity": _learned("popularity", Popularity.from_weights),
    "affinity": _learned("affinity", Affinity.from_weights),
    "mlp": _learned("mlp", MlpPredictor.from_weights),
    "expert-mlp": _learned("expert-mlp", ExpertMlp.from_weights),
    "routing-path": _learned("routing-path", RoutingPath.from_weights),
}
UNTRAINED = ("none", "previous-token", "eamc", "skip", "fresh-gate")


def make_predictor(name: str, shape: MoeShape, sources: Sources) -> Predictor:
    """The predictor of this name for a model.

    One whose file is damaged says nothing, after a warning. Raises OptionError for an unknown name, and for a predictor
    that was never trained for this model.
    """
    make = PREDICTORS.get(name)
    if make is None:
        raise OptionError(f"there is no predictor {name!r}; known are {', '.join(PREDICTORS)}.")
    return make(shape, sources)
