"""Experts computed as they arrive: ggml's own MUL_MAT_ID over a pool whose matrices are still being read."""

from __future__ import annotations

import ctypes as c
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import FakeModel, Open, make_model

from moegguf.native import library
from moegguf.native.store import Lane, Store

F32, I32 = 0, 26
N_THREADS = 3


class InitParams(c.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


def load(name: str, pointers: tuple[str, ...]) -> c.CDLL:
    """A library of ggml's with functions that return pointers."""
    loaded = c.CDLL(str(library.find_library() / f"lib{name}.so"))
    for function in pointers:
        getattr(loaded, function).restype = c.c_void_p
    return loaded


class Product:
    """x times the first matrix of the experts that a layer's router chose, as llama.cpp's graph has it."""

    def __init__(self, store: Store, lane: Lane, fake: FakeModel, expert_ids: npt.ArrayLike) -> None:
        ids = np.asarray(expert_ids, np.int32)
        n_tokens, n_used = ids.shape
        m = fake.layout.matrices[0]
        self.lane, self._shape = lane, (n_tokens, n_used, m.ne1)
        self._base = load("ggml-base", (
            "ggml_init", "ggml_new_tensor_2d", "ggml_new_tensor_3d", "ggml_mul_mat_id", "ggml_new_graph",
            "ggml_backend_alloc_ctx_tensors_from_buft", "ggml_backend_cpu_buffer_type", "ggml_reshape_2d",
        ))  # fmt: skip
        self._cpu = load("ggml-cpu", ("ggml_backend_cpu_init",))
        moegguf = library.load()
        moegguf.moegguf_pool_tensor.restype = c.c_void_p
        self._weights = self._base.ggml_init(InitParams(1 << 16, None, True))
        w = self._base.ggml_new_tensor_3d(
            c.c_void_p(self._weights), m.ggml_type, c.c_int64(m.ne0), c.c_int64(m.ne1), c.c_int64(m.n_expert)
        )
        self._base.ggml_set_name(c.c_void_p(w), m.name.encode())
        allocate = self._base.ggml_backend_alloc_ctx_tensors_from_buft
        self._reserved = allocate(c.c_void_p(self._weights), c.c_void_p(store.buffer_type))
        self._context = self._base.ggml_init(InitParams(1 << 20, None, True))
        self._x = self._base.ggml_new_tensor_3d(
            c.c_void_p(self._context), F32, c.c_int64(m.ne0), c.c_int64(1), c.c_int64(n_tokens)
        )
        self.ids = self._base.ggml_new_tensor_2d(c.c_void_p(self._context), I32, c.c_int64(n_used), c.c_int64(n_tokens))
        self._base.ggml_set_name(c.c_void_p(self.ids), b"ffn_moe_slot_ids-0")
        pool = moegguf.moegguf_pool_tensor(c.c_void_p(w))
        self._out = self._base.ggml_mul_mat_id(
            c.c_void_p(self._context), c.c_void_p(pool), c.c_void_p(self._x), c.c_void_p(self.ids)
        )
        self._graph = self._base.ggml_new_graph(c.c_void_p(self._context))
        self._base.ggml_build_forward_expand(c.c_void_p(self._graph), c.c_void_p(self._out))
        self._buffer = allocate(c.c_void_p(self._context), c.c_void_p(self._base.ggml_backend_cpu_buffer_type()))
        x = np.random.default_rng(1).standard_normal((n_tokens, m.ne0)).astype(np.float32)
        self._set(self._x, x)
        self._set(self.ids, ids)
        self._backend = self._cpu.ggml_backend_cpu_init()
        self._cpu.ggml_backend_cpu_set_n_threads(c.c_void_p(self._backend), N_THREADS)

    def _set(self, tensor: int, values: npt.NDArray[Any]) -> None:
        self._base.ggml_backend_tensor_set(
            c.c_void_p(tensor), values.ctypes.data_as(c.c_void_p), c.c_size_t(0), c.c_size_t(values.nbytes)
        )

    def acquire(self) -> None:
        """What the scheduler's callback does once the node with the ids is computed."""
        evaluate = library.load().moegguf_eval
        evaluate.restype, evaluate.argtypes = c.c_bool, [c.c_void_p, c.c_bool, c.c_void_p]
        assert evaluate(self.ids, False, self.lane.handle)

    def compute(self) -> bytes:
        """The product's bits, [n_tokens][n_used][ne1]."""
        self._base.ggml_backend_graph_compute(c.c_void_p(self._backend), c.c_void_p(self._graph))
        out = np.zeros(self._shape, np.float32)
        self._base.ggml_backend_tensor_get(
            c.c_void_p(self._out), out.ctypes.data_as(c.c_void_p), c.c_size_t(0), c.c_size_t(out.nbytes)
        )
        return out.tobytes()

    def close(self) -> None:
        self._base.ggml_backend_free(c.c_void_p(self._backend))
        for buffer in (self._buffer, self._reserved):
            self._base.ggml_backend_buffer_free(c.c_void_p(buffer))
        for context in (self._context, self._weights):
            self._base.ggml_free(c.c_void_p(context))


@pytest.fixture
def products(open_store: Open) -> Iterator[list[Product]]:
    """What a test made, freed before the stores are closed."""
    made: list[Product] = []
    yield made
    for product in made:
        product.close()


def aborts(lane: Lane) -> bool:
    function = library.load().moegguf_abort
    function.restype, function.argtypes = c.c_bool, [c.c_void_p]
    return bool(function(lane.handle))


def resident(fake: FakeModel, open_store: Open, products: list[Product], ids: npt.ArrayLike, **options: Any) -> bytes:
    """The product with every expert there before it begins."""
    n_experts = sum(layer.n_expert for layer in fake.layout.layers)
    store, lane = open_store(fake, n_experts, **options)
    store.drain(10)
    products.append(Product(store, lane, fake, ids))
    products[-1].acquire()
    return products[-1].compute()


@pytest.mark.parametrize("repack", [False, True])
@pytest.mark.parametrize("slow", [1, 3, 6])
def test_what_is_computed_while_experts_arrive_has_the_same_bits(
    fake: FakeModel, open_store: Open, products: list[Product], repack: bool, slow: int
) -> None:
    ids = [[5, 2], [1, 5], [6, 0]]
    expected = resident(fake, open_store, products, ids, repack=repack)
    store, lane = open_store(fake, 8, repack=repack, readers=1)
    store.prefetch([0, 0], [1, 6])
    store.drain(10)
    product = Product(store, lane, fake, ids)
    products.append(product)
    library.arm_fault("slow_read", slow)
    start = time.monotonic()
    product.acquire()
    assert time.monotonic() - start < 1, "a slow read takes two seconds, and nothing waits for it here"
    assert store.counters()["queue_needed"] > 0
    assert product.compute() == expected
    assert not aborts(lane)
    assert store.counters()["stall_ns"] > 0


def test_without_overlap_everything_is_there_first(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    ids = [[5, 2]]
    expected = resident(fake, open_store, products, ids)
    store, lane = open_store(fake, 8, overlap=False)
    products.append(Product(store, lane, fake, ids))
    products[-1].acquire()
    assert store.counters()["queue_needed"] == 0
    fake.check(store, 0, ids, [[lane_slot(store, 0, 5), lane_slot(store, 0, 2)]])
    assert products[-1].compute() == expected


def lane_slot(store: Store, il: int, expert: int) -> int:
    """The slot of an expert in a pool that has given out slots in the order of first choice."""
    assert store.residency()[il][expert] == 2
    return {5: 0, 2: 1}[expert]


def test_a_failed_read_ends_the_pass_and_not_the_kernel(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    store, lane = open_store(fake, 8, readers=1)
    products.append(Product(store, lane, fake, [[3, 4]]))
    library.arm_fault("read", 2, sticky=True)
    products[-1].acquire()
    products[-1].compute()
    assert aborts(lane)
    failure = lane.take_failure()
    assert failure is not None
    assert (failure.status, failure.il) == (library.IO, 0)
    library.arm_fault("read", 0)
    fake.token(store, lane, [3, 4])


def test_a_read_that_fails_in_the_last_layer_is_reported(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    """No node follows that would ask whether to abort."""
    store, lane = open_store(fake, 8, readers=1)
    products.append(Product(store, lane, fake, [[3, 4]]))
    library.arm_fault("read", 1, sticky=True)
    products[-1].acquire()
    products[-1].compute()
    failure = lane.take_failure()
    assert failure is not None
    assert failure.status == library.IO


def test_cancelling_ends_a_kernel_that_waits(fake: FakeModel, open_store: Open, products: list[Product]) -> None:
    store, lane = open_store(fake, 8, readers=1)
    products.append(Product(store, lane, fake, [[3, 4]]))
    library.arm_fault("slow_read", 1, sticky=True)
    products[-1].acquire()
    timer = threading.Timer(0.2, store.cancel)
    timer.start()
    start = time.monotonic()
    products[-1].compute()
    assert time.monotonic() - start < 1.5
    assert aborts(lane)
    timer.join()
    library.arm_fault("slow_read", 0)


def test_slot_ids_of_a_failed_pass_are_not_waited_for(
    fake: FakeModel, open_store: Open, products: list[Product]
) -> None:
    store, lane = open_store(fake, 8)
    products.append(Product(store, lane, fake, [[3, 99]]))  # no such expert: every slot id is 0, where nothing is
    products[-1].acquire()
    products[-1].compute()
    assert aborts(lane)
    failure = lane.take_failure()
    assert failure is not None
    assert failure.status == library.ROUTING


def test_more_late_experts_than_a_thread_keeps_in_mind(
    tmp_path: Path, open_store: Open, products: list[Product]
) -> None:
    fake = make_model(tmp_path, n_layer=1, n_expert=700, n_used=7, n_ff=32)
    ids = np.random.default_rng(3).permutation(700).reshape(100, 7)
    expected = resident(fake, open_store, products, ids)
    store, lane = open_store(fake, 700, fill=False, readers=2)
    products.append(Product(store, lane, fake, ids))
    library.arm_fault("slow_read", 1)
    products[-1].acquire()
    assert products[-1].compute() == expected
