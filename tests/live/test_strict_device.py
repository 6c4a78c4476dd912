"""Slots on a device that asks of its users what CUDA does: padding behind rows, poison where nothing was written, and
copies that come late and in any order (native/link_device.cpp)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_process import in_own_process
from running import Llama, Logits, TinyModel, greedy_logits, hooks_off, random_prompt, share_for

from moegguf.gguf.experts import read_layout
from moegguf.native.link_device import add_link_device
from moegguf.native.store import StoreOptions
from moegguf.quantities import Link
from tools.models import PRESETS

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "logits_all": True, "verbose": False}
LINK = Link(8e9, 5e-6)
N_PROMPT, N_NEW = 8, 8
TINY = [name for name in PRESETS if name.startswith("tiny-")]


def resized(path: Path, device: str, n_new: int = N_NEW) -> tuple[Logits, Logits]:
    """Logits of plain llama.cpp on the device, and those of slots there over slots in RAM, whose numbers change before
    each pass. The prompt is staged."""
    layout, rng = read_layout(path), np.random.default_rng(0)
    n_least, n_total = 2 * layout.n_expert_used + layout.n_expert + 2, layout.n_expert_total
    most = (n_total * 3 // 4, n_total // 2)
    store = StoreOptions(device=device, staging=1)
    vram, ram = (share_for(path, n, device) for n in most)
    with Llama(path, placement="slots", store=store, vram_cache=vram, expert_cache=ram, **OPTIONS) as llm:
        n_ubatch, prompt = llm.plan.n_ubatch, random_prompt(llm, N_PROMPT)

        def before_each() -> None:
            sizes = (rng.integers(least, n) for least, n in zip((n_least, 1), most, strict=True))
            vram, ram = (share_for(path, int(n), device) for n in sizes)
            llm.set_budget(vram_cache=vram, expert_cache=ram)

        logits = greedy_logits(llm, prompt, n_new, before_each)
        assert llm.stats().evictions > 0 and llm.stats().bytes_staged > 0
        assert llm.session.store.info()["slot_bytes"] == llm.plan.slot_bytes
    with hooks_off(), Llama(path, n_gpu_layers=-1, n_ubatch=n_ubatch, **OPTIONS) as llm:
        return greedy_logits(llm, prompt, n_new), logits


def differences(paths: list[Path]) -> dict[str, float]:
    """The largest between both, by file."""
    device, found = add_link_device(LINK, strict_seed=1), dict[str, float]()
    for path in paths:
        plain, logits = resized(path, device)
        assert np.isfinite(plain).all()
        found[path.stem] = float(np.abs(logits - plain).max())
    return found


@pytest.mark.parametrize("preset", TINY)
def test_slots_that_are_resized_while_the_model_writes(tiny: TinyModel, preset: str) -> None:
    found = in_own_process(differences, [tiny(preset, quant) for quant in ("q4_0", "q4_k_m", "q8_0")])
    assert set(found.values()) == {0.0}, found
