"""Tests tables that are read by row: a table larger than a memory limit, failed reads
of rows, and plain llama.cpp's logits."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from running import Llama, Load, Reference, TinyModel, greedy_logits, hooks_off, written
from waiting import until

from moegguf.bench.memory_limit import drop_page_cache, make_group
from moegguf.bench.series import limit_fault
from moegguf.errors import ExpertIOError
from moegguf.gguf.experts import read_layout
from moegguf.quantities import MIB
from moegguf.testing.library import arm_fault, count_operations, limit_faults
from tools.models import PRESETS, write_model

LIMIT_BYTES = 280 * MIB
N_ROWS_BASE = 5_000_000
CHILD = """
import hashlib, json, re, sys
from pathlib import Path
import numpy as np
from moegguf.engine.llama import Llama

def mib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

digest = hashlib.sha256()
random = np.random.default_rng(0)
with Llama(sys.argv[1], n_ctx=2048, n_threads=1, expert_cache="40%", strategy="none", verbose=False) as llm:
    before, most = mib("RssFile"), 0.0
    for _ in range(4):
        llm.reset()
        llm.eval([int(token) for token in random.integers(300, llm.n_vocab() - 5, 2000)])
        digest.update(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)))
        most = max(most, mib("RssFile"))
    found = {"grown_mib": most - before, "digest": digest.hexdigest(), "misses": llm.stats().misses}
    found["table_bytes"] = llm.layout.row_table_bytes
    found["planned_bytes"] = llm.session.plan.total_bytes
    print(json.dumps(found | {"peak_mib": mib("VmHWM")}))
"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two models that differ in the size of their row table: a table above LIMIT_BYTES,
    and a small table."""
    folder = tmp_path_factory.mktemp("table")
    small = PRESETS["tiny-qwen4exp"]
    large = write_model(
        folder / "m.gguf", replace(small, ple_vocab_base=N_ROWS_BASE), "q4_0"
    )[0]
    # Pages that were cached before a process starts do not count towards its memory
    # limit.
    drop_page_cache([large])
    yield large, write_model(folder / "small.gguf", small, "q4_0")[0]
    large.unlink()


def answer(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_row_table_above_the_memory_limit_takes_no_memory_and_evicts_no_expert(
    paths: tuple[Path, Path],
) -> None:
    if fault := limit_fault(LIMIT_BYTES):
        pytest.skip(fault)
    command, with_small_table = (
        [sys.executable, "-c", CHILD, str(path)] for path in paths
    )
    small = answer(with_small_table)
    free = answer(command)
    group = make_group(LIMIT_BYTES)
    try:
        limited = answer(group.command(command))
        assert group.oom_kills == 0
    finally:
        group.remove()
    assert limited["table_bytes"] > LIMIT_BYTES
    assert limited["digest"] == free["digest"]
    assert limited["misses"] == free["misses"] > 0
    assert limited["planned_bytes"] == free["planned_bytes"] < LIMIT_BYTES
    assert max(limited["grown_mib"], free["grown_mib"]) < 4, "the table is not mapped"
    assert limited["peak_mib"] - small["peak_mib"] < 4
    # The estimate for the interpreter and its libraries is too low by about 16 MiB,
    # whatever the size of the model.
    assert limited["peak_mib"] * MIB <= limited["planned_bytes"] * 1.03 + 16 * MIB


@pytest.mark.parametrize("preset", ["tiny-qwen4exp", "tiny-gemma4"])
def test_weights_in_memory_have_the_planned_bytes_without_row_tables(
    tiny: TinyModel, preset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with Llama(tiny(preset), n_ctx=256, n_threads=1, verbose=True) as llm:
        tables = [table.name for table in llm.layout.row_tables]
        dense_bytes = llm.plan.needs.dense_bytes
    log = capfd.readouterr().err
    assert len(tables) == 2
    assert re.findall(r"tensor (\S+) .* overridden to moegguf-rows", log) == tables
    sizes = re.findall(r" CPU\w* model buffer size = *([0-9.]+) MiB", log)
    rounding = 0.005 * len(sizes)
    assert sum(map(float, sizes)) == pytest.approx(dense_bytes / MIB, abs=rounding)


def write_embedding_adapter(path: Path, arch: str, n_vocab: int, n_embd: int) -> Path:
    """Writes a LoRA adapter of rank 8 with random values for the token embedding."""
    writer, rng = GGUFWriter(path, arch), np.random.default_rng(0)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for half, n_rows in (("lora_a", n_vocab), ("lora_b", n_embd)):
        values = 0.1 * rng.standard_normal((n_rows, 8), np.float32)
        writer.add_tensor(f"token_embd.weight.{half}", values)
    return written(writer, path)


def test_an_adapter_for_token_embeddings_keeps_plain_llama_cpps_logits(
    tiny: TinyModel, load: Load, tmp_path: Path
) -> None:
    path = tiny()
    layout = read_layout(path)
    adapter = write_embedding_adapter(
        tmp_path / "a.gguf", layout.hparams.arch, layout.n_vocab, layout.hparams.n_embd
    )
    options: dict[str, Any] = {
        "n_ctx": 512,
        "n_threads": 1,
        "logits_all": True,
        "verbose": False,
    }
    with hooks_off(), Llama(path, **options) as llm:
        without = greedy_logits(llm)
    with hooks_off(), Llama(path, lora_path=str(adapter), **options) as llm:
        expected = greedy_logits(llm)
    logits = greedy_logits(load(path, expert_cache="40%", lora_path=str(adapter)))
    assert np.array_equal(logits, expected)
    assert not np.array_equal(logits, without)


def test_truncating_the_file_while_every_expert_is_in_memory_raises_and_ends_no_process(
    tiny: TinyModel, load: Load, tmp_path: Path
) -> None:
    path = Path(shutil.copy(tiny(), tmp_path / "copy.gguf"))
    llm = load(path, expert_cache="100%")
    greedy_logits(llm)
    until(lambda: llm.stats().tiers[0].slots_used == llm.layout.n_expert_total, 10)
    os.truncate(path, 4096)
    for _ in range(2):
        with pytest.raises(
            ExpertIOError, match="was written to after the model was loaded"
        ):
            llm.eval([1])


def test_rows_are_read_from_a_mirror_if_the_models_own_file_fails(
    tiny: TinyModel, load: Load, reference: Reference, tmp_path: Path
) -> None:
    path = tiny()
    llm = load(
        path,
        expert_cache="100%",
        mirror=Path(shutil.copy(path, tmp_path / "copy.gguf")),
    )
    greedy_logits(llm)
    llm.reset()
    limit_faults(path)
    arm_fault("read", 1, sticky=True)
    try:
        assert np.array_equal(greedy_logits(llm), reference(path))
        assert count_operations("read") > 0
    finally:
        arm_fault("read", 0)
        limit_faults(None)
