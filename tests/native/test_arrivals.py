"""Tests products that ggml's own MUL_MAT_ID computes while experts are arriving.

The matrices of the pool are still being read, or a prompt's layer has more experts than
there are slots.
"""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import FakeModel, Open, make_model
from product import Product, aborts, check_failure

from moegguf.controller.shape import MoeShape
from moegguf.errors import ExpertIOError
from moegguf.native import abi
from moegguf.native.store import Store, StoreContext, StoreOptions
from moegguf.testing.library import arm_fault
from moegguf.trace.simulate import layout_of

Late = tuple[Store, StoreContext, Product]
# Ids of 12 tokens: every expert occurs three times.
IDS = np.arange(24).reshape(12, 2) * 3 % 8


def resident(
    fake: FakeModel,
    open_store: Open,
    products: list[Product],
    ids: npt.ArrayLike,
    **options: Any,
) -> bytes:
    """Returns the bits of the product from a store with a slot for every expert, once
    all experts have been read."""
    n_experts = sum(layer.n_expert for layer in fake.layout.layers)
    store, context = open_store(fake, n_experts, **options)
    store.drain(10)
    products.append(Product(store, context, fake, ids))
    products[-1].acquire()
    return products[-1].compute()


@pytest.fixture
def late(fake: FakeModel, open_store: Open, products: list[Product]) -> Late:
    """Returns a store with 8 slots and one reader, its context, and a product of two
    experts without slots."""
    store, context = open_store(fake, 8, readers=1)
    products.append(Product(store, context, fake, [[3, 4]]))
    return store, context, products[-1]


@pytest.mark.parametrize(("repack", "slow"), [(False, 1), (True, 3), (False, 6)])
def test_product_computed_while_experts_arrive_equals_the_resident_product(
    fake: FakeModel, open_store: Open, products: list[Product], repack: bool, slow: int
) -> None:
    ids = [[5, 2], [1, 5], [6, 0]]
    expected = resident(fake, open_store, products, ids, repack=repack)
    store, context = open_store(fake, 8, repack=repack, readers=1)
    store.prefetch([0, 0], [1, 6])
    store.drain(10)
    product = Product(store, context, fake, ids)
    products.append(product)
    arm_fault("slow_read", slow)
    product.acquire()
    assert store.counters()["queue_needed"] > 0, (
        "a slow read takes two seconds, and nothing waits for it here"
    )
    assert product.compute() == expected
    assert not aborts(context)
    assert store.counters()["stall_ns"] > 0


