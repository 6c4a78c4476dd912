"""Finds eviction policies by name, for all slots or for each tier.

The store computes native policies, whose formulas are in `moegguf/native/policies`.
Other policies compute a table of scores in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.controller.own_classes import load_class, make_own, names_file
from moegguf.controller.predictors.eamc import EamcPredictor
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.events import Float32s
from moegguf.native.store import NativePolicy, native_policies

LRU = NativePolicy("lru")
"""Least recently used: the store's default."""
LOCALITY = NativePolicy("locality", takes_forecast=True)
"""ExpertFlow's policy: first evicts experts that were prefetched but then not chosen by
their layer's router, and last evicts experts that are predicted for this pass."""


@runtime_checkable
class Policy(Protocol):
    """The interface of a policy in Python, which scores experts.

    Whatever the scores are, the store never evicts pinned experts. A layer with no more
    than its share of slots loses one only if no layer above its share has an expert
    that can be evicted. Among equal scores, the store evicts an expert of the layer
    that is needed last if it sweeps (`StoreOptions.sweep`), and otherwise the least
    recently used expert.
    """

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """Returns scores (n_layer, n_expert); the expert with the lowest score is
        evicted first. A result of None keeps the previous scores, which a pass of only
        prompt tokens clears.

        Called after each routing event. NaN and infinite scores are treated as 0.
        Scores are not used in passes of only prompt tokens.
        """


AnyPolicy = Policy | NativePolicy


class Lfu:
    """Scores an expert by the number of routing events so far that used it, as
    MoE-Infinity's published code does."""

    name: ClassVar[str] = "lfu"

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """Returns the history's counts of uses (n_layer, n_expert)."""
        return history.uses


class Static:
    """Scores an expert by its popularity in recorded routing. The scores never change.
    `popularity` has the shape (number of layers with experts, n_expert)."""

    name: ClassVar[str] = "static"

    def __init__(self, shape: MoeShape, popularity: Float32s) -> None:
        self._scores: Float32s = np.zeros(shape.table, np.float32)
        self._scores[list(shape.layers)] = popularity

    def scores(self, history: History, forecast: Forecast) -> Float32s | None:
        """Returns the same table (n_layer, n_expert) on every call."""
        return self._scores


class Sparsity(NativePolicy):
    """MoE-Infinity's algorithm 1, which the store computes. It evicts according to the
    forecast of the predictor in use, which is `predictor` unless another predictor is
    chosen."""

    predictor: EamcPredictor  # forecasts from past requests


def _sparsity(shape: MoeShape, artifacts: Artifacts) -> AnyPolicy:
    policy = Sparsity("sparsity", takes_forecast=True)
    policy.predictor = EamcPredictor(shape, artifacts.collection(shape))
    return policy


AUTO = "auto"
TIERS = ("vram", "ram")


def _static(shape: MoeShape, artifacts: Artifacts) -> AnyPolicy:
    """Returns the policy that scores by the model's popularity file. Returns LRU, after
    a warning, if every such file is damaged or belongs to another model. Raises
    OptionError if there is no such file."""
    size = shape.n_moe_layer, shape.n_expert
    static = artifacts.load(
        "popularity",
        shape,
        lambda saved: Static(shape, saved.array("popularity", *size)),
        "the policy 'static' needs the model's popularity.safetensors; `moegguf learn MODEL --strategy"
        " duoserve` creates this file.",
    )
    return static or LRU


OWN_POLICIES: dict[str, Callable[[MoeShape, Artifacts], AnyPolicy]] = {
    "lfu": lambda shape, artifacts: Lfu(),
    "static": _static,
    "sparsity": _sparsity,
}


def policy_names() -> list[str]:
    """Returns the names of all policies: the store's own, then the policies of this
    package. "auto" is not among them."""
    return [*dict.fromkeys([*native_policies(), *OWN_POLICIES])]


def make_policy(name: str, shape: MoeShape, artifacts: Artifacts) -> AnyPolicy:
    """Returns the policy that `name`, a policy's name or "FILE.py:CLASS", refers to.
    Raises OptionError for an unknown name (including "auto"), a missing popularity
    file, and a class that cannot be used."""
    if names_file(name):
        return make_own(name, "policy", Policy, shape)  # type: ignore[type-abstract]
    if make := OWN_POLICIES.get(name):
        return make(shape, artifacts)
    native = native_policies().get(name)
    if native is None:
        raise OptionError(
            f"there is no policy {name!r}; known policies: {', '.join(policy_names())}."
        )
    return native


def check_policy(name: str) -> None:
    """Raises OptionError unless `name` is "auto", a policy's name, or "FILE.py:CLASS"
    of a class that is a policy."""
    if names_file(name):
        load_class(name, "policy", Policy)  # type: ignore[type-abstract]
    elif name != AUTO and name not in policy_names():
        raise OptionError(
            f"there is no policy {name!r}; known policies: {AUTO}, {', '.join(policy_names())}."
        )


def parse_policies(text: str) -> Mapping[str, str]:
    """Parses text such as "vram=next-use,ram=slru" into {tier: policy}. Tiers that are
    not in the text have no key. Raises OptionError for an unknown tier or policy, or a
    tier that occurs twice."""
    found: dict[str, str] = {}
    for part in text.split(","):
        tier, given, name = (word.strip() for word in part.partition("="))
        if tier not in TIERS or not given or tier in found:
            raise OptionError(
                f"policy={text[:60]!r} must be one policy, or vram=NAME,ram=NAME with each tier at most once."
            )
        check_policy(name)
        found[tier] = name
    return found


def device_policy(text: str, tier: str) -> str:
    """Returns the name of the policy for `tier` ("vram" or "ram"), the tier that layers
    read experts from. A `text` without "=" is itself the name. Returns "auto" if `text`
    names a policy only for the other tier."""
    return parse_policies(text).get(tier, AUTO) if "=" in text else text


def ram_policy(text: str) -> str:
    """Returns the name of the policy for slots in RAM if a device has slots, too.
    Returns "lru" if `text` does not name a policy for "ram", or names "auto".

    Raises OptionError for a policy that needs forecasts or scores from Python, because
    the store does not apply these to slots in RAM below a device.
    """
    name = parse_policies(text).get("ram", AUTO) if "=" in text else AUTO
    fitting = [
        native.name
        for native in native_policies().values()
        if not native.takes_forecast
    ]
    if name != AUTO and name not in fitting:
        raise OptionError(
            f"the policy for slots in RAM below a device must be one of {', '.join(fitting)}, but is {name!r}."
        )
    return LRU.name if name == AUTO else name
