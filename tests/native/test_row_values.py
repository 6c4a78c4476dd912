"""Element-wise operations of ggml's CPU backend with one value for each row: numpy's bits."""

from __future__ import annotations

import ctypes as c
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from product import F32, N_THREADS, InitParams, load

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def computed(operation: str, x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """ggml's result for x [n_tokens, n_rows, n] and y [n_tokens, n_rows, 1 or n]."""
    base = load("ggml-base", (
        "ggml_init", "ggml_new_tensor_3d", "ggml_new_graph", f"ggml_{operation}", "ggml_backend_cpu_buffer_type",
        "ggml_backend_alloc_ctx_tensors_from_buft",
    ))  # fmt: skip
    cpu = load("ggml-cpu", ("ggml_backend_cpu_init",))
    context = c.c_void_p(base.ggml_init(InitParams(1 << 20, None, True)))

    def tensor(values: npt.NDArray[np.float32]) -> Any:
        return c.c_void_p(base.ggml_new_tensor_3d(context, F32, *(c.c_int64(n) for n in reversed(values.shape))))

    inputs = [(tensor(values), values) for values in (x, y)]
    result = c.c_void_p(getattr(base, f"ggml_{operation}")(context, inputs[0][0], inputs[1][0]))
    graph = c.c_void_p(base.ggml_new_graph(context))
    base.ggml_build_forward_expand(graph, result)
    buffer_type = c.c_void_p(base.ggml_backend_cpu_buffer_type())
    buffer = c.c_void_p(base.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type))
    for into, values in inputs:
        pointer = values.ctypes.data_as(c.c_void_p)
        base.ggml_backend_tensor_set(into, pointer, c.c_size_t(0), c.c_size_t(values.nbytes))
    backend = c.c_void_p(cpu.ggml_backend_cpu_init())
    cpu.ggml_backend_cpu_set_n_threads(backend, N_THREADS)
    base.ggml_backend_graph_compute(backend, graph)
    out = np.empty(x.shape, np.float32)
    base.ggml_backend_tensor_get(result, out.ctypes.data_as(c.c_void_p), c.c_size_t(0), c.c_size_t(out.nbytes))
    base.ggml_backend_free(backend)
    base.ggml_backend_buffer_free(buffer)
    base.ggml_free(context)
    return out


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [1, 3, 64, 131])
@pytest.mark.parametrize("is_broadcast", [True, False])
def test_each_element_has_numpys_bits(operation: str, n: int, is_broadcast: bool) -> None:
    random = np.random.default_rng(n)
    x = random.standard_normal((5, 4, n)).astype(np.float32)
    y = random.standard_normal((5, 4, 1 if is_broadcast else n)).astype(np.float32)
    x[0, 0, 0], y[1, 1, 0] = np.inf, 0.0
    with np.errstate(divide="ignore"):
        expected = OPERATIONS[operation](x, y)
    assert computed(operation, x, y).tobytes() == expected.tobytes()
