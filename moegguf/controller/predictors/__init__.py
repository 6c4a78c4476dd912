"""Creates predictors by name. Most predictors implement a method from a paper.
`base.Predictor` is their interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.own_classes import load_class, make_own, names_file
from moegguf.controller.predictors.base import NoPrediction, Predictor
from moegguf.controller.predictors.counts import (
    affinity,
    popularity,
    previous_token,
    token_table,
)
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.predictors.networks import MLP, SKIP, expert_mlp, mlp, skip
from moegguf.controller.predictors.routing_path import routing_path
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights, read_facts
from moegguf.errors import OptionError


def _learned(name: str, shape: MoeShape, artifacts: Artifacts) -> Predictor:
    """Creates the predictor from the first usable NAME.safetensors in search order. If
    there are files, but none is usable, warns and returns NoPrediction. Raises
    OptionError if there is no file."""
    # The folder next to the model is not searched if the model is unknown.
    then = "then name the model (--model), or the folder of its files (--predictors); "
    found = artifacts.load(
        name,
        shape,
        partial(LEARNED[name], shape),
        f"the predictor {name!r} has to be trained for this model first: `moegguf learn MODEL --strategy"
        f" {LEARNT_FOR[name]}`; {'' if artifacts.layout else then}these need no training: {', '.join(UNTRAINED)}.",
    )
    return found or NoPrediction(shape)


UNTRAINED: dict[str, Callable[[MoeShape, Artifacts], Predictor]] = {
    "none": lambda shape, artifacts: NoPrediction(shape),
    "previous-token": lambda shape, artifacts: previous_token(shape),
    "eamc": lambda shape, artifacts: EamcPredictor(shape, artifacts.collection(shape)),
    SKIP: lambda shape, artifacts: skip(shape, artifacts.routers()),
}
LEARNED: dict[str, Callable[[MoeShape, Weights], Predictor]] = {
    "token-id": token_table,
    "popularity": popularity,
    "affinity": affinity,
    MLP: mlp,
    "expert-mlp": expert_mlp,
    "routing-path": routing_path,
}
LEARNT_FOR = {
    MLP: "promoe",
    "token-id": "promoe",
    "routing-path": "expertflow",
    "expert-mlp": "duoserve",
    "affinity": "duoserve",
    "popularity": "duoserve",
    "eamc": "moe-infinity",
}
"""{predictor: the strategy for which `moegguf learn` writes the predictor's file}."""
PREDICTORS = (*UNTRAINED, *LEARNED)
"""Names of all predictors."""


def make_predictor(name: str, shape: MoeShape, artifacts: Artifacts) -> Predictor:
    """Returns a new predictor, for a predictor's name or "FILE.py:CLASS".

    Returns `NoPrediction`, after a warning, if all trained files for the predictor are
    damaged or belong to other models. Raises OptionError for an unknown name, for a
    predictor that must be trained but has no file, and for a class that cannot be used.
    The predictor `skip` also raises the errors of `Artifacts.routers`.
    """
    check_predictor(name)
    if make := UNTRAINED.get(name):
        return make(shape, artifacts)
    if not names_file(name):
        return _learned(name, shape, artifacts)
    own = make_own(name, "predictor", Predictor, shape)  # type: ignore[type-abstract]
    if not isinstance(getattr(own, "reach", None), int):
        raise OptionError(
            f"the predictor {name!r:.200} must have a whole number as its reach; call super().__init__(shape, reach)."
        )
    return own


def check_predictor(name: str) -> None:
    """Raises OptionError unless `name` is a predictor's name, or "FILE.py:CLASS" of a
    subclass of Predictor."""
    if names_file(name):
        load_class(name, "predictor", Predictor)  # type: ignore[type-abstract]
    elif name not in PREDICTORS:
        raise OptionError(
            f"there is no predictor {name!r}; known predictors: {', '.join(PREDICTORS)}."
        )


def prefetch_predictor(artifacts: Artifacts) -> str:
    """Returns the name of the predictor to prefetch with: `mlp` if there is a file
    mlp.safetensors, and `skip` otherwise. Does not check that the file belongs to this
    model. Also returns `skip` if the facts in that file show that `skip` was right more
    often than `mlp` in the test after the training run."""
    path = next(artifacts.find("mlp.safetensors"), None)
    if path is None:
        return SKIP
    facts = read_facts(path)
    match [facts.get(f"{name}_right") for name in (SKIP, MLP)]:
        case [float(skip_right), float(mlp_right)] if skip_right > mlp_right:
            return SKIP
    return MLP
