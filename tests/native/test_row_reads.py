"""Tests GET_ROWS from a table that stays in the model's file: values, failed reads,
mirrors and a cancellation."""

from __future__ import annotations

import ctypes as c
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from fake_model import I32, FakeModel, InitParams, Open
from gguf import GGMLQuantizationType, dequantize, quantize
from product import N_THREADS, aborts, check_failure, load
from waiting import until

from moegguf.errors import OptionError
from moegguf.gguf.experts import RowTable
from moegguf.native import abi
from moegguf.native.store import Store, StoreContext
from moegguf.testing.library import arm_fault, count_operations, limit_faults

NAME = "token_embd.weight"
N_ROWS, N_COLS = 300, 4096  # the table in F32 has more bytes than are read at once
TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
)
ROWS = [7, 299, 0, 7]


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    limit_faults(None)
    for kind in ("read", "slow_read"):
        arm_fault(kind, 0)


class Rows:
    """GET_ROWS of `rows` from the table of a store, computed by ggml's CPU backend."""

    def __init__(
        self, store: Store, type_: GGMLQuantizationType, rows: Sequence[int]
    ) -> None:
        self._base = load("ggml-base", (
            "ggml_init", "ggml_new_tensor_1d", "ggml_new_tensor_2d", "ggml_get_rows", "ggml_new_graph",
            "ggml_backend_alloc_ctx_tensors_from_buft", "ggml_backend_cpu_buffer_type",
        ))  # fmt: skip
        self._cpu = load("ggml-cpu", ("ggml_backend_cpu_init",))
        base, allocate = self._base, self._base.ggml_backend_alloc_ctx_tensors_from_buft
        self._weights = c.c_void_p(base.ggml_init(InitParams(1 << 16, None, True)))
        table = c.c_void_p(
            base.ggml_new_tensor_2d(
                self._weights, int(type_), c.c_int64(N_COLS), c.c_int64(N_ROWS)
            )
        )
        base.ggml_set_name(table, NAME.encode())
        self._reserved = c.c_void_p(
            allocate(self._weights, c.c_void_p(store.row_buffer_type))
        )
        self._context = c.c_void_p(base.ggml_init(InitParams(1 << 20, None, True)))
        ids = c.c_void_p(
            base.ggml_new_tensor_1d(self._context, I32, c.c_int64(len(rows)))
        )
        self._out = c.c_void_p(base.ggml_get_rows(self._context, table, ids))
        self._graph = c.c_void_p(base.ggml_new_graph(self._context))
        base.ggml_build_forward_expand(self._graph, self._out)
        self._buffer = c.c_void_p(
            allocate(self._context, c.c_void_p(base.ggml_backend_cpu_buffer_type()))
        )
        values = np.asarray(rows, np.int32)
        base.ggml_backend_tensor_set(
            ids,
            values.ctypes.data_as(c.c_void_p),
            c.c_size_t(0),
            c.c_size_t(values.nbytes),
        )
        self._backend = c.c_void_p(self._cpu.ggml_backend_cpu_init())
        self._cpu.ggml_backend_cpu_set_n_threads(self._backend, N_THREADS)
        self._shape = len(rows), N_COLS

    def compute(self) -> npt.NDArray[np.float32]:
        """Returns the rows as floats, [n_rows][N_COLS]."""
        self._base.ggml_backend_graph_compute(self._backend, self._graph)
        found = np.zeros(self._shape, np.float32)
        self._base.ggml_backend_tensor_get(
            self._out,
            found.ctypes.data_as(c.c_void_p),
            c.c_size_t(0),
            c.c_size_t(found.nbytes),
        )
        return found

    def close(self) -> None:
        self._base.ggml_backend_free(self._backend)
        for buffer in (self._buffer, self._reserved):
            self._base.ggml_backend_buffer_free(buffer)
        for context in (self._context, self._weights):
            self._base.ggml_free(context)


Opened = tuple[Rows, Store, StoreContext, npt.NDArray[np.float32]]


