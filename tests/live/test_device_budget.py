"""Budgets of two tiers that change while the model writes, and a device that refuses memory."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from rpc_device import in_child
from running import N_NEW, Llama, Own, TinyModel, greedy_logits, share_for

from moegguf.controller.watchdog import WatchdogOptions
from moegguf.engine.devices import find_gpus
from moegguf.engine.session import Place
from moegguf.engine.warm_start import most_used
from moegguf.errors import AllocationError, BudgetError
from moegguf.gguf.experts import read_layout
from moegguf.native import library
from moegguf.native.link_device import add_link_device
from moegguf.native.slot_sizes import padded, slot_sizes
from moegguf.native.store import Store, StoreOptions, Tier
from moegguf.quantities import Link

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False}
ALLOC = 3  # enum moegguf_fault_kind
LINK = Link(8e9, 5e-6)
DEVICE_BYTES = 256 << 20
WEIGHED_AT = WatchdogOptions().warm_tokens + WatchdogOptions().weighed_tokens  # tokens


def share_of(path: Path, n_slots: int) -> int:
    """A budget in bytes for exactly so many slots on the first device, or in RAM below it."""
    return share_for(path, n_slots, find_gpus()[0].name)


def behind_a_link(path: Path, vram: int, ram: int, **options: Any) -> Llama:
    """A model on a simulated device with so many slots there, and in RAM below it."""
    device = add_link_device(LINK, memory_bytes=DEVICE_BYTES, strict_seed=1)
    budgets = {"vram_cache": share_of(path, vram), "expert_cache": share_of(path, ram)}
    return Llama(path, store=StoreOptions(device=device, staging=0), **budgets, **OPTIONS | options)


def in_several_pools(path: Path) -> dict[str, Any]:
    """A device whose buffers hold 20 slots: logits with more, and with every expert, and how the pools divide them."""
    layout = padded(read_layout(path), [add_link_device(LINK, strict_seed=1)])
    stride, guard = max(slot_sizes(layout).stride_bytes.values()), 4096
    small = add_link_device(LINK, memory_bytes=DEVICE_BYTES, most_buffer_bytes=20 * stride + guard, strict_seed=1)
    found: dict[str, Any] = {}
    for vram, ram in ((19, 40), (36, 30), (64, 64)):
        budgets = {"vram_cache": share_of(path, vram), "expert_cache": share_of(path, ram)}
        store = StoreOptions(device=small, staging=0)
        options = {"placement": "slots", "store": store, "n_ubatch": 1, **budgets, **OPTIONS}
        with warnings.catch_warnings(record=True) as told, Llama(path, **options) as llm:
            warnings.simplefilter("always")
            opened = llm.session.store
            logits = greedy_logits(llm)
            pools = [(device.n_slots, tuple(device.layers)) for device in opened.devices]
            found[f"{vram}"] = (
                logits,
                pools,
                opened.tier()["device"],
                llm.stats().evictions,
                [str(w.message) for w in told],
            )
            if vram == 36:
                with pytest.raises(BudgetError, match="too small for a model that was loaded to read 1 tokens"):
                    llm.set_budget(vram_cache=share_of(path, 7))
                llm.set_budget(vram_cache=share_of(path, 34))
                found["less"] = greedy_logits(llm), opened.tier()["n_slots_usable"]
    return found


def test_slots_are_in_several_pools_where_one_would_be_too_large(tiny: TinyModel) -> None:
    found = in_own_process(in_several_pools, tiny("tiny-mix", "q4_0"))
    logits, pools, device, evictions, told = found["19"]
    assert (pools, device) == ([(19, (0, 1, 2, 3))], "LINK1") and evictions > 0 and not told
    of_36, pools, device, evictions, told = found["36"]
    assert pools == [(18, (0, 1)), (18, (2, 3))]
    assert (device, told) == ("LINK1", []) and evictions > 0
    resident, pools, *_ = found["64"]
    assert pools == [(16, (il,)) for il in range(4)]
    assert found["less"][1] == 34
    for other in (of_36, resident, found["less"][0]):
        assert np.array_equal(logits, other)


def by_policies(path: Path, policy: str | None) -> dict[str, Any]:
    """Logits with these policies of VRAM and RAM, what the model says of them, and which RAM's slots were given."""
    given = {} if policy is None else {"policy": policy}
    chosen: list[tuple[Tier, str]] = []
    set_policy = Store.set_policy

    def recorded(store: Store, name: str, tier: Tier = Tier.COMPUTE) -> None:
        set_policy(store, name, tier)
        chosen.append((tier, name))

    Store.set_policy = recorded  # type: ignore[method-assign]
    with behind_a_link(path, 24, 20, placement="slots", **given) as llm:
        logits, tiers = greedy_logits(llm), llm.session.tiers()
        evictions = [tiers[name]["evictions"] for name in ("VRAM", "RAM")]
        return {"logits": logits, "named": llm.decisions()["policy"], "chosen": chosen, "evictions": evictions}


