"""Eviction policies by name, for all slots or by tier; formulas of the native ones are in `moegguf/native/policies`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.policies.base import LOCALITY, LRU, AnyPolicy
from moegguf.controller.policies.baselines import LeastStale, Lfu, LfuRequest, Random, Static
from moegguf.controller.policies.sparsity import OwnSparsityAware, SparsityAware
from moegguf.controller.shape import MoeShape
from moegguf.errors import OptionError
from moegguf.native.store import native_policies

AUTO = "auto"
TIERS = ("vram", "ram")


def _static(shape: MoeShape, artifacts: Artifacts) -> AnyPolicy:
    """From the nearest popularity file of the model; LRU, after a warning, when every such file is damaged."""
    size = len(shape.layers), shape.n_expert
    try:
        static = artifacts.load("popularity", shape, lambda saved: Static(shape, saved.array("popularity", *size)))
    except FileNotFoundError as error:
        raise OptionError(
            "the policy 'static' needs the model's popularity.safetensors (predictors/train/predictor.py, on a trace)."
        ) from error
    return LRU if static is None else static


OWN_POLICIES: dict[str, Callable[[MoeShape, Artifacts], AnyPolicy]] = {
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


def make_policy(name: str, shape: MoeShape, artifacts: Artifacts) -> AnyPolicy:
    """The policy of this name for a model. Raises OptionError for an unknown name, or a missing popularity file."""
    if native := native_policies().get(name):
        return native
    make = OWN_POLICIES.get(name)
    if make is None:
        raise OptionError(f"there is no policy {name!r}; known are {', '.join(policy_names())}.")
    return make(shape, artifacts)


def check_policy(name: str) -> None:
    """Raises OptionError for a name that is neither a policy nor "auto"."""
    if name != AUTO and name not in policy_names():
        raise OptionError(f"there is no policy {name!r}; known are {AUTO}, {', '.join(policy_names())}.")


def parse_policies(text: str) -> Mapping[str, str]:
    """{tier: policy} from "vram=next-use,ram=slru", of the tiers that the text names. Raises OptionError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        tier, given, name = (word.strip() for word in part.partition("="))
        if tier not in TIERS or not given or tier in found:
            raise OptionError(
                f"policy={text[:60]!r} is neither a policy nor vram=NAME,ram=NAME with one of each at most."
            )
        check_policy(name)
        found[tier] = name
    return found


def device_policy(text: str, tier: str) -> str:
    """The policy of the tier that layers compute on, "vram" or "ram"; a name without a tier is its policy."""
    return parse_policies(text).get(tier, AUTO) if "=" in text else text


def ram_policy(text: str) -> str:
    """The policy of slots in RAM behind those of a device, LRU where none is named. Raises OptionError for one that the
    store has none of there: no forecast, and no scores of Python's policies, are about them."""
    name = parse_policies(text).get("ram", AUTO) if "=" in text else AUTO
    fitting = [native.name for native in native_policies().values() if not native.takes_forecast]
    if name != AUTO and name not in fitting:
        raise OptionError(f"slots in RAM below a device evict by {', '.join(fitting)}, not by {name!r}.")
    return LRU.name if name == AUTO else name
