"""Eviction policies by name. The native ones are defined in `moegguf/native/policies`, where their formulas stand."""

from __future__ import annotations

from collections.abc import Callable

from moegguf.controller.policies.base import LRU, AnyPolicy
from moegguf.controller.policies.least_stale import LeastStale
from moegguf.controller.policies.lfu import Lfu, LfuRequest
from moegguf.controller.policies.locality import Locality
from moegguf.controller.policies.random_scores import Random
from moegguf.controller.policies.sparsity import SparsityAware
from moegguf.controller.policies.static import Static
from moegguf.controller.predictors import Sources
from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import load
from moegguf.errors import OptionError
from moegguf.native.store import native_policies

Make = Callable[[MoeShape, Sources], AnyPolicy]


def _static(shape: MoeShape, sources: Sources) -> AnyPolicy:
    """From the shipped or learned popularity of the model; LRU, after a warning, when its file is damaged."""
    n_row = len(shape.layers)
    there_is_one = False
    for path in sources.find("popularity.safetensors"):
        there_is_one = True
        found = load(
            path, "popularity", sources.fingerprint, shape,
            lambda weights: Static(shape, weights.array("popularity", n_row, shape.n_expert)),
        )  # fmt: skip
        if found is not None:
            return found
    if there_is_one:
        return LRU
    raise OptionError(
        "the policy 'static' needs the model's popularity.safetensors (tools/train_predictor.py, on a trace)."
    )


PYTHON_POLICIES: dict[str, Make] = {
    "lfu": lambda shape, sources: Lfu(),
    "lfu-request": lambda shape, sources: LfuRequest(shape),
    "static": _static,
    "random": lambda shape, sources: Random(shape),
    "least-stale": lambda shape, sources: LeastStale(shape),
    "locality": lambda shape, sources: Locality(shape),
    "sparsity": lambda shape, sources: SparsityAware(shape, sources.collection(shape)),
}


def policy_names() -> list[str]:
    """All policies by name: those of the store, then those in Python."""
    return [*native_policies(), *PYTHON_POLICIES]


def make_policy(name: str, shape: MoeShape, sources: Sources) -> AnyPolicy:
    """The policy of this name for a model. Raises OptionError for an unknown name, or a profile that does not exist."""
    if native := native_policies().get(name):
        return native
    make = PYTHON_POLICIES.get(name)
    if make is None:
        raise OptionError(f"there is no policy {name!r}; known are {', '.join(policy_names())}.")
    return make(shape, sources)
