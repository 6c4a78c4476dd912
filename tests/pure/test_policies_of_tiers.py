"""Policies of VRAM and RAM, named in one text."""

from __future__ import annotations

import pytest

from moegguf.controller.policies import check_policy, device_policy, parse_policies, ram_policy
from moegguf.engine.live_controller import ControllerOptions
from moegguf.errors import OptionError
from moegguf.settings import read_environment


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
