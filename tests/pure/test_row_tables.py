"""Tests tables that are read by row and stay in the file: layouts and plans."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_builder import moe

from moegguf.engine import loader
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.machine import MACHINE, Machine, Memory
from moegguf.engine.solver import make_plan
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.quantities import GIB
from tools.models import PRESETS, write_sparse_model
from tools.models.tensors import tensors

# Shapes of models with a table of 5 GiB or more, and few layers. Published files of
# Gemma 4 with experts have no such table, but llama.cpp loads one.
SHAPES = {
    "qwen4exp": replace(
        PRESETS["qwen3.8-flash-next"], n_layer=4, ple_vocab_base=4_000_000
    ),
    "gemma4": replace(
        PRESETS["gemma-4-26b-a4b"], n_layer=6, n_vocab=1 << 17, n_embd_per_layer=12288
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def layout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ExpertLayout:
    """The layout of a model of SHAPES. The file is sparse and occupies almost no disk
    space."""
    path = tmp_path_factory.mktemp("tables") / "sparse.gguf"
    return read_layout(write_sparse_model(path, SHAPES[request.param], "q4_0"))


def test_row_table_bytes_are_not_counted_as_dense_weights(layout: ExpertLayout) -> None:
    made = {tensor.name: tensor for tensor in tensors(SHAPES[layout.arch], "q4_0")}
    table_bytes = (
        made["per_layer_token_embd.weight"].n_bytes + made["token_embd.weight"].n_bytes
    )
    assert layout.row_table_bytes == table_bytes > 5 * GIB
    all_bytes = sum(tensor.n_bytes for tensor in made.values())
    assert layout.dense_bytes + layout.expert_bytes + table_bytes == all_bytes


@pytest.mark.parametrize(
    ("arch", "n_bytes"),
    [("qwen4exp", 4 * 32 * 16), ("gemma4", 4 * 32 * 16), ("gemma3n", 0)],
)
def test_row_tables_are_recognised_only_for_architectures_that_read_by_row(
    tmp_path: Path, arch: str, n_bytes: int
) -> None:
    plain, with_table = moe(arch), moe(arch)
    with_table.tensor("per_layer_token_embd.weight", 32, 16)
    without = read_layout(plain.write(tmp_path / "without.gguf"))
    found = read_layout(with_table.write(tmp_path / "with.gguf"))
    assert found.row_table_bytes - without.row_table_bytes == n_bytes
    assert found.dense_bytes - without.dense_bytes == 4 * 32 * 16 - n_bytes


def test_embedding_is_a_row_table_and_counts_as_a_weight_only_as_the_output_matrix(
    tmp_path: Path,
) -> None:
    tied = moe()
    tied.tensors = [tensor for tensor in tied.tensors if tensor.name != "output.weight"]
    as_output = read_layout(tied.write(tmp_path / "tied.gguf"))
    apart = read_layout(moe().write(tmp_path / "untied.gguf"))
    n_bytes = 4 * 64 * 16
    assert apart.row_table_bytes == as_output.row_table_bytes == n_bytes
    assert (apart.tied_output_bytes, as_output.tied_output_bytes) == (0, n_bytes)
    assert apart.dense_bytes == as_output.dense_bytes + as_output.tied_output_bytes


def test_plan_fits_a_machine_with_less_memory_than_the_row_table(
    layout: ExpertLayout,
) -> None:
    memory = Memory(8 * GIB, 4 * GIB, MACHINE)
    plan = make_plan(layout, Machine(memory), LoadSpec(n_ctx=2048))
    assert plan.total_bytes <= memory.available_bytes < layout.row_table_bytes
    assert plan.n_slots > layout.token_cycle_slots
    resident_bytes = layout.dense_bytes + layout.tied_output_bytes
    assert plan.facts()["dense_bytes"] == resident_bytes < memory.available_bytes


def test_loader_advice_leaves_out_the_row_table(
    layout: ExpertLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised = list[tuple[int, int]]()
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _file, begin, n, _how: advised.append((begin, n))
    )
    loader._advise(layout, "POSIX_FADV_WILLNEED", loader.threading.Event())
    for table in layout.row_tables:
        assert not [
            n
            for begin, n in advised
            if table.offset <= begin < table.offset + table.n_bytes
        ]
    assert sum(n for _, n in advised) < 2 * layout.dense_bytes
