"""Says which results change their bits with the number of rows that the CPU computes together.

Each operation of the supported architectures' graphs is computed by ggml for 1, 2, 3, 4, 7, 8, 16, 33, 64 and 512 rows
(tokens), and every row is compared with what the same row gives alone. Products are taken with every quantisation that
ggml can make, as plain and, where the processor has a layout for it, as interleaved weights; attention over a cache of
several sequences. That others' cells change no bit is a property of a whole graph: tests/live/test_width.py.

Usage: python tools/width_check.py [--only REGEX] [--threads N] [--all]
Lists the operations of which a row changes, with the widths and how many of their rows; `--all` lists the others too.
The exit status is 1 where a row changes.
"""

from __future__ import annotations

import argparse
import ctypes as c
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.native import library

WIDTHS = (1, 2, 3, 4, 7, 8, 16, 33, 64, 512)
F32, F16, I32 = 0, 1, 26
N_TYPES = 43
N_SEQUENCES = 4
N_CELLS = 512

QUIET = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda _level, _text, _data: None)  # as long as ggml

Array = npt.NDArray[Any]
Compute = Callable[[Sequence[int]], Array]  # of the rows by number: the result, with rows first


class InitParams(c.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


@dataclass(frozen=True)
class Case:
    """An operation, and what computes some of its rows."""

    name: str
    compute: Compute

    def changed(self, widths: Sequence[int] = WIDTHS) -> dict[int, list[int]]:
        """By width: the rows whose bits are not those of the row alone. Without widths at which none is."""
        alone = [self.compute([row]).tobytes() for row in range(max(widths))]
        found = {}
        for width in widths:
            together = self.compute(range(width))
            rows = [row for row in range(width) if together[row : row + 1].tobytes() != alone[row]]
            if rows:
                found[width] = rows
        return found


class Ggml:
    """ggml's CPU backend by ctypes. Shapes are numpy's: the reverse of ggml's."""

    def __init__(self, n_threads: int = 2) -> None:
        folder = library.find_library()
        self._base, cpu = (c.CDLL(str(folder / f"libggml-{name}.so")) for name in ("base", "cpu"))
        self._base.ggml_log_set(QUIET, None)
        self._reg = self._pointer(cpu.ggml_backend_cpu_reg)
        self._device = self._pointer(self._base.ggml_backend_reg_dev_get, self._reg, c.c_size_t(0))
        self._backend = self._pointer(cpu.ggml_backend_cpu_init)
        cpu.ggml_backend_cpu_set_n_threads(self._backend, n_threads)
        self.plain = self._pointer(self._base.ggml_backend_cpu_buffer_type)
        self.interleaved = self._extra("CPU_REPACK")
        self.types = {self.type_name(i): i for i in range(N_TYPES) if self.type_name(i)}

    @staticmethod
    def _pointer(function: Any, *arguments: Any) -> c.c_void_p:
        function.restype = c.c_void_p
        return c.c_void_p(function(*arguments))

    def _extra(self, name: str) -> c.c_void_p | None:
        get_function = self._base.ggml_backend_reg_get_proc_address
        address = self._pointer(get_function, self._reg, b"ggml_backend_dev_get_extra_bufts").value
        assert address is not None
        found = c.CFUNCTYPE(c.POINTER(c.c_void_p), c.c_void_p)(address)(self._device)
        self._base.ggml_backend_buft_name.restype = c.c_char_p
        for buffer_type in found:
            if buffer_type is None:
                return None
            if self._base.ggml_backend_buft_name(c.c_void_p(buffer_type)) == name.encode():
                return c.c_void_p(buffer_type)
        return None

    def type_name(self, ggml_type: int) -> str:
        """ggml's name of a type; empty where the number is not in use."""
        self._base.ggml_type_name.restype = c.c_char_p
        self._base.ggml_type_size.restype = c.c_size_t
        is_used = self._base.ggml_type_size(ggml_type) > 0
        return (self._base.ggml_type_name(ggml_type) or b"").decode() if is_used else ""

    def quantized(self, ggml_type: int, values: Array) -> bytes:
        """float32 values [..., n] as ggml stores them in that type."""
        flat = np.ascontiguousarray(values, np.float32)
        n = flat.shape[-1]
        self._base.ggml_row_size.restype = c.c_size_t
        row_bytes = self._base.ggml_row_size(ggml_type, c.c_int64(n))
        out = np.zeros((flat.size // n, row_bytes), np.uint8)
        importance = np.ones(n, np.float32)
        self._base.ggml_quantize_chunk.restype = c.c_size_t
        self._base.ggml_quantize_chunk(
            ggml_type, flat.ctypes.data_as(c.c_void_p), out.ctypes.data_as(c.c_void_p), c.c_int64(0),
            c.c_int64(len(out)), c.c_int64(n), importance.ctypes.data_as(c.c_void_p),
        )  # fmt: skip
        return out.tobytes()

    def graph(self, buffer_type: c.c_void_p | None = None) -> Graph:
        """A new graph, whose weights go into that buffer type; plain memory by default."""
        return Graph(self._base, self._backend, self._device, self.plain, buffer_type or self.plain)


class Graph:
    """Inputs with their values, and operations on them, computed once. Freed with `close`."""

    def __init__(self, base: Any, backend: Any, device: Any, plain: c.c_void_p, of_weights: c.c_void_p) -> None:
        self._base = base
        self._backend = backend
        self._device = device
        self._buffers = [plain, of_weights]
        self._contexts = [Ggml._pointer(base.ggml_init, InitParams(1 << 20, None, True)) for _ in range(2)]
        self._values: list[tuple[c.c_void_p, bytes]] = []
        self._allocated: list[c.c_void_p] = []

    def input(self, ggml_type: int, shape: Sequence[int], values: bytes, is_weight: bool = False) -> c.c_void_p:
        """A tensor [shape] with these bytes."""
        dims = (c.c_int64 * len(shape))(*reversed(shape))
        tensor = Ggml._pointer(self._base.ggml_new_tensor, self._contexts[is_weight], ggml_type, len(shape), dims)
        self._values.append((tensor, values))
        return tensor

    def array(self, values: Array) -> c.c_void_p:
        """A tensor with the values and shape of a float32, float16 or int32 array."""
        kinds = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.int32): I32}
        return self.input(kinds[values.dtype], values.shape, np.ascontiguousarray(values).tobytes())

    def op(self, name: str, *arguments: Any) -> c.c_void_p:
        """The node that ggml_<name> makes. Numbers that are no tensors are given as ctypes."""
        return Ggml._pointer(getattr(self._base, f"ggml_{name}"), self._contexts[0], *arguments)

    def change(self, name: str, *arguments: Any) -> None:
        """Calls ggml_<name>, which changes a node."""
        getattr(self._base, f"ggml_{name}")(*arguments)

    def supports(self, node: c.c_void_p) -> bool:
        """Whether the CPU computes this node, whose weights are in the buffer type of weights."""
        self._allocate()
        self._base.ggml_backend_dev_supports_op.restype = c.c_bool
        return bool(self._base.ggml_backend_dev_supports_op(self._device, node))

    def _allocate(self) -> None:
        if not self._allocated:
            pairs = zip(self._contexts, self._buffers, strict=True)
            allocate = self._base.ggml_backend_alloc_ctx_tensors_from_buft
            self._allocated = [Ggml._pointer(allocate, context, buffer_type) for context, buffer_type in pairs]

    def compute(self, node: c.c_void_p, shape: Sequence[int], dtype: type = np.float32) -> Array:
        """The node's values [shape], of contiguous memory."""
        self._base.ggml_new_graph.restype = c.c_void_p
        graph = c.c_void_p(self._base.ggml_new_graph(self._contexts[0]))
        self._base.ggml_build_forward_expand(graph, node)
        self._allocate()
        for tensor, values in self._values:
            self._base.ggml_backend_tensor_set(tensor, values, c.c_size_t(0), c.c_size_t(len(values)))
        status = self._base.ggml_backend_graph_compute(self._backend, graph)
        assert status == 0, f"ggml_backend_graph_compute: status {status}"
        out: Array = np.empty(shape, dtype)
        self._base.ggml_backend_tensor_get(node, out.ctypes.data_as(c.c_void_p), c.c_size_t(0), c.c_size_t(out.nbytes))
        return out

    def close(self) -> None:
        """Frees tensors and contexts."""
        for buffer in self._allocated:
            self._base.ggml_backend_buffer_free(buffer)
        for context in self._contexts:
            self._base.ggml_free(context)


def product(ggml: Ggml, ggml_type: int, x: Array, n_out: int, buffer_type: c.c_void_p | None) -> Compute | None:
    """MUL_MAT of rows of x [n, n_in] with random weights [n_out, n_in]; None where the buffer type has no layout."""
    values = np.random.default_rng(1).standard_normal((n_out, x.shape[1]))
    weights = ggml.quantized(ggml_type, values)

    def compute(rows: Sequence[int]) -> Array:
        graph = ggml.graph(buffer_type)
        w = graph.input(ggml_type, values.shape, weights, is_weight=True)
        out = graph.compute(graph.op("mul_mat", w, graph.array(x[list(rows)])), (len(rows), n_out))
        graph.close()
        return out

    graph = ggml.graph(buffer_type)
    node = graph.op("mul_mat", graph.input(ggml_type, values.shape, b"", is_weight=True), graph.array(x[:1]))
    is_supported = graph.supports(node)
    graph.close()
    return compute if is_supported else None


def expert_product(ggml: Ggml, ggml_type: int, x: Array, n_out: int, buffer_type: c.c_void_p | None) -> Compute | None:
    """MUL_MAT_ID of rows of x [n, n_in], each with two of eight experts [n_out, n_in]: one half shares an expert."""
    n_expert = 8
    n_used = 2
    rng = np.random.default_rng(2)
    values = rng.standard_normal((n_expert, n_out, x.shape[1]))
    weights = ggml.quantized(ggml_type, values)
    ids = np.column_stack([np.where(np.arange(len(x)) % 2, 7, rng.integers(0, 4, len(x))), rng.integers(4, 7, len(x))])
    ids = ids.astype(np.int32)

    def node(graph: Graph, rows: list[int], data: bytes) -> c.c_void_p:
        w = graph.input(ggml_type, values.shape, data, is_weight=True)
        return graph.op("mul_mat_id", w, graph.array(x[rows, None, :]), graph.array(ids[rows]))

    def compute(rows: Sequence[int]) -> Array:
        graph = ggml.graph(buffer_type)
        out = graph.compute(node(graph, list(rows), weights), (len(rows), n_used, n_out))
        graph.close()
        return out

    graph = ggml.graph(buffer_type)
    is_supported = graph.supports(node(graph, [0], b""))
    graph.close()
    return compute if is_supported else None


def products(ggml: Ggml, n_in: int, n_out: int, n_rows: int, left_out: Collection[str]) -> Iterator[Case]:
    """Both products with every type but `left_out`, plain and interleaved."""
    x = np.random.default_rng(0).standard_normal((n_rows, n_in)).astype(np.float32)
    skipped = {"f64", "i8", "i16", "i32", "i64", "q8_1", "q8_K", *left_out}
    for name, ggml_type in ggml.types.items():
        for layout, buffer_type in (("plain", None), ("interleaved", ggml.interleaved)):
            if name in skipped or (layout == "interleaved" and buffer_type is None):
                continue
            for operation, make in (("mul_mat", product), ("mul_mat_id", expert_product)):
                compute = make(ggml, ggml_type, x, n_out, buffer_type)
                if compute is not None:
                    yield Case(f"{operation} {name} {layout}", compute)


def attention(ggml: Ggml, is_flash: bool, n_rows: int) -> Compute:
    """Attention of rows q [n, n_head, d], each with the cells of its own sequence up to its own position."""
    rng = np.random.default_rng(3)
    d, n_head, n_head_kv = 64, 4, 2
    q = rng.standard_normal((n_rows, n_head, d)).astype(np.float32)
    k, v = (rng.standard_normal((n_head_kv, N_CELLS, d)).astype(np.float16) for _ in range(2))
    cells = np.arange(N_CELLS)
    row = np.arange(n_rows)[:, None]
    sees = (cells % N_SEQUENCES == row % N_SEQUENCES) & (cells // N_SEQUENCES <= 80 + row // N_SEQUENCES % 48)
    scale = c.c_float(d**-0.5)

    def compute(rows: Sequence[int]) -> Array:
        graph = ggml.graph()
        mask = graph.array(np.where(sees[list(rows)], 0, -np.inf).astype(np.float16))
        queries = graph.array(q[list(rows)].transpose(1, 0, 2))
        keys = graph.array(k)
        if is_flash:
            values = graph.array(v)
            zero = c.c_float(0)
            node = graph.op("flash_attn_ext", queries, keys, values, mask, scale, zero, zero)
        else:
            values = graph.array(v.transpose(0, 2, 1))
            weights = graph.op("soft_max_ext", graph.op("mul_mat", keys, queries), mask, scale, c.c_float(0))
            mixed = graph.op("mul_mat", values, weights)
            node = graph.op("cont", graph.op("permute", mixed, 0, 2, 1, 3))
        out = graph.compute(node, (len(rows), n_head, d))
        graph.close()
        return out

    return compute


def simple(ggml: Ggml, inputs: Sequence[Array], build: Callable[..., c.c_void_p], shape: Sequence[int]) -> Compute:
    """An operation on rows of each input [n, ...] that gives [n, shape]."""

    def compute(rows: Sequence[int]) -> Array:
        graph = ggml.graph()
        node = build(graph, *(graph.array(values[np.array(rows)]) for values in inputs))
        dtype = np.int32 if shape[-1:] == (8,) else np.float32
        out = graph.compute(node, (len(rows), *shape), dtype)
        graph.close()
        return out

    return compute


def weighted_sum(graph: Graph, experts: c.c_void_p, weights: c.c_void_p) -> c.c_void_p:
    """Experts' outputs [n, n_used, n_embd] times their weights [n, n_used, 1], added up."""
    scaled = graph.op("mul", experts, weights)
    return graph.op("cont", graph.op("sum_rows", graph.op("cont", graph.op("permute", scaled, 1, 0, 2, 3))))


def others(ggml: Ggml, n: int, n_rows: int) -> Iterator[Case]:
    """Attention, norms, rope, softmax, top-k, gates and weighted sums."""
    for is_flash in (True, False):
        yield Case(f"{'flash' if is_flash else 'plain'} attention", attention(ggml, is_flash, n_rows))
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((n_rows, n)).astype(np.float32) for _ in range(2))
    heads = rng.standard_normal((n_rows, 4, 64)).astype(np.float32)
    positions = np.arange(n_rows, dtype=np.int32)
    experts = rng.standard_normal((n_rows, 8, n)).astype(np.float32)
    weights = rng.random((n_rows, 8, 1)).astype(np.float32)
    eps = c.c_float(1e-6)
    zero = c.c_float(0)
    one = c.c_float(1)

    def rope(mode: int) -> Callable[..., c.c_void_p]:
        frequencies = (c.c_float(1e6), one, zero, one, zero, zero)
        return lambda g, a, at: g.op("rope_ext", a, at, None, 64, mode, 4096, *frequencies)

    yield Case("norm", simple(ggml, [x], lambda g, a: g.op("norm", a, eps), (n,)))
    yield Case("rms_norm", simple(ggml, [x], lambda g, a: g.op("rms_norm", a, eps), (n,)))
    yield Case("l2_norm", simple(ggml, [x], lambda g, a: g.op("l2_norm", a, eps), (n,)))
    yield Case("rope, pairs of neighbours", simple(ggml, [heads, positions], rope(0), (4, 64)))
    yield Case("rope, halves", simple(ggml, [heads, positions], rope(2), (4, 64)))
    yield Case("soft_max", simple(ggml, [x], lambda g, a: g.op("soft_max", a), (n,)))
    yield Case("sum_rows", simple(ggml, [x], lambda g, a: g.op("sum_rows", a), (1,)))
    yield Case("top-k", simple(ggml, [x], lambda g, a: g.op("cont", g.op("top_k", a, 8)), (8,)))
    yield Case("swiglu", simple(ggml, [x, y], lambda g, a, b: g.op("swiglu_split", a, b), (n,)))
    yield Case("geglu", simple(ggml, [x, y], lambda g, a, b: g.op("geglu_split", a, b), (n,)))
    yield Case("sigmoid", simple(ggml, [x], lambda g, a: g.op("sigmoid", a), (n,)))
    yield Case("weighted sum", simple(ggml, [experts, weights], weighted_sum, (n,)))


def cases(
    n_in: int = 512, n_out: int = 192, n_rows: int = max(WIDTHS), n_threads: int = 2, left_out: Collection[str] = ()
) -> Iterator[Case]:
    """All operations, products with weights [n_out, n_in], of n_rows rows. left_out: types of weights."""
    ggml = Ggml(n_threads)
    yield from products(ggml, n_in, n_out, n_rows, left_out)
    yield from others(ggml, n_in, n_rows)


def main() -> int:
    """Prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="operations whose name matches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="list also operations of which no row changes")
    options = parser.parse_args()
    n_changed = 0
    for case in cases(n_threads=options.threads):
        if not re.search(options.only, case.name):
            continue
        found = case.changed()
        n_changed += bool(found)
        if found or options.all:
            rows = ", ".join(f"{len(rows)} of {width}" for width, rows in found.items())
            print(f"{case.name:44} {rows or 'none'}", flush=True)
    print(f"operations of which a row changes: {n_changed}")
    return 1 if n_changed else 0


if __name__ == "__main__":
    sys.exit(main())
