"""Lists the operations whose results, compared bit by bit, depend on the number of rows
that the CPU computes together.

ggml computes the operations of the supported architectures' graphs for 1, 2, 3, 4, 7,
8, 16, 33, 64 and 512 rows (tokens). The program compares the bits of every row with the
bits of the row computed alone. Products use every quantisation that ggml can make, as
plain weights and, where the processor has a layout for them, as interleaved weights.
Attention reads a cache of several sequences. The cells of other sequences must not
change a single bit of a row's result, either. This is a property of a whole graph, so
tests/live/test_width.py checks it instead.

Operations with a recurrent state are computed for several sequences together, in passes
of each width. The program compares every token's output, and every returned state, with
the results for the sequence alone, token by token.

Usage: python tools/width_check.py [--only REGEX] [--threads N] [--all] [--model FILE]
The program lists each operation with a changed row: the widths, and the number of
changed rows at each width. `--all` lists the other operations too. The exit status is 1
if a row changes. With a model, the program lists the operations of the model's graph,
and the checked operation that covers each. The exit status is then 1 if any listed
operation is not checked.
"""

from __future__ import annotations

import argparse
import ctypes as c
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moegguf.native import library

WIDTHS = (1, 2, 3, 4, 7, 8, 16, 33, 64, 512)
F32, F16, I32 = 0, 1, 26
N_TYPES = 43
N_SEQUENCES = 4
N_CELLS = 512
N_STATES = 3  # number of sequences with recurrent states
# Some operations return N_BACK states: one after each of the last N_BACK tokens.
N_BACK = 3

# Operations that only move, repeat or generate values, so their bits cannot depend on
# the number of rows.
MOVES = {
    "ARANGE", "CONCAT", "CONT", "CPY", "FILL", "GET_ROWS", "NONE", "PAD", "PERMUTE", "REPEAT", "RESHAPE", "SET_ROWS",
    "TRANSPOSE", "VIEW",
}  # fmt: skip
# {ggml's name for an operation: name of a case that checks the operation}
CHECKED_BY = {
    "ABS": "abs", "ADD": "add", "ADD_ID": "add", "ARGSORT": "argsort", "CLAMP": "clamp",
    "DIV": "div", "DSV4_HC_COMB": "mix of streams", "DSV4_HC_POST": "streams from one",
    "DSV4_HC_PRE": "one of streams", "EXP": "exp", "FLASH_ATTN_EXT": "flash attention",
    "GATED_DELTA_NET": "gated delta net", "GATED_LINEAR_ATTN": "gated linear attention",
    "GEGLU": "geglu", "GELU": "gelu",
    "L2_NORM": "l2_norm", "LIGHTNING_INDEXER": "lightning indexer", "MUL": "mul",
    "MUL_MAT": "mul_mat f32 plain", "MUL_MAT_ID": "mul_mat_id f32 plain", "NORM": "norm",
    "RELU": "relu", "RMS_NORM": "rms_norm", "ROPE": "rope, halves", "ROPE_BACK": "rope, back",
    "SCALE": "scale", "SGN": "sgn", "SIGMOID": "sigmoid", "SILU": "silu",
    "SOFTPLUS": "softplus", "SOFT_MAX": "soft_max", "SQR": "sqr", "SQRT": "sqrt",
    "SSM_CONV": "convolution", "SSM_SCAN": "scan, a decay for each head", "SUB": "sub",
    "SUM_ROWS": "sum_rows", "SWIGLU": "swiglu", "SWIGLU_CLAMP": "swiglu, clamped",
    "TANH": "tanh", "TOP_K": "top-k",
}  # fmt: skip

# ggml keeps a pointer to this function, so Python must not free it.
QUIET = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(
    lambda _level, _text, _data: None
)

Array = npt.NDArray[Any]
# A function from row numbers to the result, whose first axis has these rows.
Compute = Callable[[Sequence[int]], Array]


class InitParams(c.Structure):
    """The C struct ggml_init_params."""

    _fields_ = [
        ("mem_size", c.c_size_t),
        ("mem_buffer", c.c_void_p),
        ("no_alloc", c.c_bool),
    ]


@dataclass(frozen=True)
class Case:
    """A named operation. compute(rows) computes it for these rows only.

    A row computed alone can thus be compared with the same row computed among others.
    """

    name: str
    compute: Compute

    def changed(self, widths: Sequence[int] = WIDTHS) -> dict[int, list[int]]:
        """Returns {width: rows whose bits differ from the row computed alone}. Omits
        widths at which no row changes."""
        alone = [self.compute([row]).tobytes() for row in range(max(widths))]
        found = {}
        for width in widths:
            together = self.compute(range(width))
            rows = [
                row
                for row in range(width)
                if together[row : row + 1].tobytes() != alone[row]
            ]
            if rows:
                found[width] = rows
        return found


