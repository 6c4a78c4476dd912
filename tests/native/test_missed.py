"""Misses that the CPU computes, on the modelled clock: what that gains, and that it never costs anything."""

from __future__ import annotations

import pytest
from fake_model import FakeModel, Open

from moegguf.controller.policies import LRU
from moegguf.controller.predictors.base import NoPrediction
from moegguf.errors import OptionError
from moegguf.quantities import Link
from moegguf.trace.simulate import RamTier, SimOptions, SimResult, Simulation, slots_of
from predictors.study.synthesize import shape_of, synthesize

SHAPE = shape_of("qwen3-30b", 4, expert_bytes=2_654_208)  # 2048 x 768 x 3 in Q4_0
TRACE = synthesize("qwen3-30b", SHAPE, 300)
FAST, SLOW = Link(24e9, 35e-6), Link(1e9, 35e-6)


def run(share: float, link: Link, cpu: Link | None, in_ram: float = 1.0) -> SimResult:
    ram_tier = RamTier(slots_of(SHAPE, in_ram), link=link, cpu=cpu)
    options = SimOptions(link_bytes_per_s=3e9, layer_compute_us=150, ram=ram_tier)
    return Simulation(TRACE, LRU, NoPrediction(SHAPE), slots_of(SHAPE, share), options).run()


@pytest.mark.parametrize("in_ram", [0.5, 1.0])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_a_fast_link_is_never_slower_with_misses_computed(share: float, in_ram: float) -> None:
    fetched = run(share, FAST, None, in_ram).whole.clock_ns
    for bytes_per_s in (2e9, 10e9, 20e9, 40e9):
        computed = run(share, FAST, Link(bytes_per_s, 20e-6), in_ram).whole.clock_ns
        assert computed <= 1.002 * fetched, bytes_per_s
    assert share > 0.1 or computed < 0.75 * fetched


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_slow_link_has_much_less_to_copy_with_misses_computed(share: float) -> None:
    fetched, computed = run(share, SLOW, None), run(share, SLOW, Link(10e9, 20e-6))
    assert computed.whole.clock_ns < 0.6 * fetched.whole.clock_ns
    assert computed.tiers["VRAM"].copy_ns < 0.75 * fetched.tiers["VRAM"].copy_ns
    assert computed.whole.lookups == fetched.whole.lookups
    assert computed.tiers["RAM"].lookups > 0


def test_a_cpu_that_is_modelled_needs_a_rate_and_slots_below(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, n_ram_slots=16, fill=False, simulate=True, copy_bytes_per_s=1e9)
    for impossible in (Link(0.0), Link(1e9, -1.0)):
        with pytest.raises(OptionError, match="slots over slots in RAM"):
            store.model_computed_misses(impossible)
    store.model_computed_misses(Link(4e9))
    context.acquire(0, [0, 1])  # by copies, whose speed is known then
    context.acquire(0, [2, 3])
    assert store.computed().misses == 2
    for n_ram_slots, simulate in ((0, True), (16, False)):
        other, _ = open_store(fake, 8, n_ram_slots=n_ram_slots, simulate=simulate)
        with pytest.raises(OptionError, match="slots over slots in RAM"):
            other.model_computed_misses(Link(4e9))
