"""Eviction policies by name. The native ones, with their formulas, are in `moegguf/native/policies`."""

from __future__ import annotations

from collections.abc import Callable

from moegguf.controller.policies.base import LRU, AnyPolicy
from moegguf.controller.policies.baselines import LeastStale, Lfu, LfuRequest, Random, Static
from moegguf.controller.policies.locality import LOCALITY
from moegguf.controller.policies.sparsity import OwnSparsityAware, SparsityAware
from moegguf.controller.predictors import ArtifactSource
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import load_nearest
from moegguf.errors import OptionError
from moegguf.native.store import native_policies

Make = Callable[[MoeShape, ArtifactSource], AnyPolicy]


def _static(shape: MoeShape, artifacts: ArtifactSource) -> AnyPolicy:
    """From the nearest popularity file of the model; LRU, after a warning, when every such file is damaged."""
    n_row = len(shape.layers)
    try:
        static = load_nearest(
            artifacts.find("popularity.safetensors"), "popularity", artifacts.fingerprint, shape,
            lambda weights: Static(shape, weights.array("popularity", n_row, shape.n_expert)),
        )  # fmt: skip
    except FileNotFoundError as error:
        raise OptionError(
            "the policy 'static' needs the model's popularity.safetensors (predictors/train/predictor.py, on a trace)."
        ) from error
    return LRU if static is None else static


OWN_POLICIES: dict[str, Make] = {
    "lfu": lambda shape, artifacts: Lfu(),
    "lfu-request": lambda shape, artifacts: LfuRequest(shape),
    "static": _static,
    "random": lambda shape, artifacts: Random(shape),
    "least-stale": lambda shape, artifacts: LeastStale(shape),
    "locality": lambda shape, artifacts: LOCALITY,
    "sparsity": lambda shape, artifacts: SparsityAware(shape, artifacts.collection(shape)),
    "sparsity-own": lambda shape, artifacts: OwnSparsityAware(shape, artifacts.collection(shape)),
}


def policy_names() -> list[str]:
    """All policies by name: the store's own, then those of this package."""
    return [*native_policies(), *OWN_POLICIES]


def make_policy(name: str, shape: MoeShape, artifacts: ArtifactSource) -> AnyPolicy:
    """The policy of this name for a model. Raises OptionError for an unknown name, or a missing popularity file."""
    if native := native_policies().get(name):
        return native
    make = OWN_POLICIES.get(name)
    if make is None:
        raise OptionError(f"there is no policy {name!r}; known are {', '.join(policy_names())}.")
    return make(shape, artifacts)