def test_tiers_evict_by_their_own_policies(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("tiny-qwen2moe", "q4_0")
    plain = in_own_process(by_policies, path, "lru")
    both = in_own_process(by_policies, path, "vram=lfu-decay,ram=slru")
    assert (plain["named"], both["named"]) == ("lru", "vram=lfu-decay,ram=slru")
    assert both["chosen"] == [(Tier.RAM, "slru"), (Tier.COMPUTE, "lfu-decay")]
    monkeypatch.setenv("MOEGGUF_POLICY", "ram=lfu-decay")
    of_environment = in_own_process(by_policies, path, None)
    assert (Tier.RAM, "lfu-decay") in of_environment["chosen"]
    for found in (plain, both, of_environment):
        assert np.array_equal(found["logits"], plain["logits"]) and min(found["evictions"]) > 0


def free_bytes() -> int:
    return find_gpus()[0].free_bytes


def moves(path: Path) -> dict[str, Any]:
    """What a run sees whose budgets move: logits that never differ, memory of the device that comes and goes."""
    with behind_a_link(path, 60, 40) as llm:
        store, expected, full = llm.session.store, greedy_logits(llm), free_bytes()
        steps = iter([(20, 10), (17, 1), (40, 30), (16, 20), (60, 40)] * N_NEW)
        seen = []

        def before_each() -> None:
            vram, ram = next(steps)
            llm.set_budget(vram_cache=share_of(path, vram), expert_cache=share_of(path, ram))
            figures = [store.tier(tier) for tier in Tier]
            assert [figure["n_slots_usable"] for figure in figures] == [vram, ram]
            seen.append((vram, free_bytes(), figures[0]["pool_bytes"]))

        assert np.array_equal(greedy_logits(llm, before_each=before_each), expected)
        assert free_bytes() != full
        llm.set_budget(vram_cache="auto", expert_cache="auto")
        assert free_bytes() == full
        assert np.array_equal(greedy_logits(llm), expected)
        return {"seen": seen, "full": full, "slot_bytes": llm.plan.slot_bytes}


def test_budgets_of_both_tiers_move_while_the_model_writes(tiny: TinyModel) -> None:
    found = in_own_process(moves, tiny("tiny-qwen2moe", "q4_0"))
    for n_slots, free, pool_bytes in found["seen"]:
        given_back = free - found["full"]
        assert given_back == pytest.approx((60 - n_slots) * found["slot_bytes"], abs=1 << 16)
        assert pool_bytes == pytest.approx(n_slots * found["slot_bytes"], abs=1 << 16)


def from_resident_on_rpc(path: Path) -> bool:
    """Whether a pool with every expert shrinks and grows on another machine's memory, and logits are those of every
    expert there in passes of as many tokens."""
    with Llama(path, vram_cache="100%", **OPTIONS) as llm:
        n_batch, llm.n_batch = llm.n_batch, llm.plan.slot_tokens
        expected, llm.n_batch = greedy_logits(llm), n_batch
        with pytest.warns(UserWarning, match="read 1 token at a time, as slots are exact for no more"):
            llm.set_budget(vram_cache=share_of(path, 50))
        assert llm.n_batch == llm.plan.slot_tokens == 1 < llm.plan.n_ubatch
        for n_slots in (40, 16, 50):
            llm.set_budget(vram_cache=share_of(path, n_slots))
            assert llm.stats().tiers[0].n_slots == n_slots
            before = llm.stats()
            assert np.array_equal(greedy_logits(llm), expected)
            assert (llm.stats() - before).evictions > 0
        with pytest.raises(BudgetError, match="every expert in VRAM"):
            llm.set_budget(expert_cache="50%")
        return True


def test_a_resident_pool_on_a_device_shrinks(tiny: TinyModel) -> None:
    assert in_child(from_resident_on_rpc, tiny("tiny-qwen2moe", "q4_0"))


def with_staging(path: Path) -> tuple[int, int, list[int]]:
    """Slots and slots' worth of staging of a budget for 60 slots, and slots after others were set."""
    device = add_link_device(LINK, memory_bytes=DEVICE_BYTES, strict_seed=1)
    budgets = {"vram_cache": share_of(path, 60), "expert_cache": share_of(path, 40)}
    with Llama(path, placement="slots", store=StoreOptions(device=device), **budgets, **OPTIONS) as llm:
        expected, n_staged = greedy_logits(llm), llm.plan.staging_slots_bytes // llm.plan.slot_bytes
        found = []
        for budget in (share_of(path, 60), share_of(path, 50), "auto", "75%"):
            llm.set_budget(vram_cache=budget)
            found.append(llm.stats().tiers[0].n_slots)
            assert np.array_equal(greedy_logits(llm), expected)
        with pytest.raises(BudgetError, match="give at least"):
            llm.set_budget(vram_cache=share_of(path, n_staged + 3))
        assert llm.n_batch > 1
        return llm.plan.n_slots, n_staged, found


def test_a_budget_that_changes_holds_what_prompts_are_staged_in_as_at_load(tiny: TinyModel) -> None:
    n_slots, n_staged, found = in_own_process(with_staging, tiny("tiny-qwen2moe", "q4_0"))
    assert n_staged > 0 and n_slots + n_staged == 60
    assert found == [n_slots, n_slots - 10, n_slots, 48 - n_staged]


def refusals(path: Path) -> bool:
    """Whether the model stays usable where the device refuses memory for a moment, and for good."""
    arm = library.load().moegguf_fault_arm
    with behind_a_link(path, 40, 30) as llm:
        expected = greedy_logits(llm)
        arm(ALLOC, 1, 0, 12)  # too little for both pools at once: slots are emptied first
        llm.set_budget(vram_cache=share_of(path, 20))
        assert llm.stats().tiers[0].n_slots == 20 and llm.stats().tiers[0].slots_used == 0
        assert np.array_equal(greedy_logits(llm), expected)
        arm(ALLOC, 2, 1, 12)  # the second arena, and everything after it
        with pytest.raises(AllocationError, match="refused memory for 40 expert slots; there are 20 as before"):
            llm.set_budget(vram_cache="auto")
        assert llm.stats().tiers[0].n_slots == 20
        arm(ALLOC, 0, 0, 0)
        assert np.array_equal(greedy_logits(llm), expected)
        before = llm.stats().tiers
        for budgets in ({"vram_cache": share_of(path, 3)}, {"vram_cache": share_of(path, 3), "expert_cache": "50%"}):
            with pytest.raises(BudgetError, match="at least"):
                llm.set_budget(**budgets)
        with pytest.raises(BudgetError, match="holds no expert"):
            llm.set_budget(vram_cache="auto", expert_cache=1024)
        assert [tier.n_slots for tier in llm.stats().tiers] == [tier.n_slots for tier in before]
        llm.set_budget(vram_cache="auto")
        assert np.array_equal(greedy_logits(llm), expected)
        return True


def test_a_device_that_refuses_memory_leaves_the_model_usable(tiny: TinyModel) -> None:
    assert in_own_process(refusals, tiny("tiny-qwen2moe", "q4_0"))


def tight(path: Path) -> bool:
    """Whether a context that does not fit beside the slots takes from them instead of failing."""
    with behind_a_link(path, 60, 40) as llm:
        expected, most = greedy_logits(llm), find_gpus()[0]
        used = most.total_bytes - most.free_bytes - llm.plan.staging_bytes  # prompts are not staged where it is short
    short = add_link_device(LINK, strict_seed=1, memory_bytes=used - 10 * llm.plan.slot_bytes)
    budgets = {"vram_cache": share_of(path, 60), "expert_cache": share_of(path, 40)}
    with pytest.warns(UserWarning, match=f"{short} has no memory for weights and a context beside 60 expert slots"):
        llm = Llama(path, store=StoreOptions(device=short, staging=0), **budgets, **OPTIONS)
    with llm:
        assert 16 <= llm.stats().tiers[0].n_slots <= 30
        assert np.array_equal(greedy_logits(llm), expected)
    none = add_link_device(LINK, strict_seed=1, memory_bytes=used // 4)
    warnings.simplefilter("ignore")  # in this process
    with pytest.raises(AllocationError):
        Llama(path, store=StoreOptions(device=none, staging=0), **budgets, **OPTIONS)
    return True


def test_a_context_takes_memory_of_slots(tiny: TinyModel) -> None:
    assert in_own_process(tight, tiny("tiny-qwen2moe", "q4_0"))


def warm(path: Path) -> bool:
    """Whether the experts used most are in VRAM after the next load, and the next ones in RAM."""
    with behind_a_link(path, 20, 12, warm_start=True) as llm:
        expected = greedy_logits(llm, n_new=8)
        uses = llm.session.store.activity()[0].astype(np.float32)
    with behind_a_link(path, 20, 12, warm_start=True) as llm:
        llm.session.store.drain(10)
        places = llm.session.places()[most_used(uses, 32)]
        assert (places[:20] == Place.VRAM).all() and (places[20:] == Place.RAM).all()
        assert llm.stats().evictions == 0
        assert np.array_equal(greedy_logits(llm, n_new=8), expected)
    return True


def test_a_warm_start_fills_both_tiers(own: Own) -> None:
    assert in_own_process(warm, own())


def test_a_model_on_the_cpu_has_no_budget_in_vram(tiny: TinyModel) -> None:
    with (
        Llama(tiny("tiny-qwen2moe", "q4_0"), expert_cache="60%", **OPTIONS) as llm,
        pytest.raises(BudgetError, match="the CPU computes this model"),
    ):
        llm.set_budget(vram_cache="50%")


def behind_a_busy_link(path: Path) -> list[tuple[Any, ...]]:
    """Of a device's default at load, and when slots were filled and the link was weighed."""
    device = add_link_device(Link(2e6, 0.0), memory_bytes=DEVICE_BYTES)
    options = {"vram_cache": share_of(path, 16), "expert_cache": "100%", "placement": "slots"}
    states = []
    with Llama(path, store=StoreOptions(device=device), **options, **OPTIONS) as llm:
        for n_tokens in (0, WEIGHED_AT, 1 + WatchdogOptions().off_tokens):
            for token in range(n_tokens):
                llm.eval([token])
            found, predicted = llm.decisions(), llm.session.store.counters()["forecast_picks"]
            states.append((found["predictor"], found["prefetch"], predicted > 0))
    return states


def test_a_device_predicts_once_its_link_was_busy(tiny: TinyModel) -> None:
    paused, still_paused, measuring = in_own_process(behind_a_busy_link, tiny("tiny-mix", "q4_0"))
    assert paused == still_paused == ("skip", "paused", False)
    assert measuring == ("skip", "measuring", True)
