"""Tests experts in slots on a device: logits, changed budgets, refused memory, and
strict devices.

A device is either ggml's RPC server over loopback, whose memory is not host memory, or
a device behind a simulated link. A strict simulated device reveals errors that could
occur on CUDA. Its rows need padding, unwritten memory holds poison, and copies complete
late (moegguf/testing/link_device.cpp).
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rpc_device import on_servers
from running import (
    N_NEW,
    Llama,
    Logits,
    Meddler,
    Own,
    TinyModel,
    greedy_logits,
    hooks_off,
    random_prompt,
    share_for,
)

from moegguf.controller.watchdog import OFF_TOKENS, WARM_TOKENS, WEIGHED_TOKENS
from moegguf.engine import loader
from moegguf.engine.devices import find_gpus
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.pinning import refused_bytes
from moegguf.engine.session import Place, Session, divide_among_devices
from moegguf.engine.warm_start import most_used
from moegguf.errors import (
    AllocationError,
    BudgetError,
    ClosedError,
    GenerationCancelled,
    OptionError,
)
from moegguf.gguf.experts import read_layout
from moegguf.native.slot_sizes import padded, slot_sizes
from moegguf.native.store import StoreOptions, Tier
from moegguf.quantities import Link
from moegguf.testing.library import ABI, arm_fault
from moegguf.testing.link_device import add_link_device
from tools.models import PRESETS

OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "n_threads": 1,
    "logits_all": True,
    "verbose": False,
}
LINK = Link(8e9, 5e-6)
DEVICE_BYTES = 256 << 20
WEIGHED_AT = WARM_TOKENS + WEIGHED_TOKENS
# Models with recurrent layers are left out, because slots do not depend on the parts of
# a layer before its experts.
TINY = [
    name
    for name, shape in PRESETS.items()
    if name.startswith("tiny-") and "r" not in shape.mixers
]
QUANTS = pytest.mark.parametrize(
    "path", [("tiny-qwen2moe", "q4_0"), ("tiny-qwen2moe", "q4_k_m")], indirect=True
)


@QUANTS
@pytest.mark.parametrize(
    ("slots", "shrink_to"),
    [
        ((16, 1), (16, 1)),
        ((26, 26), (26, 26)),
        ((40, 30), (18, 4)),
        ((26, 64), (20, 50)),
    ],
)
@on_servers(1)
def test_vram_slots_over_ram_slots_give_the_devices_own_logits(
    path: Path, slots: tuple[int, int], shrink_to: tuple[int, int]
) -> None:
    """Resizes both tiers halfway through the new tokens. Also compares `llm.stats()`
    with the store's own figures."""
    vram, ram = (share_of(path, n) for n in slots)
    with Llama(path, vram_cache=vram, expert_cache=ram, **OPTIONS) as llm:
        store, passes = llm.session.store, count()

        def before_each() -> None:
            meddler.meddle()
            if next(passes) == N_NEW // 2:
                n_vram, n_ram = shrink_to
                for (tier, device), n in divide_among_devices(store, n_vram).items():
                    store.resize(n, tier, device)
                store.resize(n_ram, Tier.RAM)

        with Meddler(store) as meddler:
            logits = greedy_logits(llm, before_each=before_each)
        assert llm.plan.device == "RPC0"
        store.drain(10)  # prefetches may still be running
        tiers, places = llm.session.tiers(), llm.session.places()
        there = {tier: llm.session.store.residency(tier) == 2 for tier in Tier}
        assert (places[there[Tier.COMPUTE]] == Place.VRAM).all()
        assert (places[there[Tier.RAM] & ~there[Tier.COMPUTE]] == Place.RAM).all()
        assert ((places >= Place.RAM) == (there[Tier.COMPUTE] | there[Tier.RAM])).all()
        stats, n_ubatch = llm.stats(), llm.plan.n_ubatch
        assert stats.in_vram and stats.below is stats.tiers[1]
    for typed, figures in zip(stats.tiers, tiers.values(), strict=True):
        assert (typed.device, typed.n_slots) == ("RPC0", figures["n_slots_usable"])
        for field in (
            "lookups",
            "hits_ready",
            "hits_late",
            "misses",
            "evictions",
            "bytes_missed",
            "slots_used",
        ):
            assert getattr(typed, field) == figures[field]
        assert typed.stall_s == figures["stall_ns"] / 1e9
        assert typed.lookups == typed.hits + typed.misses > 0 and typed.evictions > 0
    assert [tier.name for tier in stats.tiers] == list(tiers) == ["VRAM", "RAM"]
    assert tuple(tier.n_slots for tier in stats.tiers) == shrink_to
    assert tiers["VRAM"]["stream_waits"] > 0
    assert tiers["RAM"]["hits_ready"] > 0 or slots[1] == 1
    with hooks_off(), Llama(path, n_gpu_layers=-1, n_ubatch=n_ubatch, **OPTIONS) as llm:
        assert np.array_equal(greedy_logits(llm), logits)


