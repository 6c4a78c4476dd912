"""Each policy by a few events and its victim: the lowest score, least recently used among equals. Policies by tier."""

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
from moegguf.controller.shape import MoeShape
from moegguf.engine.live_controller import ControllerOptions
from moegguf.errors import OptionError
from moegguf.native.events import Float32s, Phase, RoutingEvent
from moegguf.native.store import NativePolicy
from moegguf.settings import read_environment

TWO = MoeShape(n_layer=3, n_expert=4, n_expert_used=1, layers=(1, 2))
Expert = tuple[int, int]


class NoForecast:
    """Nothing is predicted."""

    def probabilities(self) -> Float32s:
        return np.zeros(TWO.table, np.float32)

    def known(self) -> list[int]:
        return []


def routed(
    pass_: int, il: int, experts: Sequence[int], *, sequence: int = 0, phase: Phase = Phase.DECODE
) -> RoutingEvent:
    return RoutingEvent(pass_, 0, sequence, phase, -1, il, np.array(experts, np.int32).reshape(-1, 1))


def last_scores(policy: Policy, history: History, events: Sequence[RoutingEvent]) -> Float32s | None:
    """The last scores after these events."""
    scores = None
    for one in events:
        history.update(one)
        scores = policy.scores(history, NoForecast())
    return scores


def victim(policy: Policy, residents: Sequence[Expert], events: Sequence[RoutingEvent]) -> tuple[int, int]:
    """Which of the residents (il, expert) goes first after these events."""
    history = History(TWO)
    scores = last_scores(policy, history, events)
    table = np.zeros(TWO.table, np.float32) if scores is None else scores
    return min(residents, key=lambda expert: (table[expert], history.last_use[expert]))


def uses_of(experts: Sequence[int], il: int = 1, sequence: int = 0) -> list[RoutingEvent]:
    """One token per expert, each through layer `il` only."""
    return [routed(100 * sequence + n, il, [e], sequence=sequence) for n, e in enumerate(experts)]


A, B, C = (1, 0), (1, 1), (1, 2)


def test_lfu_evicts_the_least_frequently_used() -> None:
    assert victim(Lfu(), [A, B, C], uses_of([0, 1, 0, 1, 2])) == C
    assert victim(Lfu(), [A, B], uses_of([0, 1, 0, 1])) == A  # equally often: the older one


def test_static_never_changes() -> None:
    profile = np.array([[0.1, 0.5, 0.4, 0], [0.2, 0.3, 0.1, 0.4]], np.float32)
    assert victim(Static(TWO, profile), [A, B, (2, 0)], uses_of([0] * 5)) == A


def test_policies_work_without_prediction_and_return_the_shape() -> None:
    history, policy = History(TWO), OWN_POLICIES["lfu"](TWO, Artifacts(None))
    assert isinstance(policy, Policy)
    events = [routed(0, 1, [0, 3], phase=Phase.PREFILL), routed(1, 1, [1]), routed(1, 2, [2])]
    scores = last_scores(policy, history, events)
    assert scores.shape == TWO.table
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("name", ["lru", "lfu-decay", "next-use", "locality"])
def test_native_policies_are_names_that_the_store_carries_out(name: str) -> None:
    policy = make_policy(name, TWO, Artifacts(None))
    assert isinstance(policy, NativePolicy) and not isinstance(policy, Policy)
    assert name_of(policy) == name
    assert policy.takes_forecast == (name in ("next-use", "locality"))


def test_names_and_what_is_missing() -> None:
    for name in OWN_POLICIES.keys() - {"static"}:
        assert name_of(make_policy(name, TWO, Artifacts(None))) == name
    with pytest.raises(OptionError, match="'static' needs"):
        make_policy("static", TWO, Artifacts(None))
    with pytest.raises(OptionError, match="no policy 'lruu'; known are lru, lfu"):
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
def test_each_tier_has_its_own_policy(text: str, vram: str, ram: str, below: str) -> None:
    assert ControllerOptions(policy=text).policy == text
    assert (device_policy(text, "vram"), device_policy(text, "ram"), ram_policy(text)) == (vram, ram, below)


@pytest.mark.parametrize("text", ["vram=", "gpu=lru", "vram=lru,vram=slru", "vram=lru,slru", "=lru", "vram=lru,"])
def test_texts_that_name_no_policy_of_a_tier_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"vram=NAME,ram=NAME|there is no policy"):
        parse_policies(text)
    with pytest.raises(OptionError):
        ControllerOptions(policy=text)


def test_unknown_policies_and_those_that_ram_below_a_device_cannot_have_are_refused() -> None:
    with pytest.raises(OptionError, match="there is no policy 'none'; known are auto, lru"):
        check_policy("none")
    with pytest.raises(OptionError, match="no policy 'best'"):
        ControllerOptions(policy="ram=best")
    for name in ("next-use", "lfu"):
        with pytest.raises(OptionError, match=f"slots in RAM below a device evict by lru, .*not by '{name}'"):
            ram_policy(f"ram={name}")


def test_the_environment_may_name_them() -> None:
    assert read_environment({}).policy == "auto"
    assert read_environment({"MOEGGUF_POLICY": " vram=lru,ram=slru "}).policy == "vram=lru,ram=slru"