def with_table(
    fake: FakeModel, type_: GGMLQuantizationType
) -> tuple[FakeModel, npt.NDArray[np.float32]]:
    """Appends a table of random values to the model's file. Returns the model with the
    table, and the values."""
    values = np.random.default_rng(0).standard_normal((N_ROWS, N_COLS), np.float32)
    data = quantize(values, type_)
    path = fake.paths[0]
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(data.tobytes())
    table = RowTable(NAME, 0, offset, data.nbytes)
    return replace(fake, layout=replace(fake.layout, row_tables=(table,))), dequantize(
        data, type_
    )


@pytest.fixture
def opened(fake: FakeModel, open_store: Open) -> Iterator[Opened]:
    """Yields GET_ROWS of ROWS from a table in F32, with its store, the store's context,
    and the right result."""
    model, values = with_table(fake, TYPES[0])
    store, context = open_store(model, 8)
    rows = Rows(store, TYPES[0], ROWS)
    yield rows, store, context, values[ROWS]
    rows.close()


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
@pytest.mark.parametrize(
    "rows", [[5], ROWS, list(range(N_ROWS))], ids=["one", "four", "all"]
)
def test_rows_equal_the_rows_in_the_file(
    fake: FakeModel, open_store: Open, type_: GGMLQuantizationType, rows: list[int]
) -> None:
    model, values = with_table(fake, type_)
    store, context = open_store(model, 8)
    found = Rows(store, type_, rows)
    for _ in range(2):
        assert np.array_equal(found.compute(), values[rows])
    assert context.take_failure() is None and not aborts(context)
    found.close()


def test_a_row_that_cannot_be_read_fails_this_pass_only(opened: Opened) -> None:
    rows, _, context, expected = opened
    arm_fault("read", 1, sticky=True)
    rows.compute()
    assert aborts(context)
    arm_fault("read", 0)
    check_failure(context, abi.IO)
    assert np.array_equal(rows.compute(), expected)
    assert context.take_failure() is None


def test_a_read_that_fails_once_is_repeated(opened: Opened) -> None:
    rows, _, context, expected = opened
    arm_fault("read", 2)
    assert np.array_equal(rows.compute(), expected)
    assert context.take_failure() is None


def test_rows_are_read_from_a_mirror_if_the_file_fails(
    fake: FakeModel, open_store: Open, tmp_path: Path
) -> None:
    model, values = with_table(fake, TYPES[0])
    copy = Path(shutil.copy(fake.paths[0], tmp_path / "copy.bin"))
    store, context = open_store(model, 8, mirrors=[[copy]])
    rows = Rows(store, TYPES[0], ROWS)
    limit_faults(fake.paths[0])
    arm_fault("read", 1, sticky=True)
    assert np.array_equal(rows.compute(), values[ROWS])
    assert count_operations("read") > 0 and context.take_failure() is None
    rows.close()


def test_a_cancellation_ends_the_wait_for_a_slow_row(opened: Opened) -> None:
    rows, store, context, expected = opened
    arm_fault("slow_read", 1, sticky=True)
    thread = threading.Thread(target=rows.compute)
    thread.start()
    until(lambda: count_operations("slow_read") >= 1)
    start = time.perf_counter()
    store.cancel()
    thread.join(10)
    assert time.perf_counter() - start < 1.0
    assert aborts(context)
    arm_fault("slow_read", 0)
    store.cancel(False)
    check_failure(context, abi.CANCELLED)
    assert np.array_equal(rows.compute(), expected)


def test_a_table_in_a_missing_shard_is_refused(
    fake: FakeModel, open_store: Open
) -> None:
    layout = replace(fake.layout, row_tables=(RowTable(NAME, 1, 0, 64),))
    with pytest.raises(
        OptionError, match="a row table needs a name, and a shard that exists"
    ):
        open_store(replace(fake, layout=layout), 8)


def test_the_memory_of_a_table_is_only_reserved(opened: Opened) -> None:
    rows = opened[0]
    statm = Path("/proc/self/statm")
    before = int(statm.read_text().split()[1])
    rows.compute()
    assert (int(statm.read_text().split()[1]) - before) * 4096 < N_ROWS * N_COLS
