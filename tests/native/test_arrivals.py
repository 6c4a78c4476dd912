"""Experts computed as they arrive: ggml's own MUL_MAT_ID over a pool whose matrices are still being read."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import FakeModel, Open, make_model
from product import Product, aborts, check_a_failed_read_ends_the_pass, check_failure

from moegguf.errors import ExpertIOError
from moegguf.native import abi, library
from moegguf.native.store import Store


def resident(fake: FakeModel, open_store: Open, products: list[Product], ids: npt.ArrayLike, **options: Any) -> bytes:
    """The product with every expert there before it begins."""
    n_experts = sum(layer.n_expert for layer in fake.layout.layers)
    store, context = open_store(fake, n_experts, **options)
    store.drain(10)
    products.append(Product(store, context, fake, ids))
    products[-1].acquire()
    return products[-1].compute()


@pytest.mark.parametrize(("repack", "slow"), [(False, 1), (True, 3), (False, 6)])
def test_what_is_computed_while_experts_arrive_has_the_same_bits(
    fake: FakeModel, open_store: Open, products: list[Product], repack: bool, slow: int
) -> None:
    ids = [[5, 2], [1, 5], [6, 0]]
    expected = resident(fake, open_store, products, ids, repack=repack)
    store, context = open_store(fake, 8, repack=repack, readers=1)
    store.prefetch([0, 0], [1, 6])
    store.drain(10)
    product = Product(store, context, fake, ids)
    products.append(product)
    library.arm_fault("slow_read", slow)
    product.acquire()
    assert store.counters()["queue_needed"] > 0, "a slow read takes two seconds, and nothing waits for it here"
    assert product.compute() == expected
    assert not aborts(context)
    assert store.counters()["stall_ns"] > 0


def test_without_overlap_everything_is_there_first(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    ids = [[5, 2]]
    expected = resident(fake, open_store, products, ids)
    store, context = open_store(fake, 8, overlap=False)
    products.append(Product(store, context, fake, ids))
    products[-1].acquire()
    assert store.counters()["queue_needed"] == 0
    fake.check(store, 0, ids, [[slot_of(store, 0, 5), slot_of(store, 0, 2)]])
    assert products[-1].compute() == expected


def slot_of(store: Store, il: int, expert: int) -> int:
    """The slot of an expert in a pool that has given out slots in the order of first choice."""
    assert store.residency()[il][expert] == 2
    return {5: 0, 2: 1}[expert]


def test_a_failed_read_ends_the_pass_not_the_kernel(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    store, context = open_store(fake, 8, readers=1)
    products.append(Product(store, context, fake, [[3, 4]]))
    check_a_failed_read_ends_the_pass(store, products[-1], fake, 2)


def test_a_failed_last_read_is_reported(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    """No node follows that would ask whether to abort."""
    store, context = open_store(fake, 8, readers=1)
    products.append(Product(store, context, fake, [[3, 4]]))
    library.arm_fault("read", 1, sticky=True)
    products[-1].acquire()
    products[-1].compute()
    check_failure(context, abi.IO)


def test_cancelling_ends_a_kernel_that_waits(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    store, context = open_store(fake, 8, readers=1)
    products.append(Product(store, context, fake, [[3, 4]]))
    library.arm_fault("slow_read", 1, sticky=True)
    products[-1].acquire()
    timer = threading.Timer(0.2, store.cancel)
    timer.start()
    products[-1].compute()
    assert store.counters()["queue_needed"] > 0, "these reads take twelve seconds"
    assert aborts(context)
    timer.join()
    library.arm_fault("slow_read", 0)


def test_cancelling_ends_the_pass_of_a_kernel_that_gave_up_even_if_it_is_allowed_again(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    store, context = open_store(fake, 8, readers=1)
    products.append(Product(store, context, fake, [[3, 4]]))
    library.arm_fault("slow_read", 1, sticky=True)
    products[-1].acquire()
    store.cancel()
    products[-1].compute()
    store.cancel(False)
    assert aborts(context), "it left out what was not there"
    check_failure(context, abi.CANCELLED)
    library.arm_fault("slow_read", 0)
    fake.token(store, context, [3, 4])
    assert context.take_failure() is None


def test_a_read_that_fails_after_its_pass_has_ended_is_not_the_next_passes_failure(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    store, context = open_store(fake, 8, readers=1)
    products.append(Product(store, context, fake, [[3, 4]]))
    library.arm_fault("slow_read", 2)
    library.arm_fault("read", 1, sticky=True)
    products[-1].acquire()
    while not aborts(context):
        time.sleep(0.001)
    check_failure(context, abi.IO)
    store.drain(10)  # the second read takes two seconds, and fails then
    library.arm_fault("read", 0)
    fake.token(store, context, [3, 4])
    assert context.take_failure() is None


def test_a_read_that_fails_is_made_again_for_a_request_that_came_meanwhile(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    store, context = open_store(fake, 8, readers=1)
    products.append(Product(store, context, fake, [[3, 4]]))
    library.arm_fault("slow_read", 1)
    library.arm_fault("stat", 1)
    products[-1].acquire()  # the first read takes two seconds, and fails then
    fake.acquire(store, context, 0, [3, 4])
    assert store.counters()["read_errors"] == 1
    assert context.take_failure() is None


def test_what_failed_in_a_pass_is_read_again_while_the_rest_still_comes(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 8, readers=2)
    library.arm_fault("slow_read", 2)  # takes two seconds
    library.arm_fault("read", 1, sticky=True)
    with pytest.raises(ExpertIOError):
        context.acquire(0, [[3, 4]])
    library.arm_fault("read", 0)
    check_failure(context, abi.IO)
    assert store.counters()["chunks_reading"] > 0, "its slot is not free yet"
    fake.acquire(store, context, 0, [3, 4])
    assert context.take_failure() is None


@pytest.mark.parametrize("prefetching", [False, True])
def test_slot_ids_of_a_failed_pass_are_not_waited_for(
    fake: FakeModel, open_store: Open, products: list[Product], prefetching: bool
) -> None:
    store, context = open_store(fake, 8, readers=1)
    if prefetching:
        library.arm_fault("slow_read", 1, sticky=True)
        store.prefetch([2], [0])
    products.append(Product(store, context, fake, [[3, 99]]))  # no such expert: every slot id is 0, which nobody pins
    products[-1].acquire()
    products[-1].compute()
    assert not prefetching or store.counters()["queue_wanted"] > 0, "these reads take six seconds"
    library.arm_fault("slow_read", 0)
    assert aborts(context)
    check_failure(context, abi.ROUTING)


def test_more_late_experts_than_a_thread_remembers(tmp_path: Path, open_store: Open, products: list[Product]) -> None:
    fake = make_model(tmp_path, n_layer=1, n_expert=700, n_used=7, n_ff=32)
    ids = np.random.default_rng(3).permutation(700).reshape(100, 7)
    expected = resident(fake, open_store, products, ids)
    store, context = open_store(fake, 700, fill=False, readers=2)
    products.append(Product(store, context, fake, ids))
    library.arm_fault("slow_read", 1)
    products[-1].acquire()
    assert products[-1].compute() == expected
