"""Experts of a prompt's layer that pass through fewer slots than there are, computed by ggml's own MUL_MAT_ID."""

import threading
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel, Open, make_model
from product import Product, aborts, check_a_failed_read_ends_the_pass, check_failure
from test_arrivals import resident

from moegguf.controller.shape import MoeShape
from moegguf.native import abi, library
from moegguf.native.store import Store, StoreContext, StoreOptions
from moegguf.trace.simulate import layout_of

IDS = np.arange(24).reshape(12, 2) * 3 % 8  # of 12 tokens: every expert, three times


@pytest.mark.parametrize("repack", [False, True])
@pytest.mark.parametrize("n_slots", [2, 3, 7])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_product_with_fewer_slots_than_experts_has_the_same_bits(
    fake: FakeModel, open_store: Open, products: list[Product], repack: bool, n_slots: int, readers: int
) -> None:
    expected = resident(fake, open_store, products, IDS, repack=repack)
    store, context = open_store(fake, n_slots, repack=repack, readers=readers)
    products.append(Product(store, context, fake, IDS))
    for _ in range(3):  # its slots are free again for the next one
        products[-1].set_ids(IDS)
        products[-1].acquire()
        assert products[-1].compute() == expected
        assert not aborts(context)
    counters = store.counters()
    assert counters["misses"] > 0
    gates = fake.layout.matrices[0].expert_bytes * counters["misses"]
    assert gates <= counters["bytes_missed"] <= fake.expert_bytes * counters["misses"]
    assert context.take_failure() is None


def test_slots_keep_what_others_use_while_streaming(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
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
    assert store.counters()["slots_used"] == 8, "slots of the layer that did not come to an end are free"


def test_a_failed_read_ends_the_pass(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    store, context = open_store(fake, 3, readers=2)
    products.append(Product(store, context, fake, IDS))
    check_a_failed_read_ends_the_pass(store, products[-1], fake, 5)
    assert context.take_failure() is None


def test_cancelling_ends_it(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    store, context = open_store(fake, 3, readers=1)
    products.append(Product(store, context, fake, IDS))
    library.arm_fault("slow_read", 2, sticky=True)
    products[-1].acquire()
    timer = threading.Timer(0.2, store.cancel)
    timer.start()
    products[-1].compute()
    assert aborts(context)
    timer.join()
    store.cancel(False)
    check_failure(context, abi.CANCELLED)
    library.arm_fault("slow_read", 0)
    fake.token(store, context, [3, 4])


def test_an_expert_that_does_not_fit_is_no_error_in_simulation_either(fake: FakeModel, open_store: Open) -> None:
    store, context = open_store(fake, 3, simulate=True, link_bytes_per_s=1e9)
    simulate(store, context)
    counters = store.counters()
    assert (counters["misses"], counters["hits_ready"]) == (32, 0)
    assert counters["bytes_missed"] == 32 * fake.expert_bytes
    assert counters["sim_clock_ns"] == pytest.approx(32 * fake.expert_bytes, rel=0.01)
    assert (store.residency()[3] == 2).sum() == 2, "the last experts of the last layer stay"


def simulate(store: Store, context: StoreContext) -> None:
    """A prompt's pass."""
    for il in range(4):
        context.acquire(il, IDS)


def test_what_is_there_is_not_read_again(tmp_path: Path, open_store: Open) -> None:
    fake = make_model(tmp_path, n_layer=1)
    store, context = open_store(fake, 6, simulate=True, readers=1)
    simulated = [context.acquire(0, IDS) for _ in range(2)]
    assert len(simulated) == 2
    counters = store.counters()
    assert (counters["hits_ready"], counters["misses"]) == (3, 13), (
        "half of the slots are streamed through, and kept then"
    )


@pytest.mark.parametrize("n_slots", [2, 40])
def test_the_next_layers_first_expert_comes_while_attention_computes(n_slots: int) -> None:
    """DuoServe-MoE, section 5.2: of a prompt, where its experts are streamed and nothing else is fetched ahead."""
    shape = MoeShape(n_layer=3, n_expert=8, n_expert_used=2, layers=(0, 1, 2), expert_bytes=3000)
    prompt = np.random.default_rng(0).permuted(np.tile(np.arange(8, dtype=np.int32), (32, 1)), axis=1)[:, :2]
    for stream in (False, True):
        comes = stream and n_slots > 2  # all slots of a smaller pool are this layer's until the next is routed
        options = StoreOptions(
            repack=False, fill=False, simulate=True, sweep=False, stream=stream, chunked=False, link_bytes_per_s=1e9
        )
        store = Store(layout_of(shape), n_slots, options)
        for il in range(3):
            store.context.acquire(il, prompt)
            store.advance(10**6)
            ahead = np.argwhere(store.residency()[il + 1 :]).tolist()
            assert ahead == ([[0, 0]] if comes and il < 2 else [])
        assert store.counters()["hits_ready"] == 2 * comes
        store.close()
