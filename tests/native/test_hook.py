"""The scheduler's callback as llama.cpp calls it, on two nodes of one layer: no model, tensors made here."""

import ctypes as c
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import FakeModel, Open
from product import I32, InitParams, aborts, check_failure, load

from moegguf.native import abi, library
from moegguf.native.events import Phase
from moegguf.native.store import StoreContext

ASK, DO = True, False


class Nodes:
    """The node with the expert ids of layer 0, one token and two experts, and the one before its down matrices."""

    def __init__(self) -> None:
        self._base = load("ggml-base", (
            "ggml_init", "ggml_new_tensor_2d", "ggml_get_data", "ggml_backend_alloc_ctx_tensors_from_buft",
            "ggml_backend_cpu_buffer_type",
        ))  # fmt: skip
        self._context = c.c_void_p(self._base.ggml_init(InitParams(1 << 16, None, True)))
        self.ids, self.down = (self._tensor(name) for name in (b"ffn_moe_slot_ids-0", b"ffn_moe_down_in-0"))
        memory = c.c_void_p(self._base.ggml_backend_cpu_buffer_type())
        self._buffer = c.c_void_p(self._base.ggml_backend_alloc_ctx_tensors_from_buft(self._context, memory))

    def _tensor(self, name: bytes) -> int:
        made: int = self._base.ggml_new_tensor_2d(self._context, I32, c.c_int64(2), c.c_int64(1))
        self._base.ggml_set_name(c.c_void_p(made), name)
        return made

    @property
    def values(self) -> npt.NDArray[np.int32]:
        """The ids, in place."""
        address = self._base.ggml_get_data(c.c_void_p(self.ids))
        return np.ctypeslib.as_array((c.c_int32 * 2).from_address(address)).reshape(1, 2)

    def close(self) -> None:
        self._base.ggml_backend_buffer_free(self._buffer)
        self._base.ggml_free(self._context)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def call(context: StoreContext, node: Any, ask: bool) -> bool:
    return bool(library.load().moegguf_eval(node, ask, context.handle))


def test_expert_ids_become_slot_ids_in_place(fake: FakeModel, open_store: Open, nodes: Nodes) -> None:
    store, context = open_store(fake, 4)
    nodes.values[:] = [[5, 2]]
    assert call(context, nodes.ids, ASK)
    assert call(context, nodes.ids, DO)
    assert not aborts(context)
    store.drain(10)
    fake.check(store, 0, [[5, 2]], nodes.values)


def test_a_resident_layer_is_passed_over_and_counted(fake: FakeModel, open_store: Open, nodes: Nodes) -> None:
    store, context = open_store(fake, 32)
    store.drain(10)
    before = store.counters()
    for _ in range(3):
        assert not call(context, nodes.ids, ASK)
        assert not call(context, nodes.down, ASK)
    counters = store.counters()
    assert counters["passes"] - before["passes"] == counters["routing_events"] - before["routing_events"] == 3
    assert counters["hits_ready"] - before["hits_ready"] == 6
    store.watch(True)
    assert call(context, nodes.ids, ASK)
    store.watch(False)
    store.resize(8)
    assert call(context, nodes.ids, ASK)
    nodes.values[:] = [[7, 3]]
    assert call(context, nodes.ids, DO)
    assert store.info()["resident"] == 0
    store.drain(10)
    fake.check(store, 0, [[7, 3]], nodes.values)


def test_reads_that_fail_while_others_compute_end_the_pass(fake: FakeModel, open_store: Open, nodes: Nodes) -> None:
    store, context = open_store(fake, 4, readers=1)
    nodes.values[:] = [[0, 1]]
    library.arm_fault("read", 5, sticky=True)
    call(context, nodes.ids, DO)
    store.drain(10)
    assert not call(context, nodes.down, ASK), "kernels wait, not the callback"
    assert aborts(context)
    check_failure(context, abi.IO)
    library.arm_fault("read", 0)
    fake.token(store, context, [0, 1])


def test_an_announcement_changes_nothing_a_layer_waits_for(fake: FakeModel, open_store: Open, nodes: Nodes) -> None:
    """Its pins are of the layer before; the next down node may come without a routing event, of a pass of no tokens."""
    store, context = open_store(fake, 4, readers=1)
    nodes.values[:] = [[5, 2]]
    library.arm_fault("slow_read", 5)
    call(context, nodes.ids, DO)
    context.announce(0, Phase.DECODE, [1])
    store.drain(10)
    assert not aborts(context)
    fake.check(store, 0, [[5, 2]], nodes.values)
