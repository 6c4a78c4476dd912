"""Eviction policies of VRAM and of RAM, named in one text: "vram=next-use,ram=slru"."""

from __future__ import annotations

from collections.abc import Mapping

from moegguf.controller.policies import policy_names
from moegguf.controller.policies.base import LRU
from moegguf.errors import OptionError
from moegguf.native.store import native_policies

AUTO = "auto"
TIERS = ("vram", "ram")


def parse_policies(text: str) -> Mapping[str, str]:
    """{tier: policy} of a text with an "=", of the tiers that it names. Raises OptionError."""
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


def check_policy(name: str) -> None:
    """Raises OptionError for an unknown one."""
    if name != AUTO and name not in policy_names():
        raise OptionError(f"there is no policy {name!r}; known are {AUTO}, {', '.join(policy_names())}.")


def of_compute_tier(text: str, tier: str) -> str:
    """The policy of the tier that layers compute on, "vram" or "ram"; one without a tier's name is its policy."""
    return parse_policies(text).get(tier, AUTO) if "=" in text else text


def of_ram_below(text: str) -> str:
    """The policy of slots in RAM below those of a device, LRU where none is named. Raises OptionError for one that the
    store has none of there: no forecast, and no scores of Python's policies, are about them."""
    name = parse_policies(text).get("ram", AUTO) if "=" in text else AUTO
    fitting = [native.name for native in native_policies().values() if not native.takes_forecast]
    if name != AUTO and name not in fitting:
        raise OptionError(f"slots in RAM below a device evict by {', '.join(fitting)}, not by {name!r}.")
    return LRU.name if name == AUTO else name