@on_servers(1)
def test_no_ram_tier_exists_if_every_expert_is_in_vram(path: Path) -> None:
    with hooks_off(), Llama(path, n_gpu_layers=-1, **OPTIONS) as llm:
        plain = greedy_logits(llm)
    with Llama(path, vram_cache="100%", **OPTIONS) as llm:
        assert list(llm.session.tiers()) == ["VRAM"]
        assert np.array_equal(greedy_logits(llm), plain)
    with pytest.raises(OptionError, match=r"no GPU named 'NPU7'; the GPUs are: RPC0"):
        Llama(path, vram_cache="50%", store=StoreOptions(device="NPU7"), **OPTIONS)


def share_of(path: Path, n_slots: int) -> Any:
    """Returns a budget for exactly `n_slots` slots on the first device, or in RAM below
    it."""
    return share_for(path, n_slots, find_gpus()[0].name)


def behind_a_link(path: Path, vram: int, ram: int, **options: Any) -> Llama:
    """Loads a model with `vram` slots on a simulated device and `ram` slots in RAM
    below it."""
    device = add_link_device(LINK, memory_bytes=DEVICE_BYTES, strict_seed=1)
    budgets = {"vram_cache": share_of(path, vram), "expert_cache": share_of(path, ram)}
    return Llama(
        path,
        store=StoreOptions(device=device, staging=0),
        **budgets,
        **OPTIONS | options,
    )


def short_logits(
    llm: Llama, before_each: Callable[[], object] = lambda: None
) -> Logits:
    """Returns the logits of 40 random prompt tokens and 8 greedy tokens."""
    return greedy_logits(llm, random_prompt(llm, 40), 8, before_each)


@pytest.mark.parametrize("path", [("tiny-mix", "q4_0")], indirect=True)
@on_servers()
def test_slots_beyond_the_largest_buffer_are_split_into_pools(path: Path) -> None:
    """A buffer of the device holds at most 20 slots. The model has 19, 36 or 64 slots;
    64 are enough for every expert.
    """
    layout = padded(read_layout(path), [add_link_device(LINK, strict_seed=1)])
    stride, guard = max(slot_sizes(layout, on_device=True).stride_bytes.values()), 4096
    small = add_link_device(
        LINK,
        memory_bytes=DEVICE_BYTES,
        most_buffer_bytes=20 * stride + guard,
        strict_seed=1,
    )
    logits = []
    pools = {
        19: [(19, (0, 1, 2, 3))],
        36: [(18, (0, 1)), (18, (2, 3))],
        64: [(16, (il,)) for il in range(4)],
    }
    for vram, ram in ((19, 40), (36, 30), (64, 64)):
        budgets = {
            "vram_cache": share_of(path, vram),
            "expert_cache": share_of(path, ram),
        }
        options = {
            "placement": "slots",
            "store": StoreOptions(device=small, staging=0),
            "n_ubatch": 1,
        }
        with (
            warnings.catch_warnings(record=True) as told,
            Llama(path, **options, **budgets, **OPTIONS) as llm,
        ):
            warnings.simplefilter("always")
            store = llm.session.store
            logits.append(short_logits(llm))
            assert [
                (device.n_slots, tuple(device.layers)) for device in store.devices
            ] == pools[vram]
            if vram < 64:
                assert (
                    store.tier()["device"] == "LINK1"
                    and llm.stats().evictions > 0
                    and not told
                )
            if vram == 36:
                with pytest.raises(
                    BudgetError,
                    match="too small for a model that was loaded to read 1 tokens",
                ):
                    llm.set_budget(vram_cache=share_of(path, 7))
                llm.set_budget(vram_cache=share_of(path, 34))
                logits.append(short_logits(llm))
                assert store.tier()["n_slots_usable"] == 34
    for other in logits[1:]:
        assert np.array_equal(other, logits[0])


