"""Tests policies in Python by the expert that each evicts first.

The first victim has the lowest score; among equal scores it is the least recently used.
Other tests cover policies by tier, and strategies by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moegguf.controller.artifacts import Artifacts
from moegguf.controller.controller import name_of
from moegguf.controller.history import History
from moegguf.controller.policies import (
    OWN_POLICIES,
    Lfu,
    Policy,
    Static,
    check_policy,
    device_policy,
    make_policy,
    parse_policies,
    ram_policy,
)
from moegguf.controller.prefetch import PrefetchOptions
from moegguf.controller.shape import MoeShape
from moegguf.controller.strategies import OWN, STRATEGIES, find_strategy
from moegguf.engine.live_controller import ControllerOptions
from moegguf.errors import OptionError
from moegguf.native.events import Phase, RoutingEvent
from moegguf.native.store import NativePolicy
from moegguf.settings import read_load_keywords

TWO = MoeShape(n_layer=3, n_expert=4, n_expert_used=1, layers=(1, 2))
Expert = tuple[int, int]


def victim(
    policy: Policy, residents: Sequence[Expert], used: Sequence[int]
) -> tuple[int, int]:
    """Returns the resident (il, expert) that is evicted first after tokens that each
    used one expert of layer 1."""
    history, scores = History(TWO), None
    for n, expert in enumerate(used):
        history.update(
            RoutingEvent(n, 0, 0, Phase.DECODE, -1, 1, np.array([[expert]], np.int32))
        )
        scores = policy.scores(history, None)  # type: ignore[arg-type]  # neither policy uses a forecast
    table = np.zeros(TWO.table, np.float32) if scores is None else scores
    return min(residents, key=lambda expert: (table[expert], history.last_use[expert]))


A, B, C = (1, 0), (1, 1), (1, 2)


def test_lfu_evicts_the_least_frequent_expert_and_static_never_changes() -> None:
    assert victim(Lfu(), [A, B, C], [0, 1, 0, 1, 2]) == C
    # Both are used equally often, so the less recently used one is evicted.
    assert victim(Lfu(), [A, B], [0, 1, 0, 1]) == A
    profile = np.array([[0.1, 0.5, 0.4, 0], [0.2, 0.3, 0.1, 0.4]], np.float32)
    assert victim(Static(TWO, profile), [A, B, (2, 0)], [0] * 5) == A


@pytest.mark.parametrize("name", ["lru", "lfu-decay", "next-use", "locality"])
def test_make_policy_returns_native_policies_by_name(name: str) -> None:
    policy = make_policy(name, TWO, Artifacts(None))
    assert isinstance(policy, NativePolicy) and not isinstance(policy, Policy)
    assert name_of(policy) == name
    assert policy.takes_forecast == (name in ("next-use", "locality"))


def test_make_policy_rejects_unknown_names_and_missing_artifacts() -> None:
    for name in OWN_POLICIES.keys() - {"static"}:
        assert name_of(make_policy(name, TWO, Artifacts(None))) == name
    with pytest.raises(OptionError, match="'static' needs"):
        make_policy("static", TWO, Artifacts(None))
    with pytest.raises(OptionError, match="no policy 'lruu'; known policies: lru, lfu"):
        make_policy("lruu", TWO, Artifacts(None))


@pytest.mark.parametrize(
    ("text", "vram", "ram", "below"),
    [
        ("next-use", "next-use", "next-use", "lru"),
        ("auto", "auto", "auto", "lru"),
        ("vram=next-use,ram=slru", "next-use", "slru", "slru"),
        (" ram = lfu-decay ", "auto", "lfu-decay", "lfu-decay"),
        ("vram=lfu", "lfu", "auto", "lru"),
        ("ram=auto,vram=lru", "lru", "auto", "lru"),
    ],
)
def test_policy_text_sets_a_policy_for_each_tier(
    text: str, vram: str, ram: str, below: str
) -> None:
    assert ControllerOptions(policy=text).policy == text
    assert (
        device_policy(text, "vram"),
        device_policy(text, "ram"),
        ram_policy(text),
    ) == (vram, ram, below)


@pytest.mark.parametrize(
    "text",
    ["vram=", "gpu=lru", "vram=lru,vram=slru", "vram=lru,slru", "=lru", "vram=lru,"],
)
def test_parse_policies_rejects_malformed_texts(text: str) -> None:
    with pytest.raises(OptionError, match=r"vram=NAME,ram=NAME|there is no policy"):
        parse_policies(text)
    with pytest.raises(OptionError):
        ControllerOptions(policy=text)


def test_check_policy_rejects_unknown_names_and_ram_rejects_device_policies() -> None:
    with pytest.raises(
        OptionError, match="there is no policy 'none'; known policies: auto, lru"
    ):
        check_policy("none")
    with pytest.raises(OptionError, match="no policy 'best'"):
        ControllerOptions(policy="ram=best")
    for name in ("next-use", "lfu"):
        with pytest.raises(
            OptionError,
            match=f"slots in RAM below a device must be one of lru, .*but is '{name}'",
        ):
            ram_policy(f"ram={name}")
    assert "policy" not in read_load_keywords(environ={})
    variables = {"MOEGGUF_POLICY": " vram=lru,ram=slru "}
    assert read_load_keywords(environ=variables)["policy"] == "vram=lru,ram=slru"


def test_find_strategy_resolves_names_and_rejects_unknown_ones() -> None:
    assert find_strategy("") is find_strategy("moegguf")
    with pytest.raises(
        OptionError,
        match="no strategy 'promo'; known strategies: none, lru, moe-infinity",
    ):
        find_strategy("promo")


def test_strategy_parts_are_replaced_by_explicit_options() -> None:
    promoe = STRATEGIES["promoe"]
    assert promoe.parts("auto", None, None) == ("lru", "mlp", promoe.prefetch)
    assert promoe.parts("next-use", None, False) == ("next-use", "mlp", False)
    assert promoe.parts("auto", "skip", True) == ("lru", "skip", promoe.prefetch)
    own = PrefetchOptions(window=1)
    assert promoe.parts("auto", None, own)[2] == own
    assert STRATEGIES[OWN].parts("auto", None, True) == ("auto", None, True)
    assert STRATEGIES["lru"].parts("auto", None, None) == ("lru", "none", False)
