"""Tests the scheduler's callback as llama.cpp calls it: for the node of expert ids, and
before the down matrices."""

from fake_model import FakeModel, Open
from product import Product, aborts, check_failure

from moegguf.native import abi, library
from moegguf.native.events import Phase
from moegguf.native.store import StoreContext
from moegguf.testing.library import arm_fault

ASK, DO = True, False


def call(context: StoreContext, node: int, ask: bool) -> bool:
    return bool(library.load().moegguf_eval(node, ask, context.handle))


def test_hook_skips_nodes_of_a_resident_layer_and_counts_their_events(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    store, context = open_store(fake, 32)
    store.drain(10)
    products.append(node := Product(store, context, fake, [[7, 3]]))
    before = store.counters()
    for _ in range(3):
        assert not call(context, node.ids, ASK)
        assert not call(context, node.out, ASK)
    counters = store.counters()
    assert (
        counters["passes"] - before["passes"]
        == counters["routing_events"] - before["routing_events"]
        == 3
    )
    assert counters["hits_ready"] - before["hits_ready"] == 6
    store.watch(True)
    assert call(context, node.ids, ASK)
    store.watch(False)
    store.resize(8)
    assert call(context, node.ids, ASK)
    assert call(context, node.ids, DO)
    assert store.info()["resident"] == 0
    # The announcement of tokens does not unpin the slots of this layer.
    context.announce(0, Phase.DECODE, [1])
    store.drain(10)
    assert not aborts(context)
    fake.check(store, 0, [[7, 3]], node.slot_ids())


def test_hook_aborts_the_pass_after_a_failed_read(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    store, context = open_store(fake, 4, readers=1)
    products.append(node := Product(store, context, fake, [[0, 1]]))
    arm_fault("read", 5, sticky=True)
    call(context, node.ids, DO)
    store.drain(10)
    assert not call(context, node.out, ASK), "kernels wait, not the callback"
    assert aborts(context)
    check_failure(context, abi.IO)
    arm_fault("read", 0)
    fake.token(store, context, [0, 1])