@on_servers()
def test_slow_pinning_reports_progress_and_a_refusal_is_remembered(path: Path) -> None:
    opened = list[Session]()

    def slow_session(*arguments: Any) -> Session:
        time.sleep(0.3)
        opened.append(Session(*arguments))
        return opened[-1]

    loader.Session, loader.REPORT_S = slow_session, 0.05  # type: ignore[assignment, misc]
    device = add_link_device(LINK, memory_bytes=DEVICE_BYTES, pinned=ABI.PINNED_NOT)
    options = {
        "vram_cache": "50%",
        "expert_cache": "100%",
        "placement": "slots",
        "store": StoreOptions(device=device),
    }
    layout, shares = read_layout(path), list[float]()
    assert refused_bytes(layout) == 0

    def cancel(_: float) -> bool:
        shares.append(2.0)
        return shares.count(2.0) < 3

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Llama(path, **options, progress=shares.append, **OPTIONS) as llm:
            assert shares.count(0.0) >= 3
            assert (
                refused_bytes(layout) == llm.session.store.tier(Tier.RAM)["pool_bytes"]
            )
        with pytest.raises(GenerationCancelled):
            Llama(path, **options, progress=cancel, **OPTIONS)
    assert "pinned memory: slots in RAM are pageable" in str(told[0].message)
    assert str(told[0].message).endswith(
        "the next plan for this model uses the speed of such copies."
    )
    with pytest.raises(ClosedError):
        opened[1].store.info()


@on_servers()
def test_budget_changes_of_both_tiers_keep_the_logits(path: Path) -> None:
    def free_bytes() -> int:
        return find_gpus()[0].free_bytes

    with behind_a_link(path, 60, 40) as llm:
        store, expected, full = llm.session.store, short_logits(llm), free_bytes()
        steps, slot_bytes = (
            iter([(20, 10), (17, 1), (40, 30), (16, 20), (60, 40)] * N_NEW),
            llm.plan.slot_bytes,
        )

        def before_each() -> None:
            vram, ram = next(steps)
            llm.set_budget(
                vram_cache=share_of(path, vram), expert_cache=share_of(path, ram)
            )
            figures = [store.tier(tier) for tier in Tier]
            assert [figure["n_slots_usable"] for figure in figures] == [vram, ram]
            assert free_bytes() - full == pytest.approx(
                (60 - vram) * slot_bytes, abs=1 << 16
            )
            assert figures[0]["pool_bytes"] == pytest.approx(
                vram * slot_bytes, abs=1 << 16
            )

        assert np.array_equal(short_logits(llm, before_each=before_each), expected)
        assert free_bytes() != full
        llm.set_budget(vram_cache="auto", expert_cache="auto")
        assert free_bytes() == full
        assert np.array_equal(short_logits(llm), expected)


@on_servers(1)
def test_a_resident_device_pool_shrinks_and_grows_with_equal_logits(path: Path) -> None:
    """The pool shrinks and grows. At each size the logits equal the logits with a full
    pool, in passes of one token."""
    with Llama(path, vram_cache="100%", **OPTIONS) as llm:
        n_batch, llm.n_batch = llm.n_batch, llm.plan.supply.slot_tokens
        expected, llm.n_batch = short_logits(llm), n_batch
        with pytest.warns(
            UserWarning,
            match="read 1 token at a time, because slots are exact only for such passes",
        ):
            llm.set_budget(vram_cache=share_of(path, 50))
        assert llm.n_batch == llm.plan.supply.slot_tokens == 1 < llm.plan.n_ubatch
        for n_slots in (40, 16, 50):
            llm.set_budget(vram_cache=share_of(path, n_slots))
            assert llm.stats().tiers[0].n_slots == n_slots
            before = llm.stats()
            assert np.array_equal(short_logits(llm), expected)
            assert (llm.stats() - before).evictions > 0
        with pytest.raises(BudgetError, match="every expert in VRAM"):
            llm.set_budget(expert_cache="50%")


