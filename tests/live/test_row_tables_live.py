"""Tests a model whose row table is larger than a memory limit: the limit changes neither the logits nor the number of
misses."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moegguf.bench.memory_limit import drop_page_cache, make_group
from moegguf.bench.series import limit_fault
from moegguf.engine.machine import MACHINE, read_memory
from moegguf.engine.row_tables import ROW_PAGES_BYTES
from moegguf.quantities import MIB
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
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    shape = replace(PRESETS["tiny-qwen4exp"], ple_vocab_base=N_ROWS_BASE)
    path = write_model(tmp_path_factory.mktemp("table") / "m.gguf", shape, "q4_0")[0]
    drop_page_cache([path])  # pages that were cached before a process starts do not count towards its memory limit
    yield path
    path.unlink()


def answer(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_row_table_above_the_memory_limit_evicts_no_expert(path: Path) -> None:
    if fault := limit_fault(LIMIT_BYTES):
        pytest.skip(fault)
    command = [sys.executable, "-c", CHILD, str(path)]
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
    assert limited["grown_mib"] * MIB <= ROW_PAGES_BYTES + 8 * MIB
    if read_memory().limited_by == MACHINE:
        assert free["grown_mib"] * MIB > 1.5 * ROW_PAGES_BYTES, "too few rows were read to reach the limit"
    assert limited["peak_mib"] * MIB <= limited["planned_bytes"] * 1.03