def test_acquire_without_overlap_returns_after_all_experts_have_arrived(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    ids = [[5, 2]]
    expected = resident(fake, open_store, products, ids)
    store, context = open_store(fake, 8, overlap=False)
    products.append(Product(store, context, fake, ids))
    products[-1].acquire()
    assert store.counters()["queue_needed"] == 0
    assert (store.residency()[0, [5, 2]] == 2).all()
    # Slots are assigned in the order in which the router chose the experts.
    fake.check(store, 0, ids, [[0, 1]])
    assert products[-1].compute() == expected


# slots, readers, ids, and which read fails.
ROUTED = {"slots": (8, 1, [[3, 4]], 2), "streamed": (3, 2, IDS, 5)}


@pytest.mark.parametrize(
    ("how", "asks"), [("slots", True), ("slots", False), ("streamed", True)]
)
def test_failed_read_aborts_the_pass_and_the_kernel_returns(
    fake: FakeModel, open_store: Open, products: list[Product], how: str, asks: bool
) -> None:
    """Makes a read fail. In the case without `asks`, no later node calls the abort
    callback of the store."""
    n_slots, readers, ids, nth = ROUTED[how]
    store, context = open_store(fake, n_slots, readers=readers)
    products.append(Product(store, context, fake, ids))
    arm_fault("read", nth, sticky=True)
    products[-1].acquire()
    products[-1].compute()
    assert not asks or aborts(context)
    check_failure(context, abi.IO)
    arm_fault("read", 0)
    fake.token(store, context, [3, 4])
    assert context.take_failure() is None


@pytest.mark.parametrize("how", ROUTED)
def test_cancel_ends_a_kernel_that_waits_for_reads(
    fake: FakeModel, open_store: Open, products: list[Product], how: str
) -> None:
    n_slots, _, ids, _ = ROUTED[how]
    store, context = open_store(fake, n_slots, readers=1)
    products.append(Product(store, context, fake, ids))
    arm_fault("slow_read", 2, sticky=True)
    products[-1].acquire()
    timer = threading.Timer(0.2, store.cancel)
    timer.start()
    products[-1].compute()
    assert how == "streamed" or store.counters()["queue_needed"] > 0, (
        "these reads take twelve seconds"
    )
    assert aborts(context)
    timer.join()
    store.cancel(False)
    check_failure(context, abi.CANCELLED)
    arm_fault("slow_read", 0)
    fake.token(store, context, [3, 4])


def test_cancelled_pass_aborts_even_if_cancel_is_reset_after_the_kernel(
    fake: FakeModel, late: Late
) -> None:
    store, context, product = late
    arm_fault("slow_read", 1, sticky=True)
    product.acquire()
    store.cancel()
    product.compute()
    store.cancel(False)
    assert aborts(context), "it left out what was not there"
    check_failure(context, abi.CANCELLED)
    arm_fault("slow_read", 0)
    fake.token(store, context, [3, 4])
    assert context.take_failure() is None


def test_late_read_error_of_an_ended_pass_does_not_fail_the_next_pass(
    fake: FakeModel, late: Late
) -> None:
    store, context, product = late
    # The first read is repeated once, so the third operation reads another expert.
    arm_fault("slow_read", 3)
    arm_fault("read", 1, sticky=True)
    product.acquire()
    while not aborts(context):
        time.sleep(0.001)
    check_failure(context, abi.IO)
    assert store.counters()["chunks_reading"] > 0, (
        "this read takes two seconds and then fails"
    )
    store.drain(10)
    arm_fault("read", 0)
    fake.token(store, context, [3, 4])
    assert context.take_failure() is None


def test_failed_read_is_repeated_for_an_event_that_came_meanwhile(
    fake: FakeModel, late: Late
) -> None:
    store, context, product = late
    arm_fault("slow_read", 1)
    arm_fault("stat", 1)
    product.acquire()  # the first read takes two seconds and then fails
    fake.acquire(store, context, 0, [3, 4])
    assert store.counters()["read_errors"] == 1
    assert context.take_failure() is None


def test_failed_expert_is_read_again_while_another_read_is_still_running(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 8, readers=2)
    arm_fault("slow_read", 2)  # takes two seconds
    arm_fault("read", 1, sticky=True)
    with pytest.raises(ExpertIOError):
        context.acquire(0, [[3, 4]])
    arm_fault("read", 0)
    check_failure(context, abi.IO)
    assert store.counters()["chunks_reading"] > 0, "its slot is not free yet"
    fake.acquire(store, context, 0, [3, 4])
    assert context.take_failure() is None


@pytest.mark.parametrize("prefetching", [False, True])
def test_kernel_does_not_wait_for_slot_ids_of_a_failed_pass(
    fake: FakeModel, open_store: Open, products: list[Product], prefetching: bool
) -> None:
    store, context = open_store(fake, 8, readers=1)
    if prefetching:
        arm_fault("slow_read", 1, sticky=True)
        store.prefetch([2], [0])
    # Expert 99 does not exist, so the pass fails, all slot ids are 0, and no slot is
    # pinned.
    products.append(Product(store, context, fake, [[3, 99]]))
    products[-1].acquire()
    products[-1].compute()
    assert not prefetching or store.counters()["queue_wanted"] > 0, (
        "these reads take six seconds"
    )
    arm_fault("slow_read", 0)
    assert aborts(context)
    check_failure(context, abi.ROUTING)


def test_product_is_exact_with_700_experts_that_arrive_late(
    tmp_path: Path, open_store: Open, products: list[Product]
) -> None:
    fake = make_model(tmp_path, n_layer=1, n_expert=700, n_used=7, n_ff=32)
    ids = np.random.default_rng(3).permutation(700).reshape(100, 7)
    expected = resident(fake, open_store, products, ids)
    store, context = open_store(fake, 700, fill=False, readers=2)
    products.append(Product(store, context, fake, ids))
    arm_fault("slow_read", 1)
    products[-1].acquire()
    assert products[-1].compute() == expected


@pytest.mark.parametrize("repack", [False, True])
@pytest.mark.parametrize("n_slots", [2, 3, 7])
@pytest.mark.parametrize("readers", [1, 3])
def test_streamed_product_with_few_slots_equals_the_resident_product(
    fake: FakeModel,
    open_store: Open,
    products: list[Product],
    repack: bool,
    n_slots: int,
    readers: int,
) -> None:
    expected = resident(fake, open_store, products, IDS, repack=repack)
    store, context = open_store(fake, n_slots, repack=repack, readers=readers)
    products.append(Product(store, context, fake, IDS))
    # Later products find some experts in slots of the previous product.
    for _ in range(3):
        products[-1].set_ids(IDS)
        products[-1].acquire()
        assert products[-1].compute() == expected
        assert not aborts(context)
    counters = store.counters()
    assert counters["misses"] > 0
    gates = fake.layout.matrices[0].expert_bytes * counters["misses"]
    assert gates <= counters["bytes_missed"] <= fake.expert_bytes * counters["misses"]
    assert context.take_failure() is None


def test_streaming_evicts_no_expert_of_other_layers(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    expected = resident(fake, open_store, products, IDS)
    store, context = open_store(fake, 20, readers=1, stream=True)
    for layer in range(4):
        context.acquire(layer, [[0, 1]])
    products.append(Product(store, context, fake, IDS))
    products[-1].acquire()
    assert products[-1].compute() == expected
    assert all((store.residency()[il][:2] == 2).all() for il in range(4))
    assert store.info()["n_slots"] == 20 and store.counters()["evictions"] == 0
    context.acquire(0, [[0, 1]])
    store.drain(10)
    assert store.counters()["slots_used"] == 8, (
        "slots of the layer that did not come to an end are free"
    )


def test_simulation_counts_misses_for_a_prompt_with_more_experts_than_slots(
    fake: FakeModel, open_store: Open
) -> None:
    store, context = open_store(fake, 3, simulate=True, link_bytes_per_s=1e9)
    for il in range(4):
        context.acquire(il, IDS)
    counters = store.counters()
    assert (counters["misses"], counters["hits_ready"]) == (32, 0)
    assert counters["bytes_missed"] == 32 * fake.expert_bytes
    assert counters["sim_clock_ns"] == pytest.approx(32 * fake.expert_bytes, rel=0.01)
    assert (store.residency()[3] == 2).sum() == 2, (
        "the last experts of the last layer stay"
    )


def test_repeated_prompt_hits_experts_kept_in_slots_that_are_not_streamed(
    tmp_path: Path, open_store: Open
) -> None:
    store, context = open_store(
        make_model(tmp_path, n_layer=1), 6, simulate=True, readers=1
    )
    for _ in range(2):
        context.acquire(0, IDS)
    counters = store.counters()
    assert (counters["hits_ready"], counters["misses"]) == (3, 13), (
        "half of the slots are streamed through, and kept"
    )


@pytest.mark.parametrize("n_slots", [2, 40])
def test_streaming_reads_the_first_expert_of_the_next_layer_ahead(n_slots: int) -> None:
    """Tests the option `stream` (DuoServe-MoE, section 5.2) for a prompt's experts,
    without other prefetches."""
    shape = MoeShape(
        n_layer=3, n_expert=8, n_expert_used=2, layers=(0, 1, 2), expert_bytes=3000
    )
    prompt = np.random.default_rng(0).permuted(
        np.tile(np.arange(8, dtype=np.int32), (32, 1)), axis=1
    )[:, :2]
    for stream in (False, True):
        # The current layer keeps both slots until the next layer is routed.
        comes = stream and n_slots > 2
        options = StoreOptions(
            repack=False,
            fill=False,
            simulate=True,
            sweep=False,
            stream=stream,
            chunked=False,
            link_bytes_per_s=1e9,
        )
        store = Store(layout_of(shape), n_slots, options)
        for il in range(3):
            store.context.acquire(il, prompt)
            store.advance(10**6)
            ahead = np.argwhere(store.residency()[il + 1 :]).tolist()
            assert ahead == ([[0, 0]] if comes and il < 2 else [])
        assert store.counters()["hits_ready"] == 2 * comes
        store.close()