# Computes tokens of n sequences: (states [n, ...] before these tokens, *inputs [n,
# n_tokens, ...]). Returns the outputs [n, n_tokens, ...] and the states [n_back, n,
# ...] after each of the last n_back tokens, the most recent token first.
Advance = Callable[..., tuple[Array, Array]]


@dataclass(frozen=True)
class StateCase:
    """An operation with a state for each sequence, and the function that computes some
    tokens of some sequences."""

    name: str
    advance: Advance
    first: Array  # the states [N_STATES, ...] before the first token
    inputs: Sequence[Array]  # each [N_STATES, n_tokens, ...]

    def changed(self, widths: Sequence[int] = WIDTHS) -> dict[int, list[int]]:
        """Returns {width: tokens whose output or state changes}. Omits widths at which
        no token changes.

        A token changes if its bits in passes of this width, with all sequences
        together, differ from the bits when each sequence is computed alone, token by
        token.
        """
        n_tokens = max(widths)
        alone = [self._alone(sequence, n_tokens) for sequence in range(N_STATES)]
        outputs, states = (np.stack(arrays) for arrays in zip(*alone, strict=True))
        found = {}
        for width in widths:
            tokens = sorted(self._changed_in_passes(width, outputs, states))
            if tokens:
                found[width] = tokens
        return found

    def _alone(self, sequence: int, n_tokens: int) -> tuple[Array, Array]:
        """Returns the output of each token of a sequence, and the state after each
        token."""
        outputs, states = [], []
        state = self.first[sequence : sequence + 1]
        for token in range(n_tokens):
            parts = [
                values[sequence : sequence + 1, token : token + 1]
                for values in self.inputs
            ]
            output, after = self.advance(state, *parts)
            state = after[0]
            outputs.append(output[0, 0])
            states.append(state[0])
        return np.stack(outputs), np.stack(states)

    def _changed_in_passes(self, width: int, outputs: Array, states: Array) -> set[int]:
        changed = set()
        state = self.first
        n_tokens = outputs.shape[1]
        for begin in range(0, n_tokens, width):
            end = min(begin + width, n_tokens)
            parts = [values[:, begin:end] for values in self.inputs]
            output, after = self.advance(state, *parts)
            state = after[0]
            for token in range(begin, end):
                if output[:, token - begin].tobytes() != outputs[:, token].tobytes():
                    changed.add(token)
            for n_back, earlier in enumerate(after[: end - begin]):
                if earlier.tobytes() != states[:, end - 1 - n_back].tobytes():
                    changed.add(end - 1 - n_back)
        return changed


