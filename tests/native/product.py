"""Computes ggml's own MUL_MAT_ID over a store's pool, with the names that llama.cpp's
graph uses."""

import ctypes as c
from typing import Any

import numpy as np
import numpy.typing as npt
from fake_model import F32, I32, FakeModel, InitParams

from moegguf.native import library
from moegguf.native.store import Store, StoreContext

N_THREADS = 3


def load(name: str, pointers: tuple[str, ...]) -> c.CDLL:
    """Loads one of ggml's libraries, and declares that the functions named in
    `pointers` return pointers."""
    loaded = c.CDLL(str(library.find_library() / f"lib{name}.so"))
    for function in pointers:
        getattr(loaded, function).restype = c.c_void_p
    return loaded


class Product:
    """The product of x [n_tokens][ne0] with the first matrix of the experts in
    `expert_ids` [n_tokens][n_used].

    The matrix is the model's first one, in layer 0. x is random by default.
    """

    def __init__(
        self,
        store: Store,
        context: StoreContext,
        fake: FakeModel,
        expert_ids: npt.ArrayLike,
        x: npt.ArrayLike | None = None,
    ) -> None:
        ids = np.asarray(expert_ids, np.int32)
        n_tokens, n_used = ids.shape
        m = fake.layout.matrices[0]
        if x is None:
            x = np.random.default_rng(1).standard_normal((n_tokens, m.ne0))
        self.context, self._shape = context, (n_tokens, n_used, m.ne1)
        self._base = load("ggml-base", (
            "ggml_init", "ggml_new_tensor_2d", "ggml_new_tensor_3d", "ggml_mul_mat_id", "ggml_new_graph",
            "ggml_backend_alloc_ctx_tensors_from_buft", "ggml_backend_cpu_buffer_type", "ggml_reshape_2d",
        ))  # fmt: skip
        self._cpu = load("ggml-cpu", ("ggml_backend_cpu_init",))
        self._weights = self._base.ggml_init(InitParams(1 << 16, None, True))
        w = self._base.ggml_new_tensor_3d(
            c.c_void_p(self._weights),
            m.ggml_type,
            c.c_int64(m.ne0),
            c.c_int64(m.ne1),
            c.c_int64(m.n_expert),
        )
        self._base.ggml_set_name(c.c_void_p(w), m.name.encode())
        allocate = self._base.ggml_backend_alloc_ctx_tensors_from_buft
        self._reserved = allocate(
            c.c_void_p(self._weights), c.c_void_p(store.buffer_type)
        )
        self._context = self._base.ggml_init(InitParams(1 << 20, None, True))
        self._x = self._base.ggml_new_tensor_3d(
            c.c_void_p(self._context),
            F32,
            c.c_int64(m.ne0),
            c.c_int64(1),
            c.c_int64(n_tokens),
        )
        self.ids = self._base.ggml_new_tensor_2d(
            c.c_void_p(self._context), I32, c.c_int64(n_used), c.c_int64(n_tokens)
        )
        self._base.ggml_set_name(c.c_void_p(self.ids), b"ffn_moe_slot_ids-0")
        pool = library.load().moegguf_pool_tensor(w, self.ids)
        self.out = self._base.ggml_mul_mat_id(
            c.c_void_p(self._context),
            c.c_void_p(pool),
            c.c_void_p(self._x),
            c.c_void_p(self.ids),
        )
        # llama.cpp's name for the input of the down matrices.
        self._base.ggml_set_name(c.c_void_p(self.out), b"ffn_moe_down_in-0")
        self._graph = self._base.ggml_new_graph(c.c_void_p(self._context))
        self._base.ggml_build_forward_expand(
            c.c_void_p(self._graph), c.c_void_p(self.out)
        )
        self._buffer = allocate(
            c.c_void_p(self._context),
            c.c_void_p(self._base.ggml_backend_cpu_buffer_type()),
        )
        self._set(self._x, np.asarray(x, np.float32))
        self._set(self.ids, ids)
        self._backend = self._cpu.ggml_backend_cpu_init()
        self._cpu.ggml_backend_cpu_set_n_threads(c.c_void_p(self._backend), N_THREADS)

    def _set(self, tensor: int, values: npt.NDArray[Any]) -> None:
        self._base.ggml_backend_tensor_set(
            c.c_void_p(tensor),
            values.ctypes.data_as(c.c_void_p),
            c.c_size_t(0),
            c.c_size_t(values.nbytes),
        )

    def _get(self, tensor: int, into: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._base.ggml_backend_tensor_get(
            c.c_void_p(tensor),
            into.ctypes.data_as(c.c_void_p),
            c.c_size_t(0),
            c.c_size_t(into.nbytes),
        )
        return into

    def slot_ids(self) -> npt.NDArray[np.int32]:
        """Returns ids [n_tokens][n_used]: the router's expert ids, or slot ids after
        `acquire`."""
        return self._get(self.ids, np.empty(self._shape[:2], np.int32))

    def set_ids(self, expert_ids: npt.ArrayLike) -> None:
        """Sets the expert ids of the router. `acquire` replaces them with slot ids."""
        self._set(self.ids, np.asarray(expert_ids, np.int32))

    def acquire(self) -> None:
        """Calls the hook for the node with the ids, as llama.cpp's scheduler does after
        it has computed this node."""
        assert library.load().moegguf_eval(self.ids, False, self.context.handle)

    def compute(self) -> bytes:
        """Computes the product. Returns its bits, [n_tokens][n_used][ne1]."""
        self._base.ggml_backend_graph_compute(
            c.c_void_p(self._backend), c.c_void_p(self._graph)
        )
        return self._get(self.out, np.zeros(self._shape, np.float32)).tobytes()

    def close(self) -> None:
        self._base.ggml_backend_free(c.c_void_p(self._backend))
        for buffer in (self._buffer, self._reserved):
            self._base.ggml_backend_buffer_free(c.c_void_p(buffer))
        for context in (self._context, self._weights):
            self._base.ggml_free(c.c_void_p(context))


def aborts(context: StoreContext) -> bool:
    """Returns True if the store's abort callback would stop the pass after the node
    that was computed last."""
    return bool(library.load().moegguf_abort(context.handle))


def check_failure(context: StoreContext, status: int) -> None:
    """Asserts that the last pass failed with this status. Clears the failure, so that
    the next pass can start."""
    assert context.take_failure().status == status
