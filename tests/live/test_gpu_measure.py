"""One measurement of tools/gpu_trial.py, on a device behind a simulated link with limited memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_process import in_own_process
from running import TinyModel, hooks_off

from moegguf.gguf.experts import read_layout
from moegguf.native.link_device import add_link_device
from moegguf.quantities import MIB, Link
from tools.gpu.case import Case

SIZES = {"n_prompt": 40, "n_decode": 8, "n_ctx": 256, "n_ubatch": 32}


def measured(path: Path, share: float) -> list[dict[str, Any]]:
    """Everything on the device; some layers' experts there; all on the CPU; moegguf with memory for that share."""
    from tools.gpu import measure

    device, layout = add_link_device(Link(2e9, 20e-6), memory_bytes=64 * MIB), read_layout(path)
    case = Case(str(path), device, "llama.cpp", **SIZES)
    limited = replace(case, hold=False, limit_bytes=layout.dense_bytes + int(share * layout.expert_bytes) + 2 * MIB)
    with hooks_off():
        upstream = [measure.run(each) for each in (case, limited, replace(limited, all_on_cpu=True))]
    return [*upstream, measure.run(replace(limited, system="moegguf", options={"expert_cache": "30%"}))]


def test_both_write_the_same_tokens_and_are_measured_alike(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGGUF_PLACEMENT", "slots")
    path = tiny("tiny-mix", "q4_0")
    everything, some, none, ours = in_own_process(measured, path, 0.6)
    assert everything["tokens"] == some["tokens"] == none["tokens"] == ours["tokens"]
    assert len(ours["tokens"]) == 64 + SIZES["n_decode"]
    assert everything["n_cpu_moe"] == 0 < some["n_cpu_moe"] < none["n_cpu_moe"] == read_layout(path).n_layer
    assert everything["device_bytes"] > some["device_bytes"] > none["device_bytes"] > 0
    assert ours["n_cpu_moe"] is None
    assert 0 < ours["steady"]["VRAM"]["hit_rate"] < 1
    assert ours["steady"]["VRAM"]["bytes_per_token"] > 0
    for result in (everything, some, none, ours):
        assert min(result[f"{part}_tokens_per_s"] for part in ("prompt", "first", "steady")) > 0


def held(keep_free_bytes: int) -> int:
    """What is free on a device of 64 MiB, of which all but so much is held."""
    from moegguf.engine.devices import find_gpus
    from tools.gpu.measure import Held

    device = add_link_device(Link(2e9, 20e-6), memory_bytes=64 * MIB)
    Held(find_gpus(device)[0], keep_free_bytes)
    return find_gpus(device)[0].free_bytes


@pytest.mark.parametrize("keep_free_mib", [1, 24, 200])
def test_a_smaller_card_is_imitated_by_holding_the_rest(keep_free_mib: int) -> None:
    free = in_own_process(held, keep_free_mib * MIB)
    assert abs(free - min(keep_free_mib, 64) * MIB) < 4096