class Ggml:
    """ggml's CPU backend, called through ctypes. Shapes are numpy's: the reverse of
    ggml's."""

    def __init__(self, n_threads: int = 2) -> None:
        folder = library.find_library()
        self._base, cpu = (
            c.CDLL(str(folder / f"libggml-{name}.so")) for name in ("base", "cpu")
        )
        self._reg = self._pointer(cpu.ggml_backend_cpu_reg)
        self._device = self._pointer(
            self._base.ggml_backend_reg_dev_get, self._reg, c.c_size_t(0)
        )
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
        address = self._pointer(
            get_function, self._reg, b"ggml_backend_dev_get_extra_bufts"
        ).value
        assert address is not None
        found = c.CFUNCTYPE(c.POINTER(c.c_void_p), c.c_void_p)(address)(self._device)
        self._base.ggml_backend_buft_name.restype = c.c_char_p
        for buffer_type in found:
            if buffer_type is None:
                return None
            if (
                self._base.ggml_backend_buft_name(c.c_void_p(buffer_type))
                == name.encode()
            ):
                return c.c_void_p(buffer_type)
        return None

    def type_name(self, ggml_type: int) -> str:
        """Returns ggml's name for a type, or "" if the number is not in use."""
        self._base.ggml_type_name.restype = c.c_char_p
        self._base.ggml_type_size.restype = c.c_size_t
        is_used = self._base.ggml_type_size(ggml_type) > 0
        return (self._base.ggml_type_name(ggml_type) or b"").decode() if is_used else ""

    def op_name(self, node: int) -> str:
        """Returns ggml's name for the operation of the node at this address."""
        self._base.ggml_op_desc.restype = c.c_char_p
        return str(self._base.ggml_op_desc(c.c_void_p(node)).decode())

    def row_bytes(self, ggml_type: int, n: int) -> int:
        """Returns the size in bytes of n values of this type."""
        self._base.ggml_row_size.restype = c.c_size_t
        return int(self._base.ggml_row_size(ggml_type, c.c_int64(n)))

    def quantized(self, ggml_type: int, values: Array) -> bytes:
        """Returns the bytes of the values [..., n], quantised by ggml to this type."""
        flat = np.ascontiguousarray(values, np.float32)
        n = flat.shape[-1]
        out = np.zeros((flat.size // n, self.row_bytes(ggml_type, n)), np.uint8)
        importance = np.ones(n, np.float32)
        self._base.ggml_quantize_chunk.restype = c.c_size_t
        self._base.ggml_quantize_chunk(
            ggml_type, flat.ctypes.data_as(c.c_void_p), out.ctypes.data_as(c.c_void_p), c.c_int64(0),
            c.c_int64(len(out)), c.c_int64(n), importance.ctypes.data_as(c.c_void_p),
        )  # fmt: skip
        return out.tobytes()

    def graph(self, buffer_type: c.c_void_p | None = None) -> Graph:
        """Returns a new graph, whose weights are in this buffer type; None: in plain
        memory."""
        return Graph(
            self._base,
            self._backend,
            self._device,
            self.plain,
            buffer_type or self.plain,
        )


class Graph:
    """A ggml graph: inputs with their values, and operations on them. `close` frees
    it."""

    def __init__(
        self,
        base: Any,
        backend: Any,
        device: Any,
        plain: c.c_void_p,
        of_weights: c.c_void_p,
    ) -> None:
        self._base = base
        self._backend = backend
        self._device = device
        self._buffers = [plain, of_weights]
        self._contexts = [
            Ggml._pointer(base.ggml_init, InitParams(1 << 20, None, True))
            for _ in range(2)
        ]
        self._values: list[tuple[c.c_void_p, bytes]] = []
        self._allocated: list[c.c_void_p] = []

    def input(
        self,
        ggml_type: int,
        shape: Sequence[int],
        values: bytes,
        is_weight: bool = False,
    ) -> c.c_void_p:
        """Adds an input tensor [shape] and returns it. `prepare` writes the bytes
        `values` into the tensor."""
        dims = (c.c_int64 * len(shape))(*reversed(shape))
        tensor = Ggml._pointer(
            self._base.ggml_new_tensor,
            self._contexts[is_weight],
            ggml_type,
            len(shape),
            dims,
        )
        self._values.append((tensor, values))
        return tensor

    def array(self, values: Array) -> c.c_void_p:
        """Adds an input tensor with the values and shape of a float32, float16 or int32
        array, and returns it."""
        kinds = {
            np.dtype(np.float32): F32,
            np.dtype(np.float16): F16,
            np.dtype(np.int32): I32,
        }
        return self.input(
            kinds[values.dtype], values.shape, np.ascontiguousarray(values).tobytes()
        )

    def op(self, name: str, *arguments: Any) -> c.c_void_p:
        """Returns the node that ggml_<name> creates. Numbers other than C ints must be
        passed as ctypes values."""
        return Ggml._pointer(
            getattr(self._base, f"ggml_{name}"), self._contexts[0], *arguments
        )

    def change(self, name: str, *arguments: Any) -> None:
        """Calls ggml_<name>, which changes a node."""
        getattr(self._base, f"ggml_{name}")(*arguments)

    def supports(self, node: c.c_void_p) -> bool:
        """Returns True if the CPU backend can compute this node with its weights in the
        graph's buffer type."""
        self._allocate()
        self._base.ggml_backend_dev_supports_op.restype = c.c_bool
        return bool(self._base.ggml_backend_dev_supports_op(self._device, node))

    def _allocate(self) -> None:
        if not self._allocated:
            pairs = zip(self._contexts, self._buffers, strict=True)
            allocate = self._base.ggml_backend_alloc_ctx_tensors_from_buft
            self._allocated = [
                Ggml._pointer(allocate, context, buffer_type)
                for context, buffer_type in pairs
            ]

    def set(self, tensor: c.c_void_p, values: Array) -> None:
        """Replaces the values of an input, whose memory `prepare` must have
        allocated."""
        data = np.ascontiguousarray(values)
        self._base.ggml_backend_tensor_set(
            tensor,
            data.ctypes.data_as(c.c_void_p),
            c.c_size_t(0),
            c.c_size_t(data.nbytes),
        )

    def prepare(self, node: c.c_void_p) -> Callable[[], None]:
        """Allocates all tensors, sets the values of the inputs, and returns a function
        that computes the node."""
        self._base.ggml_new_graph.restype = c.c_void_p
        graph = c.c_void_p(self._base.ggml_new_graph(self._contexts[0]))
        self._base.ggml_build_forward_expand(graph, node)
        self._allocate()
        for tensor, values in self._values:
            self._base.ggml_backend_tensor_set(
                tensor, values, c.c_size_t(0), c.c_size_t(len(values))
            )

        def compute() -> None:
            status = self._base.ggml_backend_graph_compute(self._backend, graph)
            assert status == 0, f"ggml_backend_graph_compute: status {status}"

        return compute

    def compute(
        self, node: c.c_void_p, shape: Sequence[int], dtype: type = np.float32
    ) -> Array:
        """Computes a node with contiguous memory and returns its values [shape]."""
        self.prepare(node)()
        return self.values(node, shape, dtype)

    def values(
        self, tensor: c.c_void_p, shape: Sequence[int], dtype: type = np.float32
    ) -> Array:
        """Returns the values [shape] at the beginning of a tensor's memory."""
        out: Array = np.empty(shape, dtype)
        self._base.ggml_backend_tensor_get(
            tensor,
            out.ctypes.data_as(c.c_void_p),
            c.c_size_t(0),
            c.c_size_t(out.nbytes),
        )
        return out

    def close(self) -> None:
        """Frees tensors and contexts."""
        for buffer in self._allocated:
            self._base.ggml_backend_buffer_free(buffer)
        for context in self._contexts:
            self._base.ggml_free(context)


def supported(
    ggml: Ggml,
    buffer_type: c.c_void_p | None,
    build: Callable[[Graph, list[int]], c.c_void_p],
    shape: Sequence[int],
) -> Compute | None:
    """Returns a function that computes the node of `build` for some rows, with weights
    in the buffer type. The result has the shape [number of rows, *shape].

    Returns None if the CPU does not support the operation.
    """

    def compute(rows: Sequence[int]) -> Array:
        graph = ggml.graph(buffer_type)
        out = graph.compute(build(graph, list(rows)), (len(rows), *shape))
        graph.close()
        return out

    graph = ggml.graph(buffer_type)
    is_supported = graph.supports(build(graph, [0]))
    graph.close()
    return compute if is_supported else None


def product(
    ggml: Ggml, ggml_type: int, x: Array, n_out: int, buffer_type: c.c_void_p | None
) -> Compute | None:
    """Returns a function that computes MUL_MAT of rows of x [n, n_in] and random
    weights [n_out, n_in].

    Returns None if the CPU does not support the operation.
    """
    values = np.random.default_rng(1).standard_normal((n_out, x.shape[1]))
    weights = ggml.quantized(ggml_type, values)

    def build(graph: Graph, rows: list[int]) -> c.c_void_p:
        w = graph.input(ggml_type, values.shape, weights, is_weight=True)
        return graph.op("mul_mat", w, graph.array(x[rows]))

    return supported(ggml, buffer_type, build, (n_out,))


def expert_product(
    ggml: Ggml, ggml_type: int, x: Array, n_out: int, buffer_type: c.c_void_p | None
) -> Compute | None:
    """Returns a function that computes MUL_MAT_ID of rows of x [n, n_in] with two of
    eight experts [n_out, n_in] each.

    Every second row uses expert 7. Returns None if the CPU does not support the
    operation.
    """
    n_expert = 8
    n_used = 2
    rng = np.random.default_rng(2)
    values = rng.standard_normal((n_expert, n_out, x.shape[1]))
    weights = ggml.quantized(ggml_type, values)
    ids = np.column_stack(
        [
            np.where(np.arange(len(x)) % 2, 7, rng.integers(0, 4, len(x))),
            rng.integers(4, 7, len(x)),
        ]
    )
    ids = ids.astype(np.int32)

    def build(graph: Graph, rows: list[int]) -> c.c_void_p:
        w = graph.input(ggml_type, values.shape, weights, is_weight=True)
        return graph.op(
            "mul_mat_id", w, graph.array(x[rows, None, :]), graph.array(ids[rows])
        )

    return supported(ggml, buffer_type, build, (n_used, n_out))


def products(
    ggml: Ggml, n_in: int, n_out: int, n_rows: int, left_out: Collection[str]
) -> Iterator[Case]:
    """Yields cases for MUL_MAT and MUL_MAT_ID with plain and interleaved weights of
    each type.

    Omits the types in `left_out`, and types and layouts that the CPU does not support.
    """
    x = np.random.default_rng(0).standard_normal((n_rows, n_in)).astype(np.float32)
    skipped = {"f64", "i8", "i16", "i32", "i64", "q8_1", "q8_K", *left_out}
    for name, ggml_type in ggml.types.items():
        for layout, buffer_type in (("plain", None), ("interleaved", ggml.interleaved)):
            if name in skipped or (layout == "interleaved" and buffer_type is None):
                continue
            for operation, make in (
                ("mul_mat", product),
                ("mul_mat_id", expert_product),
            ):
                compute = make(ggml, ggml_type, x, n_out, buffer_type)
                if compute is not None:
                    yield Case(f"{operation} {name} {layout}", compute)


def attention(ggml: Ggml, is_flash: bool, n_rows: int) -> Compute:
    """Returns a function that computes attention of query rows [n, n_head, d].

    A row belongs to one of N_SEQUENCES sequences and sees the cells of this sequence,
    up to the row's position.
    """
    rng = np.random.default_rng(3)
    d, n_head, n_head_kv = 64, 4, 2
    q = rng.standard_normal((n_rows, n_head, d)).astype(np.float32)
    k, v = (
        rng.standard_normal((n_head_kv, N_CELLS, d)).astype(np.float16)
        for _ in range(2)
    )
    cells = np.arange(N_CELLS)
    row = np.arange(n_rows)[:, None]
    sees = (cells % N_SEQUENCES == row % N_SEQUENCES) & (
        cells // N_SEQUENCES <= 80 + row // N_SEQUENCES % 48
    )
    scale = c.c_float(d**-0.5)

    def compute(rows: Sequence[int]) -> Array:
        graph = ggml.graph()
        mask = graph.array(np.where(sees[list(rows)], 0, -np.inf).astype(np.float16))
        queries = graph.array(q[list(rows)].transpose(1, 0, 2))
        keys = graph.array(k)
        if is_flash:
            values = graph.array(v)
            zero = c.c_float(0)
            node = graph.op(
                "flash_attn_ext", queries, keys, values, mask, scale, zero, zero
            )
        else:
            values = graph.array(v.transpose(0, 2, 1))
            weights = graph.op(
                "soft_max_ext",
                graph.op("mul_mat", keys, queries),
                mask,
                scale,
                c.c_float(0),
            )
            mixed = graph.op("mul_mat", values, weights)
            node = graph.op("cont", graph.op("permute", mixed, 0, 2, 1, 3))
        out = graph.compute(node, (len(rows), n_head, d))
        graph.close()
        return out

    return compute


def simple(
    ggml: Ggml,
    inputs: Sequence[Array],
    build: Callable[..., c.c_void_p],
    shape: Sequence[int],
    dtype: type = np.float32,
) -> Compute:
    """Returns a function that applies the operation of `build` to rows of each input
    [n, ...].

    The function returns an array [number of rows, *shape].
    """

    def compute(rows: Sequence[int]) -> Array:
        graph = ggml.graph()
        node = build(graph, *(graph.array(values[np.array(rows)]) for values in inputs))
        out = graph.compute(node, (len(rows), *shape), dtype)
        graph.close()
        return out

    return compute


UNARY = (
    "abs",
    "exp",
    "gelu",
    "relu",
    "sgn",
    "sigmoid",
    "silu",
    "softplus",
    "sqr",
    "sqrt",
    "tanh",
)


def node_of(name: str, *numbers: Any) -> Callable[..., c.c_void_p]:
    """Returns a function that returns the node ggml_<name>(*inputs, *numbers)."""
    return lambda graph, *inputs: graph.op(name, *inputs, *numbers)


def weighted_sum(graph: Graph, experts: c.c_void_p, weights: c.c_void_p) -> c.c_void_p:
    """Returns the node with the sum of the experts' outputs [n, n_used, n_embd] times
    their weights [n, n_used, 1]."""
    scaled = graph.op("mul", experts, weights)
    columns = graph.op("cont", graph.op("permute", scaled, 1, 0, 2, 3))
    return graph.op("cont", graph.op("sum_rows", columns))


def top_k(graph: Graph, x: c.c_void_p) -> c.c_void_p:
    """Returns the node with the ids of the 8 largest values in each row."""
    return graph.op("cont", graph.op("top_k", x, 8))


def others(ggml: Ggml, n: int, n_rows: int) -> Iterator[Case]:
    """Yields cases for attention, norms, rope, softmax, top-k, gates, weighted sums and
    element-wise operations."""
    for is_flash in (True, False):
        yield Case(
            f"{'flash' if is_flash else 'plain'} attention",
            attention(ggml, is_flash, n_rows),
        )
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((n_rows, n)).astype(np.float32) for _ in range(2))
    heads = rng.standard_normal((n_rows, 4, 64)).astype(np.float32)
    positions = np.arange(n_rows, dtype=np.int32)
    experts = rng.standard_normal((n_rows, 8, n)).astype(np.float32)
    weights = rng.random((n_rows, 8, 1)).astype(np.float32)
    eps = c.c_float(1e-6)
    zero = c.c_float(0)
    one = c.c_float(1)

    frequencies = c.c_float(1e6), one, zero, one, zero, zero

    def rope(mode: int, name: str = "rope_ext") -> Callable[..., c.c_void_p]:
        return node_of(name, None, 64, mode, 4096, *frequencies)

    def case(
        name: str, build: Callable[..., c.c_void_p], *inputs: Array, **others: Any
    ) -> Case:
        return Case(name, simple(ggml, inputs, build, **{"shape": (n,), **others}))

    for name in ("norm", "rms_norm", "l2_norm"):
        yield case(name, node_of(name, eps), x)
    for kind, build in (
        ("pairs of neighbours", rope(0)),
        ("halves", rope(2)),
        ("back", rope(2, "rope_ext_back")),
    ):
        yield case(f"rope, {kind}", build, heads, positions, shape=(4, 64))
    yield case("soft_max", node_of("soft_max"), x)
    yield case("sum_rows", node_of("sum_rows"), x, shape=(1,))
    yield case("top-k", top_k, x, shape=(8,), dtype=np.int32)
    yield case("argsort", node_of("argsort", 1), x, dtype=np.int32)
    yield case("swiglu", node_of("swiglu_split"), x, y)
    yield case("swiglu, clamped", node_of("swiglu_clamp", one), x, y)
    yield case("geglu", node_of("geglu_split"), x, y)
    for name in UNARY:
        yield case(name, node_of(name), np.abs(x) if name == "sqrt" else x)
    for name in ("add", "mul", "sub", "div"):
        yield case(name, node_of(name), x, y)
    yield case("scale", node_of("scale", c.c_float(0.3)), x)
    yield case("clamp", node_of("clamp", c.c_float(-1), one), x)
    yield case("weighted sum", weighted_sum, experts, weights)


def streams(ggml: Ggml, n: int, n_rows: int) -> Iterator[Case]:
    """Yields cases for operations that mix residual streams, and a case for the scores
    of sparse attention."""
    rng = np.random.default_rng(5)
    n_streams = 4
    n_mixed = (2 + n_streams) * n_streams

    def rows(*shape: int) -> Array:
        return rng.standard_normal((n_rows, *shape)).astype(np.float32)

    x, streams_of, gates = rows(n), rows(n_streams, n), rows(n_streams, n)
    weights, mixes, combined = (
        rows(n_streams),
        rows(n_mixed),
        rows(n_streams, n_streams),
    )
    scale, base = (
        rng.standard_normal(size).astype(np.float32) for size in (3, n_mixed)
    )
    eps, one = c.c_float(1e-6), c.c_float(1)

    def mix(graph: Graph, a: c.c_void_p) -> c.c_void_p:
        return graph.op(
            "dsv4_hc_comb", a, graph.array(scale), graph.array(base), eps, 20
        )

    yield Case("mix of streams", simple(ggml, [mixes], mix, (n_streams, n_streams)))
    yield Case(
        "one of streams",
        simple(ggml, [streams_of, weights], node_of("dsv4_hc_pre"), (n,)),
    )
    gated = node_of("dsv4_hc_pre_gated", one)
    yield Case("one of streams, gated", simple(ggml, [streams_of, gates], gated, (n,)))
    inputs = [x, streams_of, weights, combined]
    spread = simple(ggml, inputs, node_of("dsv4_hc_post"), (n_streams, n))
    yield Case("streams from one", spread)

    keys = rng.standard_normal((N_CELLS, 1, 64)).astype(np.float16)
    seen = np.arange(N_CELLS) <= np.arange(n_rows)[:, None] % N_CELLS
    mask = np.where(seen, 0, -np.inf).astype(np.float16)

    def scores(
        graph: Graph, q: c.c_void_p, weight: c.c_void_p, seen: c.c_void_p
    ) -> c.c_void_p:
        return graph.op("lightning_indexer", q, graph.array(keys), weight, seen)

    yield Case(
        "lightning indexer",
        simple(ggml, [rows(4, 64), rows(4), mask], scores, (N_CELLS,)),
    )


def outputs_and_states(
    graph: Graph, node: c.c_void_p, outputs: tuple[int, ...], states: tuple[int, ...]
) -> tuple[Array, Array]:
    """Computes a node whose memory holds outputs, then states. Returns both arrays and
    frees the graph."""
    n_outputs = int(np.prod(outputs))
    values = graph.compute(node, (n_outputs + int(np.prod(states)),))
    graph.close()
    return values[:n_outputs].reshape(outputs), values[n_outputs:].reshape(states)


def states_of_delta_nets(ggml: Ggml, n_tokens: int) -> Iterator[StateCase]:
    """Yields cases for the gated delta net, with a gate for each head or, as in Kimi's
    delta attention, each channel.

    Both kinds have a case that returns only the last state, and a case that also
    returns earlier states.
    """
    rng = np.random.default_rng(6)
    n_head, n_key_head, d = 4, 2, 64

    def tokens(*shape: int) -> Array:
        return rng.standard_normal((N_STATES, n_tokens, *shape)).astype(np.float32)

    q, k = (
        x / np.linalg.norm(x, axis=-1, keepdims=True)
        for x in (tokens(n_key_head, d), tokens(n_key_head, d))
    )
    v, beta = tokens(n_head, d), 1 / (1 + np.exp(-tokens(n_head, 1)))
    first = rng.standard_normal((N_STATES, n_head, d, d)).astype(np.float32)
    gates = {"gated delta net": 1, "gated delta net, a gate for each channel": d}
    for name, n_gates in gates.items():
        inputs = q, k, v, -0.1 * np.abs(tokens(n_head, n_gates)), beta
        for n_back in (1, N_BACK):
            suffix = ", earlier states" if n_back > 1 else ""
            yield StateCase(
                name + suffix, partial(advance_delta_net, ggml, n_back), first, inputs
            )


def advance_delta_net(
    ggml: Ggml, n_back: int, states: Array, *inputs: Array
) -> tuple[Array, Array]:
    """Advances a gated delta net (see Advance) with these inputs."""
    graph = ggml.graph()
    nodes = [graph.array(values) for values in (*inputs, states)]
    node = graph.op("gated_delta_net", *nodes, c.c_int64(n_back))
    v = inputs[2]
    return outputs_and_states(graph, node, v.shape, (n_back, *states.shape))


def states_of_scans(ggml: Ggml, n_tokens: int) -> Iterator[StateCase]:
    """Yields cases for two scans: Mamba 2's with a decay for each head, and Mamba 1's
    with one for each state value."""
    rng = np.random.default_rng(7)

    def tokens(*shape: int) -> Array:
        return rng.standard_normal((N_STATES, n_tokens, *shape)).astype(np.float32)

    kinds = (("head", 4, 64, 2, 128, 1, N_BACK), ("value", 96, 1, 1, 16, 16, 1))
    for kind, n_head, d, n_group, d_state, n_decay, n_back in kinds:
        decay = -np.exp(rng.standard_normal((n_head, n_decay))).astype(np.float32)
        first = rng.standard_normal((N_STATES, n_head, d, d_state)).astype(np.float32)
        inputs = (
            tokens(n_head, d),
            tokens(n_head),
            tokens(n_group, d_state),
            tokens(n_group, d_state),
        )
        yield StateCase(
            f"scan, a decay for each {kind}",
            partial(advance_scan, ggml, decay, n_back),
            first,
            inputs,
        )


def advance_scan(
    ggml: Ggml, decay: Array, n_back: int, states: Array, *inputs: Array
) -> tuple[Array, Array]:
    """Advances a scan (see Advance) with these inputs: x, time steps, B and C."""
    graph = ggml.graph()
    x, steps, b, c_ = inputs
    ids = np.arange(len(states), dtype=np.int32)
    nodes = [graph.array(values) for values in (states, x, steps, decay, b, c_, ids)]
    node = graph.op("ssm_scan", *nodes, c.c_int64(n_back))
    return outputs_and_states(graph, node, x.shape, (n_back, *states.shape))


def states_of_convolutions(ggml: Ggml, n_tokens: int) -> Iterator[StateCase]:
    """Yields cases for the convolution before recurrent states, over four tokens, and
    for LFM2's, over three tokens."""
    rng = np.random.default_rng(8)
    n = 192
    x = rng.standard_normal((N_STATES, n_tokens, n)).astype(np.float32)
    for name, n_conv in (("convolution", 4), ("short convolution", 3)):
        weights = rng.standard_normal((n, n_conv)).astype(np.float32)
        first = rng.standard_normal((N_STATES, n, n_conv - 1)).astype(np.float32)
        yield StateCase(name, partial(advance_convolution, ggml, weights), first, [x])


def advance_convolution(
    ggml: Ggml, weights: Array, states: Array, x: Array
) -> tuple[Array, Array]:
    """Advances a convolution (see Advance) of x [n, n_tokens, n_value].

    The state holds the last inputs of each sequence.
    """
    graph = ggml.graph()
    columns = graph.op("transpose", graph.array(x))
    both = graph.op("concat", graph.array(states), columns, 0)
    node = graph.op("ssm_conv", both, graph.array(weights))
    outputs = graph.compute(node, x.shape)
    graph.close()
    seen = np.concatenate([states, x.transpose(0, 2, 1)], axis=2)
    return outputs, seen[None, :, :, -states.shape[2] :]


def states_of_linear_attention(ggml: Ggml, n_tokens: int) -> Iterator[StateCase]:
    """Yields the case for gated linear attention."""
    rng = np.random.default_rng(9)
    n_head, d = 4, 64
    k, v, q = rng.standard_normal((3, N_STATES, n_tokens, n_head, d)).astype(np.float32)
    decay = np.exp(-np.abs(rng.standard_normal(q.shape))).astype(np.float32)
    first = rng.standard_normal((N_STATES, n_head * d * d)).astype(np.float32)
    yield StateCase(
        "gated linear attention",
        partial(advance_linear_attention, ggml),
        first,
        (k, v, q, decay),
    )


def advance_linear_attention(
    ggml: Ggml, states: Array, *inputs: Array
) -> tuple[Array, Array]:
    """Advances gated linear attention (see Advance) with these inputs [n, n_tokens,
    n_head, d]."""
    graph = ggml.graph()
    shape = inputs[0].shape
    nodes = [graph.array(values.reshape(-1, *shape[2:])) for values in inputs]
    node = graph.op("gated_linear_attn", *nodes, graph.array(states), c.c_float(1))
    return outputs_and_states(graph, node, shape, (1, *states.shape))


def with_states(ggml: Ggml, n_tokens: int) -> Iterator[StateCase]:
    """Yields the cases for the checked operations that have a recurrent state."""
    yield from states_of_delta_nets(ggml, n_tokens)
    yield from states_of_scans(ggml, n_tokens)
    yield from states_of_convolutions(ggml, n_tokens)
    yield from states_of_linear_attention(ggml, n_tokens)


def operations_of(model: Path, n_tokens: Sequence[int] = (1, 64)) -> set[str]:
    """Returns ggml's names for the operations that the CPU computes for a model, in
    passes of `n_tokens` tokens."""
    llama = library.llama_cpp()
    ggml = Ggml()
    found = set()

    def look(node: int, _asks: bool, _data: int) -> bool:
        found.add(ggml.op_name(node))
        return False

    with ExitStack() as undo:
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        weights = llama.llama_model_load_from_file(str(model).encode(), options)
        undo.callback(llama.llama_model_free, weights)
        settings = llama.llama_context_default_params()
        settings.cb_eval = llama.ggml_backend_sched_eval_callback(look)
        settings.flash_attn_type = 1
        settings.n_batch = max(n_tokens)
        context = llama.llama_init_from_model(weights, settings)
        undo.callback(llama.llama_free, context)
        for n in n_tokens:
            tokens = (llama.llama_token * n)(*range(5, 5 + n))
            status = llama.llama_decode(context, llama.llama_batch_get_one(tokens, n))
            assert status == 0, f"llama_decode: status {status}"
    return found


def print_operations(model: Path) -> int:
    """Prints each operation of a model's graph, except MOVES, and the name of a case
    that checks the operation.

    Returns the number of printed operations that no case checks.
    """
    names = sorted(operations_of(model) - MOVES)
    for name in names:
        print(f"{name:24} {CHECKED_BY.get(name, 'not checked')}")
    return sum(name not in CHECKED_BY for name in names)


def cases(
    n_in: int = 512,
    n_out: int = 192,
    n_rows: int = max(WIDTHS),
    n_threads: int = 2,
    left_out: Collection[str] = (),
) -> Iterator[Case | StateCase]:
    """Yields the cases for all operations, with n_rows rows or tokens. Weights of
    products are [n_out, n_in].

    left_out: types of weights to leave out.
    """
    ggml = Ggml(n_threads)
    yield from products(ggml, n_in, n_out, n_rows, left_out)
    yield from others(ggml, n_in, n_rows)
    yield from streams(ggml, n_in, n_rows)
    yield from with_states(ggml, n_rows)


def silence() -> None:
    """Switches off ggml's log in this process."""
    c.CDLL(str(library.find_library() / "libggml-base.so")).ggml_log_set(QUIET, None)


def main() -> int:
    """Prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="operations whose name matches"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--all",
        action="store_true",
        help="list also operations of which no row changes",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help="list the operations of this model's graph instead",
    )
    options = parser.parse_args()
    silence()
    if options.model:
        return 1 if print_operations(options.model) else 0
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
