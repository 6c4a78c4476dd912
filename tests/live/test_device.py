"""llama.cpp computing on a device whose memory is not host memory, with the experts' slots there as well."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rpc_device import in_child
from running import N_NEW, Llama, Logits, Meddler, TinyModel, greedy_logits, hooks_off, share_for

from moegguf.engine.session import Place
from moegguf.engine.stats import TierStats
from moegguf.errors import BudgetError, OptionError
from moegguf.native.store import StoreOptions, Tier


def on_rpc(path: Path, n_slots: int, shrink_to: int) -> tuple[Logits, Logits, dict[str, int]]:
    """Logits of plain llama.cpp with every layer on the device, those of a store there, and the store's figures.

    The store shrinks to `shrink_to` slots while tokens are generated.
    """
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False, "n_gpu_layers": 99}
    with hooks_off(), Llama(path, **options) as llm:
        assert llm.session is None
        plain = greedy_logits(llm)
    with Llama(path, expert_cache=share_for(path, n_slots), store=StoreOptions(device="RPC0"), **options) as llm:
        store, passes = llm.session.store, count()

        def before_each() -> None:
            meddler.meddle()
            if next(passes) == N_NEW // 2:
                store.resize(shrink_to)

        with Meddler(store) as meddler:
            logits = greedy_logits(llm, before_each=before_each)
        return plain, logits, {**store.info(), **store.counters()}


@pytest.mark.parametrize(("n_slots", "shrink_to"), [(24, 24), (30, 17), (64, 40)])
@pytest.mark.parametrize("quant", ["q4_0", "q4_k_m"])
def test_slots_on_a_device_give_that_devices_logits(tiny: TinyModel, quant: str, n_slots: int, shrink_to: int) -> None:
    plain, logits, figures = in_child(on_rpc, tiny("tiny-qwen2moe", quant), n_slots, shrink_to)
    assert np.array_equal(logits, plain)
    assert figures["n_slots_usable"] == shrink_to
    assert figures["n_repacked"] == 0
    assert figures["bytes_prefetched"] > 0
    assert figures["evictions"] > 0


def two_tiers_on_rpc(
    path: Path, slots: tuple[int, int], shrink_to: tuple[int, int]
) -> tuple[Logits, Logits, dict[str, dict[str, Any]]]:
    """Logits of plain llama.cpp on the device, those of slots there over slots in RAM, and the figures of both tiers.

    Both tiers shrink while tokens are generated.
    """
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False}
    vram, ram = (share_for(path, n) for n in slots)
    with Llama(path, vram_cache=vram, expert_cache=ram, **options) as llm:
        store, passes = llm.session.store, count()

        def before_each() -> None:
            meddler.meddle()
            if next(passes) == N_NEW // 2:
                for tier, n_slots in zip(Tier, shrink_to, strict=True):
                    store.resize(n_slots, tier)

        with Meddler(store) as meddler:
            logits = greedy_logits(llm, before_each=before_each)
        assert llm.plan.device == "RPC0"
        store.drain(10)  # what was predicted for the next token still arrives
        figures, places = llm.session.tiers(), llm.session.places()
        there = {tier: llm.session.store.residency(tier) == 2 for tier in Tier}
        assert (places[there[Tier.COMPUTE]] == Place.VRAM).all()
        assert (places[there[Tier.RAM] & ~there[Tier.COMPUTE]] == Place.RAM).all()
        assert ((places >= Place.RAM) == (there[Tier.COMPUTE] | there[Tier.RAM])).all()
        stats = llm.stats()
        for tier in stats.tiers:
            figures[tier.name]["typed"] = tier
        assert stats.in_vram and stats.below is stats.tiers[1]
        n_ubatch = llm.plan.n_ubatch
    with hooks_off(), Llama(path, n_gpu_layers=-1, n_ubatch=n_ubatch, **options) as llm:
        return greedy_logits(llm), logits, figures


def check_views(tiers: dict[str, dict[str, Any]]) -> None:
    """The typed figures of each tier are the store's."""
    for name, figures in tiers.items():
        typed: TierStats = figures["typed"]
        assert (typed.name, typed.device, typed.n_slots) == (name, "RPC0", figures["n_slots_usable"])
        for field in ("lookups", "hits_ready", "hits_late", "misses", "evictions", "bytes_missed", "slots_used"):
            assert getattr(typed, field) == figures[field]
        assert typed.stall_s == figures["stall_ns"] / 1e9
        assert typed.lookups == typed.hits + typed.misses > 0


@pytest.mark.parametrize(
    ("slots", "shrink_to"), [((16, 1), (16, 1)), ((26, 26), (26, 26)), ((40, 30), (18, 4)), ((26, 64), (20, 50))]
)
@pytest.mark.parametrize("quant", ["q4_0", "q4_k_m"])
def test_slots_on_a_device_over_slots_in_ram_give_the_logits_of_that_device(
    tiny: TinyModel, quant: str, slots: tuple[int, int], shrink_to: tuple[int, int]
) -> None:
    plain, logits, tiers = in_child(two_tiers_on_rpc, tiny("tiny-qwen2moe", quant), slots, shrink_to)
    assert np.array_equal(logits, plain)
    check_views(tiers)
    assert (tiers["VRAM"]["n_slots_usable"], tiers["RAM"]["n_slots_usable"]) == shrink_to
    assert tiers["VRAM"]["evictions"] > 0
    assert tiers["RAM"]["evictions"] > 0
    assert tiers["VRAM"]["stream_waits"] > 0
    assert tiers["RAM"]["hits_ready"] > 0 or slots[1] == 1


def test_every_expert_in_vram_needs_no_ram(tiny: TinyModel) -> None:
    assert in_child(all_on_rpc, tiny("tiny-qwen2moe", "q4_0"))


def all_on_rpc(path: Path) -> bool:
    """Whether the plain device's logits come out of one tier on the device, and budgets that do not fit are refused."""
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False}
    with hooks_off(), Llama(path, n_gpu_layers=-1, **options) as llm:
        plain = greedy_logits(llm)
    with Llama(path, vram_cache="100%", **options) as llm:
        assert list(llm.session.tiers()) == ["VRAM"]
        assert np.array_equal(greedy_logits(llm), plain)
    with pytest.raises(BudgetError, match=r"vram_cache=.* holds 0 experts"):
        Llama(path, vram_cache=1024, **options)
    with pytest.raises(BudgetError, match=r"expert_cache=.* holds no expert"):
        Llama(path, vram_cache="50%", expert_cache=1024, **options)
    with pytest.raises(OptionError, match=r"no GPU named 'NPU7'; there are: RPC0"):
        Llama(path, vram_cache="50%", store=StoreOptions(device="NPU7"), **options)
    with pytest.raises(OptionError, match="n_gpu_layers is 1"):
        Llama(path, vram_cache="50%", n_gpu_layers=1, **options)
    return True