@on_servers()
def test_changed_vram_budgets_keep_the_staging_slots(path: Path) -> None:
    device = add_link_device(LINK, memory_bytes=DEVICE_BYTES, strict_seed=1)
    budgets = {"vram_cache": share_of(path, 60), "expert_cache": share_of(path, 40)}
    with Llama(
        path, placement="slots", store=StoreOptions(device=device), **budgets, **OPTIONS
    ) as llm:
        expected, n_staged = (
            short_logits(llm),
            llm.plan.staging_slots_bytes // llm.plan.device_slot_bytes,
        )
        n_slots, found = llm.plan.n_slots, []
        for budget in (share_of(path, 60), share_of(path, 50), "auto", "75%"):
            llm.set_budget(vram_cache=budget)
            found.append(llm.stats().tiers[0].n_slots)
            assert np.array_equal(short_logits(llm), expected)
        with pytest.raises(BudgetError, match="give at least"):
            llm.set_budget(vram_cache=share_of(path, n_staged + 3))
        assert llm.n_batch > 1
    assert n_staged > 0 and n_slots + n_staged == 60
    assert found == [n_slots, n_slots - 10, n_slots, 48 - n_staged]


@on_servers()
def test_a_device_out_of_memory_leaves_the_model_usable(path: Path) -> None:
    """The device first refuses one allocation. Later it refuses the last arena of a
    pool, and everything after it."""
    strides = slot_sizes(read_layout(path), on_device=True).stride_bytes
    n_arenas = sum(n_bytes > 0 for n_bytes in strides.values())
    with behind_a_link(path, 40, 30) as llm:
        expected = short_logits(llm)
        # No room for the old and the new pool at once: the old slots are emptied first.
        arm_fault("alloc", 1, errno=12)
        llm.set_budget(vram_cache=share_of(path, 20))
        assert (
            llm.stats().tiers[0].n_slots == 20 and llm.stats().tiers[0].slots_used == 0
        )
        assert np.array_equal(short_logits(llm), expected)
        # This allocation and all later ones fail.
        arm_fault("alloc", n_arenas, sticky=True, errno=12)
        with pytest.raises(
            AllocationError,
            match="refused memory for 40 expert slots; the tier still has 20 slots",
        ):
            llm.set_budget(vram_cache="auto")
        assert llm.stats().tiers[0].n_slots == 20
        arm_fault("alloc", 0)
        assert np.array_equal(short_logits(llm), expected)
        with pytest.raises(BudgetError, match="is too small for one expert"):
            llm.set_budget(vram_cache="auto", expert_cache=1024)
        assert [tier.n_slots for tier in llm.stats().tiers] == [20, 30]
        llm.set_budget(vram_cache="auto")
        assert np.array_equal(short_logits(llm), expected)


