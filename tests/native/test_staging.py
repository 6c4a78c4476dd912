"""Tests staging tensors, which a device uses to process prompts.

A staging tensor has room for every expert of a layer.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import PLAIN, Q4_0, FakeModel, Open, Types, make_model
from test_tiers import check_tiers, held

from moegguf.errors import OptionError
from moegguf.native import abi
from moegguf.native.slot_sizes import slot_sizes
from moegguf.native.store import DeviceSlots, Store, StoreContext, StoreOptions, Tier

N_TOKENS = (1, 2, 3, 9, 33)
# Ids of 12 tokens: every expert occurs three times.
IDS = np.arange(24).reshape(12, 2) * 3 % 8


def routed(
    rng: np.random.Generator, n_tokens: int, n_expert: int = 8, n_used: int = 2
) -> Any:
    """Returns random expert ids (n_tokens, n_used). Experts with lower ids are more
    likely."""
    share = 1.0 / np.arange(1, n_expert + 1)
    return np.array(
        [
            rng.choice(n_expert, n_used, False, share / share.sum())
            for _ in range(n_tokens)
        ]
    )


def check_staged(
    fake: FakeModel, store: Store, il: int, ids: Any, slot_ids: Any
) -> None:
    """Asserts that the slot ids are the router's expert ids, and that the staging
    tensor holds the file's bytes at these ids."""
    assert np.array_equal(ids, slot_ids)
    fake.check(store, il, ids, slot_ids)


def events(
    fake: FakeModel, store: Store, context: StoreContext, n_passes: int, seed: int = 0
) -> int:
    """Runs random passes, and checks the experts' bytes. At least every second pass has
    a single token.

    Returns the number of staged look-ups: the distinct experts of each layer in passes
    of several tokens.
    """
    rng, staged = np.random.default_rng(seed), 0
    for n in range(n_passes):
        n_tokens = int(rng.choice(N_TOKENS)) if n % 2 else 1
        context.announce(n, 0, list(range(n_tokens)))
        for il in range(fake.layout.n_layer):
            ids = routed(rng, n_tokens)
            slot_ids = context.acquire(il, ids)
            if n_tokens == 1:
                fake.check(store, il, ids, slot_ids)
            else:
                check_staged(fake, store, il, ids, slot_ids)
                staged += len(np.unique(ids))
    return staged


def check_figures(store: Store, staged: int) -> None:
    """Waits until no transfer is queued or running. Asserts that the counters of all
    tiers are consistent.

    `staged` is the expected number of look-ups in staging tensors.
    """
    store.drain(10)
    check_tiers(store)
    figures = store.staging()
    assert (
        figures["lookups"]
        == figures["hits_ready"] + figures["hits_late"] + figures["misses"]
        == staged
        > 0
    )
    assert figures["bytes_missed"] > 0
    assert figures["stall_ns"] <= store.tier()["stall_ns"]


def test_staged_prompt_fills_slots_only_in_its_last_pass(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 8, n_ram_slots=32, staging=2, fill=False)
    context.announce(0, 0, list(range(24)))
    for il in range(4):
        context.acquire(il, IDS)
    store.drain(10)
    assert not held(store, Tier.COMPUTE)
    for il in range(4):
        context.acquire(il, IDS)
    assert {il for il, _ in held(store, Tier.COMPUTE)} == set(range(4))
    assert len(held(store, Tier.COMPUTE)) == 8
    before = held(store, Tier.COMPUTE)
    context.announce(0, 0, list(range(24)))
    for il in range(4):
        context.acquire(il, IDS)
    assert held(store, Tier.COMPUTE) == before
    assert store.counters()["evictions"] == 0


@pytest.mark.parametrize("n_layer", [4, 5])
def test_staging_copies_the_next_layer_while_a_layer_computes(
    tmp_path: Path, open_store: Open, n_layer: int
) -> None:
    """Uses the modelled clock, on which copying a layer's experts takes 1 us less than
    computing the layer.

    A layer's experts are copied while earlier layers are computed. The last of five
    layers is not computed, as in a pass without logits.
    """
    fake = make_model(tmp_path, n_layer=n_layer)
    options = {
        "simulate": True,
        "link_bytes_per_s": 1e12,
        "copy_bytes_per_s": 1e9,
        "fill": False,
    }
    store, context = open_store(fake, 8, n_ram_slots=8 * n_layer, staging=2, **options)
    for n in range(4):
        context.announce(n, 0, list(range(24)))
        for il in (0, 1, 2, 3, 0, 1, 2, 3):
            context.acquire(il, IDS)
            store.advance(8 * fake.expert_bytes + 1000)
        if n == 0:
            before = store.staging()
    after = store.staging()
    copied, waited = (after[name] - before[name] for name in ("copy_ns", "stall_ns"))
    assert copied > 0
    assert 1 - waited / copied >= 0.8


def test_staging_rejects_impossible_numbers_of_tensors_and_a_resize(
    fake: FakeModel, open_store: Open
) -> None:
    for n in (-1, 3):
        with pytest.raises(OptionError, match=f"at most 2 staging tensors, not {n}"):
            open_store(fake, 8, n_ram_slots=8, staging=n)
    store, _ = open_store(fake, 8, n_ram_slots=8, staging=2)
    with pytest.raises(OptionError, match="keep the size"):
        store.resize(4, abi.STAGING_TIER)
    # staging needs slots in RAM, and there are none.
    store, _ = open_store(fake, 8, staging=2)
    assert store.staging() == {}


@pytest.mark.parametrize(
    ("names", "n_tensors"), [((None, None), 2), (("A", "A"), 2), (("A", "B"), 4)]
)
def test_pools_of_one_device_share_staging_tensors(
    tmp_path: Path, names: tuple[str | None, str | None], n_tensors: int
) -> None:
    """Every second layer has larger experts and larger slots. Devices with names are
    simulated."""
    small: Types = {"gate": Q4_0, "up": Q4_0, "down": Q4_0}
    fake = make_model(tmp_path, n_layer=7, types=(small, PLAIN))
    slots = [
        DeviceSlots(name, n, layers, through_ram=True, staging=2)
        for name, n, layers in zip(
            names, (6, 5), ((0, 2, 4, 6), (1, 3, 5)), strict=True
        )
    ]
    simulate = names[0] is not None
    store = Store(
        fake.layout,
        slots,
        StoreOptions(repack=False, fill=False, simulate=simulate),
        n_ram_slots=14,
    )
    context = store.context
    try:
        sizes = [slot_sizes(fake.layout.only(of.layers)).slot_bytes for of in slots]
        assert [store.device(d)["slot_bytes"] for d in range(2)] == sizes and sizes[
            0
        ] < sizes[1]
        assert store.tier()["slot_bytes"] == (6 * sizes[0] + 5 * sizes[1]) // 11
        assert store.tier(Tier.RAM)["slot_bytes"] == slot_sizes(fake.layout).slot_bytes
        if not simulate:
            check_figures(store, events(fake, store, context, 16))
        for _ in range(2):
            for il in range(7):
                assert np.array_equal(context.acquire(il, IDS), IDS)
                if simulate:
                    store.advance(1)
        assert store.staging()["n_slots"] == n_tensors * 8
        assert store.staging()["bytes_prefetched"] > 0
    finally:
        store.close()
