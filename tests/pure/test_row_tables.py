"""Tests tables that are read by row and stay in the file: layouts, plans, and pages that remain in memory."""

import mmap
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_builder import moe

from moegguf.engine import loader, row_tables
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import MACHINE, Machine, Memory
from moegguf.engine.row_tables import ROW_PAGES_BYTES, RowTables, row_pages_bytes
from moegguf.engine.solver import make_plan
from moegguf.gguf.experts import ExpertLayout, RowTable, read_layout
from moegguf.gguf.reader import Shard
from moegguf.quantities import GIB, MIB
from tools.models import PRESETS, write_sparse_model
from tools.models.tensors import tensors

N_ROWS_BASE = 4_000_000


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ExpertLayout:
    """The layout of Qwen3.8-Flash-Next with 4 layers and a table of 5.4 GiB.

    The file is sparse and occupies almost no disk space.
    """
    shape = replace(PRESETS["qwen3.8-flash-next"], n_layer=4, ple_vocab_base=N_ROWS_BASE)
    path = tmp_path_factory.mktemp("tables") / "sparse.gguf"
    return read_layout(write_sparse_model(path, shape, "q4_0"))


def test_row_table_bytes_are_not_counted_as_dense_weights(layout: ExpertLayout) -> None:
    made = {tensor.name: tensor for tensor in tensors(
        replace(PRESETS["qwen3.8-flash-next"], n_layer=4, ple_vocab_base=N_ROWS_BASE), "q4_0"
    )}  # fmt: skip
    table_bytes = made["per_layer_token_embd.weight"].n_bytes
    assert layout.row_table_bytes == table_bytes > 5 * GIB
    all_bytes = sum(tensor.n_bytes for tensor in made.values())
    assert layout.dense_bytes + layout.expert_bytes + table_bytes == all_bytes


@pytest.mark.parametrize(("arch", "n_bytes"), [("qwen4exp", 4 * 32 * 16), ("gemma4", 4 * 32 * 16), ("gemma3n", 0)])
def test_row_tables_are_recognised_only_for_architectures_that_read_by_row(
    tmp_path: Path, arch: str, n_bytes: int
) -> None:
    plain, with_table = moe(arch), moe(arch)
    with_table.tensor("per_layer_token_embd.weight", 32, 16)
    without = read_layout(plain.write(tmp_path / "without.gguf"))
    found = read_layout(with_table.write(tmp_path / "with.gguf"))
    assert found.row_table_bytes == n_bytes
    assert found.dense_bytes - without.dense_bytes == 4 * 32 * 16 - n_bytes


def test_plan_fits_a_machine_with_less_memory_than_the_row_table(layout: ExpertLayout) -> None:
    memory = Memory(8 * GIB, 4 * GIB, MACHINE)
    plan = make_plan(layout, Machine(memory), LoadSpec(n_ctx=2048))
    assert plan.total_bytes <= memory.available_bytes < layout.row_table_bytes
    assert plan.n_slots > layout.token_cycle_slots
    assert plan.facts()["dense_bytes"] == layout.dense_bytes + ROW_PAGES_BYTES


def test_row_pages_bytes_counts_a_small_table_whole(layout: ExpertLayout) -> None:
    small = replace(layout, row_tables=(RowTable(0, 4096, 3 * MIB),))
    assert row_pages_bytes(small) == 3 * MIB
    assert row_pages_bytes(replace(layout, row_tables=())) == 0


def test_loader_advice_leaves_out_the_row_table(layout: ExpertLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    advised = list[tuple[int, int]]()
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, begin, n, _how: advised.append((begin, n)))
    loader._advise(layout, "POSIX_FADV_WILLNEED", loader.threading.Event())
    table = layout.row_tables[0]
    inside = [n for begin, n in advised if table.offset <= begin < table.offset + table.n_bytes]
    assert inside == []
    assert sum(n for _, n in advised) < 2 * layout.dense_bytes


def mapped_bytes(path: Path) -> int:
    """Returns how many bytes of a file are resident in this process's memory."""
    found = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return sum(int(kib) for kib in found) * 1024


@pytest.mark.parametrize("limited_by", [MACHINE, "cgroup v2 /x"])
def test_row_table_pages_are_dropped_only_under_a_memory_limit(
    layout: ExpertLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited_by: str
) -> None:
    path = tmp_path / "table"
    n_bytes = ROW_PAGES_BYTES // 2 + MIB
    path.write_bytes(os.urandom(256) * (n_bytes // 256))
    table = RowTable(0, 4096 + 100, n_bytes - 2 * 4096)
    shard = Shard.of(path, path.stat())
    monkeypatch.setattr(row_tables, "read_memory", lambda: Memory(GIB, GIB, limited_by))
    tables = RowTables(replace(layout, shards=(shard,), row_tables=(table,)))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        first = sum(view[: 4 * MIB : 4096])
        tables.after_pass()
        assert mapped_bytes(path) >= 4 * MIB
        whole = sum(view[::4096])
        assert mapped_bytes(path) == n_bytes
        tables.after_pass()
        kept = mapped_bytes(path)
        assert kept == n_bytes if limited_by == MACHINE else kept < 4 * 4096
        assert (sum(view[: 4 * MIB : 4096]), sum(view[::4096])) == (first, whole)