@on_servers()
def test_a_context_that_does_not_fit_reduces_the_slots(path: Path) -> None:
    """A load uses fewer slots if its context does not fit together with 60 slots. It
    fails on a much smaller device."""
    with behind_a_link(path, 60, 40) as llm:
        expected, most = short_logits(llm), find_gpus()[0]
        # Bytes in use without staging tensors, which the smaller devices below do not
        # have.
        used = most.total_bytes - most.free_bytes - llm.plan.supply.staging_bytes
    short = add_link_device(
        LINK, strict_seed=1, memory_bytes=used - 10 * llm.plan.slot_bytes
    )
    budgets = {"vram_cache": share_of(path, 60), "expert_cache": share_of(path, 40)}
    with pytest.warns(
        UserWarning,
        match=f"{short} has too little memory for weights, a context and 60 expert slots together",
    ):
        llm = Llama(
            path, store=StoreOptions(device=short, staging=0), **budgets, **OPTIONS
        )
    with llm:
        assert 16 <= llm.stats().tiers[0].n_slots <= 30
        assert np.array_equal(short_logits(llm), expected)
    none = add_link_device(LINK, strict_seed=1, memory_bytes=used // 4)
    # This test runs in its own process, so other tests still see warnings.
    warnings.simplefilter("ignore")
    with pytest.raises(AllocationError):
        Llama(path, store=StoreOptions(device=none, staging=0), **budgets, **OPTIONS)


@pytest.fixture
def own_path(own: Own) -> Path:
    """Returns the path of a tiny model in the test's own folder."""
    return own()


@on_servers()
def test_warm_start_places_most_used_experts_in_vram_then_ram(own_path: Path) -> None:
    with behind_a_link(own_path, 20, 12, warm_start=True) as llm:
        expected = short_logits(llm)
        uses = llm.session.store.activity()[0].astype(np.float32)
    with behind_a_link(own_path, 20, 12, warm_start=True) as llm:
        llm.session.store.drain(10)
        places = llm.session.places()[most_used(uses, 32)]
        assert (places[:20] == Place.VRAM).all() and (places[20:] == Place.RAM).all()
        assert llm.stats().evictions == 0
        assert np.array_equal(short_logits(llm), expected)


@pytest.mark.parametrize("path", [("tiny-mix", "q4_0")], indirect=True)
@on_servers()
def test_prefetching_on_a_device_begins_after_the_link_is_measured(path: Path) -> None:
    """Prefetching with default options stays paused until the link has been measured,
    and then begins."""
    device = add_link_device(Link(1e7, 0.0), memory_bytes=DEVICE_BYTES)
    options = {
        "vram_cache": share_of(path, 16),
        "expert_cache": "100%",
        "placement": "slots",
    }
    states = []
    with Llama(path, store=StoreOptions(device=device), **options, **OPTIONS) as llm:
        for n_tokens in (0, WEIGHED_AT, 1 + OFF_TOKENS):
            for token in range(n_tokens):
                llm.eval([token])
            found, predicted = (
                llm.decisions(),
                llm.session.store.counters()["forecast_picks"],
            )
            states.append((found["predictor"], found["prefetch"], predicted > 0))
    assert states == [("skip", "paused", False)] * 2 + [("skip", "measuring", True)]


def check_resized_slots(path: Path, device: str) -> None:
    """Asserts that logits on a device equal plain llama.cpp's while the numbers of
    slots change before each evaluation.

    The prompt's experts are staged.
    """
    layout, rng = read_layout(path), np.random.default_rng(0)
    n_least, n_total = (
        2 * layout.n_expert_used + layout.n_expert + 2,
        layout.n_expert_total,
    )
    most = (n_total * 3 // 4, n_total // 2)
    store = StoreOptions(device=device, staging=1)
    vram, ram = (share_for(path, n, device) for n in most)
    with Llama(
        path,
        placement="slots",
        store=store,
        vram_cache=vram,
        expert_cache=ram,
        **OPTIONS,
    ) as llm:
        n_ubatch, prompt = llm.plan.n_ubatch, random_prompt(llm, 8)

        def before_each() -> None:
            sizes = (
                rng.integers(least, n)
                for least, n in zip((n_least, 1), most, strict=True)
            )
            vram, ram = (share_for(path, int(n), device) for n in sizes)
            llm.set_budget(vram_cache=vram, expert_cache=ram)

        logits = greedy_logits(llm, prompt, 8, before_each)
        assert llm.stats().evictions > 0 and llm.stats().bytes_staged > 0
        assert llm.session.store.info()["slot_bytes"] == pytest.approx(
            llm.plan.device_slot_bytes, rel=0.02
        )
    with hooks_off(), Llama(path, n_gpu_layers=-1, n_ubatch=n_ubatch, **OPTIONS) as llm:
        plain = greedy_logits(llm, prompt, 8)
    assert np.isfinite(plain).all() and np.array_equal(logits, plain), path.stem


@on_servers()
def check_all_on_a_strict_device(paths: list[Path]) -> None:
    device = add_link_device(LINK, strict_seed=1)
    for path in paths:
        check_resized_slots(path, device)


@pytest.mark.parametrize("preset", TINY)
def test_resized_slots_give_the_logits_of_plain_llama_cpp(
    tiny: TinyModel, preset: str
) -> None:
    check_all_on_a_strict_device(
        paths=[tiny(preset, quant) for quant in ("q4_0", "q4_k_m", "q8_0")]
    )


@pytest.mark.parametrize("path", [("tiny-mix", "q4_0")], indirect=True)
@on_servers()
def test_a_plan_that_warms_up_evaluates_its_largest_pass_once(path: Path) -> None:
    device = add_link_device(LINK, memory_bytes=DEVICE_BYTES, strict_seed=1)
    budgets = {"vram_cache": share_of(path, 30), "expert_cache": share_of(path, 64)}
    options = {
        "placement": "slots",
        "store": StoreOptions(device=device),
        **budgets,
        **OPTIONS,
    }
    plan = Llama.estimate(
        str(path), **{name: options[name] for name in options if name != "verbose"}
    )
    logits = []
    for warms_up in (False, True):
        planned = LoadSpec.of(options), replace(plan, warms_up=warms_up)
        with Llama(path, planned=planned, verbose=False) as llm:
            stats = llm.stats()
            assert stats.tokens == warms_up * plan.n_ubatch and llm.n_tokens == 0
            assert stats.below.misses <= 4 * 4, (
                "identical tokens use one token's experts"
            )
            logits.append(short_logits(llm))
    assert np.array_equal(*logits)
