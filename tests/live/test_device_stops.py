"""What a layer with slots on a device costs beside its products: copies of adapters, copies of ids, and stops."""

import ctypes as c
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rpc_device import on_servers
from running import Llama, greedy_logits, hooks_off, write_adapter

from moegguf.native import library
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link
from moegguf.testing.link_device import add_link_device

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False}
DEVICE_BYTES = 256 << 20
LINK = Link(8e9, 5e-6)


def strict_devices(n: int) -> list[str]:
    return [add_link_device(LINK, memory_bytes=DEVICE_BYTES, strict_seed=1 + i) for i in range(n)]


def scheduled(run: Callable[[], object]) -> str:
    """Returns what the scheduler logs about the nodes of graphs that are built while `run` runs, and about the inputs
    that it copies to a device (GGML_SCHED_DEBUG)."""
    lines: list[str] = []

    @c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
    def keep(_level: int, text: bytes, _data: int | None) -> None:
        lines.append(text.decode())

    base = c.CDLL(str(library.find_library() / "libggml-base.so"))
    base.ggml_log_set(keep, None)
    run()
    base.ggml_log_set(None, None)
    return "".join(lines)


@pytest.mark.parametrize("n_devices", [1, 2])
@on_servers()
def test_no_pass_copies_an_adapter_on_experts_to_their_device(path: Path, tmp_path: Path, n_devices: int) -> None:
    matrix, shape = "blk.3.ffn_gate_exps.weight", (16, 64, 128)
    adapter = write_adapter(tmp_path / "adapter.gguf", "qwen2moe", matrix, shape)
    names = strict_devices(n_devices)
    slots = {"vram_cache": "60%", "expert_cache": "50%", "placement": "slots"}
    options: dict[str, Any] = OPTIONS | {"lora_path": str(adapter), "n_ubatch": 1}
    os.environ["GGML_SCHED_DEBUG"] = "2"
    with Llama(path, store=StoreOptions(staging=0), **slots, **options) as llm:
        logged = scheduled(lambda: llm.eval([1]))
        logits = greedy_logits(llm, n_new=4)
        assert llm.stats().evictions > 0
    del os.environ["GGML_SCHED_DEBUG"]
    assert f"## SPLIT #1: {names[0]}" in logged or f"## SPLIT #0: {names[0]}" in logged
    assert "lora_" not in logged
    with hooks_off(), Llama(path, n_gpu_layers=-1, **options) as llm:
        assert np.array_equal(greedy_logits(llm, n_new=4), logits)
    with hooks_off(), Llama(path, n_gpu_layers=-1, **OPTIONS | {"n_ubatch": 1}) as llm:
        assert not np.array_equal(greedy_logits(llm, n_new=4), logits)
